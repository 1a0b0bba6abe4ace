"""A database is opened so that no query can change it, leave it or outlast it."""

from __future__ import annotations

import pickle
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pytest

from healthrag.funsql import From, render
from healthrag.omop.database import CDM, open_omop
from healthrag.records import ResultSet

QUESTION = (  # How many women have a recorded gastrointestinal hemorrhage?
    "SELECT COUNT(DISTINCT person_id) AS women FROM person JOIN condition_occurrence USING (person_id) "
    "WHERE gender_concept_id = 8532 AND condition_concept_id = 192671"
)
FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small.duckdb"
    with duckdb.connect(path) as connection:
        connection.execute("CREATE TABLE person (person_id INTEGER); INSERT INTO person SELECT range FROM range(10)")
    return path


def test_answers_the_question(cdm):
    assert cdm.execute(QUESTION) == ResultSet(("women",), ((242,),))


def test_shows_itself(cdm):
    shown = cdm._repr_html_()
    assert "gibleed: OMOP CDM v5.4, 2,694 persons, 18 of 39 tables hold rows" in shown
    assert "<td>drug_exposure</td><td>67,707</td>" in shown and "<td>death</td>" not in shown
    assert repr(cdm) == "CDM('gibleed', 39 tables)"


def test_a_name_cannot_inject_html(small):
    with CDM(small, name="<script>x</script>") as cdm:
        assert "<script>" not in cdm._repr_html_()


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM person", "UPDATE person SET person_id = 1", "INSERT INTO person VALUES (1)", "DROP TABLE person",
        "CREATE TABLE x (a INTEGER)", "CREATE TABLE memory.main.x (a INTEGER)", "CREATE TEMP TABLE x (a INTEGER)",
        "TRUNCATE person", "ALTER TABLE person ADD COLUMN x INTEGER", "SELECT 1; SELECT 2", "SET threads = 8",
        "RESET lock_configuration", "PRAGMA enable_profiling", "USE memory", "ATTACH ':memory:' AS x", "DETACH cdm",
        "INSTALL httpfs", "LOAD httpfs", "COPY person TO 'out.csv'", "EXPORT DATABASE 'out'", "CHECKPOINT", "BEGIN", "VACUUM",
        "CALL pragma_version()", "EXPLAIN ANALYZE DELETE FROM person", "EXPLAIN ANALYZE CREATE TABLE memory.main.q AS SELECT 1", "EXPLAIN SELECT 1", "PREPARE p AS SELECT 1",
    ],
)  # fmt: skip
def test_refuses_whatever_is_not_one_select(small, sql, tmp_path):
    with CDM(small) as cdm:
        with pytest.raises(ValueError) as error:
            cdm.execute(sql)
        assert "\n" not in str(error.value)
        assert cdm.persons == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.duckdb"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM glob('/*')",
        "SELECT * FROM '/etc/passwd'", "SELECT * FROM read_parquet('https://example.com/x.parquet')",
        "SELECT * FROM read_blob('/etc/passwd')", "SELECT * FROM sniff_csv('/etc/passwd')", "SELECT getenv('HOME')",
        "SELECT * FROM parquet_scan('x')", "SELECT * FROM sqlite_scan('x', 'y')",
    ],
)  # fmt: skip
def test_files_and_network_are_out_of_reach(small, sql):
    with CDM(small) as cdm, pytest.raises(ValueError, match=r"Permission|Catalog|Binder|Missing Extension|IO Error"):
        cdm.execute(sql)


@pytest.mark.parametrize("sql", ["", "  \n", ";", "-- only a comment", "/* and another */"])
def test_an_empty_query_is_named(cdm, sql):
    with pytest.raises(ValueError, match="the query is empty"):
        cdm.execute(sql)


@pytest.mark.parametrize("sql", ["SELECT", "SELECT * FROM nowhere", "SELECT sex FROM person", "SELECT '", "((((", "\0", "\ud800", "SELECT ?", "¿"])
def test_a_wrong_query_is_one_line(cdm, sql):
    with pytest.raises(ValueError) as error:
        cdm.execute(sql)
    assert str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("nested", ["SELECT " + "(" * 100_000, "SELECT " + "(" * 5000 + "1" + ")" * 5000, "SELECT " + "-" * 9 + "1" + "+1" * 50_000])
def test_a_deeply_nested_query_does_no_harm(small, nested):
    with CDM(small) as cdm:
        try:
            assert len(cdm.execute(nested)) == 1
        except ValueError as error:
            assert len(str(error)) < 500
        assert cdm.persons == 10


