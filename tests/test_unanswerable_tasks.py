"""The questions that the database cannot answer. That their proofs hold is a rule for tasks (T21), asked in test_benchmark_tasks."""

from __future__ import annotations

from collections import Counter

import pytest

from healthrag.evaluation import load_tasks
from healthrag.settings import resource

TASKS = load_tasks(resource("data", "benchmark", "unanswerable.jsonl"))
REASONS = ("no_such_data", "needs_note", "asks_advice", "asks_write", "ambiguous")
every_task = pytest.mark.parametrize("task", TASKS, ids=[task.id for task in TASKS])


def test_there_are_enough_of_every_kind():
    kinds = Counter(task.group for task in TASKS)
    assert len(TASKS) >= 60 and set(kinds) == set(REASONS) and min(kinds.values()) >= 10


def test_ids_and_questions_are_unique_and_not_those_of_tasks_with_an_answer():
    others = load_tasks(resource("data", "benchmark", "tasks.jsonl"))
    for values in ([task.id for task in (*TASKS, *others)], [task.question.lower() for task in (*TASKS, *others)]):
        assert len(values) == len(set(values))
    assert [task.id for task in TASKS] == [f"unanswerable-{n:03d}" for n in range(1, len(TASKS) + 1)]


@every_task
def test_a_task_says_why_it_has_no_answer(task):
    assert not task.answerable and not task.gold_sql and not task.gold_funsql and task.database == "gibleed"
    assert task.question[0].isupper() and task.question[-1] in ".?" and task.description.endswith(".")
    assert bool(task.absent) == (task.group in ("no_such_data", "needs_note"))
    assert (len(task.readings) >= 2) == (task.group == "ambiguous")


def test_a_patient_who_is_asked_about_is_who_the_question_says(cdm):
    (asked,) = [task for task in TASKS if "has atrial fibrillation" in task.question]
    number = int(asked.question.split()[1])
    sql = f"SELECT p.gender_concept_id FROM person p JOIN condition_occurrence co ON co.person_id = p.person_id WHERE p.person_id = {number}"
    assert cdm.execute(f"{sql} AND co.condition_concept_id = 313217").rows[0] == (8532,)
