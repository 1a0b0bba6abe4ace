"""Tables, figures, error analyses and reports."""

from __future__ import annotations

import csv
import hashlib
import itertools
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from healthrag.evaluation import (
    DIAGNOSES,
    ERROR_KINDS,
    Estimate,
    PValue,
    Run,
    Table,
    all_charts,
    build_report,
    diagnose,
    error_examples,
    error_kind,
    error_report,
    error_table,
    kind_table,
    label_runs,
    leaderboard,
    markdown_report,
    mcnemar_exact,
    mcnemar_table,
    model_pairs,
    outcome_table,
    query_shape,
    read_run,
    run_benchmark,
    stage_table,
    tier_table,
    wilson_interval,
    write_results,
)
from healthrag.evaluation.contents import report_charts
from healthrag.evaluation.run import UNSCORED
from healthrag.records import MODES, OUTCOMES, STAGES, TIERS, BenchmarkTask, TaskResult

STAGE_OF = {
    "correct": "executed", "mismatch": "executed", "execute_error": "rendered", "render_error": "built", "build_error": "parsed",
    "parse_error": "none", "generation_error": "none", "gold_error": "none", "abstained": "none", "unsafe": "parsed", UNSCORED: "none",
}  # fmt: skip
SHORT = {"c": "correct", "m": "mismatch", "x": "execute_error", "r": "render_error", "b": "build_error", "p": "parse_error",
         "g": "generation_error", "G": "gold_error", "u": UNSCORED, "a": "abstained", "s": "unsafe"}  # fmt: skip
GOLD = "SELECT COUNT(*) AS n FROM condition_occurrence WHERE condition_concept_id = 192671"
WRONG = "SELECT COUNT(*) AS n FROM condition_occurrence WHERE condition_concept_id = 4112343"


def task(n: int) -> BenchmarkTask:
    return BenchmarkTask(f"t{n}", f"How many <b>bleedings</b>, {n}?", "condition", TIERS[n % 3], GOLD)


def results(letters: str, mode: str = "rag", **more) -> list[TaskResult]:
    made = []
    for n, letter in enumerate(letters):
        t, outcome = task(n), SHORT[letter]
        base = TaskResult(t.id, t.question, t.group, t.tier, mode, outcome, stage=STAGE_OF[outcome], lenient=outcome == "correct")
        sql = GOLD if outcome == "correct" else WRONG if outcome == "mismatch" else None
        error = None if outcome == "correct" else f"no column `x`; ``` {outcome} | 100 %"
        made.append(replace(base, sql=sql, code=sql or "SELECT x", error=error, **more))
    return made


TWO = {
    "weak": results("cmmrrp", "zero_shot") + results("ccmcrm"),
    "strong": results("ccmmrr", "zero_shot") + results("cccccm"),
}
EVERYTHING = {"odd & ends_100%": results("cmxrbpgGu", "zero_shot") + results("ccmxrbpGg")}


def runs_of(named, modes=MODES) -> list[Run]:
    return [Run({"model": {"name": name}, "modes": list(modes)}, tuple(dict.fromkeys(r.task_id for r in rs)), "ab12", tuple(rs)) for name, rs in named.items()]


def column(table: Table, name: str) -> list:
    return [row[table.columns.index(name)] for row in table.rows]


# ---- tables


def test_leaderboard_ranks_and_counts():
    table = leaderboard(TWO)
    assert [row[:4] for row in table.rows] == [("strong", "rag", 6, 5), ("weak", "rag", 6, 3), ("strong", "zero_shot", 6, 2), ("weak", "zero_shot", 6, 1)]
    assert column(table, "accuracy")[0] == Estimate(5 / 6, *wilson_interval(5, 6))
    assert column(table, "seconds") == [None] * 4  # live wall time has no place in a table that is compared


def test_replies_that_were_cut_off_are_counted():
    cut = {"m": [*results("c"), *results("pp", "zero_shot", cut_off=True)]}
    assert dict(zip(column(leaderboard(cut), "mode"), column(leaderboard(cut), "cut off"), strict=True)) == {"rag": 0, "zero_shot": 2}


