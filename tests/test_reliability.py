"""Reliability scores, stability over paraphrases, leakage, and the figures about them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.inter_rater import cohens_kappa

from healthrag.evaluation import (
    PENALTIES,
    abstention_table,
    agreement_chart,
    agreement_table,
    cost_chart,
    cost_table,
    k_chart,
    leakage_accuracy,
    leakage_table,
    load_benchmark,
    nearest_examples,
    pool_runs,
    question_similarity,
    reliability_chart,
    reliability_points,
    reliability_score,
    reliability_table,
    same_answers,
    same_text,
    sql_skeleton,
    stability_table,
    wordings,
)
from healthrag.evaluation.log import UNSCORED, Run
from healthrag.models.prices import Price
from healthrag.records import MODES, OUTCOMES, BenchmarkTask, TaskResult

EVERY = (*OUTCOMES, UNSCORED)


def result(outcome: str, number: int | str = 0, mode: str = "rag", **more) -> TaskResult:
    return TaskResult(number if isinstance(number, str) else f"t{number}", "?", "person", "simple", mode, outcome, **more)


# ---- reliability


@pytest.mark.parametrize("outcome", EVERY)
@pytest.mark.parametrize("answerable", [True, False])
def test_points_are_those_of_ehrsql(outcome, answerable):
    "1 for a right answer or a right refusal, 0 for a needless refusal, -c for everything else the system did."
    points = reliability_points(result(outcome, answerable=answerable), 5)
    if outcome == "gold_error":
        assert points is None  # no gold result: nothing to hold the answer against
    elif outcome == UNSCORED:
        assert points == 0  # our crash, not its mistake
    elif outcome == "correct" or (outcome == "abstained" and not answerable):
        assert points == 1
    else:
        assert points == (0 if outcome == "abstained" else -5)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVERY), st.booleans()), min_size=1, max_size=30))
def test_scores_fall_with_the_penalty_and_are_counted_by_hand(made):
    results = [result(outcome, n, answerable=answerable) for n, (outcome, answerable) in enumerate(made)]
    scored = [r for r in results if r.outcome != "gold_error"]
    scores = [reliability_score(results, c, resamples=100) for c in PENALTIES]
    if not scored:
        assert scores == [None] * 4
        return
    right = sum(r.right for r in scored)
    neutral = sum(r.outcome in ("abstained", UNSCORED) and not r.right for r in scored)
    wrong, n = len(scored) - right - neutral, len(scored)
    assert [s.value for s in scores] == pytest.approx([(right - c * wrong) / n for c in (0, 5, 10, n)])
    assert [s.value for s in scores[:3]] == sorted((s.value for s in scores[:3]), reverse=True)
    assert all(s.low <= s.value + 1e-9 and s.value - 1e-9 <= s.high <= 1 for s in scores if wrong == 0 or right == 0)
    (row,) = reliability_table({"m": results}).rows
    assert row[4] + row[5] == right and row[6] + row[8] == neutral and row[7] == wrong and row[2] + row[3] == n


def test_a_system_that_never_errs_alone_stays_positive_at_n():
    declines = [result("correct", n) for n in range(5)] + [result("abstained", n) for n in range(5, 60)]
    assert reliability_score(declines, "N").value > 0
    assert reliability_score([*declines, result("mismatch", 99)], "N").value < 0


@pytest.mark.parametrize("penalty", [-1, float("nan"), float("inf"), "n", ""])
def test_other_penalties_are_refused(penalty):
    with pytest.raises(ValueError, match="give a number of at least 0, or 'N'"):
        reliability_score([result("correct")], penalty)


def test_abstentions_are_counted_by_reason():
    made = [result("abstained", n, answerable=False) for n in range(3)] + [result("mismatch", 3, answerable=False)]
    made = [replace(r, group="no_such_data" if n < 2 else "asks_advice") for n, r in enumerate(made)] + [result("abstained", 9), result("correct", 10)]
    table = abstention_table({"m": made})
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["without an answer"] == 4 and row["of these declined"].value == 0.75
    assert row["no such data"].value == 1.0 and row["asks advice"].value == 0.5
    assert row["declined in all"] == 4 and row["of these rightly"].value == 0.75


# ---- stability


def family(*outcomes: str, sql: str | None = "SELECT 1", base="a") -> list[TaskResult]:
    return [result(outcome, base if n == 0 else f"{base}#{n}", sql=sql) for n, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "kind", "same"),
    [
        (("correct", "correct", "correct"), "all right", True), (("correct", "mismatch"), "some right", False), (("mismatch", "mismatch"), "all alike, wrong", True),
        (("mismatch", "parse_error"), "all wrong, not alike", False), (("parse_error", "parse_error"), "all wrong, not alike", False),
        (("abstained", "abstained"), "all alike, wrong", True), (("abstained", "mismatch"), "all wrong, not alike", False),
    ],
)  # fmt: skip
def test_one_question_in_several_wordings(outcomes, kind, same):
    table = stability_table({"m": family(*outcomes)})
    row = dict(zip(table.columns, table.rows[0], strict=True))
    counts = {name: row[name] for name in ("all right", "some right", "all alike, wrong", "all wrong, not alike")}
    assert counts == {name: int(name == kind) for name in counts} and row["same answer"].value == float(same)
    assert (row["questions"], row["wordings"]) == (1, len(outcomes))


def test_wrong_answers_are_run_again_to_be_compared(cdm):
    asked = [BenchmarkTask("a", "?", "person", "simple", "SELECT 1", database="gibleed")]
    men, again, women = (f"SELECT {what} FROM person" for what in ("COUNT(*) FILTER (gender_concept_id = 8507)",
                         "SUM((gender_concept_id = 8507)::INT)", "COUNT(*) FILTER (gender_concept_id = 8532)"))  # fmt: skip
    made = {sql: result("mismatch", "a" if n == 0 else f"a#{n}", sql=sql) for n, sql in enumerate((men, again, women))}
    same = same_answers(asked, lambda name: cdm.execute)
    assert same(made[men], made[again]) and not same(made[men], made[women]) and not same_text(made[men], made[again])
    broken = replace(made[women], sql="SELECT nothing FROM nowhere")
    assert not same(made[men], broken)
    assert stability_table({"m": [made[men], made[again]]}, same).rows[0][6] == 1


def test_unscored_wordings_are_left_out():
    assert wordings([*family("correct", "correct"), result(UNSCORED, "b"), result("correct", "b#1")]).keys() == {"a"}


# ---- leakage


def test_skeletons_forget_literals_and_nothing_else():
    base = "SELECT COUNT(*) AS n FROM person WHERE gender_concept_id = 8532 AND year_of_birth IN (1950, 1960)"
    same = [base.replace("8532", "8507"), base.replace("(1950, 1960)", "(1, 2, 3)"), base.replace("n FROM", "women FROM"), base.lower(), base + " -- all"]
    other = [base.replace("COUNT(*)", "COUNT(person_id)"), base.replace("person ", "death "), base.replace("=", "<>"), base + " LIMIT 3", base.replace("AND", "OR")]
    assert {sql_skeleton(sql) for sql in same} == {sql_skeleton(base)}
    assert sql_skeleton(base) not in {sql_skeleton(sql) for sql in other}
    assert sql_skeleton("SELECT 'a''b'") == sql_skeleton("SELECT 2.5e3")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_similarity_is_symmetric_and_bounded(a, b):
    there, back = question_similarity(a, b), question_similarity(b, a)
    assert there == pytest.approx(back) and 0 <= there <= 1 and question_similarity(a, a) == pytest.approx(1.0)


def tasks(*questions: str, start="SELECT ") -> list[BenchmarkTask]:
    return [BenchmarkTask(f"{start[-2]}{n}", q, "person", "simple", f"{start}{'n' * (n + 1)} FROM t") for n, q in enumerate(questions)]


def test_near_duplicates_are_found_in_every_wording():
    examples = tasks("How many patients have asthma?", "Which drugs were given most often?", start="SELECT e.")
    asked = tasks("How many patients have asthma in all?", "What is the average age?", "How old are they?", start="SELECT q.")
    asked[1] = replace(asked[1], paraphrases=("Which drugs were given the most often?",))
    asked[2] = replace(asked[2], gold_sql="SELECT e.n AS other FROM t")
    found = nearest_examples(examples, asked)
    assert [(n.task.id, n.example.id, n.same_skeleton, n.near()) for n in found] == [("q0", "e0", False, True), ("q1", "e1", False, True), ("q2", "e0", True, True)]
    assert [n.near(1.0) for n in found] == [False, False, True]


def test_accuracy_without_near_duplicates():
    examples, asked = tasks("How many patients have asthma?", start="SELECT e."), tasks("How many patients have asthma?", "What is the mean age?", start="SELECT q.")
    found = nearest_examples(examples, asked)
    results = {"m": [result("correct", "q0"), result("mismatch", "q1"), result("correct", "q0#1"), result("gold_error", "q1#1")]}
    (row,) = leakage_accuracy(results, found).rows
    assert (row[2], row[4], row[6]) == (3, 1, 2) and (row[3].value, row[5].value, row[7].value) == (pytest.approx(2 / 3), 0.0, 1.0)
    assert "1 of 2 tasks have a near duplicate" in leakage_table(found).note


def test_that_nothing_is_a_near_duplicate_is_said():
    found = nearest_examples(tasks("Which drugs were given most often?", start="SELECT e."), tasks("How old are they?", start="SELECT q."))
    (row,) = leakage_accuracy({"m": [result("correct", "q0")]}, found).rows
    assert row[4:7] == (1, row[3], 0) and row[7] is None and "None of 1 tasks" in leakage_accuracy({"m": [result("correct", "q0")]}, found).note
    assert not leakage_accuracy({"m": [result("correct", "q0")]}, []).rows


def test_no_example_of_the_project_has_a_query_of_the_test_up_to_its_literals():
    from healthrag.evaluation import split_tasks

    for database in {task.database for task in load_benchmark()}:
        examples, test = split_tasks([t for t in load_benchmark() if t.database == database and t.answerable])
        found = nearest_examples(examples, test)
        assert len(found) == len(test)
        assert sum(n.near() for n in found) / len(found) < 0.1, leakage_table(found).markdown


# ---- figures


def run(model: str, k: int, letters: dict[str, str], **more) -> Run:
    outcomes = {"c": "correct", "m": "mismatch", "a": "abstained"}
    results = [
        result(outcomes[letter], n, mode, model=model, prompt_tokens=100 * (k + 1), completion_tokens=50, seconds=2.0, cached=True)
        for mode, of_mode in letters.items() for n, letter in enumerate(of_mode)
    ]  # fmt: skip
    return Run({"model": {"name": model}, "modes": list(letters), "store": "local", "k": k, **more}, tuple({r.task_id for r in results}), "ab", tuple(results))


RUNS = [run("p:one", k, {"zero_shot": "mmma", "rag": "ccma"[: 4 - k] + "c" * k}) for k in (1, 3)] + [run("p:two", k, {"zero_shot": "cmmm", "rag": "cccm"}) for k in (1, 3)]


def test_accuracy_against_k_holds_every_point():
    rows = k_chart(RUNS).table.rows
    assert [(row[0], row[1], row[2].value) for row in rows] == [("p:one", "zero-shot", 0.0), ("p:one", 1, 0.75), ("p:one", 3, 1.0),
                                                               ("p:two", "zero-shot", 0.25), ("p:two", 1, 0.75), ("p:two", 3, 0.75)]  # fmt: skip
    assert k_chart(RUNS[:1]).table.rows == ()


def test_costs_are_means_and_prices_are_given():
    import datetime as dt

    prices = [Price("p:one", 2.0, 10.0, dt.date(2026, 1, 1), "made up")]
    table = cost_table(pool_runs(RUNS[::2]), prices)
    cells = {(row[0], row[1]): row[3:] for row in table.rows}
    assert cells["p:one", "rag"] == (250, 2.0, pytest.approx(1000 * (200 * 2 + 50 * 10) / 1e6)) and cells["p:two", "rag"] == (250, 2.0, None)
    live = {"m": [replace(r, cached=False, prompt_tokens=None) for r in RUNS[0].results]}
    assert cost_table(live, prices).rows[0][3:] == (None, None, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_kappa_is_that_of_statsmodels(pairs):
    systems = {name: [result("correct" if pair[k] else "mismatch", n) for n, pair in enumerate(pairs)] for k, name in enumerate("ab")}
    rows = {row[:2]: row[2:] for row in agreement_table(systems).rows}
    assert rows["a", "b"] == rows["b", "a"] and rows["a", "b"][1] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    if rows["a", "b"][2] is not None:
        counts = [[sum(pair == (a, b) for pair in pairs) for b in (False, True)] for a in (False, True)]
        assert rows["a", "b"][2] == pytest.approx(cohens_kappa(counts).kappa)
    else:
        assert len({a for a, _ in pairs} | {b for _, b in pairs}) == 1


def charts():
    results = pool_runs(RUNS[::2])
    return [k_chart(RUNS), cost_chart(results), agreement_chart({label: [r for r in rs if r.mode == "rag"] for label, rs in results.items()}), reliability_chart(results)]


def test_figures_are_well_formed_and_carry_their_numbers():
    for chart in charts():
        assert ET.fromstring(chart.svg).tag.endswith("svg") and "<text" not in chart.svg and "<image" not in chart.svg
        assert chart.table.rows and chart.table.csv.count("\n") == len(chart.table.rows) + 1


def test_figures_are_the_same_bytes_in_another_process():
    program = textwrap.dedent(f"""
        import hashlib, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_reliability import charts
        print(*[hashlib.sha256((c.svg + c.table.csv).encode()).hexdigest() for c in charts()])
    """)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment).stdout.split()
    assert other == [hashlib.sha256((c.svg + c.table.csv).encode()).hexdigest() for c in charts()]


def test_every_mode_has_its_marks():
    from healthrag.evaluation.curves import _MARKERS, _MODE_NAMES

    assert set(MODES) == set(_MARKERS) == set(_MODE_NAMES)
