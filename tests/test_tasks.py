"""Tasks: reading, writing, tiers, and a split that stays."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.evaluation import VOCABULARY_TABLES, classify_tier, examples_document, fnv1a, load_tasks, save_tasks, split_tasks, task_position
from healthrag.records import TIERS, BenchmarkTask

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
WORDS = TEXT.filter(lambda t: t.strip())
TASKS = st.lists(
    st.builds(
        BenchmarkTask, id=WORDS, question=WORDS, group=TEXT, tier=st.sampled_from(TIERS), gold_sql=WORDS, gold_funsql=TEXT, description=TEXT,
        ordered=st.just(True), order_by=st.lists(TEXT, max_size=2).map(tuple), paraphrases=st.lists(TEXT, max_size=2).map(tuple),
        answerable=st.booleans(), database=TEXT, absent=st.lists(TEXT, max_size=2).map(tuple), readings=st.lists(TEXT, max_size=2).map(tuple),
    ),
    max_size=5, unique_by=lambda task: task.id,
)  # fmt: skip


def task(id: str, **more) -> BenchmarkTask:
    return replace(BenchmarkTask(id, "How many patients?", "person", "simple", "SELECT COUNT(*) FROM person"), **more)


@settings(max_examples=150, deadline=None)
@given(TASKS)
def test_saved_tasks_read_back_the_same(tmp_path_factory, tasks):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    assert load_tasks(save_tasks(path, tasks)) == tasks


def test_optional_keys_and_defaults(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [
        "", '{"query": "a", "sql_query": "SELECT person_id FROM person"}', "   ",
        '{"query": "b", "sql_query": "SELECT * FROM concept", "response": null, "note": "kept by others"}',
        '{"question": "c", "gold_sql": "SELECT 1", "id": "c", "tier": "compositional"}', '{"query": "no SQL"}', '{"sql_query": "SELECT 1"}',
        '{"query": "Will it rain?", "answerable": false, "id": "n"}',
    ]  # fmt: skip
    path.write_text("\r\n".join(lines))
    tasks = load_tasks(path)
    assert [t.id for t in tasks] == ["task-2", "task-4", "c", "n"]  # the line in the file, counted from 1
    assert [t.tier for t in tasks] == ["simple", "schema_aware", "compositional", "simple"]
    assert tasks[1].gold_funsql == "" and not tasks[3].answerable
    assert [t.id for t in load_tasks(path, tiers=["compositional"])] == ["c"]


def test_tasks_that_are_passed_over_are_named(tmp_path, caplog):
    (tmp_path / "t.jsonl").write_text('{"query": "x"}\n')
    assert load_tasks(tmp_path / "t.jsonl") == []
    assert "line 1" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"), ("[1]", "line 3: expected a JSON object"), ('"x"', "line 3: expected a JSON object"),
        ('{"query": 5, "sql_query": "SELECT 1"}', "'query' is 5; write a text"), ('{"query": "x", "sql_query": ["SELECT 1"]}', "write a text"),
        ('{"query": "x", "sql_query": "SELECT 1", "ordered": 1}', "write true or false"),
        ('{"query": "x", "sql_query": "SELECT 1", "ordered": true, "order_by": "n"}', "write a list of texts"),
        ('{"query": "x", "sql_query": "SELECT 1", "order_by": ["n"]}', "'order_by' without 'ordered'"),
        ('{"query": "x", "sql_query": "SELECT 1", "tier": "easy"}', "is not one of simple"),
        ('{"query": "x", "sql_query": "SELECT 1", "oredered": true}', "did you mean 'ordered'"),
        ('{"query": "x", "sql_query": "SELEC 1 FRM"}', "does not parse"), ('{"id": "first", "query": "x", "sql_query": "SELECT 1"}', "is taken"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"id": "first", "query": "x", "sql_query": "SELECT 1"}}\n\n{line}\n')
    with pytest.raises(ValueError, match="line 3") as error:
        load_tasks(path)
    assert message in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the path"):
        load_tasks(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"query": "\xe9"}')
    with pytest.raises(ValueError, match="UTF-8"):
        load_tasks(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match="unknown tier"):
        load_tasks(tmp_path / "latin.jsonl", tiers=["hard"])


def test_a_line_separator_inside_a_text_is_not_a_line(tmp_path):
    tasks = [task("a", question="one\u2028two\x85three\x0cfour")]
    assert load_tasks(save_tasks(tmp_path / "t.jsonl", tasks)) == tasks


def test_saving_replaces_the_whole_file(tmp_path):
    path = save_tasks(tmp_path / "t.jsonl", [task("a"), task("b")])
    save_tasks(path, [task("c")])
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["c"]


@pytest.mark.parametrize(
    ("sql", "tier"),
    [
        ("SELECT COUNT(*) FROM person", "simple"), ("SELECT gender_concept_id, COUNT(*) FROM person GROUP BY 1 HAVING COUNT(*) > 3", "simple"),
        ("SELECT 1", "simple"), ("SELECT concept_id FROM condition_occurrence", "simple"), ("SELECT 'JOIN concept' FROM person", "simple"),
        ("SELECT COUNT(*) FROM person -- concept_ancestor", "simple"), ("SELECT * FROM person AS concept", "simple"),
        ("SELECT COUNT(DISTINCT person_id) FROM death LIMIT 5", "simple"),
        ("SELECT * FROM person JOIN death USING (person_id)", "compositional"), ("SELECT * FROM person, death", "compositional"),
        ("SELECT * FROM person WHERE person_id IN (SELECT person_id FROM death)", "compositional"),
        ("SELECT * FROM (SELECT * FROM person) p", "compositional"), ("WITH p AS (SELECT 1 AS n) SELECT n FROM p", "compositional"),
        ("SELECT 1 UNION SELECT 2", "compositional"), ("SELECT person_id FROM person EXCEPT SELECT person_id FROM death", "compositional"),
        ("SELECT ROW_NUMBER() OVER (ORDER BY person_id) FROM person", "compositional"),
        ("WITH concept AS (SELECT * FROM person) SELECT * FROM concept", "compositional"),
        ("WITH c AS (SELECT * FROM concept) SELECT * FROM c", "schema_aware"),
        ("WITH concept AS (SELECT * FROM main.concept) SELECT * FROM concept", "schema_aware"),
        ("SELECT * FROM person WHERE EXISTS (SELECT 1 FROM CONCEPT_ANCESTOR)", "schema_aware"),
        ("SELECT * FROM person UNION ALL SELECT * FROM cdm.vocabulary", "schema_aware"),
        *((f"SELECT COUNT(*) FROM {table}", "schema_aware") for table in sorted(VOCABULARY_TABLES)),
    ],
)  # fmt: skip
def test_classify_tier(sql, tier):
    assert classify_tier(sql) == tier


def test_fnv1a_has_the_published_values():
    published = {b"": 0xCBF29CE484222325, b"a": 0xAF63DC4C8601EC8C, b"b": 0xAF63DF4C8601F1A5, b"foobar": 0x85944171F73967E8}
    assert {data: fnv1a(data) for data in published} == published


def test_positions_are_fixed():
    "These numbers are what every machine and every later version must give, or published splits change."
    assert [round(task_position(f"person-00{n}"), 6) for n in (1, 2, 3)] == [0.548305, 0.541786, 0.738557]
    assert round(task_position("person-001", seed=1), 6) == 0.548038


def test_neighbouring_ids_fall_into_both_halves():
    for seed in range(5):
        places = sorted(task_position(f"person-{n:04d}", seed) for n in range(1000))
        tenths = [sum(k / 10 <= p < (k + 1) / 10 for p in places) for k in range(10)]
        chi_squared = sum((count - 100) ** 2 / 100 for count in tenths)
        assert chi_squared < 27.9, tenths  # 99.9 % quantile with 9 degrees of freedom
        runs = sum((task_position(f"p{n}", seed) < 0.5) != (task_position(f"p{n + 1}", seed) < 0.5) for n in range(400))
        assert 150 < runs < 250


def test_nobody_moves_when_tasks_come_and_go():
    rng = random.Random(0)
    tasks = [task(f"t{n}", tier=rng.choice(TIERS)) for n in range(300)]
    whole = split_tasks(tasks, 0.4, seed=3)
    for _ in range(20):
        some = rng.sample(tasks, rng.randrange(300))
        part = split_tasks(some, 0.4, seed=3)
        assert set(part.test) == set(whole.test) & set(some) and set(part.examples) == set(whole.examples) & set(some)
    assert [t.id for t in whole.test] == [t.id for t in tasks if t in set(whole.test)]
    retiered = split_tasks([replace(t, tier="simple", question="…") for t in tasks], 0.4, seed=3)
    assert [t.id for t in retiered.test] == [t.id for t in whole.test]


def test_split_is_about_as_large_as_asked_and_grows_with_the_fraction():
    tasks = [task(f"t{n}") for n in range(2000)]
    before: set[str] = set()
    for fraction in (0.0, 0.1, 0.5, 0.9, 1.0):
        test = {t.id for t in split_tasks(tasks, fraction).test}
        assert abs(len(test) / 2000 - fraction) < 0.05 and before <= test
        before = test
    assert split_tasks(tasks, seed=1).test != split_tasks(tasks, seed=2).test


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_bad_fractions(fraction):
    with pytest.raises(ValueError, match="from 0 to 1"):
        split_tasks([task("a")], fraction)


def test_split_shows_itself_and_unpacks():
    split = split_tasks([task("a"), task("b")])
    examples, test = split
    assert examples == split.examples and test == split.test
    assert "<td>simple</td>" in split._repr_html_() and "examples" in repr(split)
    with pytest.raises(ValueError, match="'a' appears more than once"):
        split_tasks([task("a"), task("a")])


def test_examples_document_holds_only_what_can_be_shown():
    tasks = [task("a", gold_funsql="From(:person)"), task("b"), task("c", gold_funsql="  "), task("d", gold_sql="", answerable=False)]
    document = examples_document(tasks)
    assert document.source == "FunSQL-examples" and [json.loads(line)["id"] for line in document.content.splitlines()] == ["a"]
    assert json.loads(document.content)["response"] == "From(:person)"
    for_sql = examples_document(tasks, target="sql", source="mine")
    assert for_sql.source == "mine" and [json.loads(line)["id"] for line in for_sql.content.splitlines()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="'sql' or 'funsql'"):
        examples_document(tasks, target="python")