def test_questions_without_an_answer_have_no_tier():
    without = {"m": [replace(r, answerable=False) for r in [*results("mm"), *results("mm", "zero_shot")]]}
    assert tier_table(without).rows == () and tier_table({"m": [*TWO["weak"], *without["m"]]}).rows == tier_table({"m": TWO["weak"]}).rows
    assert "gain_by_tier" not in {chart.name for chart in report_charts(without, runs_of(without))}


def test_seconds_are_shown_when_all_replies_are_recorded():
    recorded = {"m": results("cc", cached=True, seconds=2.04, prompt_tokens=100, completion_tokens=9)}
    assert column(leaderboard(recorded), "seconds") == [2.0] and column(leaderboard(recorded), "prompt tokens") == [100]
    mixed = {"m": [*recorded["m"], *results("c", seconds=3.0)]}
    assert column(leaderboard(mixed), "seconds") == [None]


def test_gold_errors_are_out_and_crashes_are_in():
    table = leaderboard(EVERYTHING)
    assert column(table, "tasks") == [8, 8] and column(table, "right") == [2, 1] and column(table, "unscored") == [0, 1]
    pairs = mcnemar_table(EVERYTHING)
    assert column(pairs, "pairs") == [7]


def test_refusals_and_unsafe_queries_are_counted_as_what_they_are():
    unanswerable = {"m": results("aams", answerable=False)}
    assert column(leaderboard(unanswerable), "right") == [2] and "to decline is the right result" in leaderboard(unanswerable).note
    assert column(leaderboard({"m": results("aams")}), "right") == [0]
    (row,) = outcome_table({"m": results("caasm", dialect="")}).rows
    assert outcome_table({"m": results("caasm")}).columns[2:-1] == ("correct", "abstained", "mismatch", "unsafe") and row[2:] == (1, 2, 1, 1, 0)
    assert column(outcome_table({"m": results("xr", dialect="tsql")}), "other dialect") == [2]
    old = {**results("b")[0].to_json(), "unsafe": True}  # as logs of earlier releases have it
    assert TaskResult.from_json(old).outcome == "unsafe"


def test_wordings_of_one_question_are_not_taken_for_independent():
    once, twice = results("cm", "zero_shot") + results("cc"), [replace(r, task_id=f"t0#{r.task_id[1:]}") for r in results("cm", "zero_shot") + results("cc")]
    assert "surer than they should be" in mcnemar_table({"m": twice}).note and "surer" not in mcnemar_table({"m": once}).note


def test_mcnemar_table_is_paired_and_corrected():
    table = mcnemar_table(TWO)
    assert [row[:6] for row in table.rows] == [("weak", 6, 1, 2, 0, 3), ("strong", 6, 2, 3, 0, 1)]
    assert column(table, "exact p") == [mcnemar_exact(0, 2), mcnemar_exact(0, 3)]
    assert column(table, "Holm p") == [0.5, 0.5]
    assert all(isinstance(v, PValue) for v in column(table, "exact p"))
    assert mcnemar_table({"only rag": results("cc")}).rows == ()


def test_model_pairs():
    table = model_pairs({**TWO, "third": results("mmmmmm")})
    assert [row[:2] for row in table.rows] == [("weak", "strong"), ("weak", "third"), ("strong", "third")]
    assert "Cochran's Q over all 3 on 6 tasks" in table.note and "Cochran" not in model_pairs(TWO).note
    assert model_pairs(TWO, "zero_shot").name == "models_zero_shot"


def test_tiers_stages_and_outcomes_add_up():
    for table in (tier_table(EVERYTHING), stage_table(EVERYTHING), outcome_table(EVERYTHING)):
        assert table.rows
    for row in stage_table(EVERYTHING).rows:
        assert list(row[2:]) == sorted(row[2:], reverse=True)  # a funnel
    for row in outcome_table(EVERYTHING).rows:
        assert sum(row[2:-1]) == 9
    assert [row[1] for row in tier_table(TWO).rows] == [*TIERS, *TIERS]
    assert tier_table({"only rag": results("ccc")}).rows[0][3:] == (None, Estimate(1.0, *wilson_interval(1, 1)), None)


