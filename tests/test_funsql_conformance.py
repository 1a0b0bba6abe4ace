"FunSQL.jl's own documentation and tests, compared by result."

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest
from funsql_corpus import FOLDER, POSTGRES_ONLY, RECORDS, SQLITE_DATE, bag, executable, needs_corpus

from healthrag.funsql import FunSQLError, parse_julia, render, to_julia
from healthrag.funsql.nodes import Node
from healthrag.funsql.tabular import node_key

pytestmark = needs_corpus

# Queries of level 3 (general Julia) that are not in the grammar: loops over catalogs, folds, indexing, handlers.
NOT_READ = {"examples-006", "examples-008", "examples-011", "examples-012", "nodes-074", "nodes-130", "nodes-157"}


def of_kind(*kinds: str) -> Any:
    chosen = [record for record in RECORDS if record["kind"] in kinds and record["id"] not in NOT_READ]
    return pytest.mark.parametrize("record", [pytest.param(record, id=record["id"]) for record in chosen])


@pytest.fixture(scope="module")
def connection():
    found = duckdb.connect()
    found.execute((FOLDER / "testdb.sql").read_text(encoding="utf-8"))
    yield found
    found.close()


@of_kind("render", "result_only")
def test_rows_are_those_of_funsql_jl(record, connection):
    sql = render(parse_julia(record["funsql"]), record["catalog"])
    if record["id"] in POSTGRES_ONLY:
        with pytest.raises(duckdb.CatalogException, match="regexp_"):
            connection.execute(sql)
        return
    cursor = connection.execute(executable(record, sql))
    columns, rows = [item[0] for item in cursor.description], cursor.fetchall()
    if not record.get("result"):
        return
    assert columns == record["result"]["columns"]
    if record["deterministic"]:
        assert bag(rows) == bag(record["result"]["rows"])
    else:
        assert len(rows) == len(record["result"]["rows"])


def test_where_duckdb_differs_is_named():
    made = {record["id"]: record for record in RECORDS if record["kind"] in ("render", "result_only") and record["id"] not in NOT_READ}
    assert {name for name, record in made.items() if re.search(r"\bdate\(", render(parse_julia(record["funsql"]), record["catalog"]))} == SQLITE_DATE
    assert {name for name, record in made.items() if record["kind"] == "render" and not record["executes"]} == set(POSTGRES_ONLY)
    open_order = {name for name, record in made.items() if record.get("result") and not record["deterministic"]}
    page = (Path(__file__).parents[1] / "nbs" / "tutorials" / "funsql_differences.ipynb").read_text(encoding="utf-8")
    assert [name for name in sorted(SQLITE_DATE | set(POSTGRES_ONLY) | open_order | NOT_READ) if name not in page] == []


@of_kind("error")
def test_errors_have_the_type_of_funsql_jl(record):
    with pytest.raises(FunSQLError) as caught:
        render(parse_julia(record["funsql"]), record["catalog"])
    assert type(caught.value).__name__ == record["expected_error"]["type"]
    assert all(name in str(caught.value) for name in re.findall(r"`\w+`", record["expected_error"]["message"]))


def shortened(value: Any, like: Any) -> Any:
    "Cut data where the display of FunSQL.jl leaves it out with an ellipsis."
    if isinstance(like, tuple) and like and like[-1] == ("str", "…") and isinstance(value, tuple):
        return (*value[: len(like) - 1], like[-1])
    if isinstance(value, tuple) and isinstance(like, tuple) and len(value) == len(like):
        return tuple(shortened(one, two) for one, two in zip(value, like, strict=True))
    return value


@of_kind("macro_desugar", "display")
def test_displays_read_as_the_same_query(record):
    expected: Node = parse_julia("id = 4329847\n" + record["expected_display"])  # one display shows $(id) as it stands
    found = parse_julia(record["funsql"])
    assert shortened(node_key(found), node_key(expected)) == node_key(expected)


@of_kind("parse_only")
def test_other_queries_are_read(record):
    assert isinstance(parse_julia(record["funsql"]), Node)


@of_kind("render", "result_only", "macro_desugar", "display", "parse_only")
def test_print_and_parse_are_inverse(record):
    query = parse_julia(record["funsql"])
    assert node_key(parse_julia(to_julia(query))) == node_key(query)


@pytest.mark.parametrize("record", [record for record in RECORDS if record["id"] in NOT_READ], ids=lambda record: record["id"])
def test_general_julia_is_refused_cleanly(record):
    with pytest.raises(FunSQLError):
        render(parse_julia(record["funsql"]), record["catalog"])
