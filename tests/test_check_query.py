"""Stages, names and legitimate queries."""

from __future__ import annotations

import html
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.cli.answering import show_answer
from healthrag.execution import check_query, read_statement, resolve_names
from healthrag.query import Answer, ask, concept_ids, shipped_examples
from healthrag.records import STAGES, Generation, ResultSet

LEGITIMATE = """
SELECT COUNT(*) FROM person
SELECT COUNT(DISTINCT person_id) AS n FROM condition_occurrence
FROM person
FROM person SELECT gender_concept_id, COUNT(*) GROUP BY ALL
SELECT * FROM person ORDER BY ALL LIMIT 3
SELECT * EXCLUDE (person_id) FROM person LIMIT 2
SELECT * REPLACE (year_of_birth + 1 AS year_of_birth) FROM person LIMIT 2
SELECT COLUMNS('.*_concept_id') FROM person LIMIT 2
SELECT p.* FROM person AS p LIMIT 2
SELECT person FROM person LIMIT 1
SELECT 2020 - year_of_birth AS age FROM person WHERE age > 60
SELECT 2020 - year_of_birth AS age, COUNT(*) AS n FROM person GROUP BY age HAVING n > 5 ORDER BY age
SELECT year_of_birth // 10 * 10 AS decade, COUNT(*) FROM person GROUP BY 1 ORDER BY 1
SELECT year_of_birth AS y, y + 1 AS z FROM person WHERE z > 1950
SELECT c.concept_name, COUNT(*) AS n FROM condition_occurrence co JOIN concept c ON c.concept_id = co.condition_concept_id GROUP BY c.concept_name ORDER BY n DESC, c.concept_name LIMIT 5
SELECT COUNT(*) FROM person p LEFT JOIN death d USING (person_id) WHERE d.person_id IS NULL
SELECT COUNT(*) FROM person NATURAL JOIN observation_period
SELECT COUNT(*) FROM person p SEMI JOIN drug_exposure d ON d.person_id = p.person_id
SELECT COUNT(*) FROM person p ANTI JOIN drug_exposure d USING (person_id)
SELECT COUNT(*) FROM person p, visit_occurrence v WHERE v.person_id = p.person_id
SELECT COUNT(*) FROM person p WHERE EXISTS (SELECT 1 FROM condition_occurrence c WHERE c.person_id = p.person_id)
SELECT COUNT(*) FROM person WHERE person_id NOT IN (SELECT person_id FROM drug_exposure)
SELECT COUNT(*) FROM person p WHERE year_of_birth = (SELECT MAX(year_of_birth) FROM person)
SELECT person_id, (SELECT COUNT(*) FROM visit_occurrence v WHERE v.person_id = p.person_id) AS visits FROM person p ORDER BY 1 LIMIT 3
SELECT p.person_id, n FROM person p, LATERAL (SELECT COUNT(*) AS n FROM visit_occurrence v WHERE v.person_id = p.person_id) ORDER BY 1 LIMIT 3
WITH w AS (SELECT person_id FROM person WHERE gender_concept_id = 8532) SELECT COUNT(*) FROM w
WITH a AS (SELECT person_id FROM person), b AS (SELECT person_id FROM a WHERE person_id > 10) SELECT COUNT(*) FROM b JOIN a USING (person_id)
WITH person AS (SELECT * FROM person WHERE year_of_birth > 1950) SELECT COUNT(*) FROM person
WITH w(id) AS MATERIALIZED (SELECT person_id FROM person) SELECT MAX(id) FROM w
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10) SELECT SUM(i) FROM n
SELECT * FROM (SELECT gender_concept_id, COUNT(*) AS n FROM person GROUP BY 1) AS g WHERE g.n > 1
SELECT * FROM (VALUES (8507, 'male'), (8532, 'female')) AS v(id, name) ORDER BY id
(SELECT person_id FROM person) UNION (SELECT person_id FROM death) ORDER BY 1 LIMIT 3
SELECT person_id FROM person EXCEPT SELECT person_id FROM drug_exposure
SELECT person_id FROM person INTERSECT ALL SELECT person_id FROM death
SELECT gender_concept_id FROM person UNION ALL BY NAME SELECT race_concept_id, 1 AS gender_concept_id FROM person LIMIT 2
SELECT COUNT(*) FILTER (WHERE gender_concept_id = 8532) AS women, COUNT(*) FILTER (gender_concept_id = 8507) AS men FROM person
SELECT CASE WHEN year_of_birth < 1950 THEN 'old' WHEN year_of_birth < 1980 THEN 'middle' ELSE 'young' END AS g, COUNT(*) FROM person GROUP BY g
SELECT IF(gender_concept_id = 8532, 'F', 'M') AS g, COUNT(*) FROM person GROUP BY 1
SELECT COALESCE(NULLIF(race_concept_id, 0), -1) AS r, COUNT(*) FROM person GROUP BY r
SELECT ROUND(AVG(2020 - year_of_birth), 1), STDDEV(year_of_birth), VAR_POP(year_of_birth) FROM person
SELECT MEDIAN(year_of_birth), QUANTILE_CONT(year_of_birth, 0.25), QUANTILE_DISC(year_of_birth, [0.1, 0.9]), MODE(gender_concept_id) FROM person
SELECT PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY year_of_birth) FROM person
SELECT MIN(year_of_birth), MAX(year_of_birth), ARG_MAX(person_id, year_of_birth), MAX(year_of_birth, 3) FROM person
SELECT STRING_AGG(DISTINCT CAST(gender_concept_id AS VARCHAR), ', ' ORDER BY CAST(gender_concept_id AS VARCHAR)) FROM person
SELECT LIST(gender_concept_id ORDER BY person_id)[1:3], ARRAY_AGG(DISTINCT gender_concept_id) FROM person
SELECT LIST_SORT(LIST_DISTINCT(LIST(gender_concept_id))), LEN(LIST(person_id)) FROM person
SELECT LIST_TRANSFORM([1, 2, 3], x -> x * 2), LIST_FILTER([1, 2, 3], lambda x: x > 1), [x + 1 FOR x IN [1, 2] IF x > 1]
SELECT UNNEST([1, 2, 3]) AS i
SELECT * FROM UNNEST(['a', 'b']) AS u(x)
SELECT HISTOGRAM(year_of_birth // 10) FROM person
SELECT CORR(year_of_birth, person_id), REGR_SLOPE(year_of_birth, person_id), COVAR_SAMP(year_of_birth, person_id) FROM person
SELECT APPROX_COUNT_DISTINCT(person_id) > 0, BOOL_AND(person_id > 0), COUNT_IF(year_of_birth > 1950) FROM person
SELECT person_id, ROW_NUMBER() OVER (PARTITION BY person_id ORDER BY visit_start_date, visit_occurrence_id) AS r FROM visit_occurrence QUALIFY r = 1 ORDER BY 1 LIMIT 3
SELECT person_id FROM condition_occurrence QUALIFY RANK() OVER (PARTITION BY condition_concept_id ORDER BY condition_start_date) = 1 ORDER BY 1 LIMIT 3
SELECT person_id, LAG(visit_start_date) OVER w, LEAD(visit_start_date) OVER w FROM visit_occurrence WINDOW w AS (PARTITION BY person_id ORDER BY visit_start_date, visit_occurrence_id) ORDER BY ALL LIMIT 3
SELECT y, SUM(n) OVER (ORDER BY y ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS total FROM (SELECT year_of_birth AS y, COUNT(*) AS n FROM person GROUP BY 1) ORDER BY y
SELECT y, AVG(n) OVER (ORDER BY y RANGE BETWEEN 2 PRECEDING AND 2 FOLLOWING EXCLUDE CURRENT ROW) FROM (SELECT year_of_birth AS y, COUNT(*) AS n FROM person GROUP BY 1) ORDER BY y
SELECT NTILE(4) OVER (ORDER BY year_of_birth, person_id) AS q, PERCENT_RANK() OVER (ORDER BY year_of_birth), FIRST_VALUE(person_id) OVER (ORDER BY person_id) FROM person ORDER BY ALL LIMIT 3
SELECT YEAR(condition_start_date) AS y, COUNT(*) FROM condition_occurrence GROUP BY y ORDER BY y
SELECT EXTRACT(YEAR FROM condition_start_date) AS y, MONTH(condition_start_date) AS m, COUNT(*) FROM condition_occurrence GROUP BY ALL ORDER BY ALL
SELECT DATE_TRUNC('month', condition_start_date) AS m, COUNT(*) FROM condition_occurrence GROUP BY 1 ORDER BY 1
SELECT DATE_PART('dow', condition_start_date), DAYNAME(condition_start_date), STRFTIME(condition_start_date, '%Y-%m') FROM condition_occurrence ORDER BY ALL LIMIT 3
SELECT AVG(DATE_DIFF('day', visit_start_date, visit_end_date)), MAX(DATEDIFF('hour', visit_start_datetime, visit_end_datetime)) FROM visit_occurrence
SELECT COUNT(*) FROM condition_occurrence WHERE condition_start_date BETWEEN DATE '2000-01-01' AND DATE '2009-12-31'
SELECT COUNT(*) FROM condition_occurrence WHERE condition_start_date >= '2010-01-01'::DATE AND condition_start_date < CAST('2011-01-01' AS DATE)
SELECT MIN(condition_start_date + INTERVAL 30 DAY), MAX(condition_start_date - INTERVAL '1 year'), MIN(condition_start_date + 7) FROM condition_occurrence
SELECT AGE(DATE '2020-01-01', DATE '1980-06-01'), MAKE_DATE(2020, 2, 29), LAST_DAY(DATE '2020-02-01'), TO_DAYS(3), EPOCH(TIMESTAMP '2020-01-01 00:00:00')
SELECT COUNT(*) FROM condition_occurrence WHERE condition_start_date > CURRENT_DATE - INTERVAL 200 YEAR
SELECT m::DATE AS m, COUNT(c.person_id) FROM GENERATE_SERIES(DATE '2000-01-01', DATE '2000-12-01', INTERVAL 1 MONTH) AS s(m) LEFT JOIN condition_occurrence c ON DATE_TRUNC('month', c.condition_start_date) = m GROUP BY 1 ORDER BY 1
SELECT y, COUNT(p.person_id) FROM RANGE(1940, 1950) AS r(y) LEFT JOIN person p ON p.year_of_birth = y GROUP BY y ORDER BY y
SELECT COUNT(*) FROM observation_period o, UNNEST(GENERATE_SERIES(o.observation_period_start_date, o.observation_period_end_date, INTERVAL 1 YEAR)) AS g(d)
SELECT UPPER(concept_name), LENGTH(concept_name), SUBSTRING(concept_name, 1, 5), CONCAT(domain_id, ': ', concept_name), concept_name || '!' FROM concept ORDER BY concept_id LIMIT 3
SELECT COUNT(*) FROM concept WHERE concept_name ILIKE '%hemorrhage%' OR LOWER(concept_name) LIKE 'gastro%' OR CONTAINS(concept_name, 'pain')
SELECT COUNT(*) FROM concept WHERE REGEXP_MATCHES(concept_name, '^[A-C]') AND concept_name NOT SIMILAR TO 'x.*' AND NOT STARTS_WITH(concept_name, 'Z')
SELECT REGEXP_EXTRACT(concept_name, '[0-9]+'), REPLACE(concept_name, ' ', '_'), TRIM(concept_name), SPLIT_PART(concept_name, ' ', 1), LEFT(concept_name, 3) FROM concept ORDER BY concept_id LIMIT 3
SELECT LPAD(CAST(person_id AS VARCHAR), 6, '0'), REPEAT('-', 3), FORMAT('{:.1f}', 2.25), PRINTF('%d', 3) FROM person ORDER BY 1 LIMIT 2
SELECT ABS(-1), CEIL(1.2), FLOOR(1.8), 7 % 3, 7 / 2, 7 // 2, 2 ** 3, POWER(2, 3), SQRT(4), LN(2), GREATEST(1, 2), LEAST(1, 2), SIGN(-3)
SELECT TRY_CAST('x' AS INTEGER), 1.5::DECIMAL(10, 2), TYPEOF(1), 'a' = 'b', NULL IS NULL, TRUE AND NOT FALSE, 1 <> 2, 3 BETWEEN 1 AND 5
SELECT {'a': 1}.a, STRUCT_PACK(b := 2).b, MAP {'x': 1}['x'], [1, 2, 3][2], LIST_CONTAINS([1, 2], 2), ARRAY_TO_STRING(['a', 'b'], '-')
SELECT gender_concept_id, race_concept_id, COUNT(*), GROUPING(race_concept_id) FROM person GROUP BY ROLLUP (gender_concept_id, race_concept_id) ORDER BY ALL
SELECT gender_concept_id, race_concept_id, COUNT(*) FROM person GROUP BY GROUPING SETS ((gender_concept_id), (race_concept_id), ()) ORDER BY ALL
SELECT gender_concept_id, race_concept_id, COUNT(*) FROM person GROUP BY CUBE (gender_concept_id, race_concept_id) ORDER BY ALL
SELECT COUNT(DISTINCT (person_id, visit_start_date)) FROM visit_occurrence
SELECT * FROM (SELECT year_of_birth // 20 AS g, gender_concept_id FROM person) PIVOT (COUNT(*) FOR gender_concept_id IN (8507, 8532)) ORDER BY ALL
SELECT p.person_id FROM person p ASOF JOIN (SELECT person_id, visit_start_date FROM visit_occurrence) v ON p.person_id = v.person_id AND CAST(p.birth_datetime AS DATE) <= v.visit_start_date ORDER BY 1 LIMIT 2
SELECT person_id, visit_start_date FROM visit_occurrence ORDER BY visit_start_date DESC NULLS LAST, person_id LIMIT 5 OFFSET 2
SELECT DISTINCT ON (person_id) person_id, condition_start_date FROM condition_occurrence ORDER BY person_id, condition_start_date LIMIT 3
SELECT Person_ID FROM "Person" WHERE PERSON.Year_Of_Birth > 1950 ORDER BY 1 LIMIT 1
SELECT COUNT(*) FROM main.person AS p WHERE p.gender_concept_id = ANY (SELECT 8532)
SELECT (SELECT COUNT(*) FROM person WHERE gender_concept_id = 8532) * 100.0 / (SELECT COUNT(*) FROM person) AS pct
SELECT COUNT(*) FROM condition_occurrence co JOIN concept_ancestor ca ON ca.descendant_concept_id = co.condition_concept_id WHERE ca.ancestor_concept_id = 4274025
SELECT d.drug_concept_id, SUM(d.days_supply) FROM drug_exposure AS d GROUP BY d.drug_concept_id ORDER BY 2 DESC NULLS LAST, 1 LIMIT 3;
SELECT COUNT(*) -- all of them
""".strip().splitlines()


