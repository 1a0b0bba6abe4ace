"""Wrong input of every kind is a built-in error that says what was given, what is allowed or what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("trafilatura")
pytest.importorskip("psycopg")

from healthrag.answers import answer
from healthrag.ingestion.audit import audit_document, audit_sources
from healthrag.ingestion.chunk import FixedSizeChunk, HeaderChunk, RecordChunk, RecursiveChunk
from healthrag.ingestion.databases import database_name, plan_tables, read_database
from healthrag.ingestion.documents import decode_text
from healthrag.ingestion.fetch import checked_url, fetch_page
from healthrag.ingestion.files import collect_files_with_extensions, load_funsql_examples
from healthrag.ingestion.documents import Skipped
from healthrag.ingestion.html import html_to_text
from healthrag.ingestion.identifying import permitted_columns
from healthrag.ingestion.readers import folder_files, read_data
from healthrag.ingestion.rows import RowChunk, csv_rows, row_documents
from healthrag.ingestion.search import search_provider, web_search
from healthrag.ingestion.sources import ReadOptions, ingest, ingest_source
from healthrag.ingestion.web import fetch_url, page_format, read_site
from healthrag.query import generate_funsql_query
from healthrag.records import SourceDocument
from healthrag.retrieval.index import KnowledgeIndex
from healthrag.retrieval.update import build_index, build_index_rag, ingest_command, ingest_to_index
from healthrag.storage.postgres import PostgresConnections

DOCUMENT = SourceDocument("s", "", "t", "some text")


def vectors(texts):
    return np.ones((len(texts), 4), dtype=np.float32)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("db") / "clinic.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript("""CREATE TABLE visit (id INTEGER PRIMARY KEY, reason TEXT, patient_name TEXT);
            CREATE TABLE heap (a INT, b TEXT); INSERT INTO heap VALUES (1, 'x'), (1, 'y'), (NULL, 'z');
            CREATE TABLE card (ssn TEXT PRIMARY KEY, v TEXT); CREATE TABLE secret (id INTEGER PRIMARY KEY, email TEXT, dob TEXT)""")
    return f"sqlite:///{path}"


class Service:
    name = "service"

    def search(self, query, max_results):
        raise AssertionError("it must not be asked")


BAD = {
    # addresses
    "address: empty": (lambda u: checked_url(""), ValueError, "give an http or https address"),
    "address: blank": (lambda u: checked_url(" \t"), ValueError, "give an http or https address"),
    "address: not text": (lambda u: checked_url(None), ValueError, "give an http or https address"),
    "address: no scheme": (lambda u: checked_url("example.org/x"), ValueError, "no scheme"),
    "address: file": (lambda u: fetch_url("file:///etc/passwd"), ValueError, "only http and https"),
    "address: ftp": (lambda u: fetch_page("ftp://example.org"), ValueError, "only http and https"),
    "address: script": (lambda u: checked_url("javascript:alert(1)"), ValueError, "only http and https"),
    "address: no host": (lambda u: checked_url("https:///x"), ValueError, "names no host"),
    "address: password": (lambda u: checked_url("https://me:secret@example.org"), ValueError, "name or password"),
    "address: port": (lambda u: checked_url("http://a:99999"), ValueError, "Port out of range"),
    "address: bracket": (lambda u: checked_url("http://[::1"), ValueError, "is not an address"),
    "address: control": (lambda u: checked_url("http://a.org/\r\nHost: b"), ValueError, "control characters"),
    "address: loopback": (lambda u: fetch_url("http://127.0.0.1/"), PermissionError, "allow_private"),
    "address: metadata": (lambda u: fetch_url("http://169.254.169.254/"), PermissionError, "not a public address"),
    "address: private name": (lambda u: fetch_url("http://localhost:1/"), PermissionError, "not a public address"),
    "address: mapped": (lambda u: fetch_url("http://[::ffff:10.0.0.1]/"), PermissionError, "not a public address"),
    "address: unknown host": (lambda u: fetch_page("http://no-such-host.invalid/", attempts=1), ConnectionError, "check the address"),
    "fetch: timeout": (lambda u: fetch_page("http://a.org", timeout=0), ValueError, "must be positive"),
    "fetch: cap": (lambda u: fetch_page("http://a.org", max_bytes=-1), ValueError, "must be positive"),
    "fetch: attempts": (lambda u: fetch_page("http://a.org", attempts=0), ValueError, "must be positive"),
    "site: pages": (lambda u: list(read_site("http://a.org", pages=0)), ValueError, "at least 1"),
    "site: pages a flag": (lambda u: list(read_site("http://a.org", pages=True)), ValueError, "at least 1"),
    "page: type": (lambda u: page_format("video/mp4", "http://a.org/x"), ValueError, "known: text/html"),
    "html: bytes": (lambda u: html_to_text(b"<p>x</p>"), ValueError, "decode it first"),
    # search
    "search: off": (lambda u: web_search("omop"), PermissionError, "web search is off"),
    "search: provider": (lambda u: web_search("omop", provider="bing"), ValueError, "known: ddgs"),
    "search: not a provider": (lambda u: search_provider(object()), ValueError, "needs a name and search"),
    "search: blank": (lambda u: web_search(" ", provider=Service()), ValueError, "query is empty"),
    "search: count": (lambda u: web_search("x", provider=Service(), max_results=0), ValueError, "at least 1"),
    "search: a patient": (lambda u: web_search("MRN 1234567", provider=Service()), PermissionError, "identify a person by record"),
    "search: in ingest": (lambda u: ingest(None, query="omop"), PermissionError, "Name a provider"),
    # files
    "text: binary": (lambda u: decode_text(b"\x00\x01"), ValueError, "binary data"),
    "text: neither": (lambda u: decode_text(b"\x81\x8d"), ValueError, "convert it to UTF-8"),
    "folder: missing": (lambda u: list(folder_files("no/such")), NotADirectoryError, "give one that exists"),
    "folder: collect": (lambda u: collect_files_with_extensions("no/such", "md"), NotADirectoryError, "not a folder"),
    "format": (lambda u: list(read_data(b"", "docx", "f")), ValueError, "known: csv"),
    "examples: missing": (lambda u: load_funsql_examples("no.jsonl"), ValueError, "give a file of JSON lines"),
    "csv: empty": (lambda u: list(csv_rows("")), ValueError, "no line of column names"),
    "csv: double": (lambda u: list(csv_rows("a,a")), ValueError, "double or blank"),
    "csv: open quote": (lambda u: list(csv_rows('a\n"x')), ValueError, "not readable as CSV"),
    "rows: key": (lambda u: list(row_documents([(1, {"a": 1})], "f", key="b")), ValueError, "different in every row"),
    "rows: identifying key": (lambda u: list(row_documents([(1, {"ssn": 1})], "f", key="ssn")), ValueError, "choose another, or allow it"),
    "columns: one text": (lambda u: permitted_columns(["a"], allow="zip"), ValueError, "give a list"),
    # chunks
    "chunk: recursive": (lambda u: RecursiveChunk(max_length=0), ValueError, "at least 1"),
    "chunk: separators": (lambda u: RecursiveChunk(separators=("",)), ValueError, "non-empty"),
    "chunk: levels": (lambda u: HeaderChunk(min_level=3, max_level=2), ValueError, "min_level <= max_level"),
    "chunk: labels": (lambda u: RecordChunk(fields=("a",), labels=()), ValueError, "one label per field"),
    "chunk: overlap": (lambda u: FixedSizeChunk(10, 10), ValueError, "must be smaller"),
    "chunk: row": (lambda u: RowChunk(100, 60), ValueError, "more than twice"),
    # databases
    "database: address": (lambda u: plan_tables("nonsense"), ValueError, "write it as sqlite:///"),
    "database: not text": (lambda u: database_name(None), ValueError, "write it as sqlite:///"),
    "database: dialect": (lambda u: plan_tables("nosuch://h/d"), ValueError, "no driver"),
    "database: missing": (lambda u: plan_tables("sqlite:///no/such.db"), FileNotFoundError, "no SQLite database"),
    "database: in memory": (lambda u: plan_tables("sqlite://"), FileNotFoundError, "give sqlite:///"),
    "database: down": (lambda u: plan_tables("postgresql://me:secret@127.0.0.1:9/x"), ConnectionError, r"me:\*\*\*@"),
    "database: password in the query": (lambda u: plan_tables("postgresql://127.0.0.1:9/x?password=s3cret"), ConnectionError, "password=hidden"),
    "database: @ in the password": (lambda u: plan_tables("postgresql://me:s3@cret@h/x"), ValueError, "as %40"),
    "store: not an address": (lambda u: PostgresConnections("postgres:me:s3cret@h/x").connection().__enter__(), ValueError, "can't be read"),
    "store: @ in the password": (lambda u: PostgresConnections("postgresql://me:s3@cret@h/x"), ValueError, "as %40"),
    "store: half an address": (lambda u: PostgresConnections("postgresql://me:s3cret@[::1/x").connection().__enter__(), ValueError, "postgresql://user"),
    "table: unknown": (lambda u: plan_tables(u, ["visits"]), ValueError, "known: card, heap, secret, visit"),
    "table: one text": (lambda u: plan_tables(u, "visit"), ValueError, "give a list"),
    "column: unknown": (lambda u: plan_tables(u, {"visit": ["why"]}), ValueError, "known: id, reason, patient_name"),
    "column: identifying": (lambda u: plan_tables(u, {"visit": ["patient_name"]}), PermissionError, "name it in allow"),
    "columns: none left": (lambda u: plan_tables(u, {"secret": []}), ValueError, "none of its columns"),
    "key: none": (lambda u: plan_tables(u, ["heap"]), ValueError, r"keys=\{'heap'"),
    "key: doubles": (lambda u: plan_tables(u, ["heap"], keys={"heap": "a"}), ValueError, "gaps or doubles"),
    "key: unknown": (lambda u: plan_tables(u, ["heap"], keys={"heap": "z"}), ValueError, "no column 'z'"),
    "key: identifying": (lambda u: plan_tables(u, ["card"]), ValueError, "identifying and would name"),
    "after: length": (lambda u: list(read_database(u, ["visit"], after={"visit": [1, 2]})), ValueError, "one of each"),
    "page_rows": (lambda u: list(read_database(u, page_rows=0)), ValueError, "at least 1"),
    "most_rows": (lambda u: list(read_database(u, most_rows=True)), ValueError, "at least 1"),
    # sources and indexes
    "source: blank": (lambda u: ingest_source(" "), ValueError, "is not a source"),
    "source: a number": (lambda u: ingest_source(42), ValueError, "is not a source"),
    "source: a typo": (lambda u: ingest_source("no/such/folder"), ValueError, "known of these: JuliaHealth"),
    "source: s3": (lambda u: ingest_source("s3://bucket/x"), ValueError, "only http and https"),
    "option: unknown": (lambda u: ReadOptions.of({"page": 3}), ValueError, "known: allow"),
    "index: no sources": (lambda u: ingest_to_index(None, None), ValueError, "give paths"),
    "index: no documents": (lambda u: ingest_to_index(docs=[], store="local"), ValueError, "no documents could be ingested"),
    "index: blank documents": (lambda u: ingest_to_index(docs=[SourceDocument("s", "", "t", " ")], store="local"), ValueError, "gives no chunks"),
    "index: store": (lambda u: build_index([DOCUMENT], store="shelf"), ValueError, "known: "),
    "index: vectors": (lambda u: build_index([DOCUMENT], store="local", embedder=lambda t: np.ones(3)), ValueError, "the encoder gave shape"),
    "index: blank question": (lambda u: KnowledgeIndex(store="local", embedder=vectors).search(" "), ValueError, "question is empty"),
    "index: k": (lambda u: KnowledgeIndex(store="local", embedder=vectors).search("x", 0), ValueError, "k"),
    "index: id": (lambda u: KnowledgeIndex(store="local", embedder=vectors).get("a:0"), KeyError, "not indexed"),
    "index: one text": (lambda u: build_index_rag(None, "one text"), ValueError, "give a list"),
    "index: a typo among files": (lambda u: build_index_rag({"store": "local"}, ["guide.md"]), ValueError, "no file or folder"),
    "query: no placeholder": (lambda u: generate_funsql_query(lambda q, k: [], "How many?", template="Write!", model="quote"), ValueError, "put it where"),
    "query: blank": (lambda u: generate_funsql_query(lambda q, k: [], " ", model="quote"), ValueError, "question is empty"),
    "command: nothing": (lambda u: ingest_command([], show_progress=False), ValueError, "no sources"),
    # answers and audits
    "answer: blank": (lambda u: answer(KnowledgeIndex(store="local"), "", model="quote"), ValueError, "ask something"),
    "answer: no index": (lambda u: answer("index", "x", model="quote"), ValueError, "build one with build_index"),
    "answer: model": (lambda u: answer(KnowledgeIndex(store="local"), "x", model="nobody:x"), ValueError, "nobody"),
    "audit: words": (lambda u: audit_document(DOCUMENT, min_words=-1), ValueError, "at least 0"),
    "audit: terms": (lambda u: audit_document(DOCUMENT, terms="omop"), ValueError, "give a list"),
    "audit: verdict": (lambda u: audit_sources([DOCUMENT]).by_verdict("perhaps"), ValueError, "known: accept"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_clear_error(case, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, kind, said = BAD[case]
    with pytest.raises(kind, match=said) as error:
        call(url)
    text = str(error.value)
    assert 10 < len(text) < 600 and "secret@" not in text and "cret@h" not in text and "s3cret" not in text and "\n" not in text
    assert not list(tmp_path.glob("*.db")), "nothing was made"


def test_there_are_enough_of_them():
    assert len(BAD) >= 60


def test_a_password_in_an_address_is_not_kept(tmp_path):
    for address in ("postgresql://me:s3cret@127.0.0.1:9/x", "postgresql://127.0.0.1:9/x?user=me&password=s3cret&sslkey=s3cret"):
        assert "s3cret" not in ingest_source(address).origin and "127.0.0.1:9/x" in ingest_source(address).origin
        index = ingest_to_index(tmp_path / "i", [DOCUMENT, address], store="local", embedder=vectors)
        assert "s3cret" not in f"{index.last_ingest} {index.manifest()}"
    assert not [path for path in (tmp_path / "i").rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


@pytest.mark.parametrize(("form", "text", "last"), [
    ("csv", ",".join(f"c{i}" for i in range(60_000)) + "\n" + ",".join(map(str, range(60_000))) + "\n", "59999"), ("jsonl", '{"a": [' + "1," * 300_000 + "7]}\n", "7"),
    ("jsonl", "{" + ", ".join(f'"k{i}": {i}' for i in range(60_000)) + "}\n", "59999"), ("json", '{"resourceType": "Observation", "id": "1", "note": [' + '{"a": 1},' * 100_000 + '{"a": 7}]}', "7"),
], ids=["columns", "list", "keys", "FHIR"])  # fmt: skip
def test_a_row_of_countless_parts_is_read(form, text, last):  # in time that grows with the parts, not with their square
    found = [item.content for item in read_data(text.encode(), form, "s") if not isinstance(item, Skipped)]
    assert len(found) == 1 and found[0].rstrip().endswith(last)