def test_csv_reads_back():
    table = mcnemar_table(TWO)
    read = list(csv.DictReader(io.StringIO(table.csv)))
    assert read[0]["model"] == "weak" and float(read[0]["gain"]) == pytest.approx(1 / 3, abs=1e-6)
    assert float(read[0]["gain low"]) < float(read[0]["gain"]) < float(read[0]["gain high"])
    assert float(read[1]["exact p"]) == 0.25


def test_markdown_and_latex_are_escaped():
    table = Table("t", "50 % & more_", ("a|b", "p"), (("x|y_$#{}~^\\", PValue(1e-9)), ("z", None)), "a note")
    assert r"x\|y" in table.markdown and "<0.0001" in table.markdown and table.markdown.endswith("a note")
    latex = table.latex
    assert r"50 \% \& more\_" in latex and r"\_\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in latex and "$<$0.0001" in latex
    assert all(line.count("&") - line.count(r"\&") == 1 for line in latex.splitlines() if line.endswith(r"\\"))
    assert "&lt;0.0001" in table._repr_html_()


def test_labels_tell_runs_apart():
    base = {"model": {"name": "m"}, "modes": ["rag"]}
    made = lambda **more: Run({**base, **more}, ("t0",), "x", tuple(results("c")))
    assert list(label_runs([made(store="local", k=3), made(store="faiss", k=3)])) == ["m, store local", "m, store faiss"]
    with pytest.raises(ValueError, match="give each run once"):
        label_runs([made(), made()])


# ---- errors


@pytest.mark.parametrize(
    ("sql", "first"),
    [
        ("SELECT COUNT(*) AS n FROM drug_exposure WHERE condition_concept_id = 192671", "wrong table"),
        (WRONG, "wrong concept"),
        (GOLD.replace("= 192671", "IN (192671, 1)"), "wrong concept"),
        (GOLD.replace("COUNT(*)", "COUNT(DISTINCT person_id)"), "wrong aggregation"),
        (GOLD.replace("COUNT(*)", "SUM(1)"), "wrong aggregation"),
        (GOLD + " GROUP BY person_id", "wrong aggregation"),
        (GOLD + " AND condition_start_date > DATE '2000-01-01'", "wrong filter"),
        (GOLD + " LIMIT 5", "wrong filter"),
        (GOLD.replace("COUNT(*) AS n", "COUNT(*) AS n, 1 AS one"), "wrong columns"),
        (GOLD, "other"), ("not a query at all (", "other"), ("", "other"), ("DROP TABLE person", "other"),
    ],
)  # fmt: skip
def test_diagnosis(sql, first):
    assert diagnose(GOLD, sql)[0] == first and set(diagnose(GOLD, sql)) <= set(DIAGNOSES)


PREDICATES = "SELECT COUNT(*) FROM person WHERE {} AND gender_concept_id = 8532"


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("1950 < year_of_birth", "year_of_birth > 1950", False), ("1950 < year_of_birth", "year_of_birth < 1950", True), ("1950 >= year_of_birth", "year_of_birth <= 1950", False),
        ("month_of_birth IN (5)", "month_of_birth = 5", False), ("month_of_birth NOT IN (5)", "month_of_birth IN (5)", True), ("month_of_birth NOT IN (5, 6)", "month_of_birth IN (5, 6)", True),
        ("year_of_birth BETWEEN 1950 AND 1960", "year_of_birth >= 1950 AND 1960 >= year_of_birth", False), ("year_of_birth NOT BETWEEN 1950 AND 1960", "year_of_birth BETWEEN 1950 AND 1960", True),
        ("birth_datetime IS NULL", "birth_datetime IS NOT NULL", True), ("gender_source_value NOT LIKE 'M%'", "gender_source_value LIKE 'M%'", True), ("race_concept_id <> 8527", "race_concept_id = 8527", True), ("NOT (race_concept_id IN (8527))", "race_concept_id IN (8527)", True),
    ],
)  # fmt: skip
def test_a_filter_is_told_by_what_it_means(one, other, differ):
    assert diagnose(PREDICATES.format(one), PREDICATES.format(other)) == (("wrong filter",) if differ else ("other",))