@pytest.fixture(scope="module")
def catalog(cdm):
    return cdm.catalog


def test_there_are_enough_legitimate_queries():
    assert len(set(LEGITIMATE)) >= 90


@pytest.mark.parametrize("sql", LEGITIMATE)
def test_a_legitimate_query_passes_and_runs_as_written(sql, cdm):
    check = check_query(sql, catalog=cdm.catalog, executor=cdm.execute)
    assert check.ok and check.stage == "executed", check.error
    assert check.sql in sql
    plain = cdm.execute(sql)
    assert check.result.columns == plain.columns and len(check.result) == len(plain)


def test_every_gold_query_of_the_benchmark_passes(cdm):
    failed = [(task.id, check.error) for task in shipped_examples() if not (check := check_query(task.gold_sql, catalog=cdm.catalog)).ok]
    assert failed == []


UNRESOLVED = [
    ("SELECT COUNT(*) FROM patients", ["patients", "person"]),
    ("SELECT COUNT(*) FROM condition_occurence", ["condition_occurrence"]),
    ("SELECT COUNT(*) FROM drug_exposures d JOIN persons p USING (person_id)", ["drug_exposure", "person"]),
    ("SELECT sex FROM person", ["sex", "person", "gender_concept_id"]),
    ("SELECT p.sex FROM person AS p", ["sex", "gender_concept_id"]),
    ("SELECT COUNT(*) FROM person WHERE condition_concept_id = 1", ["condition_concept_id", "condition_occurrence"]),
    ("SELECT p.drug_concept_id FROM person p", ["drug_concept_id", "drug_exposure"]),
    ("SELECT q.person_id FROM person p", ["q", "p"]),
    ("SELECT person.person_id FROM person AS p", ["person", "p"]),
    ("SELECT death.death_date FROM person", ["death", "join"]),
    ("SELECT person_id FROM person p JOIN death d ON d.person_id = p.person_id", ["person_id", "p", "d"]),
    ("SELECT * FROM (SELECT year_of_birth AS y FROM person) AS t WHERE t.year > 3", ["year", "y"]),
    ("SELECT * FROM (SELECT year_of_birth AS y FROM person) AS t WHERE year_of_birth > 3", ["year_of_birth"]),
    ("WITH w AS (SELECT person_id AS id FROM person) SELECT person_id FROM w", ["person_id", "id"]),
    ("WITH w(id) AS (SELECT person_id FROM person) SELECT person_id FROM w", ["person_id"]),
    ("SELECT COUNT(*) FROM person p WHERE EXISTS (SELECT 1 FROM death d WHERE d.person = p.person_id)", ["person"]),
    ("SELECT COUNT(*) FROM person ORDER BY nothing_like_it", ["nothing_like_it"]),
    ("SELECT * EXCLUDE (sex) FROM person", ["sex"]),
    ("SELECT COLUMNS('zzz.*') FROM person", ["zzz"]),
    ("SELECT COUNT(*) FROM person JOIN death USING (patient_id)", ["patient_id"]),
    ("SELECT person_id FROM person UNION SELECT person_id FROM death ORDER BY death_date", ["death_date"]),
    ("SELECT MAX(x) FROM person, LATERAL (SELECT years AS x)", ["years"]),
    ("SELECT SUM(total) OVER (ORDER BY year_of_birth) FROM person", ["total"]),
    ("SELECT COUNT(*) FILTER (WHERE sex = 'F') FROM person", ["sex"]),
    ("SELECT year_of_birth FROM person GROUP BY year_of_birth HAVING n > 3", ["n"]),
    ("SELECT * FROM person LIMIT 3 OFFSET (SELECT x FROM death)", ["x"]),
]


