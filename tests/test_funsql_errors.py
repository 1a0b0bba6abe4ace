"A refused text says what to write instead, and what it says can be read."

import re

import pytest

from healthrag.execution import check_query
from healthrag.funsql import FunSQLError, from_sql, parse_julia, parse_python, render
from healthrag.funsql.words import NOT_FUNSQL, instead

CATALOG = {"person": ["x"], "visit": ["x"]}
FORMS = {  # form -> how a text is read, how a step is called on it, what stands for a query, a condition, a join condition, and a count
    "julia": (parse_julia, "From(:person) |> {}", "From(:visit)", "Get.x .> 1", "Get.x .== Get.name.x"),
    "macro": (parse_julia, "@funsql from(person).{}", "from(visit)", "x > 1", "x == name.x"),
    "python": (parse_python, "From('person') >> {}", "From('visit')", "Get.x > 1", "Get.x == Get.name.x"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("word", NOT_FUNSQL)
def test_what_is_advised_for_a_word_of_sql_is_read(word, form):
    read, pipe, query, condition, on = FORMS[form]
    written = word if form != "macro" else re.sub("(?<!^)(?=[A-Z])", "_", word).lower()
    if (word, form) == ("Filter", "macro"):  # its own name there
        assert render(read("@funsql from(person).filter(x > 1)"), CATALOG).startswith("SELECT")
        return
    with pytest.raises(FunSQLError) as caught:
        read(pipe.format(f"{written}()"))
    advice = instead(word, form).removeprefix("; write ")
    assert advice and f"; write {advice}" in str(caught.value)
    step = advice.split(", then")[0].split(" with")[0].split(", after")[0]
    for mark, text in (("query", query), ("condition", condition), (", …)", ")"), ("n)", "1)" if "imit" in step else "n)"), ("on = …", f"on = {on}"), ("on=…", f"on={on}")):
        step = step.replace(mark, text)
    assert render(read(pipe.format(step)), CATALOG).startswith("SELECT")


@pytest.mark.parametrize(("text", "advice"), [
    ("Fun.count(Get.x)", "write Agg.count"), ("Fun.COUNT(Get.x)", "write Agg.count"), ("count(Get.x)", "write Agg.count(…)"), ("Sum(Get.x)", "write Agg.sum(…)"),
    ("Fun.row_number()", "write Agg.row_number"), ("Agg.lower(Get.x)", "write Fun.lower"), ("lower(Get.x)", "write Fun.lower(…)"), ("Fun.lowre(Get.x)", "did you mean `lower`"),
])  # fmt: skip
def test_a_function_of_the_wrong_kind_is_named(text, advice):
    with pytest.raises(FunSQLError) as caught:
        render(parse_julia(f"From(:person) |> Group() |> Select(:y => {text})"), CATALOG)
    assert advice in str(caught.value)


@pytest.mark.parametrize("call", [
    lambda: parse_julia(5), lambda: parse_julia(None), lambda: parse_python(b"From('person')"), lambda: from_sql(5, CATALOG), lambda: from_sql("SELECT 1", 5),
    lambda: render(parse_julia("From(:person)"), 5), lambda: render(parse_julia("From(:person)"), ["person"]), lambda: render(parse_julia("From(:person)"), {"person": "x"}),
])  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_in_one_line(call):
    with pytest.raises(TypeError, match=r"^[\w ->:']+, not \w+$"):
        call()


def test_postgresql_is_postgres():
    query, text = parse_julia("From(:person) |> Select(:y => Fun.current_timestamp())"), "From(:person) |> Select(Get.x)"
    assert render(query, CATALOG, "postgresql") == render(query, CATALOG, "postgres") != render(query, CATALOG)
    assert check_query(text, target="funsql", catalog=CATALOG, dialect="PostgreSQL").ok and check_query("SELECT x FROM person", catalog=CATALOG, dialect="postgresql").ok
    for wrong in ("oracel", "", None, 5):
        with pytest.raises(ValueError, match="is not known; use duckdb, postgres or another of"):
            render(query, CATALOG, wrong)
