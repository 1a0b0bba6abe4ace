"""Systems pooled from runs and compared: every number against statsmodels or a count by hand."""

from __future__ import annotations

import csv
import io
import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import cochrans_q, mcnemar
from statsmodels.stats.multitest import multipletests

from healthrag.evaluation import RunComparison, System, compare, name_systems, pool_runs, pool_systems, run_benchmark
from healthrag.evaluation.log import UNSCORED, Run
from healthrag.records import MODES, TIERS, TaskResult

OUTCOMES = {"c": "correct", "m": "mismatch", "a": "abstained", "u": UNSCORED, "g": "gold_error", "p": "parse_error"}


def run(model: str, letters: dict[str, str], ids=None, answerable=True, **parameters) -> Run:
    "A run from one letter a task for each mode."
    length = len(next(iter(letters.values())))
    ids = list(ids or (f"t{n}" for n in range(length)))
    results = [
        TaskResult(task_id, "?", ("person", "drug")[n % 2], TIERS[n % 3], mode, OUTCOMES[letters[mode][n]], model=model, answerable=answerable)
        for n, task_id in enumerate(ids) for mode in letters
    ]  # fmt: skip
    about = {"model": {"name": model, "identity": {"threads": 1}}, "modes": list(letters), "target": "sql", "store": "local", "k": 3, "examples": "turns",
             "database": "gibleed", "seed": 0}  # fmt: skip
    return Run({**about, **parameters}, tuple(ids), "ab12", tuple(results))


def rag(model: str, letters: str, **more) -> Run:
    return run(model, {"rag": letters}, **more)


def column(table, name: str) -> list:
    return [row[table.columns.index(name)] for row in table.rows]


# ---- systems


def test_a_system_is_the_same_whatever_it_is_asked():
    first = rag("m", "cm", database="gibleed", tasks="", per_tier=None)
    other = rag("m", "cc", ids=["x", "y"], database="synthetic", tasks="other.jsonl", per_tier=2, questions="paraphrases")
    (system,), (results,) = zip(*pool_systems([first, other]).items(), strict=True)
    assert system == System("m", "rag", "sql", "local", "turns", 3, seed=0, settings=(("model.identity.threads", "1"),))
    assert [(r.task_id, r.outcome) for r in results] == [("t0", "correct"), ("t1", "mismatch"), ("x", "correct"), ("y", "correct")]


@pytest.mark.parametrize("change", [{"target": "funsql"}, {"store": "faiss"}, {"examples": "text"}, {"k": 5}, {"seed": 1}, {"chunker": "header"}])
def test_what_makes_another_system_with_retrieval(change):
    both = {"zero_shot": "cm", "rag": "cc"}
    pooled = pool_systems([run("m", both), run("m", both, **change)])
    modes = [system.mode for system in pooled]
    assert modes.count("rag") == 2 and modes.count("zero_shot") == (2 if "target" in change else 1)
    assert len(set(name_systems(list(pooled)))) == len(pooled)
    (field,) = change
    assert any(f"{field} {change[field]}" in name for name in name_systems(list(pooled)))


def test_other_settings_make_another_system_in_both_modes():
    both = {"zero_shot": "cm", "rag": "cc"}
    runs = [run("m", both, settings={"max_tokens": n}) for n in (100, 200)]
    assert len(pool_systems(runs)) == 4
    assert list(pool_runs(runs)) == ["m, max_tokens 100", "m, max_tokens 200"]


def test_a_task_counts_once():
    again = pool_systems([rag("m", "cm"), rag("m", "mm"), rag("m", "cm")])
    assert [r.outcome for r in next(iter(again.values()))] == ["correct", "mismatch"]


def test_zero_shot_stands_beside_every_retriever_for_the_questions_it_was_asked():
    runs = [run("m", {"zero_shot": "cmc", "rag": "ccc"}), rag("m", "cm", store="faiss"), run("n", {"zero_shot": "mm"})]
    pooled = pool_runs(runs)
    counts = {label: [(mode, sum(r.mode == mode for r in results)) for mode in MODES] for label, results in pooled.items()}
    assert counts == {"m, store local": [("zero_shot", 3), ("rag", 3)], "m, store faiss": [("zero_shot", 2), ("rag", 2)], "n": [("zero_shot", 2), ("rag", 0)]}


