"`healthrag ingest`: any text and any name is taken by every store, exit codes say what failed, and no option is passed over in silence."

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from database_servers import postgresql
from word_vectors import word_vectors

from healthrag.cli.entry import _one_line, main
from healthrag.ingestion.documents import LabelledDocument, Skipped
from healthrag.ingestion.sources import IngestSource, ReadOptions, ingest, ingest_source
from healthrag.records import SourceDocument
from healthrag.retrieval.index import KnowledgeIndex
from healthrag.retrieval.update import ingest_to_index, update_index

ODD = (  # halves of characters, NUL, and the bytes of a name that is no UTF-8
    LabelledDocument("rows:\ud800", "", "a \udfff title", "a half \ud800 of a character", {"kind": "row", "table": "t\udc00", "list": ["\ud800", {"k\ud801": 1}]}),
    SourceDocument("zero", "", "a \x00 title", "a zero \x00 in a text"),
    SourceDocument("plain", "", "title", "plain text with 😀"),
)  # fmt: skip


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.md").write_text("# Asthma\n\nAsthma is treated with an inhaler.\n")
    return tmp_path


@pytest.mark.parametrize("store", ["local", "faiss", "duckdb", "pgvector"])
def test_every_store_takes_any_text_and_any_name(tmp_path, store):
    def check(**where):
        source = IngestSource("test:", lambda: iter([*ODD, Skipped("left \ud800", "out \ud800")]))
        with KnowledgeIndex(tmp_path / "i", store=store, embedder=word_vectors, **where) as index:
            done = update_index(index, [source])
            assert done.added == ("rows:\\ud800", "zero", "plain") and str(done.skipped[0]) == "left \\ud800: out \\ud800"
            found = {hit.id: hit for hit in index.search("half zero plain text", 9)}
            assert "a half \\ud800 of" in found["rows:\\ud800:0"].text and "zero \\u0000 in" in found["zero:0"].text and "😀" in found["plain:0"].text
            assert found["rows:\\ud800:0"].metadata["list"] == ["\\ud800", {"k\\ud801": 1}] and index.documents["zero"].title == "a \\u0000 title"
            assert len(update_index(index, [source]).unchanged) == 3

    if store == "faiss":
        pytest.importorskip("faiss")
    if store == "pgvector":
        with postgresql() as url:
            check(store_options={"url": url})
    else:
        check()


@pytest.mark.skipif(os.name == "nt", reason="file names there are no bytes")
@pytest.mark.parametrize("store", ["local", "duckdb"])
def test_a_row_and_a_file_name_that_no_encoder_takes_are_read(work, capsys, store):
    (work / "notes" / "rows.jsonl").write_text('{"id": 1, "said": "wheezes \\ud800 at night"}\n{"id": 2, "said": "sleeps \\u0000 well"}\n')
    try:
        for name in (b"caf\xe9.md", b"caf\xe8.md"):
            (work / "notes" / os.fsdecode(name)).write_text("# Coffee\n\nCoffee keeps awake.\n")
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    for counted in ("5 added", "5 unchanged"):
        assert main(["ingest", "notes", "--index", "i", "--store", store]) == 0
        shown = capsys.readouterr()
        assert counted in shown.out and not shown.err
    assert {"notes:caf\\udce9.md", "notes:caf\\udce8.md", "notes:rows.jsonl:1"} <= set(KnowledgeIndex(work / "i").documents)


def test_documents_without_such_characters_are_handed_on_as_they_are():
    assert all(got is given for got, given in zip(ingest([ODD[2]]), [ODD[2]], strict=True))


