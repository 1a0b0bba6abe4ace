"""Chunks by tokens: exact, whole, and never through code."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from healthrag.retrieval.token_chunk import TokenChunk, encoder_spans


def words(text):
    "A tokenizer for tests: words of at most four letters, and signs."
    return [m.span() for m in re.finditer(r"\w{1,4}|[^\w\s]", text)]


TEXTS = st.text(alphabet="ab .\n#`~", max_size=300)


@given(TEXTS, st.integers(8, 30), st.integers(0, 3))
@example("# a\n" + "aaaa " * 50, 8, 3)
@example("```\n" + "a b\n" * 30 + "```\n", 8, 0)
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_and_everything_fits(text, size, overlap):
    chunks = TokenChunk(size, overlap, words).chunk(text)
    covered = [False] * len(text)
    for chunk in chunks:
        start, end = chunk.metadata["start"], chunk.metadata["end"]
        assert text[start:end] == chunk.text and chunk.text.strip() == chunk.text != ""
        covered[start:end] = [True] * (end - start)
        assert len(words(chunk.text)) <= size or re.search(r"```|~~~", text), "only code may be longer"
    assert not "".join(c for c, seen in zip(text, covered, strict=True) if not seen).strip()
    if not overlap:
        places = [(c.metadata["start"], c.metadata["end"]) for c in chunks]
        assert all(a[1] <= b[0] for a, b in pairwise(places))


def test_code_is_never_cut():
    code = "```sql\n" + "SELECT a, b, c FROM t;\n" * 40 + "```"
    text = f"# H\n\nSome words before the code.\n\n{code}\n\nSome words after it."
    assert code in [c.text for c in TokenChunk(20, spans=words).chunk(text)]


def test_passages_end_where_sentences_do():
    text = "One two three four. Five six seven eight. Nine ten eleven twelve. " * 3
    assert all(c.text.endswith(".") for c in TokenChunk(14, spans=words).chunk(text))


def test_the_encoder_reads_every_passage_whole():
    text = "K92.2 K25.4 gastrointestinal hemorrhage, hemoglobin 7.9 g/dL; " * 60
    sizes = [len(encoder_spans(c.text)) for c in TokenChunk().chunk(text)]
    assert len(sizes) > 3 and max(sizes) <= 254 and min(sizes[:-1]) > 127


@pytest.mark.parametrize("wrong", [{"size": 7}, {"size": True}, {"size": 2.5}, {"overlap": -1}, {"size": 20, "overlap": 10}])
def test_sizes_are_checked(wrong):
    with pytest.raises(ValueError, match=r"whole number|less than half"):
        TokenChunk(**wrong)
