"""Runs: outcomes, logs that survive a kill at any point, and what is never scored silently."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from healthrag.evaluation import UNSCORED, compare_modes, compare_results, read_run, run_benchmark, run_task, summarize
from healthrag.records import MODES, BenchmarkTask, Hit, Prompt, Reply, ResultSet, TaskResult

CATALOG = {"person": ["person_id", "gender_concept_id", "year_of_birth"], "death": ["person_id"]}
PEOPLE = ResultSet(("n",), ((3,),))
ROWS = {"SELECT COUNT(*) AS n FROM person": PEOPLE, "SELECT COUNT(*) AS n FROM death": ResultSet(("n",), ((1,),))}


class Database:
    "An executor that knows a few queries and counts them."

    def __init__(self, rows=ROWS):
        self.rows, self.asked = rows, []

    def __call__(self, sql: str) -> ResultSet:
        self.asked.append(sql)
        if sql not in self.rows:
            raise RuntimeError(f"Binder Error: cannot run {sql}")
        return self.rows[sql]


def task(number: int = 1, **more) -> BenchmarkTask:
    made = BenchmarkTask(f"person-{number}", f"How many patients are there, {number}?", "person", "simple", "SELECT COUNT(*) AS n FROM person")
    return replace(made, **more)


def says(text: str):
    return lambda prompt: text


def retriever(question: str) -> list[Hit]:
    return [
        Hit("schema:person", "person: one row per patient", 0.812345678, metadata={"kind": "schema", "heading": "person", "source": "cdm"}),
        Hit("example:9", "How many?", 0.5, metadata={"kind": "example", "question": "How many?", "sql": "SELECT 9"}),
    ]


WORLD = {"executor": Database(), "catalog": CATALOG, "retriever": retriever}
RIGHT = "```sql\nSELECT COUNT(*) AS n FROM person\n```"


@pytest.mark.parametrize(
    ("reply", "outcome", "stage"),
    [
        (RIGHT, "correct", "executed"),
        ("SELECT COUNT(*) AS n FROM death", "mismatch", "executed"),
        ("SELECT COUNT(person_id) AS n FROM person", "execute_error", "rendered"),
        ("SELECT COUNT(patient) AS n FROM person", "render_error", "built"),
        ("SELECT COUNT(*) AS n FROM patients", "render_error", "built"),
        ("DELETE FROM person", "unsafe", "parsed"),
        ("SELECT 1; DROP TABLE person", "unsafe", "none"),
        ("```sql\nSELECT * FROM read_csv('/etc/passwd')\n```", "unsafe", "parsed"),
        ("CANNOT_ANSWER: there is no such table", "abstained", "none"),
        ("SELECT FROM WHERE (", "parse_error", "none"),
        ("", "parse_error", "none"),
        ("I cannot help with that.", "parse_error", "none"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_outcome_is_the_stage_at_which_a_query_stops(reply, outcome, stage, mode):
    result = run_task(task(), mode, model=says(reply), **WORLD)
    assert (result.outcome, result.stage) == (outcome, stage)
    assert (result.error is None) == (outcome == "correct")
    assert result.answer == reply and result.mode == mode and result.task_id == "person-1"


def test_a_refused_query_is_told_apart():
    refused = run_task(task(), "rag", model=says("DROP TABLE person"), **WORLD)
    assert refused.unsafe and refused.outcome == "unsafe" and not refused.right and refused.error


@pytest.mark.parametrize(
    ("reply", "dialect"),
    [
        ("SELECT TOP 1 COUNT(*) AS n FROM person", "tsql"),
        ("SELECT COUNT(*) AS `n` FROM `person`", "mysql"),
        ("SELECT COUNT(patient) AS n FROM person", ""),  # no such column in any dialect
        ("SELECT FROM WHERE (", ""),
        ("DELETE TOP (1) FROM person", ""),  # refused, which is another matter
        ("SELECT COUNT(*) AS n FROM death", ""),  # runs, and is wrong
        ("SELECT COUNT(*) AS n FROM person", ""),  # runs, and is right
    ],
)
def test_another_dialect_is_told_apart_and_still_wrong(reply, dialect):
    class Anything:
        "Runs what DuckDB would run; the rows do not matter."

        def __call__(self, sql):
            return PEOPLE if "death" not in sql else ROWS["SELECT COUNT(*) AS n FROM death"]

    result = run_task(task(), "rag", model=says(f"```sql\n{reply}\n```"), **{**WORLD, "executor": Anything()})
    assert result.dialect == dialect
    assert not dialect or (result.outcome.endswith("_error") and not result.right)


def test_sql_where_funsql_was_asked_for_is_another_language():
    result = run_task(task(), "zero_shot", model=says("```sql\nSELECT COUNT(*) AS n FROM person\n```"), target="funsql", **WORLD)
    assert (result.outcome, result.dialect) == ("parse_error", "sql")


def test_mismatch_says_why_and_whether_it_is_leniently_right():
    rows = {**ROWS, "SELECT COUNT(*) AS n, 1 AS one FROM person": ResultSet(("n", "one"), ((3, 1),))}
    result = run_task(task(), "rag", model=says("SELECT COUNT(*) AS n, 1 AS one FROM person"), **{**WORLD, "executor": Database(rows)})
    assert result.outcome == "mismatch" and result.lenient
    assert result.error == "column count 1 ≠ 2; leniently right: extra columns"


def test_order_of_the_task_is_respected():
    gold, other = ResultSet(("n",), ((1,), (2,))), ResultSet(("n",), ((2,), (1,)))
    rows = {"SELECT person_id AS n FROM person ORDER BY 1": gold, "SELECT person_id AS n FROM person": other}
    asked = task(gold_sql="SELECT person_id AS n FROM person ORDER BY 1", ordered=True, order_by=("n",))
    world = {**WORLD, "executor": Database(rows)}
    reply = says("SELECT person_id AS n FROM person")
    assert run_task(asked, "rag", model=reply, **world).error.startswith("row order")
    assert run_task(replace(asked, ordered=False, order_by=()), "rag", model=reply, **world).outcome == "correct"
    assert run_task(asked, "rag", model=reply, match_kwargs={"ordered": False}, **world).outcome == "correct"


def test_context_and_scores_are_aligned_and_only_for_rag():
    seen: list[Prompt] = []
    model = lambda prompt: (seen.append(prompt), RIGHT)[1]
    result = run_task(task(), "rag", model=model, **WORLD)
    assert len(result.context) == len(result.scores) == 2 and result.scores == (0.8123, 0.5)
    assert result.context[0] == "cdm › person" and result.context[1] == "example:9"
    assert "one row per patient" in seen[0].prompt
    assert run_task(task(), "zero_shot", model=model, **WORLD).context == ()
    assert "one row per patient" not in seen[1].prompt and "SELECT 9" not in seen[1].prompt


def test_cost_of_a_recorded_reply_is_that_of_its_recording():
    class Recorded:
        name = "test:recorded"

        def generate(self, prompt, *, max_tokens=None):
            return Reply(RIGHT, self.name, 100, 7, seconds=12.5, cached=True)

        def count_tokens(self, text):
            return len(text)

    result = run_task(task(), "rag", model=Recorded(), **WORLD)
    assert (result.seconds, result.prompt_tokens, result.completion_tokens, result.cached) == (12.5, 100, 7, True)
    assert result.model == "test:recorded"


@pytest.mark.parametrize(("reason", "cut"), [("length", True), ("stop", False), ("", False)])
def test_a_reply_that_reached_its_limit_says_so(reason, cut):
    result = run_task(task(), "rag", generator=lambda prompt: Reply("SELECT COUNT(", "m", finish_reason=reason), **WORLD)
    assert result.outcome == "parse_error" and result.cut_off is cut
    assert ("cut_off" in result.to_json()) is cut and TaskResult.from_json(result.to_json()) == result


def test_a_failing_model_call_is_a_generation_error():
    def model(prompt):
        raise TimeoutError("no reply\nin 30 s")

    result = run_task(task(), "zero_shot", model=model, **WORLD)
    assert result.outcome == "generation_error" and result.error == "TimeoutError: no reply in 30 s"


@pytest.mark.parametrize("error", [LookupError("no recorded reply; run with --replies write"), ImportError("pip install it")])
def test_a_missing_recording_or_package_stops_the_run(error, tmp_path):
    def model(prompt):
        raise error

    with pytest.raises(type(error), match=r"record|pip"):
        run_task(task(), "zero_shot", model=model, **WORLD)
    if isinstance(error, LookupError):
        with pytest.raises(LookupError, match="no recorded reply"):
            run_benchmark([task()], generator=model, log=tmp_path / "run.jsonl", **WORLD)
        assert read_run(tmp_path / "run.jsonl").results == ()


def test_a_failing_gold_query_excludes_the_task_and_asks_nobody():
    asked = []
    model = lambda prompt: asked.append(prompt)
    result = run_task(task(gold_sql="SELECT broken"), "rag", model=model, **WORLD)
    assert result.outcome == "gold_error" and "Binder Error" in result.error and asked == []
    cut = {"SELECT COUNT(*) AS n FROM person": replace(PEOPLE, truncated=True)}
    assert "row limit" in run_task(task(), "rag", model=model, **{**WORLD, "executor": Database(cut)}).error
    assert run_task(task(), "rag", model=says(RIGHT), gold=ValueError("given"), **WORLD).error == "ValueError: given"


def test_gold_may_be_given():
    database = Database({"SELECT COUNT(*) AS n FROM death": PEOPLE})
    result = run_task(task(), "rag", model=says("SELECT COUNT(*) AS n FROM death"), gold=PEOPLE, **{**WORLD, "executor": database})
    assert result.outcome == "correct" and len(database.asked) == 1


def test_an_unanswerable_question_is_right_when_declined():
    asked = task(answerable=False, gold_sql="")
    declined = run_task(asked, "rag", model=says("CANNOT_ANSWER: no such data"), **WORLD)
    assert (declined.outcome, declined.right, declined.error) == ("abstained", True, None)
    for reply, outcome in ((RIGHT, "mismatch"), ("DROP TABLE person", "unsafe"), ("I cannot help.", "parse_error"), ("SELECT x FROM y", "render_error")):
        answered = run_task(asked, "rag", model=says(reply), **WORLD)
        assert answered.outcome == outcome and not answered.right and answered.error and not answered.answerable


def test_to_decline_what_has_an_answer_is_wrong_and_says_so():
    declined = run_task(task(), "rag", model=says("```\nCANNOT_ANSWER: no `person` table\n```"), **WORLD)
    assert (declined.outcome, declined.right, declined.error) == ("abstained", False, "declined: no `person` table")
    assert run_task(task(), "rag", model=says("CANNOT_ANSWER"), **WORLD).error == "declined, without a reason"
    assert run_task(task(), "rag", model=says("One CANNOT_ANSWER that."), **WORLD).outcome == "parse_error"  # it does not begin with it


def test_answerable_and_unanswerable_tasks_run_side_by_side(tmp_path):
    database = Database()
    tasks = [task(1), task(2, answerable=False, gold_sql=""), task(3)]
    model = lambda prompt: "CANNOT_ANSWER: no" if "2?" in prompt.user else RIGHT
    world = {**WORLD, "generator": model, "executor": database, "log": tmp_path / "run.jsonl"}
    results = run_benchmark(tasks, **world)
    assert [r.outcome for r in results] == ["correct"] * 2 + ["abstained"] * 2 + ["correct"] * 2 and all(r.right for r in results)
    assert len(database.asked) == 2 + 4  # two gold queries, and four queries of the model
    assert read_run(tmp_path / "run.jsonl").results == tuple(results)
    assert summarize(results)["rag"]["overall"]["accuracy"] == 1.0
    assert compare_modes(results).both_correct == 3
    kept = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[3])
    assert kept["answerable"] is False and "answerable" not in json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])


def test_a_paraphrase_never_sees_its_own_answer():
    seen: list[Prompt] = []
    own = Hit("example:1", "How many?", 0.5, metadata={"kind": "example", "task_id": "person-1", "question": "How many?", "sql": "SELECT 42"})
    model = lambda prompt: (seen.append(prompt), RIGHT)[1]
    for asked in (task(1), task(1, id="person-1#2"), task(1, id="person-11")):
        run_task(asked, "rag", model=model, **{**WORLD, "retriever": lambda question: [own]})
    assert [" 42" in prompt.prompt for prompt in seen] == [False, False, True]


def test_our_own_failure_is_raised_by_run_task():
    with pytest.raises(KeyError):
        run_task(task(), "rag", model=says(RIGHT), **{**WORLD, "retriever": lambda q: {}["missing"]})
    with pytest.raises(TypeError):
        run_task(task(), "rag", model=says(RIGHT), match_kwargs={"no_such_option": 1}, **WORLD)


def test_our_own_failure_is_unscored_logged_and_tried_again(tmp_path, caplog):
    log = tmp_path / "run.jsonl"
    flaky = {"broken": True}

    def sometimes(question: str):
        if flaky["broken"] and question.endswith("2?"):
            raise KeyError("a fault of ours")
        return retriever(question)

    world = {**WORLD, "retriever": sometimes, "generator": says(RIGHT), "log": log}
    with caplog.at_level(logging.ERROR):
        results = run_benchmark([task(1), task(2), task(3)], **world)
    assert [r.outcome for r in results if r.mode == "rag"] == ["correct", UNSCORED, "correct"]
    assert "a fault of ours" in caplog.text
    metrics = summarize(results)["rag"]["overall"]
    assert (metrics["scored"], metrics["correct"], metrics[UNSCORED]) == (3, 2, 1)  # visible, and in the denominator
    assert compare_modes(results).n == 2 and compare_modes(results).dropped == 1  # but nobody's loss in a paired test
    flaky["broken"] = False
    again = run_benchmark([task(1), task(2), task(3)], **world)
    assert {r.outcome for r in again} == {"correct"} and len(read_run(log).results) == 6


def test_a_run_that_only_fails_is_given_up(tmp_path):
    calls = []

    def model(prompt):
        calls.append(1)
        raise ConnectionError("connection refused")

    with pytest.raises(RuntimeError, match=r"gave up after 5 failures in a row, the last: ConnectionError: connection refused"):
        run_benchmark([task(n) for n in range(20)], generator=model, log=tmp_path / "run.jsonl", **WORLD)
    assert len(calls) == 5
    fixed = run_benchmark([task(n) for n in range(20)], **{**WORLD, "generator": says(RIGHT)}, modes=["rag"])
    assert len(fixed) == 20


def test_results_come_by_task_then_mode_and_gold_runs_once():
    database = Database()
    results = run_benchmark([task(2), task(1)], generator=says("SELECT COUNT(*) AS n FROM death"), **{**WORLD, "executor": database})
    assert [(r.task_id, r.mode) for r in results] == [(f"person-{n}", mode) for n in (2, 1) for mode in MODES]
    assert database.asked.count("SELECT COUNT(*) AS n FROM person") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ["few_shot"]}, "the modes are"), ({"retriever": None}, "needs a retriever"), ({"generator": None}, "no model to ask"),
        ({"target": "python"}, "the targets are"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_runs(options, message, tmp_path):
    log = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match=message):
        run_benchmark([task()], **{**WORLD, "generator": says(RIGHT), "log": log, **options})
    assert not log.exists()


def test_tasks_with_one_id_are_refused():
    with pytest.raises(ValueError, match="must be unique"):
        run_benchmark([task(), task()], generator=says(RIGHT), **WORLD)


# ---- logs


def begin(log: Path, tasks, calls, **more):
    def model(prompt):
        calls.append(prompt)
        return RIGHT

    return run_benchmark(tasks, log=log, **{**WORLD, "generator": model, **more})


def test_a_finished_run_asks_nothing(tmp_path):
    calls: list = []
    first = begin(tmp_path / "run.jsonl", [task(1), task(2)], calls)
    content = (tmp_path / "run.jsonl").read_bytes()
    assert begin(tmp_path / "run.jsonl", [task(1), task(2)], calls) == first and len(calls) == 4
    assert (tmp_path / "run.jsonl").read_bytes() == content


def test_cut_anywhere_the_log_is_completed_and_finished_results_are_kept(tmp_path):
    calls: list = []
    log = tmp_path / "run.jsonl"
    tasks = [task(n) for n in range(4)]
    begin(log, tasks, calls)
    whole = log.read_bytes()
    stable = lambda data: [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in data.splitlines()]
    rng = random.Random(0)
    for cut in sorted({0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(40))}):
        log.write_bytes(whole[:cut])
        complete = max(whole[:cut].count(b"\n") - 1, 0)
        calls.clear()
        begin(log, tasks, calls)
        assert len(calls) == 8 - complete, cut
        assert stable(log.read_bytes()) == stable(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"modes": ["rag"]}, {"target": "funsql"}, {"match_kwargs": {"rtol": 0.1}}, {"parameters": {"k": 5}}, {"store": "faiss"},
        {"tasks": [task(1)]}, {"tasks": [task(1, gold_sql="SELECT 1"), task(2)]},
    ],
)  # fmt: skip
def test_other_parameters_are_another_run(tmp_path, change):
    log = tmp_path / "run.jsonl"
    begin(log, [task(1), task(2)], [])
    content = log.read_bytes()
    tasks = change.pop("tasks", [task(1), task(2)]) if "tasks" in change else [task(1), task(2)]
    with pytest.raises(ValueError, match="was begun with other parameters"):
        begin(log, tasks, [], **change)
    assert log.read_bytes() == content


def test_a_damaged_line_is_named_not_skipped(tmp_path):
    log = tmp_path / "run.jsonl"
    begin(log, [task(1), task(2)], [])
    lines = log.read_bytes().split(b"\n")
    lines[2] = lines[2][: len(lines[2]) // 2]
    log.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"run\.jsonl:3"):
        begin(log, [task(1), task(2)], [])


def test_not_a_run_log(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"kind": "other"}\n')
    with pytest.raises(ValueError, match="not a run log"):
        read_run(tmp_path / "x.jsonl")
    with pytest.raises(FileNotFoundError, match="no run log"):
        read_run(tmp_path / "none.jsonl")
    begin(tmp_path / "v.jsonl", [task(1)], [])
    (tmp_path / "v.jsonl").write_text((tmp_path / "v.jsonl").read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(ValueError, match="version 99"):
        read_run(tmp_path / "v.jsonl")


def test_two_processes_cannot_write_one_log(tmp_path):
    from filelock import FileLock

    with FileLock(f"{tmp_path / 'run.jsonl'}.lock"), pytest.raises(RuntimeError, match="another process"):
        begin(tmp_path / "run.jsonl", [task(1)], [])


def test_the_log_holds_no_time_of_day_and_no_path(tmp_path):
    begin(tmp_path / "run.jsonl", [task(1)], [])
    text = (tmp_path / "run.jsonl").read_text()
    assert str(tmp_path) not in text and "202" not in text.replace("tasks_sha256", "").split('"seconds"')[0].split("tasks")[0]


CHILD = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from test_run import CATALOG, RIGHT, Database, retriever, task
    from healthrag.evaluation import run_benchmark

    begun, most = [], int(sys.argv[1])

    def model(prompt):
        question = prompt.user
        begun.append(question)
        handle = os.open({calls!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, (("rag " if prompt.sources else "zero ") + question.replace(chr(10), " ") + chr(10)).encode())
        os.close(handle)
        time.sleep(0.01 if len(begun) <= most else 600)  # whoever is to be killed waits for it
        return RIGHT

    run_benchmark([task(n) for n in range(30)], log={log!r}, generator=model, executor=Database(), catalog=CATALOG, retriever=retriever, progress=False)
    print("finished")
"""


