"""Grids, sweeps on several processes and clusters, budgets, and what they leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from healthrag.budget import BUDGET, Budget, BudgetSpentError, open_budget
from healthrag.cli import main
from healthrag.evaluation import load_benchmark, read_run, split_tasks
from healthrag.experiment import CHUNKERS, Experiment, choose_tasks, grounding_passages, prepare
from healthrag.grids import GridPart, grid, grid_experiments, read_grid, report_parts
from healthrag.notebooks import NotebookError, run_notebook
from healthrag.records import BenchmarkTask, Reply
from healthrag.sweeps import Cell, count_results, open_backend, run_cells, sweep

SMALL = "llama:smollm2-135m"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("HEALTHRAG_REPLIES", "off")


def results_in(log: Path) -> list[dict]:
    "The results of a log without what the clock says."
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines if line["kind"] == "result"]


def write_tasks(path: Path, tasks: list[dict]) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def born(n: int, **more) -> dict:
    return {"id": f"born-{n}", "query": f"How many patients were born in {1900 + n}?", "tier": "simple", "group": "person",
            "sql_query": f"SELECT COUNT(*) AS n FROM person WHERE year_of_birth = {1900 + n}", **more}  # fmt: skip


@pytest.fixture
def two_databases(tmp_path) -> Path:
    folder = tmp_path / "benchmark"
    folder.mkdir()
    gibleed = [born(n, paraphrases=[f"Births in {1900 + n}?", f"Count births of {1900 + n}."] if n % 2 else []) for n in range(30, 50)]
    write_tasks(folder / "tasks.jsonl", gibleed)
    write_tasks(folder / "tasks_synthetic.jsonl", [born(n, database="synthetic:50") for n in range(50, 60)])
    write_tasks(folder / "unanswerable.jsonl", [{"id": f"no-{n}", "query": "Who will die?", "answerable": False} for n in range(3)])
    return folder


# experiments


def test_names_of_usual_experiments_stay_and_all_names_differ(project_root):
    assert Experiment("llama:qwen2.5-coder-0.5b").name == "qwen2.5-coder-0.5b-sql-local-k3"
    assert Experiment(examples="text", k=1, target="funsql").name == "nearest-example-funsql-local-k1-text"
    everything = grid(
        ["nearest-example", SMALL], ["local", "duckdb"], ["sql", "funsql"], [0, 3], ["turns", "text"], CHUNKERS, [0, 1], ["gibleed", "synthetic:50"],
        ["held-out", "unanswerable", "paraphrases"],
    )  # fmt: skip
    names = {experiment.name for experiment in everything}
    assert len(names) == len(everything) == 2 * 2 * 2 * 2 * 2 * 5 * 2 * 2 * 3
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
    for log in (project_root / "reports" / "runs").glob("*.jsonl"):
        assert Experiment.of(read_run(log)).name == log.stem


def test_only_tasks_of_the_database_are_asked_or_shown(two_databases):
    here = choose_tasks(Experiment(tasks=str(two_databases)))
    there = choose_tasks(Experiment(tasks=str(two_databases), database="synthetic:50"))
    assert len(here.examples) + len(here.test) == 20 and len(there.examples) + len(there.test) == 10
    assert {task.database for task in (*there.examples, *there.test)} == {"synthetic:50"}
    with pytest.raises(ValueError, match=r"no tasks on 'elsewhere'.*gibleed, synthetic:50"):
        choose_tasks(Experiment(tasks=str(two_databases), database="elsewhere"))


def test_more_files_move_no_task_of_the_first(two_databases):
    alone = split_tasks(load_benchmark(two_databases / "tasks.jsonl"))
    assert tuple(choose_tasks(Experiment(tasks=str(two_databases)))) == tuple(alone)


def test_the_questions_of_the_project_s_benchmark_on_gibleed_are_those_of_its_first_file(project_root):
    first = [task for task in load_benchmark(project_root / "data" / "benchmark" / "tasks.jsonl") if task.answerable]
    assert tuple(choose_tasks(Experiment())) == tuple(split_tasks(first))


def test_paraphrases_and_questions_without_an_answer(two_databases):
    usual = Experiment(tasks=str(two_databases))
    held_out = choose_tasks(usual)
    reworded = choose_tasks(replace(usual, questions="paraphrases"))
    assert reworded.examples == held_out.examples
    expected = {f"{task.id}#{n}": text for task in held_out.test for n, text in enumerate(task.paraphrases, 1)}
    assert {task.id: task.question for task in reworded.test} == expected and len(expected) > 2
    assert {task.gold_sql for task in reworded.test} <= {task.gold_sql for task in held_out.test}
    without = choose_tasks(replace(usual, questions="unanswerable"))
    assert [task.id for task in without.test] == ["no-0", "no-1", "no-2"] and without.examples == held_out.examples
    assert all(task.answerable for task in without.examples)
    assert len(choose_tasks(replace(usual, questions="paraphrases", per_tier=1)).test) == 2, "both wordings of one task"


def test_the_chunker_decides_what_documents_a_prompt_may_show():
    kinds = {}
    for chunker in CHUNKERS:
        bench = prepare(Experiment(chunker=chunker, per_tier=1), replies="off")
        hits = bench.grounding(bench.tasks[0].question)
        kinds[chunker] = [hit.metadata["kind"] for hit in hits].count("doc")
        undocumented = [hit.id for hit in hits if hit.metadata["kind"] != "doc"]
        assert kinds[chunker] == (0 if chunker == "none" else 3)
        if chunker == "none":
            usual = undocumented
        assert undocumented == usual, "documents come in addition"
        bench.cdm.close()
    texts = {chunker: tuple(chunk.text for chunk in grounding_passages(chunker)) for chunker in CHUNKERS}
    assert len(set(texts.values())) == len(CHUNKERS)
    assert any("funsql" in chunk.metadata["source"] for chunk in grounding_passages("token", "funsql"))
    assert not any("funsql" in chunk.metadata["source"] for chunk in grounding_passages("token", "sql"))


# grid files


def test_the_project_s_grid_can_be_read(project_root):
    parts = read_grid(project_root / "data" / "benchmark" / "grid.toml")
    experiments = grid_experiments(parts)
    assert len({experiment.name for experiment in experiments}) == len(experiments)
    assert parts[0].name == "" and {experiment.questions for experiment in experiments} >= {"held-out", "unanswerable"}
    assert {experiment.store for experiment in experiments} >= {"local", "faiss", "duckdb"}


def test_each_report_is_on_one_set_of_questions(two_databases):
    parts = [GridPart("", "All", tuple(grid(["nearest-example"], seeds=[0, 1], databases=["gibleed", "synthetic:50"], questions=["held-out", "unanswerable"])))]
    split = report_parts(parts)
    assert len(split) == 8 and split[0].name == "" and len({part.name for part in split}) == 8
    for part in split:
        assert len({(e.database, e.seed, e.questions) for e in part.experiments}) == 1


# budgets


def reply(tokens: int, **more) -> Reply:
    return Reply("SELECT 1", "a:model", prompt_tokens=tokens, completion_tokens=1, **more)


def test_a_budget_counts_what_all_processes_spent(tmp_path):
    with open_budget(tmp_path, max_tokens=1000) as budget:
        code = "import sys; from healthrag.budget import *; from healthrag.records import Reply; Budget.given().charge(Reply('', 'a:m', 499, 1))"
        for spent in (500, 1000):
            assert not budget.spent()
            subprocess.run([sys.executable, "-c", code], env={**os.environ, BUDGET: str(budget.path)}, check=True)
            assert budget.tokens() == spent
        assert budget.spent() == "1,000 of 1,000 tokens are used"
    assert list(tmp_path.iterdir()) == []


def test_recorded_replies_cost_nothing(tmp_path):
    with open_budget(tmp_path, max_tokens=100) as budget:
        budget.charge(reply(1000, cached=True))
        assert budget.tokens() == 0
        budget.charge(reply(1000))
        assert budget.tokens() == 1001


def test_a_run_whose_time_is_over_asks_nothing_and_goes_on_later(tmp_path, monkeypatch):
    bench, log = prepare(Experiment(per_tier=1), replies="off"), tmp_path / "run.jsonl"
    with open_budget(tmp_path, max_seconds=1e-6) as budget:
        monkeypatch.setenv(BUDGET, str(budget.path))
        with pytest.raises(BudgetSpentError, match=r"seconds are over, 6 results of nearest-example-sql-local-k3 are left"):
            bench.run(log, progress=False)
    assert count_results(log) == 0
    monkeypatch.delenv(BUDGET)
    assert not bench.run(log, progress=False).missing
    bench.cdm.close()


def test_a_budget_does_not_take_a_reply_for_a_failure(tmp_path, monkeypatch):
    "What was under way when the budget ran out is scored and kept."

    class Talkative:
        name = "talkative"

        def generate(self, prompt, *, max_tokens=None):
            return reply(400)

    bench = replace(prepare(Experiment(per_tier=1), replies="off"), model=Talkative())
    with open_budget(tmp_path / "b", max_tokens=1000) as budget:
        monkeypatch.setenv(BUDGET, str(budget.path))
        with pytest.raises(BudgetSpentError, match="1,203 of 1,000 tokens are used, 3 results"):
            bench.run(tmp_path / "run.jsonl", progress=False)
    kept = results_in(tmp_path / "run.jsonl")
    assert len(kept) == 3 and {result["outcome"] for result in kept} == {"mismatch"}
    bench.cdm.close()


@pytest.mark.model
@pytest.mark.slow
def test_a_sweep_stopped_by_its_budget_is_finished_by_the_same_command(tmp_path, capsys):
    pytest.importorskip("xllamacpp")
    command = ["sweep", "--models", SMALL, "--ks", "1,2", "--tasks", str(write_tasks(tmp_path / "t.jsonl", [born(n) for n in range(30, 36)])),
               "--jobs", "2", "--replies", "off", "--out", str(tmp_path / "report")]  # fmt: skip
    logs = sorted(tmp_path / "report" / "runs" / f"smollm2-135m-sql-local-k{k}.jsonl" for k in (1, 2))
    assert main([*command, "--max-tokens", "1"]) == 1
    said = capsys.readouterr().out
    first = [log.read_bytes() if log.exists() else b"" for log in logs]
    done = sum(max(content.count(b"\n") - 1, 0) for content in first)
    assert 1 <= done <= 2, "a process may have had one question under way"
    asked = 2 * len(choose_tasks(Experiment(tasks=str(tmp_path / "t.jsonl"))).test)
    assert f"{2 * asked - done} results of 2 runs are left" in said and "tokens are used" in said
    assert not (tmp_path / "report" / "README.md").exists() and not list((tmp_path / "report").rglob("*.running.ipynb"))
    assert not list((tmp_path / "report").rglob("*.failed.ipynb"))
    assert main(command) == 0, capsys.readouterr().out
    for log, begun in zip(logs, first, strict=True):
        assert log.read_bytes().startswith(begun), "nothing that was done is done again"
        keys = [(result["task_id"], result["mode"]) for result in results_in(log)]
        assert len(keys) == len(set(keys)) == asked
    assert (tmp_path / "report" / "README.md").is_file()


# several processes, clusters, stores


def generation(out: Path, experiment: Experiment) -> Cell:
    fields = {**{name: getattr(experiment, name) for name in Experiment.__dataclass_fields__}, "replies": "off", "threads": 1, "out": str(out)}
    return Cell(experiment.name, "generation", out / f"{experiment.name}.ipynb", fields)


BACKENDS = {"loky": "joblib", "dask": "distributed", "ray": "ray"}


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("one")
    experiments = grid(["nearest-example"], ks=[1, 2], per_tier=1)
    with open_backend("loky", 1):
        assert {result.state for result in run_cells([generation(out, e) for e in experiments], {}, Path.cwd())} == {"done"}
    return {e.name: results_in(out / "runs" / f"{e.name}.jsonl") for e in experiments}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_same_results(tmp_path, one_by_one, backend):
    pytest.importorskip(BACKENDS[backend], reason=f"{BACKENDS[backend]} is not installed: pip install 'healthrag[cluster]'")
    experiments = grid(["nearest-example"], ks=[1, 2], per_tier=1)
    with open_backend(backend, 2):
        done = list(run_cells([generation(tmp_path, e) for e in experiments], {"HEALTHRAG_ROW_LIMIT": "9999"}, Path.cwd()))
    assert [(result.state, result.message) for result in done] == [("done", ""), ("done", "")]
    for experiment in experiments:
        log = tmp_path / "runs" / f"{experiment.name}.jsonl"
        assert results_in(log) == one_by_one[experiment.name]
        assert read_run(log).parameters["settings"]["row_limit"] == 9999, "the settings went with the notebook"


def test_only_a_notebook_that_failed_is_called_so(tmp_path):
    names = "print(sorted(path.name for path in __import__('pathlib').Path(folder).glob('*.ipynb')))"
    template = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_code_cell("folder, wrong = '', 0", metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell(names + "\n1 / (1 - wrong)"),
    ], metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})  # fmt: skip
    nbformat.write(template, tmp_path / "template.ipynb")
    out = tmp_path / "out"
    for wrong, left in ((1, ["a.failed.ipynb"]), (0, ["a.ipynb"])):
        with pytest.raises(NotebookError, match="ZeroDivisionError") if wrong else nullcontext():
            run_notebook(tmp_path / "template.ipynb", out / "a.ipynb", {"folder": str(out), "wrong": wrong})
        assert [path.name for path in out.iterdir()] == left
        assert nbformat.read(out / left[0], 4).cells[-1].outputs[0].text == "['a.running.ipynb']\n"


@pytest.mark.slow
def test_a_cell_that_fails_elsewhere_says_why(tmp_path):
    cells = [generation(tmp_path, Experiment(database="no-such.duckdb", per_tier=1)), generation(tmp_path, Experiment(k=1, per_tier=1))]
    with open_backend("loky", 2):
        done = {result.name: result for result in run_cells(cells, {}, Path.cwd())}
    assert done[cells[1].name].state == "done"
    failed = done[cells[0].name]
    assert failed.state == "failed" and "no-such.duckdb" in failed.message and failed.output.with_suffix(".failed.ipynb").is_file()


@pytest.mark.slow
def test_a_sweep_over_every_store_says_that_they_rank_the_same(tmp_path):
    stores = ["local", "duckdb"]
    for name, module in (("faiss", "faiss"), ("pgvector", "psycopg")):
        try:
            __import__(module)
            if name == "pgvector" and not os.environ.get("HEALTHRAG_PG_URL"):
                from healthrag.storage.pgserver import postgres_binaries

                postgres_binaries()
            stores.append(name)
        except ImportError:
            continue
    done = sweep(grid(["nearest-example"], stores, per_tier=1), tmp_path, replies="off", jobs=2)
    assert done.finished, done.failures
    of_store = [results_in(log) for log in done.runs]
    strip = [[{k: v for k, v in result.items() if k != "store"} for result in results] for results in of_store]
    assert len(strip) == len(stores) and all(results == strip[0] for results in strip)
    for table in ("sql-stores-k3", "sql-stores-k3-vectors"):
        rows = (tmp_path / "tables" / f"{table}.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == stores and len({row.split(",")[3] for row in rows}) == 1
    assert "All of these stores give the same ranking" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_grid_file_becomes_a_report_in_parts(tmp_path, two_databases, capsys):
    file = tmp_path / "grid.toml"
    file.write_text(
        'models = ["nearest-example"]\n[[part]]\ntitle = "Main"\nquestions = ["held-out", "unanswerable"]\n'
        '[[part]]\nname = "databases"\ntitle = "Elsewhere"\ndatabases = ["synthetic:50"]\nquestions = ["held-out", "paraphrases"]\n'
        '[[part]]\nname = "vector-stores"\ntitle = "Stores"\nstores = ["local", "duckdb"]\n'
    )
    code = main(["sweep", "--grid", str(file), "--tasks", str(two_databases), "--replies", "off", "--jobs", "2", "--out", str(tmp_path / "report")])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "nearest-example-sql-local-k3-synthetic-50-paraphrases: there are no such questions, left out" in said
    readme = (tmp_path / "report" / "README.md").read_text()
    assert readme.startswith("# Main") and "(unanswerable/README.md)" in readme and "(databases/README.md)" in readme
    assert len((tmp_path / "report" / "tables" / "cells.csv").read_text().splitlines()) == 1 + 4
    of_stores = {path.parent.parent.name for path in (tmp_path / "report").rglob("sql-stores-k3.csv")}
    assert of_stores == {"vector-stores"}, "where several stores were swept, and nowhere else"
    assert "All of these stores give the same ranking" in (tmp_path / "report" / "vector-stores" / "README.md").read_text()
    for folder in ("unanswerable", "databases", "vector-stores"):
        links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "report" / folder / "README.md").read_text())
        assert links and [link for link in links if not (tmp_path / "report" / folder / link).exists()] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_the_progress_of_all_runs(tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    script = """
