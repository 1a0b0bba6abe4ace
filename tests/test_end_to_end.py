"""The main job on the real database: runs that survive, replies that replay, reports that are made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_sweeps import results_in

from healthrag.evaluation.log import read_run
from healthrag.experiment import Experiment, prepare
from healthrag.grids import grid
from healthrag.sweeps import open_servers, sweep

ENVIRONMENT = {**os.environ, "TQDM_DISABLE": "1", "HEALTHRAG_REPLIES": "off"}


def healthrag(*arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "healthrag", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run_quick(log: Path) -> subprocess.Popen:
    return healthrag("run", "--model", "nearest-example", "--quick", "--log", str(log))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    log = tmp_path_factory.mktemp("run") / "run.jsonl"
    done = run_quick(log)
    _, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    return results_in(log)


@pytest.mark.parametrize("after", [1, 5, 17, 30])
def test_a_run_killed_at_any_point_loses_and_repeats_nothing(tmp_path, undisturbed, after):
    log = tmp_path / "run.jsonl"
    first = run_quick(log)
    deadline = time.monotonic() + 240
    while first.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") > after:
            first.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    first.communicate()
    kept = len(results_in(log))
    assert after <= kept <= len(undisturbed)
    again = run_quick(log)
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert results_in(log) == undisturbed


def test_a_sweep_leaves_notebooks_logs_tables_and_figures(tmp_path):
    said: list[str] = []
    done = sweep(grid(["nearest-example"], per_tier=1), tmp_path, replies="off", say=said.append)
    assert done.failures == ()
    assert not read_run(done.runs[0]).missing
    expected = ["README.md", "retrieval/sql-local-k3.ipynb", "errors.ipynb", "summary.ipynb", "generation/nearest-example-sql-local-k3.ipynb"]
    expected += ["tables/leaderboard.csv", "tables/mcnemar.md", "tables/mcnemar.tex", "tables/retrieval-sql-local-k3.csv", "figures/accuracy.svg", "figures/accuracy.csv"]
    assert [name for name in expected if not (tmp_path / name).is_file()] == []
    assert said[0] == "1 run" and said[1].startswith("[1/1] generation/nearest-example-sql-local-k3: done")


def test_a_failing_notebook_is_named_and_does_not_stop_the_others(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"id": f"t{n}", "query": f"How many were born in {1900 + n}?", "sql_query": f"SELECT COUNT(*) AS n FROM person WHERE year_of_birth = {1900 + n}"} for n in range(40, 48)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = sweep(grid(["nearest-example"], databases=["no-such.duckdb", "gibleed"], tasks=str(tasks), per_tier=1), tmp_path, replies="off")
    assert len(done.failures) == 1 and "no-such.duckdb" in done.failures[0]
    assert [log.stem for log in done.runs] == ["nearest-example-sql-local-k3"] and not read_run(done.runs[0]).missing
    assert done.left == {"nearest-example-sql-local-k3-no-such": 2} and not (tmp_path / "README.md").exists()


def test_recorded_replies_replay_without_model_or_runtime(tmp_path):
    code = """
import sys
sys.modules["xllamacpp"] = None  # as if it were not installed
from healthrag.experiment import Experiment, prepare
run = prepare(Experiment("llama:qwen2.5-coder-0.5b", per_tier=2), replies="only-read").run(progress=False)
assert all(result.cached for result in run.results)
print(len(run.results), sum(result.outcome == "correct" for result in run.results))
"""
    environment = {**ENVIRONMENT, "HEALTHRAG_CACHE_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    cache = Path(os.environ.get("HEALTHRAG_CACHE_DIR") or Path.home() / ".cache" / "healthrag")
    (tmp_path / "models").mkdir()
    for name in ("omop", "models/all-MiniLM-L6-v2"):
        (tmp_path / name).symlink_to(cache / name)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    results = int(done.stdout.split()[0])
    assert results == 12 and not list((tmp_path / "models").glob("*.gguf"))


def test_a_prompt_that_was_never_recorded_is_an_error_that_says_so():
    bench = prepare(Experiment("llama:qwen2.5-coder-0.5b", per_tier=1, k=2), replies="only-read")
    with pytest.raises(LookupError, match="no recorded reply"):
        bench.run(progress=False)


def test_the_committed_runs_are_what_the_recorded_replies_give(project_root, monkeypatch):
    with open_servers(["pgvector"]) as servers:
        for name, value in servers.items():
            monkeypatch.setenv(name, value)
        logs = sorted((project_root / "reports" / "runs").glob("nearest-example-*.jsonl"))
        assert logs
        for path in logs:
            run = read_run(path)
            again = prepare(Experiment.of(run), replies="only-read").run(progress=False)
            assert [(r.task_id, r.mode, r.outcome) for r in again.results] == [(r.task_id, r.mode, r.outcome) for r in run.results]