@pytest.mark.parametrize(("sql", "names"), UNRESOLVED)
def test_an_unknown_name_stops_at_built_and_is_named(sql, names, cdm):
    check = check_query(sql, catalog=cdm.catalog, executor=lambda sql: pytest.fail("it ran"))
    assert check.stage == "built" and not check.unsafe, check
    for name in names:
        assert name in check.error, check.error
    assert len(check.error) <= 500 and "\n" not in check.error


DOUBTFUL = ("EXCLUDE", "COLUMNS", "USING (patient", "UNION", "LIMIT", "w(id)", "LATERAL")  # left to the database


@pytest.mark.parametrize("sql", [sql for sql, _ in UNRESOLVED if not any(w in sql for w in DOUBTFUL)])
def test_the_tree_alone_finds_most_of_them_for_other_dialects(sql, cdm):
    assert resolve_names(read_statement(sql), sql, cdm.catalog, dialect="postgres")


def test_the_database_refuses_what_only_it_can_judge(cdm):
    for sql in ("SELECT SUM(gender_source_value) FROM person", "SELECT year_of_birth, COUNT(*) FROM person"):
        without = check_query(sql, catalog=cdm.catalog)
        check = check_query(sql, catalog=cdm.catalog, executor=cdm.execute)
        assert without.ok and without.stage == "rendered"
        assert not check.ok and check.stage == "rendered" and check.sql and check.error


