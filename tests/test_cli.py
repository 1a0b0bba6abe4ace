"""The command line: what works, and one clear line for what does not."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from typer.main import get_command

from healthrag.answers import CitedAnswer, DoneEvent, TokenEvent
from healthrag.cli import main
from healthrag.cli.answering import show_events
from healthrag.cli.entry import program
from healthrag.cli.console import console, printable, show_result
from healthrag.records import Prompt, ResultSet

QUESTION = "How many women have a recorded gastrointestinal hemorrhage?"


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("HEALTHRAG_MODEL", "nearest-example")
    monkeypatch.setenv("HEALTHRAG_REPLIES", "off")


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def one_line(err):
    lines = err.strip().split("\n")
    return len(lines) == 1 and lines[0].startswith("healthrag: ") and "Traceback" not in err


# ask


def test_ask_shows_sql_table_sources_and_stages(capsys):
    code, out, err = run(capsys, "ask", QUESTION)
    assert code == 0 and not err
    for part in ("SELECT", "192671", "242", "[1] ", "✓ executed", "Gastrointestinal hemorrhage"):
        assert part in out


def test_ask_as_json(capsys):
    code, out, _ = run(capsys, "ask", QUESTION, "--json")
    answer = json.loads(out)
    assert code == 0 and answer["ok"] and answer["result"]["rows"] == [[242]] and answer["sources"] and answer["stage"] == "executed"


def test_a_query_that_did_not_run_is_exit_code_1(capsys):
    code, out, err = run(capsys, "ask", QUESTION, "--mode", "zero_shot")  # the baseline has no example to copy
    assert code == 1 and "No result" in out and not err


def test_options_hold_for_one_command_only(capsys, monkeypatch):
    before = dict(os.environ)
    run(capsys, "ask", QUESTION, "--k", "1", "--threads", "2")
    assert dict(os.environ) == before


# wrong input: one line, exit code 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ask", ""], "question is empty"),
        (["ask", "   "], "question is empty"),
        (["ask"], "Missing argument"),
        (["ask", "How many?", "--database", "/no/such.duckdb"], "does not exist"),
        (["ask", "How many?", "--database", ""], "database is empty"),
        (["ask", "How many?", "--database", "synthetic:many"], "synthetic:PERSONS"),
        (["ask", "How many?", "--model", "nobody:x"], "provider"),
        (["ask", "How many?", "--model", "llama:no-such-model"], "unknown model"),
        (["ask", "How many?", "--mode", "few_shot"], "rag"),
        (["ask", "How many?", "--target", "cypher"], "target"),
        (["ask", "How many?", "--threads", "0"], "threads"),
        (["ask", "How many?", "--threads", "two"], "--threads"),
        (["ask", "How many?", "--replies", "sometimes"], "replies"),
        (["ask", "How many?", "--no-such-option"], "--no-such-option"),
        (["ask", "How many?", "extra"], "extra"),
        (["no-such-command"], "no-such-command"),
        (["ls", "nothing"], "nothing"),
        (["ls", "tasks", "--tier", "hard"], "simple"),
        (["ls", "tasks", "--group", "nothing"], "groups"),
        (["ls", "tasks", "--tasks", "/no/such.jsonl"], "no tasks at"),
        (["ls", "runs", "/no/such/folder"], "no folder"),
        (["run", "--store", "no-such-store", "--quick"], "no-such-store"),
        (["run", "--modes", "few_shot"], "few_shot"),
        (["run", "--modes", ","], "commas"),
        (["run", "--model", "nobody"], "provider"),
        (["run", "--database", "/no/such.duckdb", "--quick"], "does not exist"),
        (["sweep", "--models", "nobody:x"], "provider"),
        (["sweep", "--stores", "no-such-store"], "no-such-store"),
        (["sweep", "--targets", "cypher"], "cypher"),
        (["sweep", "--ks", "three"], "--ks"),
        (["sweep", "--database", "/no/such.duckdb"], "does not exist"),
        (["compare"], "Missing argument"),
        (["compare", "no-such-run"], "no run log"),
        (["report", "no-such-run"], "no run log"),
        (["report", "--out", "/no/such/report"], "no run logs"),
        (["report"], "report of a sweep in parts"),
        (["models", "pull", "nobody:x"], "provider"),
        (["models", "pull", "nearest-example"], "no weights"),
        (["models", "pull"], "Missing argument"),
        (["validate", "--database", "/no/such.duckdb"], "does not exist"),
    ],
)
def test_wrong_input_is_one_clear_line(capsys, arguments, says):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and one_line(err) and says in err, err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2"),
        ('{"id": "b", "query": "q", "sql_query": 3}', "sql_query"),
        ('{"id": "a", "query": "q", "sql_query": "SELECT 1"}', "taken"),
        ('{"id": "b", "query": "q", "sql_query": "SELECT 1", "tier": "hard"}', "hard"),
        ("[1]", "line 2"),
    ],
)
@pytest.mark.parametrize("command", [["ls", "tasks"], ["run", "--quick"], ["validate"], ["sweep"]])
def test_a_malformed_tasks_line_is_named(capsys, tmp_path, line, says, command):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "query": "q", "sql_query": "SELECT 1"}\n' + line + "\n")
    code, _, err = run(capsys, *command, "--tasks", path)
    assert code == 2 and one_line(err) and says in err, err


@pytest.mark.parametrize("content", [b"", b"not a database", b"\x00" * 5000])
def test_a_file_that_is_no_database(capsys, tmp_path, content):
    path = tmp_path / "x.duckdb"
    path.write_bytes(content)
    code, _, err = run(capsys, "ask", "How many?", "--database", path)
    assert code in (1, 2) and "Traceback" not in err
    if content:
        assert code == 2 and one_line(err), err


def test_a_database_without_omop_tables_is_explained(capsys, tmp_path):
    import duckdb

    path = tmp_path / "other.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE sales (amount INTEGER)")
    code, out, err = run(capsys, "validate", "--database", path)
    assert code == 2 and "no table person" in out and "Traceback" not in err


def test_a_damaged_run_log_is_explained(capsys, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "result"}\n')
    code, _, err = run(capsys, "compare", path)
    assert code == 2 and one_line(err) and "not a run log" in err
    path.write_text("garbage\nmore\n")
    code, _, err = run(capsys, "compare", path)
    assert code == 2 and one_line(err) and "JSON" in err


def test_a_model_file_with_a_wrong_hash_is_never_used(capsys, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    from healthrag.models.weights import WEIGHTS

    weights = WEIGHTS["smollm2-135m"]
    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", str(tmp_path))
    path = tmp_path / "models" / weights.file
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(weights.size)  # the right size, the wrong bytes
    from healthrag.models.weights import WEIGHT_SOURCES

    def unreachable(*_):
        raise ConnectionError("no network")

    for name in WEIGHT_SOURCES:
        monkeypatch.setitem(WEIGHT_SOURCES, name, unreachable)
    code, out, err = run(capsys, "ask", "How many?", "--model", "llama:smollm2-135m", "--database", "synthetic:10", "--mode", "zero_shot")
    assert code == 2 and not out and one_line(err) and "no network" in err, err


def test_no_room_for_a_model_is_one_clear_line(capsys, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    code, _, err = run(capsys, "models", "pull", "llama:smollm2-135m")
    assert code == 2 and one_line(err) and ("MB" in err or "GB" in err), err


# looking around


def test_lists(capsys):
    code, out, _ = run(capsys, "ls", "tasks", "--tier", "simple")
    assert code == 0 and "person-001" in out
    code, out, _ = run(capsys, "ls", "models")
    assert code == 0 and "llama:qwen2.5-coder-0.5b" in out and "nearest-example" in out
    code, out, _ = run(capsys, "models", "ls")
    assert code == 0 and "nearest-example" in out
    code, out, _ = run(capsys, "ls", "stores")
    assert code == 0 and "local" in out


def test_validate_finds_faults(capsys, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"id": "a", "query": "q", "sql_query": "SELECT COUNT(*) FROM patients"}\n'
        '{"id": "b", "query": "q", "sql_query": "SELECT person_id FROM person WHERE person_id < 0"}\n'
    )
    code, out, _ = run(capsys, "validate", "--tasks", path)
    assert code == 2 and "a: the gold query fails: no table `patients`" in out and "b: the gold query returns no rows" in out


@pytest.mark.slow
def test_what_is_in_the_project_is_valid(capsys):
    code, out, _ = run(capsys, "validate")
    assert code == 0, out


# the benchmark


@pytest.fixture
def few(tmp_path):
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"id": f"t{i}", "query": f"How many patients were born in {1900 + i}?", "tier": "simple", "group": "person",
         "sql_query": f"SELECT COUNT(*) AS n FROM person WHERE year_of_birth = {1900 + i}"} for i in range(40, 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("models", "mode", "shown"), [(["nearest-example", "llama:x"], "write", True), (["nearest-example"], "write", False), (["llama:x"], "off", False)])
def test_where_replies_lie_is_printed(capsys, tmp_path, models, mode, shown):
    from healthrag.cli.benchmarking import _show_replies
    from healthrag.settings import get_settings

    _show_replies(models, get_settings(replies=mode, replies_dir=tmp_path))
    assert capsys.readouterr().out == (f"Replies: {tmp_path} ({mode})\n" if shown else "")


def test_run_compare_report_and_ls_runs(capsys, tmp_path, few):
    log = tmp_path / "runs" / "first.jsonl"
    code, out, err = run(capsys, "run", "--tasks", few, "--log", log)
    assert code == 0 and log.is_file() and "rag" in out and "exact McNemar" in out, err
    before = log.read_bytes()
    code, _, _ = run(capsys, "run", "--tasks", few, "--log", log)
    assert code == 0 and log.read_bytes() == before, "a finished run asks nothing again"
    code, _, err = run(capsys, "run", "--tasks", few, "--log", log, "--k", "1")
    assert code == 2 and one_line(err) and "other parameters" in err
    second = tmp_path / "runs" / "second.jsonl"
    assert run(capsys, "run", "--tasks", few, "--log", second, "--k", "1")[0] == 0
    code, out, _ = run(capsys, "compare", log, second)
    assert code == 0 and "Holm p" in out and "Systems compared" in out and "rank" in out
    code, out, _ = run(capsys, "compare", log, second, "--baseline", "zero-shot", "--as", "csv")
    header, *lines = list(csv.reader(io.StringIO(out)))
    assert code == 0 and {"system", "gain low", "Holm p", "verdict"} <= set(header) and len(lines) == 3
    code, out, _ = run(capsys, "compare", log, second, "--by", "k", "--as", "markdown")
    assert code == 0 and out.startswith("| system | first k | second k |") and "| 1 | 3 |" in out
    assert run(capsys, "compare", log, "--as", "latex")[1].startswith(r"\begin{table}")
    for wrong, message in ((("--as", "html"), "text, markdown"), (("--by", "colour"), "tier, group"), (("--baseline", "nobody"), "the systems are")):
        code, _, err = run(capsys, "compare", log, second, *wrong)
        assert code == 2 and one_line(err) and message in err
    code, out, _ = run(capsys, "ls", "runs", tmp_path / "runs")
    assert code == 0 and "first" in out and "second" in out
    code, out, _ = run(capsys, "report", "--out", tmp_path, "--tasks", few, "--title", "Two runs")
    assert code == 0 and (tmp_path / "README.md").read_text().startswith("# Two runs") and "Two runs" in out
    assert list((tmp_path / "tables").glob("*.csv")) and list((tmp_path / "figures").glob("*.svg"))


def test_an_unfinished_run_is_continued(capsys, tmp_path, few):
    log = tmp_path / "run.jsonl"
    assert run(capsys, "run", "--tasks", few, "--log", log)[0] == 0
    whole = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join(whole[:4]) + b'\n{"kind": "resu')  # stopped in the middle of a line
    assert run(capsys, "run", "--tasks", few, "--log", log)[0] == 0
    strip = lambda lines: [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines if line]
    assert strip(log.read_bytes().split(b"\n")) == strip(whole)


# the program


def process(*arguments):
    return subprocess.run([sys.executable, "-m", "healthrag", *arguments], capture_output=True, text=True, timeout=300)


def test_python_dash_m_and_help_with_examples():
    done = process("--help")
    assert done.returncode == 0 and "healthrag ask" in done.stdout
    for command in (["ask"], ["run"], ["sweep"], ["compare"], ["report"], ["validate"], ["ls", "tasks"], ["models", "pull"]):
        assert main([*command, "--help"]) == 0


@pytest.mark.parametrize("command", ["ask", "run", "sweep", "compare", "report", "validate"])
def test_every_command_teaches_by_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "Example" in out and f"healthrag {command}" in out


def test_the_examples_of_compare_run_as_they_are_shown(capsys, project_root, monkeypatch):
    monkeypatch.chdir(project_root)
    examples = re.findall(r"\[bold\]healthrag (compare .*?)\[/\]", get_command(program()).commands["compare"].help)
    assert len(examples) == 2
    for example in examples:
        code, out, err = run(capsys, *shlex.split(example))
        assert code == 0 and out, err


def test_errors_of_the_process_go_to_stderr():
    done = process("ask", " ")
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1


def test_debug_shows_the_traceback():
    done = process("--debug", "ask", " ")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_version(capsys):
    import healthrag

    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.strip() == f"healthrag {healthrag.__version__}"


def test_help_loads_nothing_heavy():
    code = "import sys; from healthrag.cli import main; main(['--help']); print(sorted({'duckdb','pandas','sqlglot','onnxruntime','torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("[]"), done.stdout[-200:]


# hostile text

COMMANDS = "\x1b]0;title\x07 \x1b[2J \x9b31m \u202etxt.exe [/bold] [red]x[/] :smile:"  # of terminals, of rich, of reading direction
SHOWN = ("\\u001b]0;title", "\\u009b31m", "\\u202etxt.exe", "[/bold] [red]x[/] :smile:")


def obeyed(text):
    return [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e"]


def test_a_table_shows_terminal_commands_and_obeys_none(capsys):
    show_result(ResultSet((COMMANDS,), ((COMMANDS,), (None,))))
    out = capsys.readouterr().out
    assert not obeyed(out) and all(part in out for part in SHOWN) and out.count("[/bold]") == 2


def test_a_line_shows_terminal_commands_and_obeys_none(capsys):
    console().print(COMMANDS)
    out = capsys.readouterr().out
    assert not obeyed(out) and all(part in out for part in SHOWN)


def test_a_model_cannot_command_the_terminal(capsys):
    done = CitedAnswer("?", COMMANDS, Prompt("", "?"), model="evil")
    show_events([TokenEvent(COMMANDS), DoneEvent(done)])
    out = capsys.readouterr().out
    assert not obeyed(out) and all(part in out for part in SHOWN)


@pytest.mark.parametrize("arguments", [["ask", QUESTION, "--model", COMMANDS], ["ask", QUESTION, "--database", COMMANDS], ["compare", COMMANDS], ["ingest", COMMANDS], ["ls", "runs", COMMANDS], [COMMANDS]])
def test_an_error_cannot_command_the_terminal(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code and not obeyed(out + err)


def test_json_stays_the_same_json():
    value = [COMMANDS, "é\u2028"]
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value
