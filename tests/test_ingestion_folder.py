"The folder of an index: nobody else's files are touched, and what is lost or damaged is said."

from __future__ import annotations

import re
import shutil

import pytest
from database_servers import postgresql
from word_vectors import word_vectors

from healthrag.cli.entry import main
from healthrag.records import SourceDocument
from healthrag.retrieval.generations import read_manifest
from healthrag.retrieval.index import KnowledgeIndex
from healthrag.retrieval.update import ingest_to_index
from healthrag.storage.file import StoreLostError

OLD = [SourceDocument("a", "", "t", "old text"), SourceDocument("b", "", "t", "second")]
NEW = [SourceDocument("a", "", "t", "new text"), SourceDocument("c", "", "t", "third")]
MINE = {
    "text-data/thesis.txt": b"my thesis", "text-2/chapter.txt": b"two", "text-02/fulltext.json": b"{}", "text-old/fulltext.json": b"{}", "vectors-mine.csv": b"1,2",
    "vectors-01.npz": b"mine", "vectors-3.npz.bak": b"mine", "vectors-4.npz/kept.txt": b"mine", "pending.jsonl": b"", "notes.md": b"mine",
}  # fmt: skip


def put(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def held(folder, names):
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def ingest(folder, documents, store="local", **options):
    with ingest_to_index(folder, docs=documents, store=store, embedder=word_vectors, **options) as index:
        return index.last_ingest


def texts(folder, **options):
    with KnowledgeIndex(folder, embedder=word_vectors, **options) as index:
        return sorted(hit.text for hit in index.search("old new text second third", 9))


@pytest.mark.parametrize("store", ["local", "duckdb"])
def test_files_of_others_in_an_index_stay(tmp_path, store):
    folder = tmp_path / "index"
    ingest(folder, OLD, store)
    put(folder, MINE)
    for documents in (NEW, OLD, NEW):
        ingest(folder, documents, store)
    assert held(folder, MINE) == (MINE if store == "local" else {name: data for name, data in MINE.items() if name != "pending.jsonl"})
    assert texts(folder) == ["new text", "third"]


@pytest.mark.parametrize("store", ["local", "duckdb"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_no_index_is_made_among_other_files(tmp_path, store, dry_run):
    put(tmp_path, MINE)
    with pytest.raises(ValueError, match="holds other files and no index; name a folder that is new or empty"):
        ingest(tmp_path, OLD, store, dry_run=dry_run)
    assert held(tmp_path, MINE) == MINE and len([path for path in tmp_path.rglob("*") if path.is_file()]) == len(MINE)


def test_the_command_touches_nothing_of_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "notes", {"a.md": b"# Asthma\n\nAn inhaler.\n"})
    put(tmp_path / "proj", MINE)
    for name in ("proj", ".", "", " "):
        assert main(["ingest", "notes", "--index", name]) == 2
        error = capsys.readouterr().err
        assert "name a folder that is new or empty" in error.replace("give a", "name a") and error.count("\n") == 1
    assert main(["ask", "What is asthma?", "--index", "", "--model", "quote"]) == 2 and "no name" in capsys.readouterr().err
    assert held(tmp_path / "proj", MINE) == MINE and sorted(path.name for path in tmp_path.iterdir()) == ["notes", "proj"]


@pytest.mark.parametrize("left", [{}, {".lock": b""}, {".lock": b"", "text-1/fulltext.json": b"{}", "vectors-1.npz": b"half"}])
def test_a_new_or_empty_folder_and_what_a_crash_left_are_taken(tmp_path, left):
    folder = tmp_path / "index"
    folder.mkdir()
    put(folder, left)
    ingest(folder, OLD)
    ingest(folder, NEW)
    assert texts(folder) == ["new text", "third"]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "manifest.json", "text-2", "vectors-2.npz"]


def test_words_that_were_being_copied_in_a_crash_are_in_nobodys_way(tmp_path):
    ingest(tmp_path / "i", OLD)
    put(tmp_path / "i", {"text-2/.managed.json": b"[]", "text-2/abc.idx": b"half"})
    ingest(tmp_path / "i", NEW)
    assert texts(tmp_path / "i") == ["new text", "third"] and read_manifest(tmp_path / "i").text == "text-3"


@pytest.mark.parametrize("foreign", [b"hello", b"hello\n", b'{"name": "Ada"}\n', b"[]\n", b'{"generation": 1}', b"\xff\xfe\n", b'{"generation": x}\n', b'{"generation": 9}\n'])
def test_a_strangers_journal_is_said_and_kept(tmp_path, foreign):
    ingest(tmp_path / "i", OLD, "duckdb")
    put(tmp_path / "i", {"pending.jsonl": foreign})
    if foreign == b'{"generation": 1}':  # a line that was cut off
        ingest(tmp_path / "i", NEW, "duckdb")
        assert texts(tmp_path / "i") == ["new text", "third"]
        return
    with pytest.raises(ValueError, match=r"pending.jsonl is not the journal of this index .*; move it to another folder") as caught:
        ingest(tmp_path / "i", NEW, "duckdb")
    assert "\n" not in str(caught.value) and (tmp_path / "i" / "pending.jsonl").read_bytes() == foreign and texts(tmp_path / "i") == ["old text", "second"]


def test_a_journal_that_was_cut_off_within_a_letter_is_read(tmp_path):
    ingest(tmp_path / "i", OLD, "duckdb")
    put(tmp_path / "i", {"pending.jsonl": '{"generation": 2, "dim": 4, "ids": ["é'.encode()[:-1]})
    ingest(tmp_path / "i", NEW, "duckdb")
    assert texts(tmp_path / "i") == ["new text", "third"]


def test_a_store_of_another_version_of_its_engine_is_not_called_lost(tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    from healthrag.storage.duckfile import DuckFile, duckdb_error

    ingest(tmp_path / "i", OLD, "duckdb")

    def described(path, table):
        raise duckdb_error(duckdb.IOException("Trying to read a database file with version number 999, but we can only read versions between 64 and 67"), path)

    monkeypatch.setattr(DuckFile, "described", staticmethod(described))
    with pytest.raises(NotImplementedError, match="upgrade duckdb") as caught:
        ingest(tmp_path / "i", NEW, "duckdb")
    assert "delete" not in str(caught.value)


def damaged(kind, folder, store):
    (path,) = folder.glob("vectors*")
    if kind == "gone":
        path.unlink()
    elif kind == "junk":
        path.write_bytes(b"junk")
    elif kind == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    else:  # of an index that held less
        ingest(folder.parent / "other", OLD[:1], store)
        (other,) = (folder.parent / "other").glob("vectors*")
        shutil.copy(other, path)


@pytest.mark.parametrize("store", ["local", "faiss", "duckdb"])
@pytest.mark.parametrize("kind", ["gone", "junk", "half", "other"])
def test_lost_and_damaged_vectors_are_said_by_every_reader_and_writer(tmp_path, store, kind):
    if store == "faiss":
        pytest.importorskip("faiss")
    folder = tmp_path / "index"
    ingest(folder, OLD, store)
    damaged(kind, folder, store)
    before = {path: path.read_bytes() for path in folder.glob("vectors*")}
    for use in (lambda: texts(folder), lambda: ingest(folder, OLD, store), lambda: ingest(folder, NEW, store)):
        with pytest.raises((ValueError, FileNotFoundError), match=f"delete {re.escape(str(folder))} and ingest again"):
            use()
    assert {path: path.read_bytes() for path in folder.glob("vectors*")} == before and read_manifest(folder).generation == 1
    shutil.rmtree(folder)
    ingest(folder, OLD, store)
    assert texts(folder) == ["old text", "second"]


def test_a_lost_table_of_postgresql_is_said_and_not_made_again(tmp_path):
    psycopg = pytest.importorskip("psycopg")
    with postgresql() as url:
        where, folder = {"store_options": {"url": url}}, tmp_path / "index"
        ingest(folder, OLD, "pgvector", **where)
        assert texts(folder, **where) == ["old text", "second"]
        with psycopg.connect(url, autocommit=True) as connection:
            table = read_manifest(folder).options["table"]
            connection.execute(f'DROP TABLE "{table}"')
            for use in (lambda: texts(folder, **where), lambda: ingest(folder, OLD, "pgvector", **where)):
                with pytest.raises(StoreLostError, match=f"no table public.{table} of vectors; delete .* and ingest again"):
                    use()
            assert connection.execute("SELECT to_regclass(%s)", [table]).fetchone() == (None,)
        shutil.rmtree(folder)
        ingest(folder, OLD, "pgvector", **where)
        assert texts(folder, **where) == ["old text", "second"]


def test_the_commands_say_lost_vectors(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "notes", {"a.md": b"# Asthma\n\nAsthma is treated with an inhaler.\n"})
    for store in ("local", "duckdb"):
        assert main(["ingest", "notes", "--index", store, "--store", store]) == 0
        (path,) = (tmp_path / store).glob("vectors*")
        path.unlink()
        capsys.readouterr()
        for command in (["ask", "How is asthma treated?", "--index", store, "--model", "quote"], ["ingest", "notes", "--index", store]):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert f"delete {store} and ingest again" in error and error.count("\n") == 1 and not path.exists()


def test_an_index_in_memory_that_was_closed_is_not_taken_for_an_empty_one():
    index = ingest_to_index(docs=OLD, store="local", embedder=word_vectors)
    index.close()
    with pytest.raises(StoreLostError, match="holds 0 chunks of the index's 2"):
        index.search("second")