def test_diagnosis_of_joins():
    gold = "SELECT p.person_id FROM person p JOIN death d ON p.person_id = d.person_id"
    assert diagnose(gold, gold.replace("JOIN", "LEFT JOIN")) == ("wrong join",)
    assert diagnose(gold, gold.replace("= d.person_id", "= d.cause_concept_id"))[0] == "wrong join"
    assert diagnose(gold, "SELECT p.person_id FROM person p JOIN death d USING (person_id)")[0] in ("wrong join", "other")
    assert query_shape("WITH a AS (SELECT 1 AS x FROM person) SELECT x FROM a").tables == ("person",)


def test_error_kinds():
    kinds = [error_kind(r, task(0)) for r in results("cmxrbpgGu")]
    expected = ["", "wrong concept, right shape", "execute error", "unknown column", "build error", "parse error", "generation error", "gold error", "unscored"]
    assert kinds == expected
    assert error_kind(replace(results("r")[0], error="no table `x`")) == "unknown table"
    assert error_kind(replace(results("b")[0], unsafe=True)) == "refused"
    assert error_kind(results("m")[0]) == "mismatch"  # without its task there is nothing to compare with
    assert error_kind(results("a")[0], task(0)) == "declined" and error_kind(replace(results("a")[0], answerable=False), task(0)) == ""
    assert error_kind(replace(results("m")[0], answerable=False), task(0)) == "should have declined"
    assert error_kind(replace(results("x")[0], dialect="tsql")) == "other dialect"


@pytest.mark.parametrize(
    ("sql", "reason", "kind"),
    [
        (WRONG, "value: column 1, row 1: 3 vs 4", "wrong concept, right shape"),
        (WRONG.replace("COUNT(*)", "COUNT(DISTINCT person_id)"), "value: column 1, row 1: 3 vs 4", "wrong concept"),
        (GOLD.replace("condition_occurrence", "drug_exposure"), "value: …", "wrong table"),
        (GOLD.replace("COUNT(*)", "MAX(person_id)"), "value: …", "wrong aggregation"),
        (GOLD.replace("condition_occurrence", "condition_occurrence JOIN condition_occurrence USING (person_id)"), "value: …", "wrong join"),
        (GOLD + " AND person_id > 5", "value: …", "wrong filter"),
        (GOLD.replace("COUNT(*) AS n", "COUNT(*) AS n, 1 AS one"), "column count 1 ≠ 2", "wrong columns"),
        (WRONG, "column count 1 ≠ 2; leniently right: extra columns", "wrong columns"),  # the results say more than the text
        (WRONG, "row order: row 1 is …; leniently right: row order", "wrong order"),
        (WRONG, "row count 1 ≠ 2; leniently right: duplicate rows, text form", "repeated rows"),
        (WRONG, "value: …; leniently right: text form", "form of texts"),
        (GOLD, "value: …", "other"),
    ],
)
def test_every_kind_of_wrong_answer_has_its_case(sql, reason, kind):
    result = replace(results("m")[0], sql=sql, error=reason)
    assert error_kind(result, task(0)) == kind and kind in ERROR_KINDS
    assert error_kind(replace(result, task_id="t0#2"), task(0)) == kind


def test_a_paraphrase_is_diagnosed_by_its_task():
    again = [replace(r, task_id=f"{r.task_id}#1") for r in results("mm")]
    assert set(error_examples(again, [task(0), task(1)])) == {("rag", "wrong concept, right shape")}
    assert GOLD in error_report("m", again, [task(0), task(1)])


