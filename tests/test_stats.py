"""Statistics against statsmodels, scipy and first principles."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from scipy.optimize import minimize_scalar
from statsmodels.stats.contingency_tables import cochrans_q, mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from healthrag.evaluation import (
    bootstrap_interval,
    cochran_q,
    holm,
    mcnemar_exact,
    mcnemar_power,
    paired_difference,
    smallest_detectable_gain,
    wilson_interval,
)

COUNTS = st.integers(0, 60)


@settings(max_examples=300, deadline=None)
@given(COUNTS, COUNTS)
def test_mcnemar_is_that_of_statsmodels(b, c):
    oracle = mcnemar([[5, b], [c, 5]], exact=True).pvalue if b + c else 1.0
    assert math.isclose(mcnemar_exact(b, c), oracle, rel_tol=1e-9, abs_tol=1e-15)
    assert mcnemar_exact(b, c) == mcnemar_exact(c, b)


def test_counts_may_be_those_of_numpy():
    b, c = np.int64(700), np.int64(760)  # as `(first & ~second).sum()` gives them; products of these overflow
    assert mcnemar_exact(b, c) == mcnemar_exact(700, 760) and wilson_interval(b, c) == wilson_interval(700, 760)
    assert paired_difference(b, c, np.int64(4000)) == paired_difference(700, 760, 4000)


def test_mcnemar_known_values():
    assert round(mcnemar_exact(2, 10), 4) == 0.0386 and mcnemar_exact(0, 6) == 0.03125
    assert mcnemar_exact(0, 0) == mcnemar_exact(7, 7) == 1.0
    assert mcnemar_exact(0, 2000) == pytest.approx(2.0**-1999, abs=0)
    assert 0.9 < mcnemar_exact(5000, 5001) <= 1.0


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.data(), st.sampled_from([0.5, 0.8, 0.95, 0.99]))
def test_wilson_is_that_of_statsmodels(n, data, confidence):
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n, confidence)
    oracle = proportion_confint(k, n, alpha=1 - confidence, method="wilson")
    assert (low, high) == pytest.approx(oracle, abs=1e-9)
    assert 0 <= low <= k / n <= high <= 1


@settings(max_examples=50, deadline=None)  # the oracle takes 0.1 s a call
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_that_of_statsmodels(p_values):
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), abs=1e-12)


def test_holm_of_nothing_is_nothing():
    assert holm([]) == []


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 5).flatmap(lambda k: st.lists(st.lists(st.integers(0, 1), min_size=k, max_size=k), min_size=2, max_size=25)))
def test_cochran_is_that_of_statsmodels(answers):
    ours = cochran_q(answers)
    if all(len(set(row)) == 1 for row in answers):
        assert ours == (0.0, len(answers[0]) - 1, 1.0)
        return
    oracle = cochrans_q(np.array(answers))
    assert ours.q == pytest.approx(oracle.statistic) and ours.df == oracle.df and ours.p_value == pytest.approx(oracle.pvalue)


def score_statistic(b: int, c: int, n: int, delta: float) -> float:
    "Tango's score statistic from first principles: maximise the likelihood with the difference held fixed."

    def minus_log_likelihood(p_b: float) -> float:
        p_c = p_b + delta
        rest = 1 - p_b - p_c
        terms = [(b, p_b), (c, p_c), (n - b - c, rest)]
        return -sum(k * math.log(max(p, 1e-300)) for k, p in terms if k)

    low, high = max(0.0, -delta), (1 - delta) / 2
    p_b = minimize_scalar(minus_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-13}).x
    variance = (2 * p_b + delta - delta**2) / n
    return ((c - b) / n - delta) / math.sqrt(variance)


@pytest.mark.parametrize(("b", "c", "n"), [(2, 10, 60), (3, 14, 30), (1, 1, 10), (12, 5, 40), (0, 7, 50), (9, 0, 44), (20, 21, 200)])
def test_tango_interval_ends_where_the_score_test_stops_rejecting(b, c, n):
    difference, low, high = paired_difference(b, c, n)
    assert difference == (c - b) / n and low < difference < high
    assert score_statistic(b, c, n, low) == pytest.approx(1.959964, abs=2e-3)
    assert score_statistic(b, c, n, high) == pytest.approx(-1.959964, abs=2e-3)


def test_tango_interval_edges():
    assert paired_difference(0, 0, 0) == (0.0, -1.0, 1.0)
    assert paired_difference(0, 5, 5).high == 1.0 and paired_difference(5, 0, 5).low == -1.0
    none = paired_difference(0, 0, 60)  # no discordant pair: z² / (n + z²) on either side
    assert none.low == pytest.approx(-none.high) and none.high == pytest.approx(1.959964**2 / (60 + 1.959964**2), abs=1e-4)
    narrow, wide = paired_difference(4, 9, 50, 0.8), paired_difference(4, 9, 50, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@settings(max_examples=150, deadline=None)
@given(COUNTS, COUNTS, COUNTS)
def test_tango_interval_is_symmetric_and_inside(b, c, rest):
    n = b + c + rest
    there, back = paired_difference(b, c, n), paired_difference(c, b, n)
    assert -1 <= there.low <= there.difference <= there.high <= 1
    assert there.low == pytest.approx(-back.high, abs=1e-9) and there.high == pytest.approx(-back.low, abs=1e-9)


def test_tango_interval_covers_the_truth():
    "Coverage by exact enumeration of a trinomial, n = 30: some 97 % where Wald's interval stays below 94 %."
    n, p_b, p_c = 30, 0.03, 0.1
    covered = wald = 0.0
    for b, c in itertools.product(range(n + 1), repeat=2):
        if b + c > n:
            continue
        weight = math.exp(
            math.lgamma(n + 1) - math.lgamma(b + 1) - math.lgamma(c + 1) - math.lgamma(n - b - c + 1)
            + b * math.log(p_b) + c * math.log(p_c) + (n - b - c) * math.log(1 - p_b - p_c)
        )  # fmt: skip
        if weight < 1e-9:
            continue
        _, low, high = paired_difference(b, c, n)
        half = 1.959964 * math.sqrt(b + c - (c - b) ** 2 / n) / n
        covered += weight * (low <= p_c - p_b <= high)
        wald += weight * (abs((c - b) / n - (p_c - p_b)) <= half)
    assert 0.95 <= covered < 0.99 and wald < 0.94


@pytest.mark.parametrize("values", [[1, 0] * 30, [1] * 50 + [-5] * 7 + [0] * 9, [0.1 * k for k in range(40)], [1] * 20 + [-100]])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_bootstrap_is_that_of_scipy(values, confidence):
    low, high = bootstrap_interval(values, confidence, resamples=20_000)
    oracle = scipy_stats.bootstrap((values,), np.mean, confidence_level=confidence, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    spread = np.std(values) / math.sqrt(len(values))
    assert (low, high) == pytest.approx(tuple(oracle), abs=0.1 * spread)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1.0, 0.0, -5.0]), min_size=1, max_size=30), st.floats(0.1, 3), st.integers(-5, 5))
def test_bootstrap_scales_and_shifts_with_its_values(values, factor, shift):
    low, high = bootstrap_interval(values, resamples=200)
    assert min(values) <= low <= high <= max(values)
    moved = bootstrap_interval([factor * v + shift for v in values], resamples=200)
    assert moved == pytest.approx((factor * low + shift, factor * high + shift), abs=1e-9)


def test_power_is_that_of_simulation():
    rng = random.Random(0)
    n, gained, lost = 60, 0.25, 0.05
    hits = 0
    for _ in range(4000):
        draws = [rng.random() for _ in range(n)]
        c, b = sum(d < gained for d in draws), sum(gained <= d < gained + lost for d in draws)
        hits += c > b and mcnemar_exact(b, c) <= 0.05
    assert mcnemar_power(n, gained, lost) == pytest.approx(hits / 4000, abs=0.025)


def test_power_by_exact_sum():
    n, gained, lost = 12, 0.5, 0.1
    total = 0.0
    for m in range(n + 1):
        for b in range(m + 1):
            if m - b > b and mcnemar_exact(b, m - b) <= 0.05:
                total += scipy_stats.binom.pmf(m, n, 0.6) * scipy_stats.binom.pmf(b, m, lost / 0.6)
    assert mcnemar_power(n, gained, lost) == pytest.approx(total, abs=1e-9)


def test_smallest_detectable_gain():
    for n in (30, 80, 160):
        gain = smallest_detectable_gain(n)
        assert gain is not None
        assert mcnemar_power(n, 0.05 + gain, 0.05) >= 0.8 > mcnemar_power(n, 0.05 + gain - 0.002, 0.05)
    assert smallest_detectable_gain(3) is None and smallest_detectable_gain(0) is None
    gains = [smallest_detectable_gain(n) for n in (40, 80, 160, 320)]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mcnemar_exact(-1, 2), lambda: mcnemar_exact(1.5, 2), lambda: mcnemar_exact(True, 2), lambda: wilson_interval(3, 2),
        lambda: wilson_interval(1, 2, 1.0), lambda: wilson_interval(1, 2, 95), lambda: paired_difference(3, 3, 5), lambda: holm([0.1, 1.2]),
        lambda: holm([float("nan")]), lambda: cochran_q([]), lambda: cochran_q([[1], [0]]), lambda: cochran_q([[1, 0], [1]]),
        lambda: cochran_q([[1, 2]]), lambda: smallest_detectable_gain(10, lost=0.6), lambda: smallest_detectable_gain(10, power=1.0),
        lambda: bootstrap_interval([]), lambda: bootstrap_interval([1], resamples=10), lambda: bootstrap_interval([1], confidence=95),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call):
    with pytest.raises(ValueError, match=r"give|cannot|needs|must|not a p-value"):
        call()