def test_functions_of_other_databases_are_wrong_not_unsafe(cdm):
    for sql in ("SELECT DATEADD('day', 1, birth_datetime) FROM person", "SELECT STR_TO_DATE('x', 'y')", "SELECT JULIANDAY('2020-01-01')"):
        check = check_query(sql, catalog=cdm.catalog)
        assert not check.ok and not check.unsafe and check.stage in ("none", "parsed") and "function" in check.error, check


def test_stages_in_order(cdm):
    texts = ["SELEC 1 FROM", "DELETE FROM person", "SELECT x FROM person", "SELECT SUM(gender_source_value) FROM person", "SELECT 1"]
    stages = [check_query(text, catalog=cdm.catalog, executor=cdm.execute).stage for text in texts]
    assert stages == list(STAGES)


def test_the_verdict_follows_the_last_stage(cdm):
    check = check_query("SELECT 1", catalog=cdm.catalog)
    assert check.ok and check.rendered and not check.executed and check.result is None
    check = check_query("SELECT COUNT(*) AS n FROM person", catalog=cdm.catalog, executor=cdm.execute)
    assert check.ok and check.result == ResultSet(("n",), ((2694,),))


@pytest.mark.parametrize("fault", [ValueError("bad\nquery"), TimeoutError("too long"), RuntimeError("x" * 2000), KeyError("k"), MemoryError()])
def test_an_executor_may_fail_in_any_way(fault, cdm):
    def executor(sql):
        raise fault

    check = check_query("SELECT 1", catalog=cdm.catalog, executor=executor)
    assert check.stage == "rendered" and not check.ok and check.error and len(check.error) <= 500 and "\n" not in check.error