# ---- the numbers


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5).flatmap(lambda k: st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=3, max_size=40)), st.booleans())
def test_tests_and_corrections_are_those_of_statsmodels(answers, corrected):
    systems = list(zip(*answers, strict=True))
    runs = [rag(f"model {k}", "".join("c" if right else "m" for right in system)) for k, system in enumerate(systems)]
    compared = compare(runs, correction="holm" if corrected else "none")
    of = {name: np.array(systems[int(name.rpartition(" ")[2])]) for name in compared.systems}
    raw = []
    for pair in compared.pairs:
        first, second = of[pair.first], of[pair.second]
        table = [[sum(first & second), sum(first & ~second)], [sum(~first & second), sum(~first & ~second)]]
        raw.append(float(mcnemar(table, exact=True).pvalue) if table[0][1] + table[1][0] else 1.0)
        assert (pair.counts.treatment_only, pair.counts.baseline_only) == (table[1][0], table[0][1])
    assert [p.counts.p_value for p in compared.pairs] == pytest.approx(raw)
    expected = multipletests(raw, method="holm")[1] if corrected else raw
    assert [p.p_value for p in compared.pairs] == pytest.approx(list(expected))
    if len(systems) < 3:
        assert compared.cochran is None
    elif any(len(set(row)) > 1 for row in answers):
        oracle = cochrans_q(np.array(answers, dtype=int))
        assert (compared.cochran.q, compared.cochran.p_value) == pytest.approx((oracle.statistic, oracle.pvalue))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_ranks_marks_and_counts_say_the_same(k, rng):
    shares = [rng.random() for _ in range(k)]
    runs = [rag(f"m{i}", "".join("c" if rng.random() < share else "m" for _ in range(60))) for i, share in enumerate(shares)]
    compared = compare(runs)
    table = compared.table
    assert column(table, "#") == list(range(1, k + 1)) and column(table, "right") == sorted(column(table, "right"), reverse=True)
    marks = {row[0]: row[table.columns.index("accuracy")].better_than for row in table.rows}
    better = {number: set(of_one) for number, of_one in marks.items()}
    for number, rank, wins, undecided, losses in zip(*(column(table, c) for c in ("#", "rank", "better", "undecided", "worse")), strict=True):
        above = [other for other in better if number in better[other]]
        assert rank == 1 + losses == 1 + len(above) and wins == len(better[number]) and wins + undecided + losses == k - 1
        assert all(other < number for other in above)  # nobody with fewer right answers is better
    assert sum(column(table, "better")) == sum(column(table, "worse"))
    raw = {(p.first, p.second): p.p_value for p in compared.pairs}
    assert sum(map(len, better.values())) == sum(p < 0.05 for p in raw.values())


def test_the_order_of_runs_and_tasks_does_not_matter():
    rng = random.Random(3)
    runs = [rag(f"m{i}", "".join(rng.choice("cmpu") for _ in range(30))) for i in range(4)]
    shuffled = [replace(r, results=tuple(rng.sample(r.results, len(r.results)))) for r in rng.sample(runs, 4)]
    there, back = compare(runs), compare(shuffled)
    numbers = lambda c: {row[1]: (*row[2:4], row[4].estimate, *row[5:]) for row in c.table.rows}
    assert numbers(there) == numbers(back)
    assert {frozenset((p.first, p.second)): p.p_value for p in there.pairs} == {frozenset((p.first, p.second)): p.p_value for p in back.pairs}


def test_one_run_compares_its_modes():
    compared = compare(run("m", {"zero_shot": "m" * 12, "rag": "c" * 12}))
    assert list(compared.systems) == ["m, rag", "m, zero-shot"] and isinstance(compared, RunComparison)
    assert column(compared.table, "rank") == [1, 2] and compared.pairs[0].better() == "m, rag"


def test_ranks_are_shared_within_noise():
    runs = [rag("best", "c" * 40), rag("good", "c" * 38 + "mm"), rag("poor", "c" * 5 + "m" * 35)]
    table = compare(runs).table
    assert column(table, "system") == ["best", "good", "poor"] and column(table, "rank") == [1, 1, 3]
    assert [row[4].better_than for row in table.rows] == [(3,), (3,), ()]