def test_a_query_is_text(cdm):
    for run in (cdm.execute, cdm.sandbox):
        for wrong in (None, 7, b"SELECT 1", From("person")):
            with pytest.raises(TypeError, match=rf"a query is text, not {type(wrong).__name__}; FunSQL becomes text by render\(query, catalog\)"):
                run(wrong)
    assert cdm.execute(render(From("person"), cdm.catalog)).columns


@pytest.mark.parametrize("sql", ["FROM person SELECT person_id", "VALUES (1)", "WITH a AS (SELECT 1) SELECT * FROM a;", "(SELECT 1) UNION (SELECT 2)", "DESCRIBE person"])
def test_every_form_of_select_runs(cdm, sql):
    assert len(cdm.execute(sql))


def test_the_row_limit_is_exact(small):
    with CDM(small, row_limit=9) as cdm:
        assert len(cdm.execute("SELECT * FROM person")) == 9 and cdm.execute("SELECT * FROM person").truncated
        assert not cdm.execute("SELECT * FROM person", row_limit=10).truncated
        huge = cdm.execute("SELECT * FROM range(100_000_000_000)")
        assert len(huge) == 9 and huge.truncated


def test_columns_may_share_a_name_and_there_may_be_no_rows(cdm):
    assert cdm.execute("SELECT 1 AS a, 2 AS a WHERE FALSE") == ResultSet(("a", "a"), ())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sql", [FOREVER, "SELECT COUNT(*) FROM range(1_000_000) a, range(1_000_000) b WHERE a.range * b.range % 7 = 1"])
def test_the_time_limit_stops_a_query(small, sql):
    with CDM(small) as cdm:
        with pytest.raises(TimeoutError, match=r"ran longer than 0.3 s and was stopped"):
            cdm.execute(sql, time_limit=0.3)
        assert cdm.persons == 10


def test_a_time_limit_that_is_over_at_once_still_stops(small):
    with CDM(small, time_limit=1e-9) as cdm, pytest.raises(TimeoutError):
        cdm.execute(FOREVER)


def test_a_time_limit_holds_while_rows_are_fetched(small):
    slow = "SELECT a.range FROM range(1_000_000_000_000) a WHERE hash(a.range) % 100_000_000_000 = 3"
    with CDM(small) as cdm, pytest.raises(TimeoutError):
        cdm.execute(slow, time_limit=0.2)


def test_the_memory_limit_stops_a_query(small, tmp_path):
    with CDM(small, memory_limit="20MB") as cdm, pytest.raises(MemoryError, match="more than 20MB of memory"):
        cdm.execute("SELECT * FROM range(50_000_000) ORDER BY hash(range)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.duckdb"]  # nothing was spilled


@pytest.mark.parametrize("limits", [{"row_limit": 0}, {"row_limit": -1}, {"time_limit": 0}, {"time_limit": float("nan")}])
def test_limits_must_make_sense(small, limits):
    with pytest.raises(ValueError, match=r"row_limit|time_limit"):
        CDM(small, **limits)
    with CDM(small) as cdm, pytest.raises(ValueError, match=r"row_limit|time_limit"):
        cdm.execute("SELECT 1", **limits)