def test_killed_at_any_point_nothing_is_lost_and_nothing_repeated(tmp_path):
    log, calls = tmp_path / "run.jsonl", tmp_path / "calls.txt"
    program = textwrap.dedent(CHILD).format(tests=str(Path(__file__).parent), calls=str(calls), log=str(log))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    rng = random.Random(1)
    kills, kept = 0, []
    for _ in range(30):
        more = rng.randrange(3, 14) if kills < 6 else 10**9
        wanted = len(kept) + more
        child = subprocess.Popen([sys.executable, "-c", program, str(more + 2)], stdout=subprocess.PIPE, text=True, env=environment)
        while child.poll() is None:
            lines = log.read_bytes().count(b"\n") - 1 if log.exists() else 0
            if lines >= wanted:
                time.sleep(rng.random() * 0.02)
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        out, _ = child.communicate()
        if "finished" in out:
            break
        kills += 1
        on_disk = [line for line in log.read_bytes().split(b"\n")[1:-1] if line]
        assert on_disk[: len(kept)] == kept  # what was finished stays, byte for byte
        kept = on_disk
    assert kills == 6 and "finished" in out
    run = read_run(log)
    assert len(run.results) == 60 and run.missing == () and {r.outcome for r in run.results} == {"correct"}
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert len({(line["task_id"], line["mode"]) for line in lines}) == len(lines) == 60  # each result once
    asked = calls.read_text().splitlines()
    repeated = len(asked) - len(set(asked))
    assert len(set(asked)) == 60 and repeated <= kills  # at most the one question in flight at each kill


