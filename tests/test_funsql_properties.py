"Properties of FunSQL over random queries and random rows."

from __future__ import annotations

import collections
import datetime as dt
import json
import re
import sqlite3
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pytest
from funsql_naive import Row, run
from hypothesis import given, settings
from hypothesis import strategies as st

import healthrag.funsql
from healthrag.funsql import (
    Agg, Append, As, Define, From, Fun, FunSQLError, Get, Group, Interval, Join, LeftJoin, Limit, Lit, Order, Partition, Select, Var, Where, With, parse_julia,
    parse_python, query_from_dict, query_to_dict, render, same, to_julia, to_python,
)
from healthrag.funsql.lexer import tokenize
from healthrag.funsql.nodes import Node

TABLES = {"t": ["id", "a", "b"], "u": ["uid", "id", "c"]}
INTEGERS = st.integers(-4, 6)


@dataclass(frozen=True)
class Shape:
    "What a random query knows about its rows."
    columns: list[str]
    records: dict[str, list[str]] = field(default_factory=dict)
    group: list[str] | None = None  # columns that aggregates see
    grouped_records: dict[str, list[str]] = field(default_factory=dict)  # record -> columns its aggregates see
    window: bool = False

    def gets(self) -> list[Node]:
        return [Get[name] for name in self.columns] + [Get[record][name] for record, names in self.records.items() for name in names]


@st.composite
def numbers(draw, shape: Shape, depth: int = 2) -> Node:
    gets = shape.gets()
    kinds = ["lit"] + (["get"] * 4 if gets else []) + (["sum", "product", "case", "coalesce", "negative"] if depth else [])
    if shape.group is not None and depth:
        kinds += ["agg"] * 3
    if shape.grouped_records and depth:
        kinds += ["record-agg"] * 2
    match draw(st.sampled_from(kinds)):
        case "lit": return Lit(draw(INTEGERS))
        case "get": return draw(st.sampled_from(gets))
        case "sum": return draw(numbers(shape, depth - 1)) + draw(numbers(shape, depth - 1))
        case "product": return draw(numbers(shape, depth - 1)) * draw(numbers(shape, 0))
        case "negative": return -draw(numbers(shape, depth - 1))
        case "case": return Fun.case(draw(conditions(shape, depth - 1)), draw(numbers(shape, depth - 1)), draw(numbers(shape, depth - 1)))
        case "coalesce": return Fun.coalesce(draw(numbers(shape, depth - 1)), draw(numbers(shape, 0)))
        case "agg": return draw(aggregates(shape.group, shape.window))
    record = draw(st.sampled_from(sorted(shape.grouped_records)))
    return Get[record] >> draw(aggregates(shape.grouped_records[record], False))


@st.composite
def aggregates(draw, columns: list[str], window: bool) -> Node:
    inner = Shape(columns)
    name = draw(st.sampled_from(["count", "sum", "min", "max", "count_distinct" if not window else "max"]))
    condition = draw(st.none() | conditions(inner, 1))
    if name == "count" or not columns:
        return Agg.count(filter=condition)
    return Agg[name](draw(numbers(inner, 1)), filter=condition)


@st.composite
def conditions(draw, shape: Shape, depth: int = 2) -> Node:
    kinds = ["compare"] * 4 + ["null", "in", "between"] + (["and", "or", "not", "query"] if depth else [])
    left = draw(numbers(shape, min(depth, 1)))
    match draw(st.sampled_from(kinds)):
        case "compare": return Fun[draw(st.sampled_from(["=", "<>", "<", "<=", ">", ">="]))](left, draw(numbers(shape, 0)))
        case "null": return draw(st.sampled_from([Fun.is_null, Fun.is_not_null]))(left)
        case "in": return Fun.in_(left, *draw(st.lists(INTEGERS, min_size=1, max_size=3)))
        case "between": return Fun.between(left, draw(INTEGERS), draw(numbers(shape, 0)))
        case "and": return draw(conditions(shape, depth - 1)) & draw(conditions(shape, depth - 1))
        case "or": return draw(conditions(shape, depth - 1)) | draw(conditions(shape, depth - 1))
        case "not": return ~draw(conditions(shape, depth - 1))
    return Fun.in_(left, From("u") >> Where(Get.c > draw(INTEGERS)) >> Select(Get.id))


def total_order(shape: Shape) -> Node:
    return Order(*shape.gets())


