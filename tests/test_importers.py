"""Other benchmarks' files: what becomes a task, what does not, and that nothing in a file is trusted."""

from __future__ import annotations

import json
import logging
import sqlite3

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.evaluation.importers import TASK_FORMATS, detect_format, import_tasks
from healthrag.evaluation.ohdsi import library_queries, render_parameters
from healthrag.evaluation.rules import parse_gold
from healthrag.evaluation.tasks import load_tasks, save_tasks
from healthrag.evaluation.translate import LONGEST_QUERY, to_duckdb
from healthrag.omop import open_omop

WOMEN = "SELECT COUNT(*) AS n FROM person WHERE gender_concept_id = 8532"


def written(tmp_path, value, name="tasks.json"):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("bird", {"question_id": 3, "db_id": "x", "question": "How many n?", "evidence": "n are women.", "SQL": WOMEN, "difficulty": "simple"}),
        ("spider", {"db_id": "x", "question": "How many n?", "query": WOMEN, "query_toks": []}),
        ("ehrsql", {"db_id": "x", "question": "How many n?", "query": WOMEN, "is_impossible": False, "id": "z"}),
    ],
)
def test_each_format_is_told_and_read(tmp_path, cdm, format, record):
    path = written(tmp_path, [record])
    assert detect_format(path) == format
    (task,) = import_tasks(path, databases={"x": "gibleed"}).tasks
    assert task.database == "gibleed" and task.group == "x" and task.answerable and task.tier == "simple" and not task.ordered
    assert cdm.execute(task.gold_sql).rows == cdm.execute(WOMEN).rows
    assert task.id == {"bird": "bird-3", "spider": "spider-1", "ehrsql": "ehrsql-z"}[format]
    assert ("n are women" in task.question) == (format == "bird")


def test_what_is_imported_is_kept_as_tasks(tmp_path):
    path = written(tmp_path, [
        {"question": "How many?", "query": WOMEN, "is_impossible": False}, {"question": "Why?", "query": "nan", "is_impossible": True},
        {"question": "Why not?", "query": None, "is_impossible": False},
    ])  # fmt: skip
    found = import_tasks(path)
    assert [task.answerable for task in found.tasks] == [True, False, False] and not found.skipped
    assert load_tasks(save_tasks(tmp_path / "out.jsonl", found.tasks)) == list(found.tasks)


def test_an_order_by_makes_an_ordered_task(tmp_path):
    named = "SELECT year_of_birth AS y, COUNT(*) AS n FROM person GROUP BY 1 ORDER BY n DESC, y"
    sql = [named, "SELECT person_id FROM person ORDER BY year_of_birth"]
    found = import_tasks(written(tmp_path, [{"question": "?", "query": text} for text in sql]))
    assert [(task.ordered, task.order_by) for task in found.tasks] == [(True, ("n", "y")), (True, ())]


def test_the_clock_is_set(tmp_path, cdm):
    sql = "SELECT date('now', '-1 day') AS a, strftime('%Y', current_time) AS b, current_date AS c"
    path = written(tmp_path, [{"question": "?", "query": sql, "is_impossible": False}])
    (set_,), (running,) = import_tasks(path, now="2105-12-31 23:59:00").tasks, import_tasks(path).tasks
    assert [str(value) for value in cdm.execute(set_.gold_sql).rows[0]] == ["2105-12-30", "2105", "2105-12-31"]
    assert {f.rule.id for f in import_tasks(path).check().errors} == {"T24"} and "CURRENT" in running.gold_sql


def test_a_database_is_only_looked_up(tmp_path):
    path = written(tmp_path, [{"db_id": "../../secret.duckdb", "question": "?", "query": WOMEN}, {"db_id": "ok", "question": "?", "query": WOMEN}])
    found = import_tasks(path, databases={"ok": "gibleed"})
    assert [task.database for task in found.tasks] == ["gibleed"] and "or --database DB_ID=DATABASE" in found.skipped[0].said