def test_only_pairs_with_the_baseline_are_tested():
    runs = [rag("a", "c" * 9 + "m" * 3), rag("b", "m" * 9 + "c" * 3), rag("c", "c" * 2 + "m" * 10)]
    each, against = compare(runs), compare(runs, baseline="b")
    assert len(each.pairs) == 3 and len(against.pairs) == 2 and against.baseline == "b"
    assert {p.first for p in against.pairs} == {"b"}
    holm = dict(zip(["a", "c"], multipletests([p.counts.p_value for p in against.pairs], method="holm")[1], strict=True))
    rows = {row[1]: dict(zip(against.table.columns, row, strict=True)) for row in against.table.rows}
    assert rows["b"]["verdict"] == "baseline" and rows["b"]["gain"] is None and "rank" not in against.table.columns
    assert (rows["a"]["wins"], rows["a"]["ties"], rows["a"]["losses"]) == (9, 0, 3) and rows["a"]["Holm p"] == pytest.approx(holm["a"])
    assert rows["a"]["gain"].value == pytest.approx(6 / 12) and rows["a"]["verdict"] == "within noise"
    assert "Holm's correction over 2 tests" in against.table.note


def test_a_baseline_is_named_as_briefly_as_is_clear():
    runs = [run("large", {"zero_shot": "cm", "rag": "cc"}), run("small", {"zero_shot": "mm", "rag": "cm"})]
    assert compare(runs, baseline="small, z").baseline == "small, zero-shot"
    for name, message in (("large", "2 systems are called 'large'"), ("tiny", "no systems are called 'tiny'; the systems are: large, rag; ")):
        with pytest.raises(ValueError, match=re.escape(message)):
            compare(runs, baseline=name)


def test_crashes_stay_in_the_denominator_and_out_of_the_tests():
    compared = compare([rag("a", "ccuu"), rag("b", "cmcg")])
    rows = {row[1]: dict(zip(compared.table.columns, row, strict=True)) for row in compared.table.rows}
    assert (rows["a"]["tasks"], rows["a"]["right"], rows["a"]["unscored"]) == (4, 2, 2) and rows["b"]["tasks"] == 3
    (pair,) = compared.pairs
    assert (pair.counts.n, pair.counts.dropped) == (2, 2)


def test_lenient_stands_beside_strict():
    letters = rag("a", "cm")
    lenient = replace(letters, results=tuple(replace(r, lenient=r.outcome == "mismatch") for r in letters.results))
    rows = compare([lenient, rag("b", "cm")]).table.rows
    assert [row[5:7] for row in rows] == [(1.0, 1), (0.5, 0)]


def test_right_refusals_count():
    compared = compare([rag("a", "aam", answerable=False), rag("b", "mam", answerable=False)])
    assert column(compared.table, "right") == [2, 1]
    assert column(compare([rag("a", "aac"), rag("b", "mmm")]).table, "right") == [1, 0]  # these had an answer


def test_only_tasks_that_all_were_asked_are_compared():
    compared = compare([rag("a", "ccc"), rag("b", "cm")])
    assert compared.left_out == 1 and column(compared.table, "tasks") == [2, 2] and "1 tasks that not all were asked are left out" in compared.table.note
    with pytest.raises(ValueError, match="no task was asked of all systems"):
        compare([rag("a", "c"), rag("b", "c", ids=["other"])])


def test_runs_on_several_databases_are_pooled():
    more = dict(ids=["x", "y"], database="synthetic")
    compared = compare([rag("a", "cc"), rag("a", "cm", **more), rag("b", "mm"), rag("b", "mm", **more)])
    assert column(compared.table, "tasks") == [4, 4] and column(compared.table, "right") == [3, 0] and len(compared.systems) == 2


@pytest.mark.parametrize(("runs", "options", "message"), [([], {}, "0 systems"), ([rag("a", "c")], {}, "1 systems"), ([rag("a", "c")], {"correction": "fdr"}, "holm, none")])
def test_what_cannot_be_compared_is_refused(runs, options, message):
    with pytest.raises(ValueError, match=message):
        compare(runs, **options)


# ---- views


def test_views_of_tasks_add_up_and_correct_over_their_table():
    rng = random.Random(5)
    runs = [rag(f"m{i}", "".join("c" if rng.random() < share else "m" for _ in range(90))) for i, share in enumerate((0.9, 0.5, 0.1))]
    compared = compare(runs)
    for view, values in (("tier", list(TIERS)), ("group", ["drug", "person"])):
        table = compared.by(view)
        assert list(dict.fromkeys(column(table, view))) == values and len(table.rows) == 3 * len(values)
        for name in compared.systems:
            rows = [row for row in table.rows if row[2] == name]
            (whole,) = [row for row in compared.table.rows if row[1] == name]
            assert sum(row[3] for row in rows) == whole[2] and sum(row[4] for row in rows) == whole[3]
        assert f"over all {3 * len(values)} tests" in table.note