# ---- summing up


def result(number: int, mode: str, outcome: str, **more) -> TaskResult:
    stage = {"correct": "executed", "mismatch": "executed", "execute_error": "rendered", "render_error": "built", "build_error": "parsed"}
    return TaskResult(f"t{number}", "?", "person", "simple", mode, outcome, stage=stage.get(outcome, "none"), **more)


def test_rates():
    outcomes = ["correct", "correct", "mismatch", "execute_error", "render_error", "build_error", "parse_error", "generation_error", "gold_error"]
    metrics = summarize([result(n, "rag", o) for n, o in enumerate(outcomes)])["rag"]["overall"]
    assert (metrics["tasks"], metrics["scored"], metrics["excluded"], metrics["correct"]) == (9, 8, 1, 2)
    assert metrics["accuracy"] == 0.25 and metrics["low"] < 0.25 < metrics["high"]
    assert [metrics[s] for s in ("parsed", "built", "rendered", "executed")] == [0.75, 0.625, 0.5, 0.375]
    assert metrics["outcomes"] == {o: outcomes.count(o) for o in outcomes}


def test_summary_by_tier_and_group():
    results = [replace(result(1, "rag", "correct"), tier="schema_aware", group="drug"), result(2, "rag", "mismatch")]
    summary = summarize(results)
    assert list(summary["rag"]["by_tier"]) == ["simple", "schema_aware"] and list(summary["rag"]["by_group"]) == ["drug", "person"]
    assert summary["rag"]["by_group"]["drug"]["accuracy"] == 1.0 and "zero_shot" not in summary
    assert "<td>rag</td>" in summary._repr_html_()


