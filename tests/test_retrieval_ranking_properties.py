"""What always holds of reranking, gates, calibration, expansion and ranking metrics."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from healthrag.evaluation.ranking import ndcg_at, permutation_p, recall_at, reciprocal_rank_at
from healthrag.records import Chunk, Hit
from healthrag.retrieval.calibrate import calibrate_gate, questions_needed
from healthrag.retrieval.expand import expand, within_budget
from healthrag.retrieval.gate import Gate, check, is_broad_question, trim_tail
from healthrag.retrieval.lexical import LexicalIndex
from healthrag.retrieval.reliability import fit_probability, wilson_share
from healthrag.retrieval.rerank import TokenVectorCache, max_sim, rerank

SCORE = st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 3))
SCORES = st.lists(SCORE, min_size=1, max_size=30)


def hits_of(scores):
    return [Hit(f"h{i:02}", f"text {i}", score) for i, score in enumerate(scores)]


class Table:
    scale = "cosine"

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, question, hits):
        return [self.scores[int(hit.id[1:])] for hit in hits]


@given(SCORES, st.randoms(use_true_random=False), st.lists(st.dictionaries(st.sampled_from([f"h{i:02}" for i in range(30)]), SCORE), max_size=2))
def test_reranking_permutes_and_ignores_the_order_given(scores, shuffler, beside):
    hits = hits_of(scores)
    ranked = rerank("q", hits, Table(scores), beside=beside)
    assert sorted(h.id for h in ranked) == [h.id for h in hits]
    assert [h.id for h in rerank("q", shuffler.sample(hits, len(hits)), Table(scores), beside=beside)] == [h.id for h in ranked]
    assert {h.id: h.score for h in ranked} == {h.id: score for h, score in zip(hits, scores, strict=True)}
    notes = [h.metadata["trace"]["rerank"] for h in ranked]
    assert [note["rank"] for note in notes] == list(range(1, len(hits) + 1))
    keys = [(-round(note["order"], 12), h.id) for note, h in zip(notes, ranked, strict=True)]
    assert keys == sorted(keys)
    if not any(beside):
        assert [h.score for h in ranked] == sorted(scores, reverse=True)


@given(SCORES)
def test_reranking_twice_changes_nothing(scores):
    once = rerank("q", hits_of(scores), Table(scores))
    assert [h.id for h in rerank("q", once, Table(scores))] == [h.id for h in once]


def unit(rng, n, dim=6):
    rows = rng.normal(size=(n, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 12), st.integers(0, 12))
def test_max_sim_is_bounded_orderless_and_grows_with_the_passage(seed, asked, length, more):
    rng = np.random.default_rng(seed)
    question, passage, extra = unit(rng, asked), unit(rng, length), unit(rng, more)
    score = max_sim(question, passage)
    assert -1 <= score <= 1
    assert max_sim(question, passage[::-1]) == pytest.approx(score, abs=1e-6)
    assert max_sim(question, np.concatenate([passage, extra])) >= score - 1e-6
    assert max_sim(question, question) == pytest.approx(1.0, abs=1e-5)
    assert max_sim(question, passage, [1.0] * asked) == pytest.approx(score, abs=1e-6)


@given(st.integers(0, 400), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60))
def test_the_cache_never_exceeds_its_size(size, wanted):
    cache = TokenVectorCache(size)
    for name, rows in wanted:
        key = cache.key("encoder", str(name))
        if cache.get(key) is None:
            cache.put(key, np.zeros((rows, 8), np.float16))
        assert cache.used == sum(kept.nbytes for kept in cache._kept.values()) <= size


# Gates


@given(SCORES, SCORE, SCORE)
def test_a_stricter_gate_never_lets_more_through(scores, first, second):
    low, high = sorted([first, second])
    hits = hits_of(scores)
    loose, strict = (check("Why?", hits, Gate("cosine", t, min(t, t / 2))) for t in (low, high))
    assert loose.passed or not strict.passed
    for verdict in (loose, strict):
        assert verdict.hits == (tuple(hits) if verdict.passed else ())
        assert verdict.passed == (max(scores) >= verdict.threshold)


@given(SCORES, SCORE)
def test_trimming_gives_a_beginning_that_is_not_empty(scores, threshold):
    ranked = sorted(hits_of(scores), key=lambda h: -h.score)
    gate = Gate("cosine", threshold, threshold - 0.2)
    kept = trim_tail(ranked, gate)
    assert kept == ranked[: len(kept)] and kept and (len(kept) == 1 or kept[-1].score >= gate.floor)
    assert trim_tail(kept, gate) == kept


@example('5"', '"fall"')  # the mark of the inch is left over
@example("„", "“chest pain”")
@given(st.text(max_size=300), st.sampled_from(["PT-00042", "pt-0004", "E11.9", "4548-4", "73211009", "B12", "“chest pain”", '"fall"']))
def test_an_identifier_anywhere_makes_a_question_pointed(text, name):
    assert not is_broad_question(f"List all visits {text} {name} and notes")


@given(st.text(max_size=300))
def test_any_text_is_judged(text):
    assert is_broad_question(text) in (True, False)


# Calibration


@settings(max_examples=20)
@given(SCORES, SCORES, st.sampled_from([0.01, 0.05, 0.2, 0.5, 0.9]), st.sampled_from(["estimate", "upper"]))
def test_the_risk_is_kept_and_no_looser_gate_keeps_it(good, bad, risk, bound):
    found = calibrate_gate(good, bad, risk=risk, bound=bound)
    limit = found.risk.value if bound == "estimate" else found.risk.high
    assert limit <= risk + 1e-9 or found.risk.number == 0 == found.recall.number
    assert found.risk.number == sum(b >= found.threshold for b in bad) and found.recall.number == sum(g >= found.threshold for g in good)
    assert found.precision.of == found.recall.number + found.risk.number
    assert found.refusal_precision.of == len(good) + len(bad) - found.precision.of
    for looser in (s for s in bad if s < found.threshold):  # letting one more through breaks the limit
        passed = wilson_share(sum(b >= looser for b in bad), len(bad))
        assert (passed.value if bound == "estimate" else passed.high) > risk


@settings(max_examples=20)
@given(SCORES, SCORES, st.sampled_from([0.05, 0.3]))
def test_a_larger_risk_answers_more(good, bad, risk):
    assert calibrate_gate(good, bad, risk=risk).recall.number <= calibrate_gate(good, bad, risk=risk * 2).recall.number


@settings(max_examples=20)
@given(SCORES, SCORES, st.sampled_from([0.5, 2.0, 4.0]), st.sampled_from([-8.0, 0.0, 16.0]))
def test_the_unit_of_the_scores_does_not_matter(good, bad, factor, shift):
    def moved(scores):
        return [s * factor + shift for s in scores]

    first, second = calibrate_gate(good, bad), calibrate_gate(moved(good), moved(bad))
    assert (first.recall, first.risk) == (second.recall, second.risk)


@settings(max_examples=20)
@given(SCORES, SCORES, st.sampled_from(["platt", "isotonic"]), st.sampled_from([None, 0.01, 0.5]))
def test_probabilities_are_probabilities_and_never_fall(good, bad, kind, prevalence):
    model = fit_probability(good, bad, kind, prevalence=prevalence)
    p = model(np.linspace(-3, 3, 101))
    assert np.isfinite(p).all() and (p >= 0).all() and (p <= 1).all() and (np.diff(p) >= -1e-12).all()


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_share_lies_in_its_interval(number, rest):
    found = wilson_share(number, number + rest)
    assert 0 <= found.low <= (found.value or 0.0) <= found.high <= 1


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.1, 0.5])
def test_the_questions_needed_are_enough_and_one_less_is_not(risk):
    n = questions_needed(risk)
    assert wilson_share(0, n).high <= risk and (n == 1 or wilson_share(0, n - 1).high > risk)


# Expansion


def count(text):  # a tokenizer that is not additive: runs of letters, and every other sign
    import re

    return len(re.findall(r"[a-z]+|[^a-z\s]", text))


@st.composite
def rows(draw):
    "A few rows of one table, cut into overlapping windows."
    index, texts = LexicalIndex(), {}
    for key in range(draw(st.integers(1, 3))):
        rng = random.Random(draw(st.integers(0, 10**6)))
        text = " ".join(rng.choice(["aspirin", "bleed", "ward", "x", "12.5", "INR"]) + str(rng.randint(0, 99)) for _ in range(draw(st.integers(1, 60))))
        size, overlap = draw(st.integers(8, 60)), draw(st.integers(0, 7))
        spans, start = [], 0
        while True:
            end = min(len(text), start + size)
            spans.append((start, end))
            if end == len(text):
                break
            start = end - overlap
        head = draw(st.sampled_from(["", f"patient: PT-{key}\n"]))
        chunks = [Chunk(head + text[a:b], {"row": str(key), "patient": f"PT-{key}", "start": a, "end": b}) for a, b in spans]
        index.add(chunks, ids=[f"note:{key}:{i}" for i in range(len(chunks))])
        texts[str(key)] = (head, text)
    return index, texts


@given(rows(), st.data(), st.integers(0, 400), st.one_of(st.none(), st.integers(1, 200)))
def test_expansion_keeps_budget_ids_rows_and_words(made, data, budget, per_passage):
    index, texts = made
    names = data.draw(st.lists(st.sampled_from(sorted(index._records)), unique=True, max_size=5))
    hits = index.get(names)
    grown = expand(hits, index, budget=budget, count_tokens=count, per_passage=per_passage)
    fit = within_budget(hits, budget=budget, count_tokens=count)
    assert [h.id for h in grown] == [h.id for h in fit.kept]
    assert sum(count(h.text) for h in grown) <= budget
    shown: list[str] = []
    for before, after in zip(fit.kept, grown, strict=True):
        head, text = texts[after.metadata["row"]]
        assert after.text == head + text[after.metadata["start"] : after.metadata["end"]]  # one stretch of its own row, nothing twice
        assert before.metadata["start"] >= after.metadata["start"] and before.metadata["end"] <= after.metadata["end"]
        if note := after.metadata.get("expanded"):
            a, b = note["found"]
            assert head + after.text[a:b] == before.text
            assert per_passage is None or count(after.text) <= per_passage
        shown += (note or {"ids": [after.id]})["ids"]
    assert len(shown) == len(set(shown))  # no chunk in two passages


@given(rows(), st.data())
def test_with_room_enough_one_hit_becomes_its_whole_row(made, data):
    index, texts = made
    (hit,) = index.get([data.draw(st.sampled_from(sorted(index._records)))])
    (grown,) = expand([hit], index, budget=10**6, count_tokens=count)
    head, text = texts[hit.metadata["row"]]
    assert grown.text == head + text and grown.id == hit.id


# Metrics

IDS = st.lists(st.sampled_from("abcdefghijklmnop"), unique=True, max_size=16)


@given(IDS, IDS, st.integers(1, 12))
def test_metrics_are_shares_and_a_better_place_is_never_worse(ranking, relevant, k):
    assume(relevant)
    for metric in (ndcg_at, recall_at, reciprocal_rank_at):
        value = metric(ranking, relevant, k)
        assert 0 <= value <= 1
        assert metric([*relevant, *ranking], relevant, k) >= value
        assert (value == 0) == (not set(ranking[:k]) & set(relevant))
    assert ndcg_at([*relevant, *ranking], relevant, k) == 1


def test_metrics_agree_with_scikit_learn():
    learn = pytest.importorskip("sklearn.metrics", reason="scikit-learn comes with the extra `st`")
    rng = np.random.default_rng(0)
    for _ in range(50):
        grades = rng.integers(0, 4, 12)
        scores = rng.permutation(12).astype(float)
        ranking = [str(i) for i in np.argsort(-scores)]
        relevant = {str(i): float(g) for i, g in enumerate(grades)}
        if relevant := {name: grade for name, grade in relevant.items() if grade}:
            assert ndcg_at(ranking, relevant, 10) == pytest.approx(learn.ndcg_score([grades], [scores], k=10))


@given(st.lists(st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 2)), max_size=12))
def test_the_randomisation_test_is_exact_and_symmetric(differences):
    p = permutation_p(differences)
    assert 0 < p <= 1 and p == pytest.approx(permutation_p([-d for d in differences]))
    kept = [d for d in differences if d]
    signs = [sum(d if bits >> i & 1 else -d for i, d in enumerate(kept)) for bits in range(2 ** len(kept))]
    assert p == pytest.approx(sum(abs(s) >= abs(sum(kept)) - 1e-9 for s in signs) / len(signs))


def test_the_sampled_test_agrees_with_the_t_test_on_many_small_differences():
    from scipy.stats import ttest_1samp

    differences = np.random.default_rng(3).normal(0.03, 0.2, 300)
    assert permutation_p(differences.tolist()) == pytest.approx(ttest_1samp(differences, 0).pvalue, abs=0.005)