@pytest.mark.parametrize("source", ["sqlite:///no.db", "broken.pdf", "http://10.0.0.1", "http://127.0.0.1:9/", "postgresql://127.0.0.1:9/x", "empty.md", "picture.png"])
def test_a_source_that_gave_nothing_is_exit_code_1(work, capsys, source):
    (work / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (work / "empty.md").write_text(" ")
    (work / "picture.png").write_bytes(b"\x89PNG")
    assert main(["ingest", source, "--index", "i"]) == 2, "nothing is in the index"
    assert main(["ingest", "notes", source, "--index", "i"]) == 1, "what the others gave is kept"
    assert main(["ingest", source, "--index", "i"]) == 1
    assert main(["ingest", source, "--index", "i", "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert "1 added" in out and "nothing came from " in out and out.count("skipped ") >= 3
    assert main(["ingest", "notes", "--index", "i"]) == 0 and len(KnowledgeIndex(work / "i").documents) == 1


def test_a_source_that_gave_something_has_not_failed(work, capsys):
    (work / "notes" / "broken.pdf").write_bytes(b"nothing")
    (work / "bare").mkdir()
    for sources in (["notes"], ["notes", "bare"], ["notes"]):
        assert main(["ingest", *sources, "--index", "i"]) == 0
    assert "skipped notes:broken.pdf" in (out := capsys.readouterr().out) and "nothing came from" not in out


def test_the_exit_codes_are_told(capsys):
    assert main(["ingest", "--help"]) == 0
    assert "Exit code 1 means that a source gave no document" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("store", ["local", "duckdb"])
def test_the_index_is_not_read_into_itself(work, capsys, store):
    for number in range(300):  # more than one batch, so that the index is begun while the folder is read
        (work / "notes" / f"n{number}.txt").write_text(f"note {number}")
    for where in ("healthrag-index", "zz/index"):
        for _ in range(2):
            assert main(["ingest", ".", "--store", store, "--index", where]) == 0
            assert "0 skipped" in capsys.readouterr().out
        with KnowledgeIndex(work / where) as index:
            assert len(index.documents) == 301
        (work / where).rename(work / ".done")
        (work / ".done").rename(work / f".{store}-{where.replace('/', '-')}")
    (work / "own").mkdir()
    assert main(["ingest", "own", "--index", "own"]) == 2 and "is the index itself" in capsys.readouterr().err


def test_a_folder_is_left_out_only_when_it_is_named(work):
    (work / "other").mkdir()
    (work / "other" / "b.md").write_text("# B\n\nB.\n")
    read = lambda omit: sorted(d.source for d in ingest_source(work, ReadOptions(omit=omit)).read())
    assert [name.partition(":")[2] for name in read(None)] == ["notes/a.md", "other/b.md"]
    assert [name.partition(":")[2] for name in read("other")] == ["notes/a.md"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["notes", "--table", "visits"], "--table is about databases"), (["notes", "--bundle", "pages"], "--bundle is about curated names"),
        (["notes", "--pages", "3"], "--pages is about web addresses"), (["notes", "--provider", "ddgs"], "--provider ddgs is about --search"),
        (["notes", "--allow-private", "h:1"], "--allow-private is about web addresses"), (["notes", "--store", "duckdb", "--url", "x"], "'duckdb' has no option 'url'"),
    ],
)  # fmt: skip
def test_an_option_that_would_change_nothing_is_refused(work, capsys, arguments, said):
    for _ in range(2):
        assert main(["ingest", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and not (work / "healthrag-index" / "manifest.json").exists()
    ingest_to_index(work / "healthrag-index", work / "notes").close()
    if "--store" not in arguments:
        assert main(["ingest", *arguments]) == 2 and said in capsys.readouterr().err


def test_an_index_in_postgresql_can_be_asked_as_the_hint_says(work, capsys, monkeypatch):
    monkeypatch.delenv("HEALTHRAG_PG_URL", raising=False)
    with postgresql() as url:
        assert main(["ingest", "notes", "--store", "pgvector", "--url", url, "--index", "i"]) == 0
        hint = capsys.readouterr().out.splitlines()[-1]
        assert hint.startswith("Ask it: set HEALTHRAG_PG_URL to the address") and url not in hint
        command = [word if word != "…" else "How is asthma treated?" for word in shlex.split(hint.partition("then: healthrag ")[2])]
        assert main([*command, "--model", "quote"]) == 2
        error = capsys.readouterr().err
        assert "set the environment variable HEALTHRAG_PG_URL to postgresql://" in error and error.count("\n") == 1
        monkeypatch.setenv("HEALTHRAG_PG_URL", url)
        assert main([*command, "--model", "quote"]) == 0 and "inhaler" in capsys.readouterr().out
        assert main(["ingest", "notes", "--index", "i"]) == 0 and capsys.readouterr().out.splitlines()[-1] == 'Ask it: healthrag ask "…" --index i'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_full_disk_says_what_to_do():
    with Path("/dev/full").open("w") as full, pytest.raises(OSError) as caught:
        full.write("x" * 100_000)
        full.flush()
    assert _one_line(caught.value) == "No space left on device; free some space there, or name a folder on another disk, then run the command again"


@pytest.mark.parametrize("command", [["ask", "How is Ada Byron, MRN 0012345, treated?", "--model", "openai:x"], ["ingest", "notes", "--index", "i"]])
def test_what_may_leave_the_machine_is_chosen_on_the_command_line(work, capsys, monkeypatch, command):
    (work / "notes" / "a.md").write_text("# Ada Byron\n\nAda Byron, MRN 0012345, wheezes.\n")
    for name, value in (("OPENAI_BASE_URL", "https://away.invalid/v1"), ("OPENAI_API_KEY", "k"), ("OLLAMA_HOST", "http://away.invalid:9"), ("HEALTHRAG_REPLIES", "off")):
        monkeypatch.setenv(name, value)
    if command[0] == "ingest":
        monkeypatch.setenv("HEALTHRAG_EMBEDDING_PROVIDER", "ollama")
        monkeypatch.setenv("HEALTHRAG_EMBEDDING_MODEL", "nomic-embed-text")
    for policy in ("refuse", "redact", "allow"):
        assert main([*command, "--phi", policy]) != 0  # no such server
        shown = capsys.readouterr()
        assert ("(--phi redact) to take it out" in shown.err + shown.out) == (policy == "refuse")
    assert main([*command, "--phi", "maybe"]) == 2 and "'refuse', 'redact' or 'allow'" in capsys.readouterr().err


def test_mode_is_not_passed_over_for_an_index(work, capsys):
    ingest_to_index(work / "i", work / "notes").close()
    assert main(["ask", "How is asthma treated?", "--index", "i", "--model", "quote", "--mode", "zero_shot"]) == 2
    assert "--mode zero_shot is about questions to a database" in capsys.readouterr().err