def test_a_recursive_query_without_end_is_stopped_by_the_time_limit(cdm):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    check = check_query(endless, catalog=cdm.catalog, executor=lambda sql: cdm.execute(sql, time_limit=0.3))
    assert check.stage == "rendered" and "0.3 s" in check.error


@pytest.mark.parametrize("form", [dict, lambda d: {t: dict.fromkeys(c, "VARCHAR") for t, c in d.items()}, lambda d: {t.upper(): tuple(c) for t, c in d.items()}])
def test_a_catalog_may_be_a_plain_mapping(form, cdm):
    given_catalog = form(cdm.catalog.to_dict())
    assert check_query("SELECT COUNT(*) FROM person WHERE year_of_birth > 1950", catalog=given_catalog).ok
    assert check_query("SELECT sex FROM person", catalog=given_catalog).stage == "built"


def test_a_generation_is_accepted_and_an_empty_one_explained(cdm):
    assert check_query(Generation("SELECT 1", "…"), catalog=cdm.catalog).ok
    check = check_query(Generation("", "CANNOT_ANSWER: no prices"), catalog=cdm.catalog)
    assert check.stage == "none" and "no query" in check.error


def test_callers_mistakes_do_raise(cdm):
    with pytest.raises(ValueError, match="use one of"):
        check_query("SELECT 1", target="cypher", catalog=cdm.catalog)
    with pytest.raises(TypeError, match="text or a Generation"):
        check_query(None, catalog=cdm.catalog)
    with pytest.raises(TypeError, match="Catalog or a mapping"):
        check_query("SELECT 1", catalog=["person"])


