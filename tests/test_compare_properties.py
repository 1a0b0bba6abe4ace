"""Properties of the comparator, and a brute-force reader that it must agree with."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import random
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.evaluation import (
    Guess, ResultColumns, alike_columns, column_alignments, pair_up, results_match, same_value, same_values, unmatched_rows,
)  # fmt: skip
from healthrag.records import ResultSet

NEAR = st.sampled_from([0.0, 0.4, 0.9, 1.3, 1.8, 2.7, -0.5])  # with an absolute tolerance of 0.5 these form chains
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), NEAR, st.sampled_from(["a", "b", "1", ""]), st.sampled_from([Decimal("0.5"), Decimal("2")]),
    st.lists(st.integers(0, 2), max_size=2), st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 3)),
)  # fmt: skip
ANY_VALUE = st.one_of(VALUES, st.floats(), st.integers(), st.text(max_size=4), st.decimals(allow_nan=True), st.datetimes(), st.binary(max_size=2))
LOOSE = {"atol": 0.5, "rtol": 0.0}


def tables(values=VALUES, max_rows=4, max_columns=3):
    shape = st.tuples(st.integers(0, max_rows), st.integers(1, max_columns))
    return shape.flatmap(lambda s: st.lists(st.lists(values, min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0]))


def pairs_of_tables(values):
    "Two tables of one shape with values from a small pool, so that matches are likely."
    shape = st.tuples(st.integers(1, 4), st.integers(1, 3))
    rows = lambda s: st.lists(st.lists(values, min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0])
    return shape.flatmap(lambda s: st.tuples(rows(s), rows(s)))


def named(rows, prefix="c") -> ResultSet:
    width = len(rows[0]) if rows else 1
    return ResultSet(tuple(f"{prefix}{k}" for k in range(width)), tuple(map(tuple, rows)))


def reader(gold, pred, by_content=False, **tolerance) -> bool:
    "Try every order of the rows, and of the columns where names do not decide."
    width = len(gold[0])
    for columns in itertools.permutations(range(width)) if by_content else [tuple(range(width))]:
        for order in itertools.permutations(range(len(pred))):
            if all(same_value(a, pred[j][c], **tolerance) for row, j in zip(gold, order, strict=True) for a, c in zip(row, columns, strict=True)):
                return True
    return False


@settings(max_examples=300, deadline=None)
@given(pairs_of_tables(NEAR))
def test_near_rows_agree_with_the_brute_force_reader(both):
    gold, pred = both
    assert bool(results_match(named(gold), named(pred), **LOOSE)) == reader(gold, pred, **LOOSE)


@settings(max_examples=250, deadline=None)
@given(pairs_of_tables(VALUES))
def test_mixed_rows_agree_with_the_brute_force_reader(both):
    gold, pred = both
    assert bool(results_match(named(gold), named(pred), **LOOSE)) == reader(gold, pred, **LOOSE)


@settings(max_examples=250, deadline=None)
@given(pairs_of_tables(st.sampled_from([0, 1, 2, 0.4, 0.9])))
def test_alignment_by_content_agrees_with_the_brute_force_reader(both):
    gold, pred = both
    assert bool(results_match(named(gold), named(pred, "d"), **LOOSE)) == reader(gold, pred, by_content=True, **LOOSE)


@settings(max_examples=150, deadline=None)
@given(tables(ANY_VALUE), st.randoms(use_true_random=False))
def test_any_table_equals_itself_shuffled_and_renamed(rows, rng):
    gold = named(rows)
    assert results_match(gold, gold) and results_match(gold, gold, ordered=True)
    shuffled = rng.sample(rows, len(rows))
    assert results_match(gold, named(shuffled))
    order = rng.sample(range(len(gold.columns)), len(gold.columns))
    moved = ResultSet(tuple(gold.columns[k] for k in order), tuple(tuple(row[k] for k in order) for row in shuffled))
    assert results_match(gold, moved)
    assert results_match(gold, ResultSet(tuple(f"other {k}" for k in order), moved.rows))


@settings(max_examples=150, deadline=None)
@given(pairs_of_tables(VALUES), st.booleans())
def test_symmetric(both, renamed):
    gold, pred = named(both[0]), named(both[1], "d" if renamed else "c")
    assert bool(results_match(gold, pred)) == bool(results_match(pred, gold))


@settings(max_examples=150, deadline=None)
@given(pairs_of_tables(VALUES))
def test_lenient_never_rejects_what_strict_accepts(both):
    gold, pred = named(both[0]), named(both[1], "d")
    strict = results_match(gold, pred)
    lenient = results_match(gold, pred, lenient=True)
    if strict:
        assert lenient == strict and lenient.leniencies == ()
    elif lenient:
        assert lenient.leniencies


def test_a_guess_is_no_reason():
    "Columns aligned by their types alone say nothing about what differs: the reason names the column that is nearest."
    gold, pred = ResultSet(("a", "b"), ((1, "x"), (2, "y"))), ResultSet(("p", "q"), (("u", 3), ("v", 4)))
    assert results_match(gold, pred).reason.endswith("the nearest column)")
    moved = ResultSet(("p", "q"), (("x", 2), ("y", 1)))
    assert results_match(gold, moved).reason == "value: column 1, row 1: 1 vs 2 (in q, the nearest column)"


@settings(max_examples=250, deadline=None)
@given(tables(), st.data())
def test_one_changed_cell_is_found(rows, data):
    if not rows:
        return
    i, k = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    changed = [list(row) for row in rows]
    changed[i][k] = "something else entirely"
    assert not results_match(named(rows), named(changed))


@settings(max_examples=250, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 0.5), st.floats(0, 10), st.floats(-2, 2))
def test_tolerance_is_that_of_isclose(value, rtol, atol, step):
    other = value + step * max(rtol * abs(value), atol)
    expected = math.isclose(value, other, rel_tol=rtol, abs_tol=atol)
    assert bool(results_match(named([[value]]), named([[other]]), rtol=rtol, atol=atol)) == expected


KINDS = st.sampled_from([10, 11, 12, 10.0, 10.4, 11.0, 11.6, 12.1, Decimal("10.2"), Decimal("11"), Decimal("11.00"), Decimal("12.3")])


@settings(max_examples=400, deadline=None)
@given(pairs_of_tables(KINDS), st.booleans())
def test_integers_floats_and_decimals_agree_with_the_brute_force_reader(both, renamed):
    "Integers are exact among themselves, near others by `atol` alone, and others near each other by `rtol` too."
    tolerance = {"atol": 0.4, "rtol": 0.1}
    gold, pred = both
    expected = reader(gold, pred, by_content=renamed, **tolerance)
    assert bool(results_match(named(gold), named(pred, "d" if renamed else "c"), **tolerance)) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(-(10**17), 10**17), st.floats(-1e17, 1e17), st.floats(0, 5), st.floats(0, 0.5))
def test_an_integer_meets_a_float_by_the_absolute_tolerance_alone(whole, other, atol, rtol):
    for value in (other, float(whole), whole + 0.25):
        difference = abs(Fraction(whole) - Fraction(value))
        if abs(difference - Fraction(atol)) <= Fraction(1, 10**12):  # on the edge the last bit of a difference decides
            continue
        expected = difference <= Fraction(atol)
        assert same_value(whole, value, atol=atol, rtol=rtol) == same_value(value, whole, atol=atol, rtol=rtol) == expected


@settings(max_examples=200, deadline=None)
@given(st.decimals(allow_nan=False), st.decimals(allow_nan=False), st.sampled_from([0.0, 1e-4, 0.3]))
def test_decimals_of_any_size_are_compared_by_value(a, b, rtol):
    a, b = (x if x.is_infinite() or x != x.to_integral_value() or x.adjusted() > 400 else x + Decimal("0.5") for x in (a, b))  # no integers
    if a.is_infinite() or b.is_infinite():
        expected = a == b
    else:
        largest = max(abs(a), abs(b))
        if largest.adjusted() > 2000:  # as a fraction it would fill the memory
            return
        difference, limit = abs(Fraction(a) - Fraction(b)), Fraction(rtol) * Fraction(largest)
        if limit and abs(difference / limit - 1) < Fraction(1, 10**9):
            return
        expected = difference <= limit
    assert same_value(a, b, atol=0.0, rtol=rtol) == expected


NESTED = st.recursive(VALUES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)), max_leaves=6)


def walk(a, b) -> bool:
    "Compare two nested values as one would by hand, level by level."
    if isinstance(a, dict) or isinstance(b, dict):
        return isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys() and all(walk(a[k], b[k]) for k in a)
    if isinstance(a, list) or isinstance(b, list):
        return isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(map(walk, a, b))
    return same_value(a, b)


@settings(max_examples=400, deadline=None)
@given(NESTED, NESTED)
def test_nested_values_are_compared_level_by_level(a, b):
    assert same_value(a, b) == walk(a, b)
    assert same_value(a, a)


@pytest.mark.parametrize("dates", [False, True])
def test_depth_has_no_limit(dates):
    day = dt.date(2020, 2, 29)
    gold, pred = ([1.0, day if dates else None], [1.00001, "2020-02-29" if dates else math.nan])
    for _ in range(5_000):
        gold, pred = [gold], [pred]
    assert results_match(named([[gold], [0]]), named([[0], [pred]], "d"))
    assert results_match(named([[gold]]), named([[[gold]]])).reason.startswith("value: column 1, row 1")
    assert results_match(named([[gold, 1]]), named([[gold, 2]]), lenient=True).reason.startswith("value: column 2")


@settings(max_examples=250, deadline=None)
@given(st.integers(), st.integers())
def test_integers_are_exact(a, b):
    assert bool(results_match(named([[a]]), named([[b]]))) == (a == b)


@settings(max_examples=300, deadline=None)
@given(ANY_VALUE, ANY_VALUE)
def test_same_value_is_symmetric_and_reflexive(a, b):
    assert same_value(a, a) and same_value(b, b)
    assert same_value(a, b) == same_value(b, a)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True), max_size=7))
def test_pair_up_finds_a_largest_matching(edges):
    found = pair_up(edges, 7)
    used = [j for j in found if j >= 0]
    assert len(set(used)) == len(used) and all(j in edges[i] for i, j in enumerate(found) if j >= 0)

    def best(i: int, taken: frozenset[int]) -> int:
        if i == len(edges):
            return 0
        return max([best(i + 1, taken), *(1 + best(i + 1, taken | {j}) for j in edges[i] if j not in taken)])

    assert len(used) == best(0, frozenset())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_large_groups_are_paired_as_small_ones_are(seed, width):
    "The maximum flow, the line and augmenting paths must find matchings of one size."
    rng = random.Random(seed)
    n = 40
    make = lambda: [tuple(rng.choice([0.0, 0.4, 0.9, 1.3, 1.8, 1e9, math.inf]) for _ in range(width)) for _ in range(n)]
    gold, pred = make(), make()
    left_g, left_p = unmatched_rows(list(zip(*gold, strict=True)), list(zip(*pred, strict=True)), **LOOSE)
    close = lambda a, b: all(math.isclose(x, y, rel_tol=0.0, abs_tol=0.5) for x, y in zip(a, b, strict=True))
    found = pair_up([[j for j, b in enumerate(pred) if close(a, b)] for a in gold], n)
    assert len(left_g) == len(left_p) == sum(j < 0 for j in found)


@pytest.mark.parametrize("seed", range(4))
def test_large_groups_with_integers_among_floats(seed):
    rng = random.Random(seed)
    make = lambda: [(rng.choice([20_000, 20_001, 20_000.0, 20_001.0, 20_001.5, 20_003]), rng.choice([1.0, 2.0])) for _ in range(30)]
    gold, pred = make(), make()
    left_g, _ = unmatched_rows(list(zip(*gold, strict=True)), list(zip(*pred, strict=True)))
    close = lambda a, b: all(same_value(x, y) for x, y in zip(a, b, strict=True))
    found = pair_up([[j for j, b in enumerate(pred) if close(a, b)] for a in gold], len(pred))
    assert len(left_g) == sum(j < 0 for j in found)


def wide_table(columns: int, rows: int, rng: random.Random, value) -> tuple[ResultSet, ResultSet, list[int]]:
    gold = ResultSet([f"g{k}" for k in range(columns)], [[value(i, k) for k in range(columns)] for i in range(rows)])
    order = rng.sample(range(columns), columns)
    shuffled = rng.sample(list(gold.rows), rows)
    return gold, ResultSet([f"p{k}" for k in range(columns)], [[row[k] for k in order] for row in shuffled]), order


@pytest.mark.parametrize("kind", ["integers", "floats", "flags", "latin square", "constant"])
@pytest.mark.timeout(300)
def test_twenty_six_columns_are_aligned(kind):
    rng = random.Random(7)
    value = {
        "integers": lambda i, k: rng.randrange(50), "floats": lambda i, k: rng.random(), "flags": lambda i, k: rng.randrange(2),
        "latin square": lambda i, k: (i + k) % 26, "constant": lambda i, k: 0,
    }[kind]  # fmt: skip
    gold, pred, order = wide_table(26, 26, rng, value)
    verdict = results_match(gold, pred)
    assert verdict
    if kind in ("integers", "floats"):
        assert [order[j] for j in verdict.columns] == list(range(26))
    rows = [list(row) for row in pred.rows]
    rows[3][5] = 999
    assert not results_match(gold, ResultSet(pred.columns, rows))


FLOATS = st.sampled_from([*(1.0 + i * 6e-5 for i in range(6)), 0.0, -0.0, 5e-7, 1e308, math.inf, -math.inf, math.nan])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=7))
def test_columns_of_floats_are_compared_as_rows_are(pairs):
    gold, pred = [a for a, _ in pairs], [b for _, b in pairs]
    assert same_values(gold, pred) == (unmatched_rows([gold], [pred]) == ([], []))


@settings(max_examples=200, deadline=None)
@given(pairs_of_tables(ANY_VALUE))
def test_columns_that_could_be_the_same_are_found(both):
    gold, pred = (ResultColumns(named(rows)) for rows in both)
    if len(gold.result) == len(pred.result):
        expected = [[j for j, b in enumerate(pred.columns) if unmatched_rows([a], [b]) == ([], [])] for a in gold.columns]
        assert alike_columns(gold, pred) == expected


@pytest.mark.timeout(300)
def test_a_misleading_table_ends():
    "Two regular graphs that look alike to every local rule, as incidence tables: no alignment exists."
    ring = lambda n, start: [(start + i, start + (i + 1) % n) for i in range(n)]
    table = lambda edges: [[int(k in edge) for k in range(12)] for edge in edges]
    gold, pred = named(table(ring(12, 0))), named(table(ring(6, 0) + ring(6, 6)), "d")
    assert not results_match(gold, pred)


def test_proposals_are_few_and_distinct():
    gold, pred, _ = wide_table(12, 12, random.Random(0), lambda i, k: (i + k) % 2)
    proposals = [aligned for aligned in itertools.islice(column_alignments(gold, pred), 1000) if not isinstance(aligned, Guess)]
    assert len(set(proposals)) == len(proposals) <= 400


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.timeout(300)
def test_bags_of_different_size_in_each_shape_are_told_apart(width, monkeypatch):
    "Where near rows are too many to list, a guess decides, and it must not forget rows."
    import healthrag.evaluation.matching as matching

    monkeypatch.setattr(matching, "_MOST_EDGES", 10)
    row = lambda key, value: (key, *[value] * width)
    gold = [row("a", i / 1e6) for i in range(20)] + [row("b", i / 1e6) for i in range(21)]
    pred = [row("a", i / 1e6 + 1e-9) for i in range(21)] + [row("b", i / 1e6 + 1e-9) for i in range(20)]
    assert not results_match(named(gold), named(pred), atol=1.0)
    assert results_match(named(gold), named(gold[::-1]), atol=1.0)


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.timeout(300)
def test_a_hundred_thousand_shuffled_rows_are_compared(renamed):
    rng = random.Random(0)
    rows = [
        (i, rng.randrange(100), f"name {rng.randrange(5000)}", rng.random(), rng.choice([None, 1.5, 2.5]), rng.randrange(10**9))
        for i in range(100_000)
    ]
    gold = ResultSet("abcdef", rng.sample(rows, len(rows)))
    order = [3, 0, 5, 1, 2, 4] if renamed else range(6)
    pred = ResultSet([("uvwxyz" if renamed else "abcdef")[k] for k in order], [tuple(row[k] for k in order) for row in rng.sample(rows, len(rows))])
    assert results_match(gold, pred)
    changed = [*pred.rows[:-1], tuple(None if value == pred.rows[-1][3] else value for value in pred.rows[-1])]
    assert not results_match(gold, ResultSet(pred.columns, changed))


@pytest.mark.timeout(300)
def test_noise_on_many_rows_ends():
    rng = random.Random(1)
    rows = [(rng.random() * 100, rng.random() * 100) for _ in range(20_000)]
    noisy = [(a * (1 + 1e-9), b * (1 - 1e-9)) for a, b in rng.sample(rows, len(rows))]
    assert results_match(named(rows), named(noisy))
    noisy[0] = (noisy[0][0] + 1, noisy[0][1])
    assert results_match(named(rows), named(noisy)).reason.startswith("value: column 1")


@settings(max_examples=250, deadline=None)
@given(tables(ANY_VALUE), tables(ANY_VALUE), st.booleans(), st.booleans(), st.sampled_from(["c", "d"]))
def test_any_two_tables_get_a_verdict_with_a_reason(first, second, ordered, lenient, prefix):
    gold, pred = named(first), named(second, prefix)
    verdict = results_match(gold, pred, ordered=ordered, order_by_columns=["c0"] if lenient else None, lenient=lenient)
    assert verdict.reason and bool(verdict.leniencies) <= verdict.match
    if verdict and not verdict.leniencies:
        assert len(first) == len(second)


@settings(max_examples=200, deadline=None)
@given(tables(st.sampled_from([0, 1, 0.4, "a", None]), max_columns=3), st.data())
def test_extra_columns_are_seen_through_and_only_leniently(rows, data):
    if not rows:
        return
    gold = named(rows)
    extra = [data.draw(st.sampled_from([0, 1, 0.4, "a", None, "z"])) for _ in rows]
    place = data.draw(st.integers(0, len(rows[0])))
    wider = [[*row[:place], more, *row[place:]] for row, more in zip(rows, extra, strict=True)]
    pred = named(data.draw(st.permutations(wider)), "d")
    assert not results_match(gold, pred)
    assert results_match(gold, pred, lenient=True).leniencies == ("extra columns",)
    assert results_match(pred, gold, lenient=True).leniencies == ("missing columns",)