def test_threads_share_one_database(cdm):
    results, errors = [], []

    def ask(i):
        try:
            results.append((i, cdm.execute(f"SELECT {i}, COUNT(*) FROM person a, person b WHERE a.person_id % {i + 2} = 0").rows[0][0]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and sorted(results) == [(i, i) for i in range(8)]


def test_a_timeout_stops_only_its_own_query(cdm):
    failed = []

    def long():
        try:
            cdm.execute(FOREVER, time_limit=0.5)
        except TimeoutError as error:
            failed.append(error)

    thread = threading.Thread(target=long)
    thread.start()
    counts = {cdm.execute("SELECT COUNT(*) FROM person").rows for _ in range(50)}
    thread.join()
    assert counts == {((2694,),)} and len(failed) == 1


def test_two_can_have_the_same_file_with_other_limits(small):
    with CDM(small, memory_limit="1GB") as one, CDM(small, memory_limit="2GB") as two, duckdb.connect(small, read_only=True) as own:
        assert one.persons == two.persons == own.execute("SELECT COUNT(*) FROM person").fetchone()[0] == 10


def test_it_can_be_sent_to_another_process(small):
    with CDM(small, name="mine", row_limit=3) as cdm, pickle.loads(pickle.dumps(cdm)) as copy:
        assert (copy.name, copy.row_limit, copy.persons) == ("mine", 3, 10)


def test_a_closed_one_says_so(small):
    cdm = CDM(small)
    cdm.close()
    cdm.close()
    with pytest.raises(ValueError, match="small is closed; open it again"):
        cdm.execute("SELECT 1")


def test_the_schema_with_the_cdm_is_current(tmp_path):
    path = tmp_path / "etl.duckdb"
    with duckdb.connect(path) as connection:
        connection.execute("""
            CREATE TABLE staging (x INTEGER); CREATE SCHEMA "My ""CDM"; CREATE TABLE "My ""CDM".PERSON ("Person_ID" INTEGER);
            INSERT INTO "My ""CDM".person VALUES (1), (2); CREATE VIEW "My ""CDM".death AS SELECT 2 AS person_id;
        """)
    with open_omop(path) as cdm:
        assert cdm.catalog.to_dict() == {"person": ["person_id"], "death": ["person_id"], "main.staging": ["x"]}
        assert cdm.execute("SELECT COUNT(*) FROM person JOIN death USING (person_id)").rows == ((1,),)
        assert cdm.row_counts() == {"person": 2, "death": 1, "main.staging": 0}
        assert cdm.version == "" and "etl: OMOP CDM, 2 persons" in cdm._repr_html_()


def test_a_database_that_is_no_cdm_opens_too(tmp_path):
    path = tmp_path / "other.duckdb"
    duckdb.connect(path).close()
    with open_omop(path) as cdm:
        assert len(cdm.catalog) == 0 and cdm.persons == 0 and "0 of 0 tables" in cdm._repr_html_()


@pytest.mark.parametrize("name", ["it's.duckdb", "räum ☃.duckdb", "a b;.duckdb", "memory"])
def test_odd_file_names(small, name):
    path = small.rename(small.parent / name)
    with open_omop(path) as cdm:
        assert cdm.persons == 10


def refusal(path) -> str:
    with pytest.raises((OSError, ValueError)) as error:
        open_omop(path)
    assert "\n" not in str(error.value)
    return f"{type(error.value).__name__}: {error.value}".replace(str(path), "FILE")


def test_files_that_cannot_be_opened(small, tmp_path):
    whole = small.read_bytes()
    files = {"text": b"person_id,gender\n" * 1000, "empty": b"", "cut": whole[: len(whole) // 2], "flipped": whole[:8192] + bytes(4096) + whole[12288:]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    sqlite3.connect(tmp_path / "sqlite").execute("CREATE TABLE person (x)").connection.close()
    assert refusal(tmp_path / "text") == refusal(tmp_path / "empty") == refusal(tmp_path / "sqlite")
    assert refusal(tmp_path / "text").startswith("ValueError: FILE is not a DuckDB database; give the file of one")
    assert refusal(tmp_path / "cut").startswith("ValueError: FILE is cut off")
    assert refusal(tmp_path / "flipped").startswith("ValueError: FILE is damaged")
    assert refusal(tmp_path / "missing.duckdb").startswith("FileNotFoundError: FILE does not exist; give the path of a DuckDB file")
    assert refusal(tmp_path).startswith("FileNotFoundError: FILE is a folder")


def test_a_file_someone_writes_cannot_be_opened(small):
    code = f"import duckdb, sys; c = duckdb.connect({str(small)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert refusal(small) == "OSError: FILE is open for writing in another process; close it there, or copy the file"
        other.stdin.close()
    with duckdb.connect(small):
        assert refusal(small) == "OSError: FILE is open for writing in this process; close that connection first"
    with open_omop(small) as cdm:
        assert cdm.persons == 10


def test_names_that_are_no_database():
    for name in ("", "  "):
        with pytest.raises(ValueError, match="the name of the database is empty"):
            open_omop(name)
    for name in ("synthetic", "synthetic:", "synthetic:many", "synthetic:10:x", "synthetic:-5"):
        with pytest.raises(ValueError, match="is not a database; write synthetic:PERSONS"):
            open_omop(name)
    with pytest.raises(ValueError, match="persons is 5; it must be from 10 to 1,000,000"):
        open_omop("synthetic:5")
    with pytest.raises(FileNotFoundError, match=r'giblead does not exist; give the path of a DuckDB file, or "gibleed"'):
        open_omop("giblead")


def test_settings_set_the_limits(small, monkeypatch):
    monkeypatch.setenv("HEALTHRAG_ROW_LIMIT", "4")
    with open_omop(small) as cdm, open_omop(small, row_limit=2, time_limit=1.5, memory_limit="100MB") as other:
        assert cdm.row_limit == 4 and (other.row_limit, other.time_limit, other.memory_limit) == (2, 1.5, "100MB")


def test_a_named_database_is_built_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", str(tmp_path))
    with open_omop("synthetic:20:3") as cdm:
        assert cdm.name == "synthetic:20:3" and cdm.persons == 20 and tmp_path in cdm.path.parents


def test_importing_it_loads_no_database_engine():
    code = "import sys, healthrag.omop.database; print([m for m in ('duckdb', 'pandas', 'sqlglot', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