import sys
from pathlib import Path
from healthrag.sweeps import show_progress
from test_sweeps import generation, grid, open_backend, run_cells
cells = [generation(Path(sys.argv[1]), e) for e in grid(["nearest-example"], ks=[1, 2], per_tier=6)]
with show_progress({cell.output.parent / "runs" / f"{cell.name}.jsonl": 36 for cell in cells}, every=0.2), open_backend("loky", 2):
    print(*(result.state for result in run_cells(cells, {}, Path.cwd())))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))  # rows, columns
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, env={**environment, "PYTHONPATH": str(Path(__file__).parent)}, stdout=follower, stderr=follower) as process:
        os.close(follower)
        shown = b""
        while piece := _read(leader):
            shown += piece
    os.close(leader)
    text = shown.decode(errors="replace")
    assert process.returncode == 0 and "done done" in text, text[-2000:]
    bars = re.findall(r"(\d+)/72 \[", text)
    assert bars and bars[0] == "0" and bars[-1] == "72", "72 results of both runs in one bar"
    assert re.search(r"nearest-example-sql-local-k[12] \d+/36", text), "and those under way by name"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


# the command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-seconds", "-1"], "max_seconds is -1"),
        (["--jobs", "0"], "jobs is 0"),
        (["--backend", "spark"], "loky, ray, dask"),
        (["--examples", "poems"], "turns, text"),
        (["--chunkers", "whole"], "none, header, recursive, fixed, token"),
        (["--seeds", "one"], "--seeds"),
        (["--databases", "gibleed,/no/such.duckdb"], "does not exist"),
    ],
)
def test_wrong_options_are_one_clear_line(capsys, tmp_path, arguments, says):
    code = main(["sweep", "--models", "nearest-example", "--quick", "--out", str(tmp_path), *arguments])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and says in err, err