def test_comparison_counts():
    pairs = ["cc", "cm", "mc", "mc", "mc", "mm", "gc", "cg"]
    names = {"c": "correct", "m": "mismatch", "g": "gold_error"}
    results = [result(n, mode, names[p[k]]) for n, p in enumerate(pairs) for k, mode in enumerate(MODES)]
    c = compare_modes(results)
    assert (c.n, c.both_correct, c.baseline_only, c.treatment_only, c.neither, c.dropped) == (6, 1, 1, 3, 1, 2)
    assert (c.baseline_accuracy, c.treatment_accuracy, c.p_value) == (2 / 6, 4 / 6, 0.625)
    assert c.treatment_only_ids == ("t2", "t3", "t4") and c.baseline_only_ids == ("t1",)
    assert c.difference == pytest.approx(2 / 6) and c.low < c.difference < c.high
    assert "exact p" in c._repr_html_()
    back = compare_modes(results, baseline="rag", treatment="zero_shot")
    assert back.p_value == c.p_value and back.difference == pytest.approx(-c.difference)


def test_comparison_of_nothing():
    empty = compare_results([], [])
    assert (empty.n, empty.p_value, empty.difference) == (0, 1.0, 0.0)
    with pytest.raises(ValueError, match="no results in mode 'zero_shot'"):
        compare_modes([result(1, "rag", "correct")])
