"""Both sides of retrieval in step, and literals that are hidden."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.records import Chunk
from healthrag.retrieval import HybridIndex, LexicalIndex, mask_literals, retrieve
from healthrag.storage import LocalVectorStore

DIM = 16


def encode(texts, *_, **__):  # a bag of words: shared words, close vectors
    rows = []
    for text in [texts] if isinstance(texts, str) else texts:
        row = np.full(DIM, 1e-3, dtype=np.float32)
        for word in re.findall(r"\w+", text.lower()):
            row[int(hashlib.sha256(word.encode()).hexdigest(), 16) % DIM] += 1
        rows.append(row)
    return np.array(rows)


def index(**options):
    made = HybridIndex(LocalVectorStore(DIM), embedder=encode, **options)
    texts = ["fever and cough", "gastrointestinal bleeding", "bleeding after aspirin", "E11.9 diabetes", "rash"]
    return made.add([Chunk(t, {"patient": f"PT-{i}"}) for i, t in enumerate(texts)], ids=list("abcde"))


@pytest.mark.parametrize("query", ["", " ", "\n\t ", None, 3])
def test_a_blank_question_is_refused(query):
    with pytest.raises(ValueError, match="empty"):
        retrieve(LocalVectorStore(DIM), query, embedder=encode)
    with pytest.raises(ValueError, match="empty"):
        index().search(query)


@pytest.mark.parametrize("shape", [lambda v: v, lambda v: v.reshape(-1), lambda v: v.T, lambda v: v.tolist()])
def test_retrieve_takes_a_row_a_column_or_a_vector(shape):
    store = LocalVectorStore(DIM).add(encode(["fever", "rash"]), ["fever", "rash"], ids=["f", "r"])
    assert retrieve(store, "rash", 1, embedder=lambda *a, **k: shape(encode("rash")))[0].id == "r"


def test_retrieve_passes_model_and_provider_on():
    seen = []
    store = LocalVectorStore(DIM).add(encode(["fever"]), ["fever"])

    def embedder(query, model, *, provider):
        seen.append((query, model, provider))
        return encode(query)

    retrieve(store, "  fever ", 1, model="bge-m3", provider="ollama", embedder=embedder)
    assert seen == [("fever", "bge-m3", "ollama")]


def test_retrieve_refuses_two_vectors():
    with pytest.raises(ValueError, match="shape"):
        retrieve(LocalVectorStore(DIM), "fever", embedder=lambda *a, **k: np.ones((2, DIM)))


def test_filters_hold_on_both_sides():
    made = HybridIndex(LocalVectorStore(DIM), embedder=encode)
    made.add([Chunk("bleeding", {"patient": p}) for p in ("PT-0004", "PT-00042", "PT-4")], ids=["x", "y", "z"])
    hits = made.search("bleeding", 9, filters={"patient": "PT-0004"}, trace=True)
    assert [h.id for h in hits] == ["x"] and all(hits[0].metadata["trace"][side]["rank"] == 1 for side in ("dense", "lexical"))


def test_the_trace_says_where_a_hit_stood():
    made = index(per_side=3)
    for hit in made.search("bleeding", 9, trace=True):
        trace = hit.metadata["trace"]
        for side, found in (("dense", made.store.search(encode("bleeding")[0], 9)), ("lexical", made.lexical.search("bleeding", 9))):
            place = [h.id for h in found].index(hit.id) + 1 if hit.id in [h.id for h in found] else None
            if trace[side]:
                assert trace[side]["rank"] == place
        ranks = [place["rank"] for place in trace.values() if place]
        assert hit.score == pytest.approx(sum(1 / (60 + rank) for rank in ranks))
    assert "trace" not in made.search("bleeding", 1)[0].metadata


def test_sides_stay_in_step():
    made = index()
    with pytest.raises(ValueError):
        made.add([Chunk("new"), Chunk("old")], ids=["n", "a"])
    assert len(made) == len(made.store) == len(made.lexical) == 5
    made.upsert([Chunk("fever only")], ids=["a"])
    assert len(made.store) == len(made.lexical) == 5 and made.search("cough", 5)[0].text != "fever and cough"
    assert made.delete(["a", "nope"]) == 1 and len(made.store) == len(made.lexical) == 4
    assert "a" not in [h.id for h in made.search("fever", 9)]


def test_what_is_searched_may_differ_from_what_is_shown():
    made = HybridIndex(LocalVectorStore(DIM), embedder=encode, mask=mask_literals)
    made.add([Chunk("older than 65"), Chunk("tall as 65 trees")], ids=["age", "tree"])
    hit = made.search("older than 40", 1)[0]
    assert (hit.id, hit.text) == ("age", "older than 65")
    assert made.lexical.search("65") == [] and made.lexical.search("<num>", 5) != []


def test_mismatched_parts_are_refused():
    with pytest.raises(ValueError, match="fill both"):
        HybridIndex(LocalVectorStore(DIM), LexicalIndex().add(["a"]), encode)
    with pytest.raises(ValueError, match="one of each"):
        index().add([Chunk("a")], ids=[])
    with pytest.raises(ValueError, match="k is"):
        index(per_side=0)


def test_half_a_character_is_no_obstacle():
    made = HybridIndex(LocalVectorStore(DIM), embedder=lambda texts: encode([text.encode().decode() for text in texts]))
    assert made.add([Chunk("fever")], ids=["a"]).search("fever \ud800", 1)[0].id == "a"


def test_more_than_per_side_can_be_asked_for():
    assert len(index(per_side=1).search("bleeding", 5)) == 5


@given(st.text(max_size=200))
def test_masking_twice_is_masking_once(text):
    once = mask_literals(text)
    assert mask_literals(once) == once


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_numbers_are_alike_once_masked(a, b):
    assert mask_literals(f"older than {a} years") == mask_literals(f"older than {b} years") == "older than <num> years"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("B12, COVID-19, T4 and H1N1", "B12, COVID-19, T4 and H1N1"),
        ("E11.9 or K92.2", "<code> or <code>"),
        ("between 2010-01-01 and 12/31/2012", "between <date> and <date>"),
        ("on 3rd March 2015, in March 2015", "on <date>, in <date>"),
        ("the patients' records and the doctor's notes", "the patients' records and the doctor's notes"),
        ("it's 5 o'clock, isn't it", "it's <num> o'clock, isn't it"),
        ("named 'Asthma' or \"Acute bronchitis\"", "named <text> or <text>"),
        ("5%, 1,200.50 and -3", "<num>, <num> and <num>"),
        ("10 mg", "<num> mg"),
        ("the year may be 1990", "the year may be <num>"),
        ("", ""),
    ],
)
def test_what_is_a_literal(text, masked):
    assert mask_literals(text) == masked


def test_concept_names_go_longest_first_and_whole():
    text = "women with acute bronchitis, bronchitis or bronchitislike signs"
    assert mask_literals(text, concepts=["bronchitis", "Acute bronchitis", " "]) == "women with <concept>, <concept> or bronchitislike signs"
    assert mask_literals("a.c abc", concepts=["a.c"]) == "<concept> abc"