def test_a_grid_file_and_lists_exclude_each_other(capsys, tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text('models = ["nearest-example"]\n[[part]]\n')
    code = main(["sweep", "--grid", str(file), "--ks", "1"])
    assert code == 2 and "--ks" in capsys.readouterr().err
    code = main(["sweep", "--grid", str(tmp_path / "none.toml")])
    assert code == 2 and "no grid at" in capsys.readouterr().err


def test_one_run_may_ask_other_questions_with_other_prompts(capsys, tmp_path, two_databases):
    common = ["run", "--model", "nearest-example", "--tasks", str(two_databases), "--modes", "rag"]
    for n, options in enumerate((["--questions", "paraphrases", "--chunker", "token"], ["--questions", "unanswerable", "--examples", "text"])):
        log = tmp_path / f"{n}.jsonl"
        assert main([*common, "--log", str(log), *options]) == 0, capsys.readouterr().err
        told = read_run(log).parameters
        assert {told["questions"], told["chunker"], told["examples"]} >= set(options[1::2])
    (tmp_path / "report" / "runs").mkdir(parents=True)
    for n, options in enumerate(([], ["--k", "1"], ["--questions", "paraphrases"])):
        assert main([*common, "--modes", "zero_shot,rag", "--log", str(tmp_path / "report" / "runs" / f"{n}.jsonl"), *options]) == 0
    assert main(["report", "--out", str(tmp_path / "report"), "--tasks", str(two_databases)]) == 0
    told = (tmp_path / "report" / "README.md").read_text()
    assert "2 runs." in told, "those on the same questions"
    assert main([*common, "--questions", "all"]) == 2 and "held-out, unanswerable, paraphrases" in capsys.readouterr().err


def test_ask_uses_the_store_of_the_settings(capsys, monkeypatch):
    question = "How many women have a recorded gastrointestinal hemorrhage?"
    monkeypatch.setenv("HEALTHRAG_MODEL", "nearest-example")
    answers = {}
    for store in ("local", "duckdb"):
        monkeypatch.setenv("HEALTHRAG_STORE", store)
        assert main(["ask", question, "--json"]) == 0
        answers[store] = json.loads(capsys.readouterr().out)
    assert answers["local"] == answers["duckdb"]
    monkeypatch.setenv("HEALTHRAG_STORE", "no-such-store")
    assert main(["ask", question]) == 2 and "no-such-store" in capsys.readouterr().err


def test_tasks_of_one_database_may_be_asked_of_another():
    from healthrag.evaluation import tasks_on

    tasks = [BenchmarkTask("a", "?", "person", "simple", "SELECT 1")]
    assert tasks_on(tasks, "my.duckdb") == tasks and Budget.given() is None