SINGERS = """
    CREATE TABLE singer (id INTEGER, name TEXT, country TEXT, age INTEGER, "Song Name" TEXT);
    INSERT INTO singer VALUES (1, 'Ann', 'France', 30, 'You'), (2, 'O''Hara', 'USA', 40, 'Sun'), (3, 'name', 'France', 51, 'Rain')
"""


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT name FROM singer WHERE country = "France" AND age > 20', "SELECT `Song Name` FROM singer WHERE `country` != 'France'",
        'SELECT "name" FROM singer WHERE "Song Name" LIKE "%u%" OR country IN ("USA", "Spain")', 'SELECT count(*) AS "n", country FROM singer GROUP BY country ORDER BY "n" DESC',
        'SELECT T1.name AS "who" FROM singer AS T1 WHERE T1.name = "O\'Hara" OR T1.name = "name"', 'SELECT [name], "none" FROM "singer" WHERE age BETWEEN 30 AND 45 AND country = "say ""hi"""',
        'WITH "old" AS (SELECT * FROM singer WHERE age > 35) SELECT CASE WHEN country = "USA" THEN "here" ELSE "there" END FROM "old" x WHERE x."age" > 1', "SELECT AVG(age) / 2, SUM(age) / 2 FROM singer",
    ],
)  # fmt: skip
def test_a_query_means_what_it_means_in_sqlite(tmp_path, sql):
    with duckdb.connect(tmp_path / "singers.duckdb") as made:
        made.execute(SINGERS)
    there = sqlite3.connect(":memory:")
    there.executescript(SINGERS)
    path = written(tmp_path, [{"db_id": "s", "question": "?", "query": sql}])
    (task,) = import_tasks(path, databases={"s": str(tmp_path / "singers.duckdb")}).tasks
    with open_omop(tmp_path / "singers.duckdb") as here:
        assert sorted(here.execute(task.gold_sql).rows) == sorted(there.execute(sql).fetchall())


def test_questions_without_their_labels_are_not_unanswerable(tmp_path):
    questions, labels = written(tmp_path, {"data": [{"id": "a", "question": "?"}, {"id": "b", "question": "?"}]}), written(tmp_path, {"a": "null"}, "labels.json")
    assert [skipped.said for skipped in import_tasks(questions).skipped] == ["it has no 'query'; EHRSQL 2024 keeps them in a file of their own: give it as labels"] * 2
    found = import_tasks(questions, labels=labels)
    assert [task.answerable for task in found.tasks] == [False] and [skipped.where for skipped in found.skipped] == ["record 2"]


HOSTILE = [
    "DROP TABLE person", "SELECT 1; DELETE FROM person", "ATTACH 'x.db'", "SELECT * FROM read_csv('/etc/passwd')", "COPY person TO 'x.csv'",
    "SELECT * FROM '/etc/passwd'", "PRAGMA database_list", "SELECT load_extension('x')", "SELECT " + "(" * 3000 + "1", "\ud800", "SELECT '\x00'",
    "INSERT INTO person SELECT * FROM person", "WITH a AS (DELETE FROM person RETURNING *) SELECT * FROM a", "SELECT pg_read_file('/etc/passwd')",
]  # fmt: skip


