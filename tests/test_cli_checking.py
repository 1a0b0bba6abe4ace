"""`healthrag validate tasks`, `validate rules` and `import` from the terminal."""

from __future__ import annotations

import json

import pytest

from healthrag.cli import main
from healthrag.evaluation.lint import RULES
from healthrag.evaluation.tasks import load_tasks

GOOD = {"id": "a", "query": "How many n are there?", "group": "person", "sql_query": "SELECT COUNT(*) AS n FROM person"}
BAD = {"id": "b", "query": "How many died, that is n?", "group": "death", "sql_query": "SELECT COUNT(*) AS n FROM death"}
LARGE = {"id": "c", "query": "Who? Return person_id.", "group": "person", "sql_query": "SELECT person_id FROM person"}


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_good_and_wrong_tasks(capsys, tmp_path):
    good, bad = written(tmp_path / "good.jsonl", GOOD), written(tmp_path / "bad.jsonl", BAD)
    code, out, _ = run(capsys, "validate", "tasks", good)
    assert code == 0 and "1 tasks: 0 errors, 0 warnings; not asked: T17, T21, T22, T23" in out
    code, out, _ = run(capsys, "validate", "tasks", good, bad)
    assert code == 2 and "all values are NULL or zero" in out and "ask for something that is there" in out


def test_warnings_alone_are_no_failure(capsys, tmp_path):
    code, out, _ = run(capsys, "validate", "tasks", written(tmp_path / "t.jsonl", LARGE), "--rules", "t14")
    assert code == 0 and "0 errors, 1 warning" in out


def test_json_is_json(capsys, tmp_path):
    code, out, err = run(capsys, "validate", "tasks", written(tmp_path / "t.jsonl", GOOD, BAD), "--json", "--shuffles", "0")
    data = json.loads(out)
    assert code == 2 and not err and data["tasks"] == 2 and not data["ok"] and data["checked"]["T16"] == 0
    assert [(finding["task"], finding["rule"]) for finding in data["findings"]] == [("b", "T13")]


def test_an_id_in_two_files_is_a_finding(capsys, tmp_path):
    code, out, _ = run(capsys, "validate", "tasks", written(tmp_path / "1.jsonl", GOOD), written(tmp_path / "2.jsonl", GOOD), "--rules", "T03")
    assert code == 2 and "taken by an earlier task" in out


def test_tasks_run_on_the_database_that_is_named(capsys, tmp_path):
    path = written(tmp_path / "t.jsonl", {**GOOD, "database": "/no/such.duckdb"})
    code, _, err = run(capsys, "validate", "tasks", path)
    assert code == 2 and "does not exist" in err
    assert run(capsys, "validate", "tasks", path, "--database", "synthetic:50")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["validate", "tasks", "--rules", "T99"], "no rule"), (["validate", "tasks", "--rules", ","], "no names"),
        (["validate", "tasks", "/no.jsonl"], "no tasks"),
        (["validate", "tasks", "--shuffles", "-1"], "shuffles"), (["validate", "nothing"], "nothing"), (["import", "/no.json"], "no file"),
        (["import", "x.sql", "--parameter", "=3"], "name=value"), (["import", "x.sql", "--database", "a", "--database", "b=c"], "alone"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(capsys, arguments, says):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and says in err and err.count("\n") == 1, err


def test_rules_are_listed(capsys):
    code, out, _ = run(capsys, "validate", "rules")
    assert code == 0 and all(rule.id in out for rule in RULES)


def test_import_reports_and_writes(capsys, tmp_path):
    (tmp_path / "q.sql").write_text("-- How many n in @year?\nSELECT COUNT(*) AS n FROM @cdm.person WHERE year_of_birth = @year;")
    out_file = tmp_path / "out.jsonl"
    code, out, _ = run(capsys, "import", tmp_path / "q.sql", "--parameter", "year=1960", "--out", out_file)
    assert code == 0 and "ohdsi: 1 ran" in out
    (task,) = load_tasks(out_file)
    assert "1960" in task.gold_sql and run(capsys, "validate", "tasks", out_file, "--rules", "T11,T12,T13")[0] == 0


def test_import_says_what_did_not_run(capsys, tmp_path):
    records = [
        {"db_id": "x", "question": "?", "query": "SELECT 1 AS n", "is_impossible": False}, {"db_id": "y", "question": "?", "query": "SELECT 1"},
        {"db_id": "x", "question": "!", "query": "SELECT * FROM nowhere"}, {"db_id": "x", "question": "Why?", "query": "nan", "is_impossible": True},
    ]  # fmt: skip
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(records))
    code, out, err = run(capsys, "import", path, "--database", "x=gibleed", "--json")
    data = json.loads(out)
    assert code == 1 and data["format"] == "ehrsql" and not err
    assert [record["state"] for record in data["records"]] == ["ran", "fails", "no answer", "not a task"]
    assert run(capsys, "import", path, "--format", "csv")[0] == 2


def test_help_has_examples(capsys):
    for command in (["validate", "tasks"], ["validate", "rules"], ["import"]):
        code, out, _ = run(capsys, *command, "--help")
        assert code == 0 and "Example" in out and "healthrag " + " ".join(command) in out
