"The rows of FunSQL.jl's own documentation, on PostgreSQL."

import pytest
from database_servers import postgresql
from funsql_corpus import FOLDER, POSTGRES_ONLY, RECORDS, bag, executable, needs_corpus

from healthrag.funsql import parse_julia, render

pytestmark = needs_corpus

TIED = {"nodes-232"}  # its LIMIT cuts through rows of one year, and PostgreSQL keeps others than DuckDB does
DATE_FUNCTIONS = """
CREATE FUNCTION sqlite_date(d text, m text) RETURNS date LANGUAGE sql AS
  $$ SELECT ((CASE WHEN d = 'now' THEN date '2010-12-31' ELSE d::date END) + m::interval)::date $$;
CREATE FUNCTION sqlite_date(d date, m interval) RETURNS date LANGUAGE sql AS $$ SELECT (d + m)::date $$;
"""


@pytest.fixture(scope="module")
def connection():
    with postgresql() as url:
        import psycopg

        with psycopg.connect(url, autocommit=True) as found:
            text = (FOLDER / "testdb.sql").read_text(encoding="utf-8").split("-- SQLite functions")[0]
            found.execute(text.replace("DOUBLE", "DOUBLE PRECISION"))
            found.execute(DATE_FUNCTIONS)
            yield found


def test_rows_on_postgresql(connection):
    chosen = [record for record in RECORDS if record["kind"] in ("render", "result_only") and record["julia_level"] <= 2]
    assert len(chosen) > 100
    for record in chosen:
        sql = render(parse_julia(record["funsql"]), record["catalog"], "postgres")
        cursor = connection.execute(executable(record, sql))
        columns, rows = [item[0] for item in cursor.description], cursor.fetchall()
        if record["id"] in POSTGRES_ONLY:
            assert bag(rows) == bag(POSTGRES_ONLY[record["id"]]), record["id"]
        if not record.get("result"):
            continue
        assert columns == record["result"]["columns"], record["id"]
        if record["deterministic"] and record["id"] not in TIED:
            assert bag(rows) == bag(record["result"]["rows"]), record["id"]
