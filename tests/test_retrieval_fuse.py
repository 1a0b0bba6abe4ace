"""Fusion: what holds for every set of rankings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthrag.retrieval import fuse_scores, rrf

ids = st.text("abcdefgh", min_size=1, max_size=2)
rankings = st.lists(st.lists(ids, unique=True, max_size=8), max_size=5)
scored = st.lists(st.lists(st.tuples(ids, st.floats(-1e6, 1e6)), max_size=6), max_size=4)


@given(rankings, st.integers(1, 1000))
def test_scores_are_sums_of_reciprocal_ranks(lists, k):
    fused = rrf(lists, k)
    assert {name for name, _ in fused} == {name for ranking in lists for name in ranking}
    for name, score in fused:
        places = [ranking.index(name) + 1 for ranking in lists if name in ranking]
        assert score == pytest.approx(sum(1 / (k + place) for place in places))
        assert 0 < score <= len(lists) / (k + 1) + 1e-12


@given(rankings)
def test_best_first_and_ties_by_id(lists):
    pairs = [(-score, name) for name, score in rrf(lists)]
    assert pairs == sorted(pairs)


@given(rankings, st.randoms())
def test_order_of_the_lists_does_not_matter(lists, random):
    shuffled = list(lists)
    random.shuffle(shuffled)
    assert rrf(lists) == rrf(shuffled)


@given(st.lists(ids, unique=True))
def test_one_list_keeps_its_order(ranking):
    assert [name for name, _ in rrf([ranking])] == ranking


@given(rankings.filter(bool), st.data())
def test_moving_up_never_lowers_the_score(lists, data):
    chosen = data.draw(st.integers(0, len(lists) - 1))
    if len(lists[chosen]) < 2:
        return
    place = data.draw(st.integers(1, len(lists[chosen]) - 1))
    name = lists[chosen][place]
    better = [list(ranking) for ranking in lists]
    better[chosen].insert(place - 1, better[chosen].pop(place))
    assert dict(rrf(better))[name] > dict(rrf(lists))[name]


@given(rankings)
def test_weight_zero_leaves_a_list_out(lists):
    if lists:
        assert rrf(lists, weights=[0, *[1] * (len(lists) - 1)]) == rrf(lists[1:])
        assert [n for n, _ in rrf(lists, weights=[3] * len(lists))] == [n for n, _ in rrf(lists)]


def test_a_repeated_id_counts_once_at_its_best_place():
    assert rrf([["a", "b", "a", "c"]]) == rrf([["a", "b", "c"]])


def test_the_known_value():
    assert rrf([["x"], ["y", "x"]]) == [("x", 1 / 61 + 1 / 62), ("y", 1 / 61)]


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "60", None])
def test_k_is_a_whole_number(k):
    with pytest.raises(ValueError, match="k must"):
        rrf([["a"]], k)


@pytest.mark.parametrize("weights", [[], [1, 1], [-1], [math.nan], [math.inf]])
def test_weights_are_checked(weights):
    for fuse, lists in ((rrf, [["a"]]), (fuse_scores, [[("a", 1.0)]])):
        with pytest.raises(ValueError, match="weights"):
            fuse(lists, weights=weights)


@given(scored)
def test_scaled_scores_stay_in_range(lists):
    fused = fuse_scores(lists)
    assert {name for name, _ in fused} == {name for ranking in lists for name, _ in ranking}
    assert all(-1e-9 <= score <= len(lists) + 1e-9 for _, score in fused)
    assert [(-score, name) for name, score in fused] == sorted((-score, name) for name, score in fused)


@given(st.lists(st.tuples(ids, st.integers(-50, 50)), min_size=1, unique_by=lambda p: p[0]), st.integers(-100, 100), st.integers(1, 9))
def test_scale_and_offset_of_a_retriever_do_not_matter(ranking, offset, scale):
    moved = [(name, score * scale + offset) for name, score in ranking]
    one, two = dict(fuse_scores([ranking])), dict(fuse_scores([moved]))
    assert one == pytest.approx(two)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_are_finite(score):
    with pytest.raises(ValueError, match="finite"):
        fuse_scores([[("a", score)]])