@st.composite
def queries(draw, steps: int = 6, joins: bool = True) -> tuple[Node, Shape]:
    table = draw(st.sampled_from(["t", "u"]))
    query: Node = From(table)
    shape = Shape(list(TABLES[table]))
    for number in range(draw(st.integers(0, steps))):
        query, shape = draw(step(query, shape, number, joins))
    return query, shape


@st.composite
def step(draw, query: Node, shape: Shape, number: int, joins: bool) -> tuple[Node, Shape]:
    kinds = ["where", "where", "define", "define", "select", "limit", "order"]
    if shape.gets():
        kinds += ["group", "group", "partition"]
    if joins and shape.columns and len(shape.records) < 2:
        kinds += ["join", "join", "append"]
    if joins:
        kinds += ["with"]
    kind = draw(st.sampled_from(kinds))
    match kind:
        case "where": return query >> Where(draw(conditions(shape))), shape
        case "define":
            name = draw(st.sampled_from([f"d{number}", *shape.columns]))
            columns = shape.columns if name in shape.columns else [*shape.columns, name]
            return query >> Define(draw(numbers(shape)) >> As(name)), Shape(columns, shape.records, shape.group, shape.grouped_records, shape.window)
        case "select":
            names = [f"s{i}" for i in range(draw(st.integers(1, 3)))]
            return query >> Select(*(draw(numbers(shape)) >> As(name) for name in names)), Shape(names)
        case "order": return query >> total_order(shape), shape
        case "limit":
            if shape.window or shape.group is not None:  # rows that look alike may have different groups
                return query, shape
            return query >> total_order(shape) >> Limit(draw(st.integers(0, 2)), draw(st.integers(0, 5))), shape
        case "group":
            keys = draw(st.lists(st.sampled_from(["k0", "k1"]), unique=True))
            columns = shape.columns
            return query >> Group(*(draw(numbers(shape, 1)) >> As(key) for key in keys)), Shape(keys, group=columns)
        case "partition":
            by = [draw(numbers(shape, 1))] if draw(st.booleans()) else []
            return query >> Partition(*by), Shape(shape.columns, shape.records, shape.columns, shape.grouped_records, True)
        case "join":
            other, inner = draw(queries(2, joins=False))
            record = f"r{number}"
            on = Get[record][draw(st.sampled_from(inner.columns))] if inner.columns else Lit(1)
            join = draw(st.sampled_from([Join, LeftJoin]))
            grouped = {record: inner.group} if inner.group is not None and not inner.window else {}
            shown = Shape(
                shape.columns, {**shape.records, record: inner.columns}, shape.group if not shape.window else None, {**shape.grouped_records, **grouped}
            )
            if shape.window:  # a window does not survive a join in the naive interpreter
                query = query >> Select(*shape.gets_named())
                shown = Shape([label for label, _ in shape.named()], {record: inner.columns}, None, grouped)
            return query >> join(other >> As(record), on=draw(st.sampled_from(shape_gets(query, shown, record))) == on), shown
        case "append":
            other, inner = draw(queries(2, joins=False))
            shared = [name for name in shape.columns if name in inner.columns]
            if not shared:
                return query, shape
            return query >> Select(*(Get[name] for name in shape.columns)) >> Append(other >> Select(*(Get[name] for name in inner.columns))), Shape(shared)
    other, inner = draw(queries(2, joins=False))
    if not inner.columns:
        return query, shape
    named = From("w") >> With(w=other >> Select(*(Get[name] for name in inner.columns)))
    return named, Shape(inner.columns)


def named(self: Shape) -> list[tuple[str, Node]]:
    return [(f"n{position}", get) for position, get in enumerate(self.gets())]


Shape.named = named  # type: ignore[attr-defined]
Shape.gets_named = lambda self: [get >> As(name) for name, get in named(self)]  # type: ignore[attr-defined]


def shape_gets(query: Node, shape: Shape, record: str) -> list[Node]:
    "List what may stand left of = in a join: columns of the input."
    return [Get[name] for name in shape.columns] or [Lit(1)]


rows_of_t = st.lists(st.tuples(st.none() | INTEGERS, st.none() | INTEGERS), max_size=6)
rows_of_u = st.lists(st.tuples(st.none() | st.integers(0, 6), st.none() | INTEGERS), max_size=6)


def bag(rows: Any) -> collections.Counter:
    return collections.Counter(tuple(None if value is None else int(value) for value in row) for row in rows)


@pytest.fixture(scope="module")
def connection():
    with duckdb.connect() as found:
        yield found


