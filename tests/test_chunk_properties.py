"""Whatever is cut: nothing is lost, offsets are true, sizes are bounded, code stays whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.ingestion import FixedSizeChunk, HeaderChunk, RecordChunk, RecursiveChunk, document_lines, document_sections
import itertools

words = st.sampled_from(["patient", "visit", "E11.9", "10 mg.", "Ünïcode", "日本", "a" * 30, ". ", "# not", "`x`", "\t"])
line = st.one_of(
    st.lists(words, max_size=8).map(" ".join),
    st.builds(lambda n, t: f"{'#' * n} {t}", st.integers(1, 7), words),
    st.sampled_from(["```", "```sql", "~~~", "~~~~", "````", "  ```", "", "   ", "#nospace", "SELECT 1;", "~~~ x"]),
)
documents = st.lists(line, max_size=30).flatmap(lambda ls: st.sampled_from(["\n", "\r\n"]).map(lambda nl: nl.join(ls)))
any_text = st.one_of(documents, st.text(max_size=200))
strategies = st.one_of(
    st.builds(RecursiveChunk, max_length=st.integers(1, 80)),
    st.builds(HeaderChunk, min_level=st.integers(1, 3), max_level=st.integers(3, 6), max_length=st.integers(1, 80)),
    st.integers(1, 60).flatmap(lambda size: st.builds(
        FixedSizeChunk, size=st.just(size), overlap=st.integers(0, size - 1), tail=st.sampled_from(["keep", "drop"]))),
)


@given(strategies, any_text)
@settings(max_examples=300, deadline=None)
def test_offsets_are_true_and_no_chunk_is_blank(strategy, text):
    for chunk in strategy.chunk(text):
        assert chunk.text == text[chunk.metadata["start"] : chunk.metadata["end"]]
        assert chunk.text and chunk.text == chunk.text.strip()


@given(strategies, any_text)
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost(strategy, text):
    covered = [False] * len(text)
    for chunk in strategy.chunk(text):
        covered[chunk.metadata["start"] : chunk.metadata["end"]] = [True] * len(chunk.text)
    assert all(seen or char.isspace() for seen, char in zip(covered, text, strict=True))


def fences(text):
    spans, start = [], None
    for item in document_lines(text):
        if item.fenced and start is None:
            start = item.start
        if not item.fenced and start is not None:
            spans.append((start, item.start))
            start = None
    return spans + ([(start, len(text))] if start is not None else [])


@given(st.integers(1, 80), any_text)
@settings(max_examples=300, deadline=None)
def test_sizes_are_bounded_but_for_code_and_unbroken_words(limit, text):
    code = fences(text)
    chunks = RecursiveChunk(max_length=limit).chunk(text)
    spans = [(c.metadata["start"], c.metadata["end"]) for c in chunks]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "chunks overlap or are out of order"
    for start, end in spans:
        if end - start > limit and not any(s < end and start < e for s, e in code):
            assert not any(separator in text[start:end] for separator in (" ", "\n")), text[start:end]


@given(st.sampled_from([RecursiveChunk, HeaderChunk]), st.integers(1, 60), documents)
@settings(max_examples=300, deadline=None)
def test_code_is_never_cut(kind, limit, text):
    spans = [(c.metadata["start"], c.metadata["end"]) for c in kind(max_length=limit).chunk(text)]
    for start, end in fences(text):
        body = text[start:end]
        first, last = start + len(body) - len(body.lstrip()), end - (len(body) - len(body.rstrip()))
        assert sum(s < last and first < e for s, e in spans) == 1


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_sections_cover_the_text_without_gaps(text):
    sections = document_sections(text)
    assert "".join(text[s.start : s.end] for s in sections) == text
    assert all(s.headings for s in sections[1:])


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_lines_cover_the_text(text):
    assert "".join(text[item.start : item.end] for item in document_lines(text)) == text


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=10))
records = st.dictionaries(st.sampled_from(["query", "description", "sql_query", "response", "group", "other"]), scalars)


@given(st.lists(st.one_of(records.map(json.dumps), st.sampled_from(["", "not json", "[1]", "null", "{"])), max_size=8))
@settings(max_examples=200, deadline=None)
def test_records_become_one_chunk_each_and_null_is_not_a_word(lines):
    chunks = RecordChunk().chunk("\n".join(lines))
    numbers = [chunk.metadata["line"] for chunk in chunks]
    assert numbers == sorted(set(numbers))
    for chunk in chunks:
        record = json.loads(lines[chunk.metadata["line"] - 1])
        shown = {k: record[k] for k in ("query", "description", "sql_query", "response") if record.get(k) is not None}
        assert chunk.metadata.get("heading", "") == (str_of(shown["query"]) if "query" in shown else "")
        assert chunk.text.count("Query: ") >= ("query" in shown and bool(str_of(shown["query"])))
        assert "None" not in chunk.text or any("None" in str(v) for v in shown.values())


def str_of(value):
    return value.strip() if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("size, overlap, length, expected", [
    (400, 50, 400, [400, 50]), (400, 50, 750, [400, 400, 50]), (512, 64, 10, [10]), (512, 64, 0, []), (4, 0, 8, [4, 4]),
])
def test_windows_are_the_references(size, overlap, length, expected):
    assert [len(c.text) for c in FixedSizeChunk(size, overlap).chunk("x" * length)] == expected


def test_a_large_document_is_cut_in_linear_time():
    text = "# Head\n\n" + "word " * 400_000
    chunks = RecursiveChunk().chunk(text)
    assert len(chunks) > 1900 and max(len(c.text) for c in chunks) <= 1024