def test_another_dialect_runs_what_was_checked():
    check = check_query("SELECT COUNT(*) /* all */ FROM person;", catalog={"person": ["person_id"]}, dialect="postgres")
    assert check.ok and check.sql == "SELECT COUNT(*) FROM person"
    assert check_query("SELECT pg_sleep(9)", catalog={"person": ["person_id"]}, dialect="postgres").unsafe
    assert check_query("SELECT * FROM person FOR UPDATE", catalog={"person": ["person_id"]}, dialect="postgres").unsafe


@given(st.text(max_size=300))
@settings(deadline=None, max_examples=200)
def test_no_text_raises(text):
    check = check_query(text, catalog={"person": ["person_id"]})
    assert check.ok or (check.error and len(check.error) <= 500)


@given(seed=st.integers(0, 10**6), sql=st.sampled_from(LEGITIMATE))
@settings(deadline=None, max_examples=250)
def test_no_mutated_query_raises(seed, sql):
    rng, text = random.Random(seed), list(sql)
    for _ in range(rng.randint(1, 6)):
        at, kind = rng.randrange(len(text)), rng.randrange(3)
        text[at : at + (kind == 0)] = [] if kind == 0 else [rng.choice(text if kind == 1 else "()[]{};,'\"`*.:|-/\\\n\t\x00é💊")]
    catalog = {"person": ["person_id", "year_of_birth", "gender_concept_id"], "death": ["person_id"]}
    check = check_query("".join(text), catalog=catalog)
    assert check.ok or (check.error and len(check.error) <= 500 and "\n" not in check.error)