def test_the_table_of_kinds_has_three_examples_of_each_from_different_tasks():
    named = {"a": results("mmcmm"), "b": results("mmmmm", "zero_shot")}
    rows = [row for row in kind_table(named, [task(n) for n in range(5)]).rows if row[0] == "wrong concept, right shape"]
    assert [row[1] for row in rows] == [9, None, None] and len({row[4] for row in rows}) == 3
    one = kind_table({"a": results("m"), "b": results("m")}, [task(0)])
    assert [(row[0], row[1], row[2]) for row in one.rows if row[1] != 0] == [("wrong concept, right shape", 2, "a"), ("wrong concept, right shape", None, "b")]
    assert {row[0] for row in one.rows if row[1] == 0} == {"wrong table", "wrong concept", "wrong aggregation", "wrong join", "wrong filter", "wrong columns"}


def test_error_table_counts_every_wrong_result():
    tasks = [task(n) for n in range(9)]
    table = error_table(EVERYTHING, tasks)
    for row in table.rows:
        assert row[2] == sum(row[3:]) > 0


def test_error_examples_are_few_and_in_order():
    picked = error_examples(results("mmmmm"), [task(n) for n in range(5)], per_kind=3)
    assert [r.task_id for r in picked["rag", "wrong concept, right shape"]] == ["t0", "t1", "t2"]


def test_error_report_shows_question_queries_and_reason():
    text = error_report("m", results("mr") + results("gu", "zero_shot", answer=""), [task(0), task(1)])
    assert "## rag: wrong concept, right shape" in text and WRONG in text and GOLD in text and "Differences: wrong concept" in text
    assert "&lt;b>bleedings" in text  # a question is text, not markup
    hostile = replace(results("r")[0], code="```\n# not a heading\n````", error="<script>")
    shown = error_report("m", [hostile], [])
    assert "`````sql" in shown and "<script>" not in shown


# ---- figures


def test_charts_are_well_formed_and_carry_their_numbers():
    for named in (TWO, EVERYTHING, {"one": results("c")}, {"only rag": results("cm"), **TWO}, {"others": results("asac", "zero_shot") + results("cass")}):
        charts = all_charts(named)
        assert len({chart.name for chart in charts}) == len(charts) == 5
        for chart in charts:
            root = ET.fromstring(chart.svg)
            assert root.tag.endswith("svg") and "<text" not in chart.svg  # letters are paths, whatever fonts a machine has
            assert "date" not in {e.tag.rsplit("}", 1)[-1] for e in root.iter()}
            assert chart.table.csv.count("\n") == len(chart.table.rows) + 1
            assert chart._repr_html_().startswith("<svg")


