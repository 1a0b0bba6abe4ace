"""Taking the query out of a reply."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.execution import abstention, extract_code, fences, generate_query, strip_reasoning
from healthrag.records import TARGETS, Prompt, Reply

Q = "SELECT COUNT(*) AS n\nFROM person\nWHERE year_of_birth > 1980"
CTE = "WITH w AS (\n  SELECT person_id FROM person\n)\nSELECT COUNT(*) FROM w"
UNION = "(SELECT person_id FROM person)\nUNION ALL\n(SELECT person_id FROM death)"

REPLIES = [
    # fences, any tag
    (f"```sql\n{Q}\n```", Q),
    (f"```SQL\n{Q}\n```", Q),
    (f"```duckdb\n{Q}\n```", Q),
    (f"```postgresql\n{Q}\n```", Q),
    (f"```\n{Q}\n```", Q),
    (f"```text\n{Q}\n```", Q),
    (f"```sql \n{Q}\n```  ", Q),
    (f"``` sql\n{Q}\n```", Q),
    (f"````sql\n{Q}\n````", Q),
    (f"~~~\n{Q}\n~~~", Q),
    (f"~~~sql\n{Q}\n~~~", Q),
    (f"```{{.sql}}\n{Q}\n```", Q),
    (f"```sql {{linenos=true}}\n{Q}\n```", Q),
    (f"```sql\r\n{Q}\r\n```\r\n", Q),
    ("```SELECT 1 AS one```", "SELECT 1 AS one"),
    ("```sql SELECT 1 AS one```", "SELECT 1 AS one"),
    (f"Here: ```sql\n{Q}\n```", Q),
    (f"   ```sql\n{Q}\n   ```", Q),
    # prose around
    (f"Sure! Here is it:\n\n```sql\n{Q}\n```\n\nThis counts people.", Q),
    (f"1. Count:\n\n```sql\n{Q};\n```", f"{Q};"),
    # unclosed
    (f"```sql\n{Q}", Q),
    (f"Answer:\n```\n{Q}\n", Q),
    (f"~~~sql\n{Q}", Q),
    # several blocks: the language first, then the first that parses
    (f"```python\nprint('x')\n```\n```sql\n{Q}\n```", Q),
    (f"```\nschema: person\n```\n```sql\n{Q}\n```", Q),
    (f"```sql\nSELEC broken\n```\n```sql\n{Q}\n```", Q),
    (f"```sql\n{Q}\n```\n```sql\nSELECT 2\n```", Q),
    (f"```bash\nls\n```\n```\n{Q}\n```", Q),
    (f"```sql\n{Q}\n```sql\nSELECT 2\n```", Q),
    ("```sql\nSELEC 1\n```\n```sql\nSELEC 2\n```", "SELEC 1"),
    # shapes of query
    (f"```sql\n{CTE}\n```", CTE),
    (f"```sql\n{UNION}\n```", UNION),
    (CTE, CTE),
    (UNION, UNION),
    (f"The query:\n\n{CTE}\n\nIt counts.", CTE),
    (f"The query:\n\n{UNION}\n\nIt lists.", UNION),
    ("FROM person SELECT COUNT(*)", "FROM person SELECT COUNT(*)"),
    ("VALUES (1), (2)", "VALUES (1), (2)"),
    # bare SQL in prose
    (Q, Q),
    (f"{Q};", f"{Q};"),
    (f"SQL: {Q}", Q),
    (f"{Q}\n\nThis query counts the patients.", Q),
    (f"{Q}\nThis query counts all of the patients who were born late.", Q),
    ("You can use `SELECT COUNT(*) FROM person` for that.", "SELECT COUNT(*) FROM person"),
    ("Please run SELECT COUNT(*) FROM person. It counts everybody.", "SELECT COUNT(*) FROM person"),
    ("# SQL query\n\nSELECT 1", "SELECT 1"),
    # reasoning and runtime marks
    (f"<think>SELECT 2?</think>\n```sql\n{Q}\n```", Q),
    (f"<thinking>\n```sql\nSELECT 2\n```\n</thinking>\n{Q}", Q),
    (f"I wonder... SELECT 2</think>{Q}", Q),
    (f"{Q}<|im_end|>", Q),
    (f"<|im_start|>{Q}</s>", Q),
    ("\ufeffSELECT\u00a01", "SELECT 1"),
    # nothing to find
    ("", ""),
    ("   \n ", ""),
    ("I do not know.", ""),
    ("The selection of patients from a hospital is hard.", ""),
    ("<think>only thoughts, cut off: SELECT 1", ""),
    ("```sql\n```", ""),
    # abstaining
    ("CANNOT_ANSWER: there are no prices", ""),
    ("```sql\nCANNOT_ANSWER: no prices\n```", ""),
    ("```\n-- CANNOT_ANSWER: no prices\n```", ""),
    ("<think>hm</think>CANNOT_ANSWER", ""),
    # broken or forbidden text comes out as it is, for the next stage to name
    ("SELECT FROM WHERE", "SELECT FROM WHERE"),
    ("DROP TABLE person", "DROP TABLE person"),
    ("```sql\nDROP TABLE person;\n```", "DROP TABLE person;"),
    (f"```sql\n{Q}; DROP TABLE person\n```", f"{Q}; DROP TABLE person"),
]


@pytest.mark.parametrize(("reply", "code"), REPLIES)
def test_table(reply, code):
    assert extract_code(reply) == code


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```julia\nFrom(:person)\n```", "From(:person)"),
        ("```jl\nFrom(:person) |> Limit(3)\n```\ntext", "From(:person) |> Limit(3)"),
        ("```sql\nSELECT 1\n```\n```julia\nFrom(:person)\n```", "From(:person)"),
        ("```python\nFrom(:person)\n```", "From(:person)"),
        ("```julia\nFrom(:person)", "From(:person)"),
        ("CANNOT_ANSWER: no", ""),
    ],
)
def test_funsql_table(reply, code):
    assert extract_code(reply, "funsql") == code


@given(
    code=st.sampled_from([Q, CTE, UNION]),
    tag=st.sampled_from(["sql", "SQL", "duckdb", "postgresql", "", "postgres"]),
    mark=st.sampled_from(["```", "````", "~~~", "~~~~"]),
    before=st.text("abc .,\n", max_size=40),
    after=st.text("abc .,\n", max_size=40),
    closed=st.booleans(),
)
def test_a_fenced_query_survives_whatever_stands_around_it(code, tag, mark, before, after, closed):
    reply = f"{before}\n{mark}{tag}\n{code}\n" + (f"{mark}\n{after}" if closed else "")
    assert extract_code(reply) == code


@given(text=st.text(max_size=300), target=st.sampled_from(TARGETS))
@settings(deadline=None, max_examples=150)
def test_any_text_is_taken_without_an_error(text, target):
    code = extract_code(text, target)
    assert code == code.strip()


@given(st.text("`~ \nsqlSELECT1()", max_size=60))
@settings(deadline=None, max_examples=200)
def test_fences_always_end_and_never_overlap(text):
    found = list(fences(text))
    assert sum(len(block.body) for block in found) <= len(text)


@given(st.text(max_size=200))
def test_reasoning_is_removed_once_and_for_all(text):
    once = strip_reasoning(text)
    assert strip_reasoning(once) == once


def test_extracting_twice_changes_nothing():
    for reply, code in REPLIES:
        if code and not code.startswith("SELEC "):
            assert extract_code(code).rstrip(";") == code.rstrip(";"), reply


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("CANNOT_ANSWER: there are no prices", "there are no prices"),
        ("CANNOT_ANSWER", ""),
        ("```sql\n-- CANNOT_ANSWER: no table\n```", "no table"),
        (Q, None),
        ("SELECT 'CANNOT_ANSWER'", None),
    ],
)
def test_abstention(reply, reason):
    assert abstention(reply) == reason


@pytest.mark.timeout(300)
def test_long_prose_is_searched_to_the_end():
    prose = "select the patients from the list and " * 3000
    assert extract_code(prose) in prose.strip()
    assert set(extract_code("```" * 5000)) <= {"`"}


TOP = "SELECT TOP 5 *\nFROM person"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("SELECT TOP 1 p.person_id FROM person p", "SELECT TOP 1 p.person_id FROM person p"),
        (f"Here it is:\n{TOP}", TOP),
        ("select a b c from person", "select a b c from person"),
        ("SELECT TOP 5 'a;b' FROM person", "SELECT TOP 5 'a;b' FROM person"),
        (f"The query is: {TOP}", None),
        (f"- {TOP}", None),
        (f"1. {TOP}", None),
    ],
)
def test_the_from_of_a_select_that_cannot_be_read_is_no_query(reply, code):
    found = extract_code(reply)
    assert found == code if code is not None else not found.startswith("FROM")


@pytest.mark.parametrize(
    "reply",
    [
        "SELECT is not needed here.\n\nFROM person",
        "FROM person",
        "With the OMOP CDM you can write:\nFROM person",
        "Select the rows as follows.\nFROM person",
        "SELECT is optional in DuckDB, so:\nFROM person",
        "SELECT 1; FROM person",
    ],
)
def test_a_query_may_begin_with_from(reply):
    assert extract_code(reply) == ("FROM person" if ";" not in reply else "SELECT 1")


HEAVY = ["SELECT 1 FROM x;", "SELECT x FROM y WHERE (\n", "FROM ", "SELECT NOT ", "please SELECT 1 FROM x and y. ", "\n", "'", ". \n", "(", "x;' "]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [*(text * 3000 for text in HEAVY), "SELECT a\n" * 1500 + "; " + "FROM x " * 1000, "\n" * 9000 + "FROM x " * 1000])
def test_what_one_reply_costs_is_bounded(text, monkeypatch):
    read = []
    monkeypatch.setattr("healthrag.execution.extract._parses_as_sql", lambda code: bool(read.append(len(code))))
    extract_code(text)
    assert sum(read) <= 10 * 20_000


def test_unknown_target():
    with pytest.raises(ValueError, match="use one of sql, funsql"):
        extract_code("SELECT 1", "cypher")


class Stub:
    name = "stub:one"

    def __init__(self):
        self.asked = []

    def generate(self, prompt, *, max_tokens=None):
        self.asked.append((prompt, max_tokens))
        return Reply(f"```sql\n{Q}\n```", self.name, prompt_tokens=7)


def test_generate_query_keeps_reply_and_cost():
    model, prompt = Stub(), Prompt("rules", "question")
    generation = generate_query(prompt, model, max_tokens=9)
    assert generation.code == Q and generation.answer.startswith("```") and generation.reply.prompt_tokens == 7
    assert model.asked == [(prompt, 9)]


def test_generate_query_with_a_function_and_its_failure():
    assert generate_query("q", lambda prompt: Q).reply is None
    with pytest.raises(ConnectionError):
        generate_query("q", lambda prompt: (_ for _ in ()).throw(ConnectionError("server gone")))
    with pytest.raises(TypeError, match="cannot answer a prompt"):
        generate_query("q", 3)
