"""The comparator against a table of cases that a careful reader agrees on."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from healthrag.evaluation import LENIENCIES, Verdict, results_match
from healthrag.records import ResultSet

sys.path.insert(0, str(Path(__file__).parent / "data"))
from comparison_cases import CASES, Case

IDS = [f"{number}: {case.kind}, {case.why}" for number, case in enumerate(CASES, start=1)]


def result(side) -> ResultSet:
    names, rows = side
    return ResultSet(tuple(names.split()), tuple(rows))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_strict_verdict(case: Case):
    verdict = results_match(result(case.gold), result(case.pred), **case.options)
    assert bool(verdict) is case.match, verdict.reason
    assert verdict.leniencies == ()
    if case.reason:
        assert verdict.reason.startswith(case.reason)
    assert verdict.reason


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_lenient_verdict(case: Case):
    verdict = results_match(result(case.gold), result(case.pred), **{**case.options, "lenient": True})
    expected = case.match if case.lenient is None else case.lenient
    assert bool(verdict) is expected, verdict.reason
    assert verdict.leniencies == case.leniencies


@pytest.mark.parametrize("case", [c for c in CASES if "order_by_columns" not in c.options], ids=lambda c: c.why)
def test_the_verdict_does_not_depend_on_which_side_is_which(case: Case):
    there = results_match(result(case.gold), result(case.pred), **case.options)
    back = results_match(result(case.pred), result(case.gold), **case.options)
    assert bool(there) == bool(back)


def test_there_are_enough_cases_of_each_kind():
    kinds = Counter(case.kind for case in CASES)
    assert len(CASES) >= 120
    assert min(kinds.values()) >= 4, kinds
    assert {case.match for case in CASES} == {True, False}
    assert len({(case.kind, case.why) for case in CASES}) == len(CASES), "every case has its own reason"


def test_verdict_is_truthy_and_explains_itself():
    verdict = results_match(ResultSet(("n",), ((1,),)), ResultSet(("n", "m"), ((1, 2),)), lenient=True)
    assert verdict and set(verdict.leniencies) <= set(LENIENCIES)
    assert str(verdict).endswith("(lenient: extra columns)")
    assert not Verdict(False, "because")


def test_a_cut_result_is_no_answer():
    whole, cut = ResultSet(("n",), ((1,),)), ResultSet(("n",), ((1,),), truncated=True)
    for gold, pred in ((whole, cut), (cut, whole)):
        for lenient in (False, True):
            verdict = results_match(gold, pred, lenient=lenient)
            assert not verdict and verdict.reason.startswith("incomplete")


@pytest.mark.parametrize("options", [{"rtol": -1}, {"rtol": 1.0}, {"atol": float("nan")}, {"atol": float("inf")}, {"atol": -1e-9}])
def test_tolerances_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="atol must be 0 or more"):
        results_match(ResultSet(("n",), ((1,),)), ResultSet(("n",), ((1,),)), **options)


@pytest.mark.parametrize("key", ["m", 2, -1, None])
def test_an_unknown_order_column_is_refused(key):
    table = ResultSet(("n",), ((1,), (2,)))
    with pytest.raises(ValueError, match="the gold columns are n"):
        results_match(table, table, ordered=True, order_by_columns=[key])


def test_the_reason_names_the_place():
    gold = ResultSet(("name", "share"), (("a", 0.1), ("b", 0.31)))
    pred = ResultSet(("name", "share"), (("b", 0.33), ("a", 0.1)))
    assert results_match(gold, pred).reason == "value: column 2, row 2: 0.31 vs 0.33"
