"SQL shown as FunSQL returns the rows of the SQL, or is refused."

from __future__ import annotations

import json

import pytest
from funsql_corpus import bag

from healthrag.funsql import FunSQLError, ReferenceError, UnsupportedError, from_sql, funsql_examples, parse_julia, render, to_julia
from healthrag.settings import resource

TASKS = [json.loads(line) for line in resource("data", "benchmark", "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
PATTERNS = [example for example in funsql_examples() if example.sql]


def same_rows(cdm, sql: str) -> None:
    query = from_sql(sql, cdm.catalog)
    again = parse_julia(to_julia(query))
    assert bag(cdm.execute(render(again, cdm.catalog)).rows) == bag(cdm.execute(sql).rows)


@pytest.mark.parametrize("task", [task for task in TASKS if task.get("sql_query")], ids=lambda task: task["id"])
def test_every_gold_query_of_the_benchmark(cdm, task):
    same_rows(cdm, task["sql_query"])


@pytest.mark.parametrize("example", PATTERNS, ids=lambda example: example.heading)
def test_every_pattern(cdm, example):
    same_rows(cdm, example.sql)


OTHERS = {
    "star": "SELECT * FROM person LIMIT 3",
    "star of one table": "SELECT p.*, c.condition_start_date FROM person p JOIN condition_occurrence c USING (person_id) WHERE c.condition_concept_id = 192671",
    "positions": "SELECT gender_concept_id, COUNT(*) FROM person GROUP BY 1 ORDER BY 2 DESC, 1",
    "alias of the first table is a column": "SELECT year_of_birth.person_id FROM person AS year_of_birth JOIN death AS person_id ON person_id.person_id = year_of_birth.person_id",
    "no FROM": "SELECT 1 AS one, 'x' AS text, NULL AS none, -2 AS minus",
    "comma join": "SELECT COUNT(*) FROM person p, death d WHERE p.person_id = d.person_id",
    "full join": "SELECT COUNT(*) FROM (SELECT person_id FROM person WHERE person_id < 50) p FULL JOIN (SELECT person_id FROM visit_occurrence WHERE person_id > 20) v ON p.person_id = v.person_id",
    "right join": "SELECT COUNT(p.person_id) FROM visit_occurrence v RIGHT JOIN person p ON p.person_id = v.person_id AND v.visit_concept_id = 9201",
    "several windows": """SELECT person_id, ROW_NUMBER() OVER (PARTITION BY person_id ORDER BY visit_start_date, visit_occurrence_id) AS n,
        COUNT(*) OVER (PARTITION BY person_id) AS visits, MAX(visit_end_date) OVER (PARTITION BY person_id ORDER BY visit_start_date, visit_occurrence_id
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM visit_occurrence""",
    "window over a group": "SELECT gender_concept_id, COUNT(*) AS n, SUM(COUNT(*)) OVER () AS total, COUNT(*) * 1.0 / SUM(COUNT(*)) OVER () AS share FROM person GROUP BY gender_concept_id",
    "qualify": "SELECT person_id, visit_start_date FROM visit_occurrence QUALIFY ROW_NUMBER() OVER (PARTITION BY person_id ORDER BY visit_start_date, visit_occurrence_id) = 1",
    "case with a subject": "SELECT CASE gender_concept_id WHEN 8532 THEN 'f' ELSE 'm' END AS sex, COUNT(*) FROM person GROUP BY sex HAVING COUNT(*) > 1",
    "correlated scalar": "SELECT p.person_id, (SELECT MAX(c.condition_start_date) FROM condition_occurrence c WHERE c.person_id = p.person_id) AS last FROM person p WHERE p.year_of_birth > 1985",
    "correlated twice": """SELECT COUNT(*) FROM person p WHERE EXISTS (SELECT 1 FROM visit_occurrence v WHERE v.person_id = p.person_id AND EXISTS (
        SELECT 1 FROM condition_occurrence c WHERE c.person_id = p.person_id AND c.condition_start_date >= v.visit_start_date))""",
    "with columns and use twice": "WITH x(a, b) AS (SELECT person_id, year_of_birth FROM person WHERE person_id < 9) SELECT l.a, r.b FROM x l JOIN x r ON l.a = r.b - 1940 OR l.b = r.b",
    "with shadows a table": "WITH death AS (SELECT person_id FROM person WHERE person_id < 5) SELECT COUNT(*) FROM death",
    "union in with": "WITH e AS (SELECT person_id FROM visit_occurrence UNION SELECT person_id FROM death) SELECT COUNT(*) AS n FROM e",
    "union with order": "SELECT person_id AS id FROM person WHERE person_id < 4 UNION ALL SELECT visit_occurrence_id FROM visit_occurrence WHERE person_id < 9 ORDER BY id DESC LIMIT 3",
    "not": "SELECT COUNT(*) FROM person WHERE NOT (gender_concept_id = 8532 OR year_of_birth BETWEEN 1940 AND 1950) AND race_source_value NOT LIKE 'w%'",
    "functions": "SELECT UPPER(LEFT(gender_source_value, 1)) AS g, ROUND(AVG(2020 - year_of_birth), 1) AS age, COALESCE(MIN(month_of_birth), 0) AS m FROM person GROUP BY g",
    "date functions": "SELECT date_diff('day', visit_start_date, visit_end_date) AS d, date_trunc('month', visit_start_date) AS m, visit_start_date + INTERVAL 30 DAY AS later FROM visit_occurrence",
    "rollup": "SELECT gender_concept_id, race_concept_id, COUNT(*) AS n FROM person GROUP BY ROLLUP (gender_concept_id, race_concept_id)",
    "distinct of two": "SELECT DISTINCT gender_concept_id AS g, race_concept_id AS r FROM person ORDER BY g DESC, r",
    "count of a literal": "SELECT COUNT(1) AS n FROM person WHERE TRUE",
    "is true": "SELECT COUNT(*) FROM person WHERE (year_of_birth > 1950) IS TRUE",
    "order by an aggregate that is not shown": "SELECT gender_concept_id FROM person GROUP BY gender_concept_id ORDER BY COUNT(*) DESC LIMIT 1",
    "order by a result and by another column": "SELECT person_id AS id FROM person ORDER BY year_of_birth DESC, id LIMIT 7 OFFSET 2",
    "a result is named like another column": "SELECT -month_of_birth AS year_of_birth FROM person WHERE person_id < 40 ORDER BY year_of_birth, day_of_birth, person_id LIMIT 3",
    "bits": "SELECT ~year_of_birth AS n, year_of_birth & 15 AS m, year_of_birth // 10 AS d FROM person",
    "nulls first": "SELECT person_id, death_date FROM person LEFT JOIN death USING (person_id) ORDER BY death_date DESC NULLS FIRST, person_id LIMIT 5",
}


@pytest.mark.parametrize("sql", OTHERS.values(), ids=OTHERS)
def test_other_shapes(cdm, sql):
    same_rows(cdm, sql)


REFUSED = [
    "DELETE FROM person", "INSERT INTO person SELECT * FROM person", "CREATE TABLE x AS SELECT 1", "SELECT 1; SELECT 2", "", "SELECT", "PRAGMA version", "COPY person TO 'x'",
    "SELECT person_id FROM person EXCEPT SELECT person_id FROM death", "SELECT person_id FROM person INTERSECT SELECT person_id FROM death", "SELECT DISTINCT ON (person_id) person_id FROM person",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT n FROM r", "SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM generate_series(1, 3)",
    "SELECT getenv('HOME') FROM person", "SELECT read_text('/etc/passwd') FROM person", "SELECT STRING_AGG(person_source_value, ',' ORDER BY person_id) FROM person", "SELECT SUM(DISTINCT year_of_birth) FROM person",
    "SELECT p.person_id FROM person p SEMI JOIN death d ON p.person_id = d.person_id", "SELECT person_id FROM person LIMIT (SELECT 3)", "SELECT person_id FROM person USING SAMPLE 10",
    "SELECT person_id FROM person TABLESAMPLE 10%", "SELECT person_id FROM (SELECT person_id FROM person) x TABLESAMPLE 10%", "SELECT gender_source_value ~ 'M' AS m FROM person",
    "SELECT x.person_id FROM person p, LATERAL (SELECT p.person_id) x", "PIVOT person ON gender_concept_id USING COUNT(*)", "SELECT person_id, person_id FROM person",
    "SELECT list_transform([1], x -> x) FROM person", "SELECT {'a': person_id} FROM person",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_what_has_no_counterpart_is_refused(cdm, sql):
    with pytest.raises(FunSQLError):
        from_sql(sql, cdm.catalog)


def test_unknown_names_are_named(cdm):
    with pytest.raises(ReferenceError, match="did you mean `person`"):
        from_sql("SELECT person_id FROM persn", cdm.catalog)
    with pytest.raises(UnsupportedError, match="persn_id"):
        from_sql("SELECT persn_id FROM person", cdm.catalog)