def filled(connection, t, u) -> dict[str, list[Row]]:
    "Put the same rows into the database and into lists."
    tables = {"t": [(i, *row) for i, row in enumerate(t)], "u": [(i, *row) for i, row in enumerate(u)]}
    for name, rows in tables.items():
        columns = ", ".join(f'"{column}" INTEGER' for column in TABLES[name])
        connection.execute(f'CREATE OR REPLACE TABLE "{name}" ({columns})')
        if rows:
            connection.execute(f'INSERT INTO "{name}" VALUES ' + ", ".join(str(row).replace("None", "NULL") for row in rows))
    return {name: [Row(dict(zip(TABLES[name], row, strict=True))) for row in rows] for name, rows in tables.items()}


@settings(max_examples=400, deadline=None)
@given(drawn=queries(), t=rows_of_t, u=rows_of_u)
def test_random_pipelines_agree_with_a_naive_interpreter(connection, drawn, t, u):
    query, shape = drawn
    tables = filled(connection, t, u)
    expected = [[row.fields[name] for name in shape.columns] for row in run(query, tables)]
    sql = render(query, TABLES)
    cursor = connection.execute(sql)
    found = cursor.fetchall()
    if not shape.columns:
        assert len(found) == len(expected), sql
        return
    assert [item[0] for item in cursor.description] == shape.columns, sql
    assert bag(found) == bag(expected), sql


@settings(max_examples=300, deadline=None)
@given(drawn=queries())
def test_all_forms_read_back_as_the_same_query(drawn):
    query, _ = drawn
    assert same(parse_julia(to_julia(query)), query)
    assert same(parse_python(to_python(query)), query)
    assert same(query_from_dict(json.loads(json.dumps(query_to_dict(query)))), query)


def tight(text: str) -> str:
    "Take away all white space that Julia can do without."
    out, before = "", None
    for token in tokenize(text)[:-1]:
        words = before is not None and "op" not in (before.kind, token.kind)
        number = before is not None and before.kind in ("int", "float") and token.value[:1] == "." if token.kind == "op" else False
        out += " " * (words or number) + text[token.position : token.end]
        before = token
    return out


@settings(max_examples=300, deadline=None)
@given(drawn=queries())
def test_white_space_is_free(drawn):
    query, _ = drawn
    assert same(parse_julia(tight(to_julia(query))), query)


@pytest.mark.parametrize("text", [
    "From(:person) |> Group(Get.gender, Get.race, sets = :cube)", "From(:person) |> Select(:women => Agg.count(filter = Get.gender .== 1))", "limit = 5\nFrom(:t) |> Limit(limit)",
    "From(:t) |> Partition(Get.a, order_by = [Get.b], frame = (mode = :rows, start = -2, finish = 0), name = :window)", "old(q, year = 1950) = q |> Where(Get.born .<= year)\nFrom(:t) |> old",
    "@funsql from(person).filter(born != 1950 && race == 1).group(race).select(race, total => count())",
])  # fmt: skip
def test_names_may_touch_operators(text):
    squeezed = "\n".join(tight(line) for line in text.split("\n"))
    assert squeezed != text and same(parse_julia(squeezed), parse_julia(text))


@settings(max_examples=150, deadline=None)
@given(drawn=queries())
def test_all_forms_render_the_same_sql(drawn):
    query, _ = drawn
    sql = render(query, TABLES)
    forms = [parse_julia(to_julia(query)), parse_python(to_python(query)), query_from_dict(query_to_dict(query))]
    assert {render(form, TABLES) for form in forms} == {sql}
    assert sql == render(query, TABLES)


NAMESPACE = {name: getattr(healthrag.funsql, name) for name in (
    "Agg", "Append", "As", "Asc", "Bind", "CrossJoin", "Define", "Desc", "Frame", "From", "Fun", "Get", "Group", "Highlight", "Interval", "Iterate", "Join", "LeftJoin", "Limit",
    "Lit", "Order", "Over", "Partition", "Select", "Var", "Where", "With",
)} | {"date": dt.date, "datetime": dt.datetime, "inf": float("inf")}


@settings(max_examples=200, deadline=None)
@given(drawn=queries())
def test_the_python_form_is_python(drawn):
    query, _ = drawn
    assert same(eval(to_python(query), dict(NAMESPACE)), query)  # the reader's own grammar and Python's must agree