@pytest.mark.parametrize("sql", HOSTILE)
@pytest.mark.parametrize("format", ["bird", "spider", "ohdsi"])
def test_hostile_sql_never_runs(tmp_path, format, sql, cdm):
    before = cdm.execute("SELECT COUNT(*) FROM person").rows
    if format == "ohdsi":
        path = tmp_path / "q.sql"
        path.write_text(sql, encoding="utf-8", errors="surrogatepass") if "\ud800" not in sql else path.write_text("SELECT '")
    else:
        path = written(tmp_path, [{"question": "?", "query": sql, "SQL": sql, "db_id": "x"}])
    found = import_tasks(path, format)
    report = found.check()
    failed = {finding.task for finding in report.findings if finding.rule.id in ("T01", "T11")}
    ran = [task.gold_sql.split() for task in found.tasks if task.id not in failed]
    assert ran == [["SELECT", "1"]] * (format == "ohdsi" and sql.startswith("SELECT 1;")), found.table(report)  # a file of statements is split
    assert cdm.execute("SELECT COUNT(*) FROM person").rows == before and not list(tmp_path.glob("*.csv"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"), ("{", "not JSON"), ("{}", "not one of"), ("[]", "not one of"), ("[1, null]", "not one of"), ('"x"', "not one of"),
        ("[" * 100_000, "too deep"), ('[{"question": "x"}]', "not one of"), ("NaN", "not one of"), (f"[{'9' * 5000}]", "tasks.json is not read"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_benchmark_is_an_error(tmp_path, content, says):
    with pytest.raises(ValueError, match=says):
        import_tasks(written(tmp_path, content))


def test_other_wrong_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        import_tasks(tmp_path / "nothing.json")
    with pytest.raises(ValueError, match="the formats are bird"):
        import_tasks(written(tmp_path, []), "csv")
    with pytest.raises(ValueError, match="not a list"):
        import_tasks(written(tmp_path, {"a": 1}), "spider")
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(ValueError, match="UTF-8"):
        import_tasks(tmp_path / "latin.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \.sql or \.md"):
        import_tasks(tmp_path / "empty")
    labels = written(tmp_path, [1], "labels.json")
    with pytest.raises(ValueError, match="not an object of id and query"):
        import_tasks(written(tmp_path, {"data": []}), labels=labels)


KEYS = st.sampled_from(["question", "query", "SQL", "id", "db_id", "is_impossible", "evidence"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON, max_size=4), st.sampled_from([name for name in TASK_FORMATS if name != "ohdsi"]))
def test_any_json_becomes_tasks_or_reasons(tmp_path_factory, records, format):
    path = tmp_path_factory.mktemp("any") / "x.json"
    path.write_text(json.dumps(records))
    found = import_tasks(path, format)
    assert len(found.tasks) + len(found.skipped) == len(records)
    assert all(skipped.said for skipped in found.skipped)


@settings(max_examples=200, deadline=None)
@given(st.text("{}?:@=!&|() 'abIN,12-/*;\n", max_size=60))
def test_any_text_is_rendered_or_an_error(text):
    try:
        rendered = render_parameters(text, {"a": "1"})
    except ValueError:
        return
    assert "@a" not in rendered
    library_queries(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80), st.sampled_from(["tsql", "sqlite"]))
def test_any_text_is_translated_or_an_error(text, dialect):
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        parse_gold(to_duckdb(text, dialect).sql)
    except ValueError:
        pass


LONG = ["/*" * 90_000, "'" * 90_001, "{" * 90_000, "@a" * 60_000, "-- " * 60_000, "# " + "#" * 90_000, "```\n" * 40_000, " " * 190_000 + "x"]


@pytest.mark.parametrize("text", LONG, ids=[text[:4] for text in LONG])
def test_long_texts_end(text):
    library_queries(text)
    try:
        render_parameters(text, {"a": 1})
    except ValueError:
        pass


def test_what_is_too_long_is_refused():
    with pytest.raises(ValueError, match=str(LONGEST_QUERY)):
        to_duckdb("SELECT 1" + " " * LONGEST_QUERY)
    with pytest.raises(ValueError, match=str(LONGEST_QUERY)):
        render_parameters("SELECT 1" + " " * LONGEST_QUERY)


@pytest.mark.parametrize(
    ("tsql", "rows"),
    [
        ("SELECT TOP 2 year_of_birth AS y FROM @cdm.person GROUP BY year_of_birth ORDER BY year_of_birth", ((1908,), (1909,))),
        ("SELECT DATEDIFF(day, '2001-01-01', '2001-03-01') AS n", ((59,),)), ("SELECT DATEDIFF(year, '2001-12-31', '2002-01-01') AS n", ((1,),)),
        ("SELECT CAST(DATEADD(month, 1, '2001-01-31') AS DATE) AS n", (("2001-02-28",),)), ("SELECT ISNULL(NULL, 3) AS n", ((3,),)),
        ("SELECT 7 / 2 AS n", ((3,),)), ("SELECT -7 / 2 AS n", ((-3,),)), ("SELECT 7 / 2.0 AS n", ((3.5,),)), ("SELECT 'a' + 'b' AS n", (("ab",),)),
        ("SELECT MAX(year_of_birth) / 10 AS n FROM @cdm.person", ((198,),)), ("SELECT LEN('abc') AS n", ((3,),)),
        ("SELECT COUNT_BIG(DISTINCT gender_concept_id) AS n FROM [person] WITH (NOLOCK)", ((2,),)),
        ("SELECT YEAR(DATEFROMPARTS(2001, 2, 3)) AS n", ((2001,),)), ("SELECT IIF(1 > 2, 'a', 'b') AS n", (("b",),)),
        ("SELECT CASE WHEN x.n = 1 THEN 'one' + '!' END AS n FROM (SELECT 1 AS n) x", (("one!",),)),
    ],
)  # fmt: skip
def test_t_sql_means_the_same_in_duckdb(cdm, tsql, rows):
    found = cdm.execute(to_duckdb(render_parameters(tsql)).sql).rows
    assert tuple(tuple(v if isinstance(v, str | int | float) else str(v) for v in row) for row in found) == rows


@pytest.mark.parametrize(
    ("sqlite", "value"),
    [
        ("date('2001-03-31', 'start of month', '-1 month')", "2001-02-01"), ("datetime('2001-03-31 10:00', '+36 hours')", "2001-04-01 22:00:00"),
        ("strftime('%Y', '2001-03-31', 'start of year')", "2001"), ("julianday('2001-01-02') - julianday('2001-01-01')", "1.0"),
        ("CAST(strftime('%J', '2000-01-01 12:00:00') AS INTEGER)", "2451545"), ("7 / 2", "3"), ("IIF(1, 'a', 'b')", "a"),
    ],
)  # fmt: skip
def test_sqlite_means_the_same_in_duckdb(cdm, sqlite, value):
    import sqlite3

    (found,) = cdm.execute(to_duckdb(f"SELECT {sqlite} AS n", "sqlite").sql).rows[0]
    with sqlite3.connect(":memory:") as connection:
        (expected,) = connection.execute(f"SELECT {sqlite}").fetchone()
    assert str(found) == value == str(expected)


def test_a_library_is_read_as_it_is_written(tmp_path):
    one = "# A: one\n## Description\nAbout\nit.\n## Query\n```sql\n-- # no heading\nSELECT 1\n```\n"
    markdown = one + "# B: two\n## Query\n```\nSELECT 2\n```\n```sql\nSELECT 3\n```\n"
    assert [(q.name, q.question, q.sql) for q in library_queries(markdown)] == [
        ("A: one", "About it.", "-- # no heading\nSELECT 1"), ("B: two 1", "B: two", "SELECT 2"), ("B: two 2", "B: two", "SELECT 3"),
    ]  # fmt: skip
    assert library_queries("-- only a comment\n;;\n") == []
    assert [q.sql for q in library_queries("SELECT ';' ; SELECT 2")] == ["SELECT ';'", "SELECT 2"]
    (tmp_path / "a.sql").write_text("{DEFAULT @n = 2}\nSELECT TOP 1 person_id FROM @cdm.person; -- second\nSELECT @n AS n;")
    found = import_tasks(tmp_path / "a.sql")
    assert [task.question for task in found.tasks] == ["a 1", "second"] and found.tasks[1].gold_sql.split() == ["SELECT", "2", "AS", "n"]


def test_records_with_one_id_are_told_apart(tmp_path):
    found = import_tasks(written(tmp_path, [{"id": "a", "question": "?", "query": WOMEN}] * 2), "spider")
    assert len(found.tasks) == 1 and "taken" in found.skipped[0].said and "Imported('spider', 1 tasks, 1 skipped)" in repr(found)


def test_it_shows_itself_without_running_what_it_shows(tmp_path):
    path = written(tmp_path, [{"question": "<script>alert(1)</script>", "query": WOMEN}, {"question": 1, "query": "<b>"}])
    found = import_tasks(path)
    assert "<script>" not in found._repr_html_() and "&lt;script&gt;" in found._repr_html_()
    assert "<b>" not in found.table(found.check())._repr_html_()
