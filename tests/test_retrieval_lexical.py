"""Full text: what a word is, and a ranking that agrees with BM25 written down plainly."""

from __future__ import annotations

import math
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.records import Chunk
from healthrag.retrieval import LexicalIndex, tokenize

WORDS = ["fever", "cough", "e11.9", "b12", "covid-19", "10", "mg", "aspirin", "no", "bleeding"]


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("E11.9", "e11.9"), ("(E11.9)", "e11.9"), ("E11.9.", "e11.9"), ("B12", "b12"), ("COVID-19,", "covid-19"),
        ("COVID-19", "covid"), ("10 mg", "10mg"), ("10mg", "10mg"), ("10 MG", "10mg"), ("10-mg", "10mg"), ("10 mg", "10"),
        ("10 mg", "mg"), ("0.09 MG/ML", "0.09mg/ml"), ("1,200", "1200"), ("HbA1c", "hba1c"), ("718-7", "718-7"),
        ("PT-00042", "pt-00042"), ("condition_occurrence", "condit"), ("Alzheimer's", "alzheim"), ("no bleeding", "no"),
        ("hepatitis A", "a"), ("消化管出血", "出血"), ("кровотечение", "кровотечение"), ("5 µg", "5mcg"), ("<num>", "<num>"),
    ],
)  # fmt: skip
def test_exact_things_stay_whole(text, token):
    assert token in tokenize(text)


def test_a_longer_code_is_not_the_shorter_one():
    assert "e11.9" not in tokenize("E11.95") and "pt-0004" not in tokenize("PT-00042") and "10mg" not in tokenize("110 mg")
    assert "10mg" not in tokenize("10 mgs of something else, 10 mglx")


@pytest.mark.parametrize("same", [("Ménière", "meniere"), ("ＡＳＰＩＲＩＮ", "aspirin"), ("Diseases", "disease"), ("10 µg", "10 mcg")])
def test_writings_of_the_same_word(same):
    assert tokenize(same[0]) == tokenize(same[1])


@given(st.text())
def test_any_text_has_tokens_without_space(text):
    tokens = tokenize(text)
    assert tokens == tokenize(text) and all(token and not any(c.isspace() for c in token) for token in tokens)


def _bm25(query, documents, k1=0.9, b=0.4):  # Lucene's BM25, from its formula
    tokens = {name: tokenize(text) for name, text in documents.items()}
    mean = sum(map(len, tokens.values())) / len(tokens)
    scores = {}
    for name, own in tokens.items():
        counts = Counter(own)
        score = 0.0
        for word in tokenize(query):
            n = sum(word in other for other in tokens.values())
            idf = math.log(1 + (len(tokens) - n + 0.5) / (n + 0.5))
            score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(own) / mean)) if counts[word] else 0
        if score > 0:
            scores[name] = score
    return scores


documents = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(documents, st.lists(st.sampled_from([*WORDS, "zebra"]), max_size=4).map(" ".join), st.integers(1, 9))
def test_agrees_with_the_formula(texts, query, k):
    named = {f"d{i}": text for i, text in enumerate(texts)}
    index = LexicalIndex().add(list(named.values()), ids=list(named))
    wanted = _bm25(query, named)
    hits = index.search(query, k)
    assert len(hits) == min(k, len(wanted))
    for hit in hits:
        assert hit.score == pytest.approx(wanted[hit.id], rel=1e-4)
    order = [(-round(hit.score, 9), hit.id) for hit in hits]
    assert order == sorted(order)


@settings(max_examples=40, deadline=None)
@given(documents, st.data())
def test_after_deleting_it_is_as_if_never_added(texts, data):
    ids = [f"d{i}" for i in range(len(texts))]
    gone = data.draw(st.sets(st.sampled_from(ids)))
    index = LexicalIndex().add(texts, ids=ids)
    index.search("fever", 9)
    assert index.delete(gone) == len(gone)
    kept = [i for i in range(len(texts)) if ids[i] not in gone]
    fresh = LexicalIndex().add([texts[i] for i in kept], ids=[ids[i] for i in kept])
    for query in ("fever b12", "covid-19 no", "10 mg"):
        assert [(h.id, h.score) for h in index.search(query, 9)] == [(h.id, h.score) for h in fresh.search(query, 9)]


def test_filters_come_before_ranking():
    index = LexicalIndex().add(
        ["bleeding bleeding bleeding"] * 20 + ["bleeding in an unrelated long note about something else"],
        ids=[f"n{i:02}" for i in range(21)],
        metadata=[{"patient": "PT-00042"}] * 20 + [{"patient": "PT-0004"}],
    )
    assert [h.id for h in index.search("bleeding", 3, filters={"patient": "PT-0004"})] == ["n20"]
    assert index.search("bleeding", 3, filters={"patient": "PT-000"}) == []
    with pytest.raises(ValueError, match="operator"):
        index.search("bleeding", filters={"patient": {"like": "PT"}})


def test_ties_go_by_id_and_hits_carry_metadata():
    index = LexicalIndex().add([Chunk("same words", {"n": i}) for i in range(3)], ids=["b", "c", "a"])
    assert [(h.id, h.metadata) for h in index.search("words", 2)] == [("a", {"n": 2}), ("b", {"n": 0})]


def test_changing_a_hit_leaves_the_index_alone():
    index = LexicalIndex().add([Chunk("words", {"n": 1})], ids=["a"])
    index.search("words")[0].metadata["n"] = 2
    assert index.search("words")[0].metadata == {"n": 1}


def test_ids_are_kept_apart():
    index = LexicalIndex().add(["one"], ids=["a"])
    with pytest.raises(ValueError, match="already"):
        index.add(["two", "three"], ids=["b", "a"])
    assert len(index) == 1 and index.search("two") == []
    with pytest.raises(ValueError, match="twice"):
        index.upsert(["x", "y"], ids=["b", "b"])
    assert index.upsert(["two"], ids=["a"]).search("two")[0].id == "a" and index.search("one") == []
    with pytest.raises(KeyError, match="missing"):
        index.get(["missing"])


@pytest.mark.parametrize("query", ["", "   ", "the of", "zebra", "!!!", "\0", "\ud800"])
def test_no_shared_word_no_hit(query):
    assert LexicalIndex().add(["the fever"], ids=["a"]).search(query) == [] == LexicalIndex().search(query)


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "3"])
def test_k_is_a_positive_number(k):
    with pytest.raises(ValueError, match="k is"):
        LexicalIndex().add(["a"]).search("a", k)


@pytest.mark.parametrize("wrong", [{"k1": -1}, {"b": 1.1}, {"b": -0.1}])
def test_parameters_have_ranges(wrong):
    with pytest.raises(ValueError, match="k1 must"):
        LexicalIndex(**wrong)


def test_searching_while_adding():
    index, errors = LexicalIndex().add(["fever 0"], ids=["0"]), []

    def search():
        try:
            for _ in range(40):
                assert index.search("fever", 3)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(1, 30):
        index.add([f"fever {i}"], ids=[str(i)])
    for thread in threads:
        thread.join()
    assert not errors and len(index.search("fever", 99)) == 30