def test_checks_are_fast_and_thread_safe(cdm):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        checks = list(pool.map(lambda sql: check_query(sql, catalog=cdm.catalog), LEGITIMATE * 2))
    assert all(check.ok for check in checks)


# pipelines


@pytest.mark.parametrize(
    ("code", "stage", "unsafe"),
    [
        ("From(:person) |> Where(Get.gender_concept_id .== 8532) |> Group() |> Select(:n => Agg.count())", "executed", False),
        ("From(:person) |> Group() |> Select(Agg.sum(Get.gender_source_value))", "rendered", False),
        ("From(:patients)", "built", False),
        ("From(:person) |> Where(Get.sex .== 1)", "built", False),
        ('From(:person) |> Select(Fun.getenv("HOME"))', "built", True),
        ('From(:person) |> Select(Fun.GetEnv("HOME"))', "built", True),
        ('From(Fun.read_csv("x"), columns = [:a])', "built", True),
        ("From(Fun.sniffle(1), columns = [:a])", "built", False),
        ("From(:person) |> Select(Fun.curdate())", "built", False),
        ("From(:person) |> Group() |> Select(Agg.div(Get.person_id, 2))", "built", False),
        ('From(:person) |> Select(Fun("getenv(?)", "HOME"))', "built", True),
        ("1 + 1", "parsed", False),
        ("From(:person", "none", False),
        ("run(`ls`)", "none", False),
        ("SELECT 1", "none", False),
        ("(" * 3000, "none", False),
        ("", "none", False),
    ],
)
def test_stages_of_a_pipeline(code, stage, unsafe, cdm):
    check = check_query(code, target="funsql", catalog=cdm.catalog, executor=cdm.execute)
    assert (check.stage, check.unsafe, check.ok) == (stage, unsafe, stage == "executed"), check
    assert check.ok or (check.error and len(check.error) <= 500)


@given(st.text(max_size=120))
@settings(deadline=None, max_examples=100)
def test_no_pipeline_text_raises(text):
    check = check_query(text, target="funsql", catalog={"person": ["person_id"]})
    assert check.ok or check.error


# asking


def test_concept_ids_of_a_query():
    sql = "SELECT 1 FROM t WHERE gender_concept_id = 8532 AND x.condition_concept_id IN (1, 2) AND 3 = drug_concept_id AND year = 9 AND (a_concept_id <> 8532)"
    assert concept_ids(sql) == [8532, 1, 2, 3]


def test_ask_keeps_every_step(cdm):
    answer = ask(" How many patients? ", cdm=cdm, model=lambda prompt: "```sql\nSELECT COUNT(*) AS patients FROM person\n```", mode="zero_shot")
    assert isinstance(answer, Answer) and answer.ok and answer.question == "How many patients?"
    assert answer.result.rows == ((2694,),) and answer.sql.startswith("SELECT") and not answer.sources
    assert [passed for _, passed, _ in answer.ladder()] == [True] * 4
    assert "2694" in str(answer) and "2694" in answer._repr_html_() and answer.to_json()["ok"]