@pytest.mark.parametrize("count", [1, 2, 4, 9, 17])
def test_nothing_in_a_chart_lies_outside_of_it(monkeypatch, count):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from healthrag.evaluation.curves import agreement_chart, cost_chart, reliability_chart

    overflows, save = [], Figure.savefig

    def measured(figure, *args, **kwargs):
        renderer = FigureCanvasAgg(figure).get_renderer()
        box, (width, height) = figure.get_tightbbox(renderer), figure.get_size_inches()
        overflows.append(max(-box.x0, -box.y0, box.x1 - width, box.y1 - height))
        titles = [axis.title.get_window_extent(renderer) for axis in figure.axes if axis.get_title()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", measured)
    letters = "cmxrbpgua" + "csa"
    many = {f"provider:a-model-with-a-long-name-{n}b, store pgvector": results(letters, "zero_shot") + results(letters[::-1]) for n in range(count)}
    charts = [*all_charts(many), cost_chart(many), reliability_chart(many), agreement_chart({name: rs[:12] for name, rs in many.items()})]
    assert len(overflows) == len(charts) and {chart.name: round(over, 2) for chart, over in zip(charts, overflows, strict=True) if over > 0.03} == {}


def test_charts_change_when_numbers_do():
    before, after = (accuracy[0].svg for accuracy in map(all_charts, (TWO, {**TWO, "weak": results("cccccc")})))
    assert before != after


def test_user_settings_of_matplotlib_do_not_matter():
    import matplotlib as mpl

    plain = [chart.svg for chart in all_charts(TWO)]
    with mpl.rc_context({"font.size": 20, "svg.fonttype": "none", "axes.grid": True, "figure.dpi": 300}):
        assert [chart.svg for chart in all_charts(TWO)] == plain


# ---- reports


def digest(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_report_writes_everything_and_links_to_it(tmp_path):
    report = build_report(runs_of(TWO), tmp_path / "out", tasks=[task(n) for n in range(6)], title="A title")
    files = set(digest(tmp_path / "out"))
    for name in ("leaderboard", "mcnemar", "compare", "compare_pairs", "compare_group", "models_rag", "tiers", "stages", "outcomes", "errors", "kinds", "reliability"):
        assert {f"tables/{name}.{suffix}" for suffix in ("csv", "md", "tex")} <= files
    for name in ("accuracy", "gain_by_tier", "stages", "outcomes", "outcome_flow", "cost", "agreement", "reliability"):
        assert {f"figures/{name}.svg", f"figures/{name}.csv"} <= files
    text = (tmp_path / "out" / "README.md").read_text()
    assert text == report.markdown and text.startswith("# A title\n")
    assert set(re.findall(r"\]\(([^)]+)\)", text)) <= files
    assert "weak: retrieval raises accuracy from 0.167 to 0.500 on 6 tasks" in text and "may be chance" in text
    assert "<table>" in report._repr_html_() and "<svg" in report._repr_html_()


def test_a_report_is_the_same_bytes_in_another_process(tmp_path):
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_report import EVERYTHING, TWO, build_report, runs_of, task
        build_report(runs_of({{**TWO}}), Path(sys.argv[1]) / "two", tasks=[task(n) for n in range(6)])
        build_report(runs_of(EVERYTHING), Path(sys.argv[1]) / "odd", tasks=[task(n) for n in range(9)])
    """)
    digests = []
    for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo")):
        folder = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", program, str(folder)], check=True, env=environment, cwd=tmp_path)
        digests.append(digest(folder))
    assert digests[0] == digests[1] and len(digests[0]) > 50


def test_report_from_real_logs(tmp_path):
    from test_run import RIGHT, WORLD
    from test_run import task as easy

    logs = []
    for name in ("first", "second"):
        model = lambda prompt: RIGHT
        model.__name__ = name
        logs.append(tmp_path / f"{name}.jsonl")
        run_benchmark([easy(n) for n in range(4)], generator=model, log=logs[-1], **WORLD)
    report = build_report(logs, tmp_path / "out")
    assert list(report.results) == ["first", "second"] and "accuracy is 1.000 with and without retrieval" in report.markdown
    assert "4 tasks" in read_run(logs[0])._repr_html_()


def test_reports_refuse_what_cannot_be_compared(tmp_path):
    good = runs_of(TWO)
    with pytest.raises(ValueError, match="no runs"):
        build_report([], tmp_path / "out")
    with pytest.raises(ValueError, match="not on the same tasks"):
        build_report([good[0], replace(good[1], tasks_sha256="cd34")], tmp_path / "out")
    with pytest.raises(ValueError, match="lacks 1 results"):
        build_report([replace(good[0], missing=(("t9", "rag"),))], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert build_report([replace(good[0], missing=(("t9", "rag"),))], tmp_path / "out", incomplete=True).results


def test_one_run_as_json_and_text(tmp_path):
    path = write_results(tmp_path / "r.json", TWO["weak"], {"model": "weak", "seed": 0})
    read = json.loads(path.read_text())
    assert [TaskResult.from_json(r) for r in read["results"]] == TWO["weak"]
    assert read["comparison"]["treatment_only_ids"] == ["t1", "t3"] and read["meta"]["seed"] == 0
    assert read["metrics"]["rag"]["overall"]["accuracy"] == 0.5
    assert json.loads(write_results(tmp_path / "s.json", results("c")).read_text())["comparison"] is None
    text = markdown_report(TWO["weak"], {"model": "weak", "seed": 0})
    for part in ("- seed: 0", "## Execution accuracy", "## How far queries come", "## Accuracy by tier", "## Outcomes", "right only with retrieval (2): t1, t3"):
        assert part in text
    assert markdown_report([]).startswith("# Benchmark report")


def test_every_outcome_and_stage_has_a_place():
    assert {*OUTCOMES, UNSCORED} == set(STAGE_OF) and set(STAGE_OF.values()) <= set(STAGES)