def test_a_view_of_tasks_corrects_once_over_all_its_tests():
    "Seven against nothing in each of two groups: 0.0156 alone, not significant after six tests."
    letters = lambda share: "".join("cm"[n // 2 >= share] for n in range(20))
    compared = compare([rag("a", letters(7)), rag("b", letters(0)), rag("c", letters(0))])
    assert [p.counts.p_value < 0.001 for p in compared.pairs] == [True, True, False]
    assert column(compared.by("group"), "better") == [0] * 6
    alone = compare([rag("a", letters(7)), rag("b", letters(0))])
    assert column(alone.by("group"), "better") == [1, 0, 1, 0]


def test_views_of_systems_compare_what_differs_in_nothing_else():
    both = lambda *letters: dict(zip(MODES, letters, strict=True))
    runs = [
        run("a", both("mmmm", "cccm")), run("a", both("mmmm", "ccmm"), store="faiss"), run("a", both("mmmm", "cmmm"), target="funsql"),
        run("a", both("mmmm", "cccc"), k=5), run("b", both("mmmc", "mmmm")),
    ]  # fmt: skip
    compared = compare(runs)
    picked = {view: [row[1:7] for row in compared.by(view).rows] for view in ("store", "target", "k", "model", "mode")}
    assert picked["store"] == [("faiss", "local", 4, 1, 3, 0)]
    assert picked["k"] == [(3, 5, 4, 1, 3, 0)]
    assert {row[:2] for row in picked["target"]} == {("funsql", "sql")}
    assert len(picked["target"]) == 2  # with retrieval and without
    assert all(row[:2] == ("zero_shot", "rag") for row in picked["mode"]) and len(picked["mode"]) == 5
    assert {row[:2] for row in picked["model"]} == {("a", "b")} and len(picked["model"]) == 2
    with pytest.raises(ValueError, match="there is no view 'colour'; choose one of tier, group, model"):
        compared.by("colour")


# ---- how it shows itself


def test_every_form_holds_the_same_numbers():
    compared = compare([rag("a_b", "c" * 30), rag("b&c", "m" * 30), rag("c", "c" * 29 + "m")])
    read = list(csv.DictReader(io.StringIO(compared.csv)))
    assert [(row["system"], row["rank"], row["accuracy better than"]) for row in read] == [("a_b", "1", "3"), ("c", "1", "3"), ("b&c", "3", "")]
    assert "1.000 [0.886, 1.000]<sup>3</sup>" in compared.markdown and "<sup>3</sup>" in compared._repr_html_()
    assert "$^{3}$" in compared.latex and r"a\_b" in compared.latex and r"b\&c" in compared.latex and "Cochran" in compared.latex
    lines = [line for line in compared.latex.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(compared.table.columns) - 1}
    assert repr(compared) == "RunComparison(3 systems, 30 tasks, each with each)"
    assert compare([rag("a", "c"), rag("b", "m")], baseline="a").pair_table.rows[0][:6] == ("a", "b", 1, 0, 0, 1)


def test_runs_of_the_benchmark_are_compared(tmp_path):
    from test_run import RIGHT, WORLD
    from test_run import task as easy

    logs = []
    for name, reply in (("knows", RIGHT), ("does-not", "SELECT COUNT(*) AS n FROM death")):
        model = lambda prompt, reply=reply: reply
        model.__name__ = name
        logs.append(tmp_path / f"{name}.jsonl")
        run_benchmark([easy(n) for n in range(8)], generator=model, log=logs[-1], modes=["rag"], parameters={"k": 3}, **WORLD)
    compared = compare(logs)
    assert list(compared.systems) == ["knows", "does-not"] and column(compared.table, "rank") == [1, 2]
    assert compared.pairs[0].p_value == pytest.approx(2 / 2**8)


def test_names_are_never_shared():
    systems = [System(m, mode, store=s, k=k) for m, mode, s, k in itertools.product("ab", MODES, ("local", "faiss"), (3, 5))]
    assert len(set(name_systems(systems))) == len(systems)