@pytest.mark.parametrize(("pipeline", "became"), [
    ("From(:person) |> Group() |> Select(:patients => Agg.count())", "SELECT"), ("From(:persons) |> Select(Get.person_id)", ""), ("From(:person) |> Where(", ""),
])  # fmt: skip
def test_ask_shows_the_pipeline_above_its_sql(cdm, capsys, pipeline, became):
    answer = ask("How many patients?", cdm=cdm, model=lambda prompt: f"```julia\n{pipeline}\n```", target="funsql", mode="zero_shot")
    show_answer(answer)
    for text in (str(answer), html.unescape(answer._repr_html_()), capsys.readouterr().out):
        assert "".join(pipeline.split()) in "".join(text.split()) and ("SELECT\n" in text) == bool(became)
        assert not became or text.index("From(:person)") < text.index("SELECT\n")
    found = answer.to_json()
    assert (found["target"], found["code"]) == ("funsql", pipeline) and found["sql"].startswith(became) and bool(found["sql"]) == bool(became)


@pytest.mark.parametrize("word", ["asthma", "sinusitis", "aspirin", "acetaminophen", "gastrointestinal hemorrhage"])
def test_a_concept_is_cited_to_the_end(cdm, word):
    answer = ask(f"How many patients have {word}?", cdm=cdm, model=lambda prompt: "no query")
    lines = [hit.text for hit in answer.sources if hit.metadata["kind"] == "concept"]
    assert lines and all(any(line in cited for cited in answer.citations()) for line in lines)


def test_an_answer_escapes_what_a_model_wrote(cdm):
    answer = ask("<b>?", cdm=cdm, model=lambda prompt: "```sql\nSELECT '<script>alert(1)</script>' AS \"<i>\" FROM person LIMIT 1\n```", mode="zero_shot")
    assert answer.ok and "<script>" not in answer._repr_html_() and "<i>" not in answer._repr_html_().replace("<i>not", "")


def test_ask_reports_instead_of_raising_on_a_bad_query(cdm):
    answer = ask("How many?", cdm=cdm, model=lambda prompt: "DROP TABLE person", mode="zero_shot")
    assert not answer.ok and answer.check.unsafe and "SELECT" in answer.problem and answer.result is None
    assert cdm.execute("SELECT COUNT(*) FROM person").rows == ((2694,),)


@pytest.mark.parametrize("wrong", [{"question": ""}, {"question": "x", "mode": "few"}, {"question": "x", "target": "cypher"}, {"question": "x", "cdm": "/no/such.duckdb"}, {"question": "x", "model": "nobody:x"}])
def test_bad_arguments_of_ask_raise_one_clear_line(wrong, cdm):
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        ask(**{"cdm": cdm, **wrong})
    assert "\n" not in str(raised.value)


BIG = "array_to_string(list_transform(range(1000000), x -> repeat('x', 10000)), '')"  # 10 GB, and no table is needed to work it out


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits of POSIX")
@pytest.mark.parametrize("query", [f"SELECT {BIG}", f"SELECT 1 LIMIT length({BIG})", f"SELECT regexp_matches(gender_source_value, {BIG}) FROM person",
    "SELECT list_reduce(list_transform(range(40), x -> repeat('x', 1000)), (a, b) -> a || a || b)",
    f"SELECT {'replace(' * 8}repeat('x', 100){''.join(f', {chr(120)!r}, repeat({chr(120)!r}, 100))' for _ in range(8))}"])  # fmt: skip
def test_constants_that_are_a_bomb_are_worked_out_in_another_process(query):
    """DuckDB computes constants while it prepares a query, and neither its own memory limit nor an interrupt ends that."""
    code = """
import resource, sys
from healthrag.cli.answering import show_answer
from healthrag.execution import check_query
tables = {"person": {"gender_source_value": "VARCHAR"}}
assert check_query("SELECT gender_source_value FROM person", catalog=tables).ok
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
check = check_query(sys.argv[1], catalog=tables)
print(check.stage, check.unsafe, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
assert check_query("SELECT gender_source_value FROM person", catalog=tables).ok and not check_query("SELECT x FROM person", catalog=tables).ok
"""
    done = subprocess.run([sys.executable, "-c", code, query], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 100_000, "kilobytes of this process"
