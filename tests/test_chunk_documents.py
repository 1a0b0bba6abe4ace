"""Chunk metadata, the choice of a strategy, and files."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthrag.ingestion import (
    FixedSizeChunk, HeaderChunk, RecordChunk, RecursiveChunk, chunk_document, chunk_provenance, collect_files_with_extensions,
    combined_manifest_path, default_strategy, document_title, load_funsql_examples, load_grounding_docs, render_provenance, write_combined_file,
)
from healthrag.records import SourceDocument


def doc(content, source="notes", url="", title="T"):
    return SourceDocument(source, url, title, content)


def test_defaults_are_the_references():
    assert RecursiveChunk() == RecursiveChunk(1024, ["\n## ", "\n### ", "\n\n", "\n", ". ", " "])
    assert HeaderChunk() == HeaderChunk(1, 6, 4096)
    assert FixedSizeChunk() == FixedSizeChunk(512, 64)
    assert RecordChunk().labels == ("Query", "Description", "SQL", "FunSQL")


@pytest.mark.parametrize("document, kind", [
    (doc("x", source="FunSQL-examples"), RecordChunk),
    (doc('\n \n{"query": "q"}\nmore'), RecordChunk),
    (doc("[1, 2]"), RecursiveChunk),
    (doc("plain", source="grounding:omop_cdm_schema.md"), HeaderChunk),
    (doc("plain", source="my-CDM-notes"), HeaderChunk),
    (doc("# a\n\n# b"), HeaderChunk),
    (doc("# a\n\ntext"), RecursiveChunk),
    (doc("# a\n```\n# b\n```"), RecursiveChunk),
    (doc(" # a\n # b"), RecursiveChunk),
    (doc(""), RecursiveChunk),
])
def test_the_strategy_follows_name_then_content(document, kind):
    assert isinstance(default_strategy(document), kind)


def test_a_chunk_names_its_document():
    first, second = chunk_document(doc("# A\nx\n# B\ny", source="s", url="https://x.org/p", title="Doc"))
    assert first.metadata == {
        "title": "Doc", "heading": "A", "headings": ["A"], "start": 0, "end": 5, "source": "s", "url": "https://x.org/p", "chunk": 0,
    }
    assert second.metadata["chunk"] == 1 and chunk_provenance(second) == "https://x.org/p › B"
    assert "url" not in chunk_document(doc("x"))[0].metadata


def test_headings_carry_the_path_above_them():
    text = "lead\n# A\n## B\n### C\n# D\n### E\n"
    assert [c.metadata.get("headings") for c in HeaderChunk().chunk(text)] == [
        None, ["A"], ["A", "B"], ["A", "B", "C"], ["D"], ["D", "E"]
    ]
    deep = HeaderChunk(max_level=2).chunk(text)
    assert [c.text for c in deep] == ["lead", "# A", "## B\n### C", "# D\n### E"]


def test_a_fence_ends_only_at_its_own_mark():
    text = "# A\n````\n```\n# code\n```\n````\n# B\n~~~\n```\n# code\n~~~ \n# C"
    assert [c.metadata["heading"] for c in HeaderChunk().chunk(text)] == ["A", "B", "C"]


def test_pieces_of_a_long_section_keep_its_heading():
    chunks = HeaderChunk(max_length=40).chunk("# Person\n\n" + "One row per patient. " * 10)
    assert len(chunks) > 3 and {c.metadata["heading"] for c in chunks} == {"Person"}
    assert max(len(c.text) for c in chunks) <= 40


@pytest.mark.parametrize("metadata, shown", [
    ({}, ""), ({"source": "s"}, "s"), ({"heading": "h"}, "h"), ({"url": "u", "source": "s", "heading": "h", "group": "g"}, "u › h"),
    ({"source": "s", "group": "g"}, "s › g"), ({"url": "", "source": None, "heading": 0}, ""),
])
def test_provenance(metadata, shown):
    assert render_provenance(metadata) == shown


def test_provenance_is_cut_by_characters():
    assert render_provenance({"source": "é" * 600}) == "é" * 512
    assert render_provenance({"source": "abc", "heading": "d"}, separator="/", maxlen=4) == "abc/"
    with pytest.raises(ValueError, match="maxlen"):
        render_provenance({}, maxlen=-1)


@pytest.mark.parametrize("make", [
    lambda: RecursiveChunk(max_length=0), lambda: RecursiveChunk(max_length=True), lambda: RecursiveChunk(separators=("",)),
    lambda: RecursiveChunk(separators="ab"), lambda: RecordChunk(fields="ab", labels="ab"),
    lambda: HeaderChunk(min_level=0), lambda: HeaderChunk(max_level=7), lambda: HeaderChunk(5, 4), lambda: HeaderChunk(max_length=0),
    lambda: RecordChunk(fields=("a",)), lambda: RecordChunk(fields=(), labels=()), lambda: FixedSizeChunk(64, 64),
    lambda: FixedSizeChunk(0), lambda: FixedSizeChunk(4, -1), lambda: FixedSizeChunk(4.0, 1), lambda: FixedSizeChunk(4, 1, tail="x"),
])
def test_impossible_strategies_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_unreadable_records_are_named_in_a_warning(caplog):
    chunks = RecordChunk().chunk('{"query": "a"}\nbroken\n{"query": "b", "id": "t1"}\n{"other": 1}')
    assert [c.metadata["line"] for c in chunks] == [1, 3] and chunks[1].metadata["id"] == "t1"
    assert "1 lines are not JSON objects" in caplog.text and "line 2" in caplog.text


@pytest.fixture
def folder(tmp_path):
    for name in ("b.MD", "a.md", "sub/c.Markdown", "sub/deep/d.md", "x.txt", "md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path


def test_files_are_found_in_a_fixed_order(folder):
    def found(extensions):
        return [p.relative_to(folder).as_posix() for p in collect_files_with_extensions(folder, extensions)]

    assert found([".md"]) == found("MD") == ["a.md", "b.MD", "sub/deep/d.md"]
    assert found([".md", "markdown"]) == ["a.md", "b.MD", "sub/c.Markdown", "sub/deep/d.md"]
    assert found([]) == found([""]) == found([".pdf"]) == []


def test_a_missing_folder_is_an_error(folder):
    for wrong in (folder / "nowhere", folder / "a.md"):
        with pytest.raises(NotADirectoryError):
            collect_files_with_extensions(wrong, ".md")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_links_in_a_circle_and_dangling_links_are_passed_over(folder):
    (folder / "sub" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "gone.md").symlink_to(folder / "nothing.md")
    assert len(collect_files_with_extensions(folder, ".md")) == 3


def test_the_combined_file(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b").write_bytes(b"")
    out = write_combined_file([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert out.read_bytes().decode() == f"# File: {tmp_path / 'a'}\none\ntwo\n\n\n# File: {tmp_path / 'b'}\n\n\n"


def test_files_are_left_out_by_pattern_and_by_size(folder, caplog):
    (folder / "big.md").write_text("x" * 1000)
    found = collect_files_with_extensions(folder, "md", exclude=["sub/*"], max_bytes=500)
    assert collect_files_with_extensions(folder, "md", exclude="sub/*", max_bytes=500) == found  # one pattern needs no list
    assert [path.name for path in found] == ["a.md", "b.MD"] and "big.md has 1000 bytes, more than 500" in caplog.text


@given(st.lists(st.text(alphabet="ab\r\n#é", max_size=12), max_size=6))
def test_the_manifest_finds_every_part_of_the_combined_file(texts):
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.txt" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text.encode())
        out = write_combined_file(files, Path(folder) / "out")
        manifest = json.loads(combined_manifest_path(out).read_text())
        lines = out.read_text(encoding="utf-8").split("\n")
        assert manifest["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
        for file, part in zip(files, manifest["files"], strict=True):
            assert lines[part["line"] - 1] == f"# File: {file}" and part["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_combined_file_is_not_written_over_a_source_or_from_binary(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="among the files"):
        write_combined_file([tmp_path / "a"], tmp_path / "." / "a")
    with pytest.raises(ValueError, match="not UTF-8"):
        write_combined_file([tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_grounding_documents(folder):
    (folder / "blank.md").write_text(" \n")
    docs = load_grounding_docs(folder)
    assert [d.source for d in docs] == [f"grounding:{n}" for n in ("a.md", "b.MD", "sub/c.Markdown", "sub/deep/d.md")]
    assert docs[0].title == "a.md" and docs[0].url == ""


def test_the_projects_own_grounding_is_cut_by_table():
    headings = set()
    for document in load_grounding_docs():
        for chunk in chunk_document(document):
            assert document.content[chunk.metadata["start"] : chunk.metadata["end"]] == chunk.text
            headings.add((document.source, chunk.metadata["heading"]))
    assert headings >= {("grounding:omop_cdm_schema.md", table) for table in ("person", "visit_occurrence", "concept_ancestor")}


@pytest.mark.parametrize("text, title", [
    ("```\n# no\n```\n## Yes ##\n", "Yes"), ("\n\n plain line \nmore", "plain line"), ("x" * 200, "x" * 120), ("", "file"),
])
def test_titles(text, title):
    assert document_title(text, "file") == title


def test_examples_are_one_document(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"query": "q"}\n')
    document = load_funsql_examples(path)
    assert (document.source, document.title, document.url) == ("FunSQL-examples", "tasks.jsonl", str(path))
    with pytest.raises(ValueError, match="no examples"):
        load_funsql_examples(tmp_path / "none")