names = st.text(min_size=1, max_size=8).filter(lambda text: "\0" not in text and not any(0xD800 <= ord(char) <= 0xDFFF for char in text))
constants = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | names
    | st.dates() | st.datetimes(min_value=dt.datetime(1900, 1, 1)) | st.builds(Interval, st.integers(-999, 999), st.sampled_from(["day", "month", "year", "hour"]))
)


@settings(max_examples=300, deadline=None)
@given(value=constants, name=names, other=names)
def test_any_constant_and_name_survive_every_form(value, name, other):
    query = From(name) >> Where((Get[name][other] == value) | ~(Var[name] > -1)) >> Select(Lit(value) >> As(name)) >> Order(Get[name].desc("first"))
    assert same(parse_julia(to_julia(query)), query)
    assert same(query_from_dict(json.loads(json.dumps(query_to_dict(query)))), query)
    assert same(parse_python(to_python(query)), query)
    assert same(eval(to_python(query), dict(NAMESPACE)), query)


@settings(max_examples=100, deadline=None)
@given(value=constants, name=names)
def test_any_constant_and_name_reach_the_database_unchanged(connection, value, name):
    query = From(None) >> Define(Lit(value) >> As(name)) >> Where(Get[name].is_null() | (Get[name] == value)) >> As("r") >> Select(Get["r"][name])
    cursor = connection.execute(render(query, {}))
    assert [item[0] for item in cursor.description] == [name]
    (found,) = cursor.fetchone()
    match value:
        case dt.datetime() | None | bool() | str() | int(): assert found == value
        case float(): assert float(found) == value
        case dt.date(): assert found == value


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet="From(:t)|>Where.Get=1\"$[]{}#@,; \n^", max_size=60))
def test_any_text_is_read_or_refused(text):
    for read in (parse_julia, lambda text: parse_julia(text, lenient=True), parse_python):
        try:
            assert isinstance(read(text), Node)
        except ValueError:
            pass


@pytest.mark.parametrize("name", ["//", "!=", "==", "**", "^", "&", "|", "<<", "~", "@>", "--", ";", ",", "->", "."])
def test_what_is_only_symbols_is_an_operator_or_refused(connection, name):
    query = From(None) >> Select(x=Fun[name](6, 4))
    try:
        sql = render(query, {})
    except FunSQLError:
        assert name in ("**", "~", "@>", "--", ";", ",", "->", ".")
        return
    assert connection.execute(sql).fetchall() == connection.execute(f"SELECT 6 {name} 4").fetchall()


def test_isin_takes_values_or_a_list():
    assert same(Get.a.isin([1, 2]), Get.a.isin(1, 2)) and same(parse_python("Get.a.isin((1, 2))"), Get.a.isin(1, 2))
    assert same(Get.a.isin([]), Fun["in"](Get.a))


@pytest.mark.parametrize("days", [30, -400, 0])
def test_date_helpers_mean_the_same_in_another_database(connection, days):
    start = Lit(dt.date(2019, 12, 31))
    query = From(None) >> Select(a=Fun.add_days(start, days), b=Fun.add_months(start, 2), c=Fun.add_years(start, -1), d=Fun.diff_days(start, Fun.add_days(start, days)))
    (there,) = sqlite3.connect(":memory:").execute(render(query, {}, dialect="sqlite")).fetchall()
    (here,) = connection.execute(render(query, {})).fetchall()
    assert there == (here[0].isoformat(), there[1], here[2].isoformat(), here[3])
    assert there[1] == "2020-03-02" and here[1] == dt.date(2020, 2, 29)  # SQLite counts on where a month has no 31st


def test_date_helpers_use_the_words_of_sql_server():
    sql = render(parse_julia("From(:t) |> Select(:d => Fun.add_days(Get.a, 30), :n => Fun.diff_days(Get.a, Get.b))"), TABLES, dialect="tsql")
    assert "dateadd(DAY, 30, CAST([t_1].[a] AS DATE))" in sql and "datediff(DAY, CAST([t_1].[a] AS DATE), CAST([t_1].[b] AS DATE))" in sql


@pytest.mark.parametrize("sign", ["&", "|", "&&", "=="])
def test_advice_on_an_undotted_operator_names_the_one_that_is_meant(sign):
    with pytest.raises(FunSQLError, match=re.escape(f"write `.{sign if len(sign) == 2 else sign * 2}`")):
        parse_julia(f"From(:t) |> Where((Get.a .> 1) {sign} (Get.b .> 2))")
