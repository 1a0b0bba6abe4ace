"""What a prompt may show: right kinds in the right order, short, and never the task itself."""

from __future__ import annotations

import json

import duckdb
import pytest

from healthrag.embeddings import count_tokens
from healthrag.omop import Catalog, open_omop
from healthrag.records import BenchmarkTask, Chunk, SourceDocument
from healthrag.retrieval import ExampleIndex, Grounding, SchemaIndex, grounding_notes, hits_table, schema_sections, table_line

QUESTION = "How many women have a recorded gastrointestinal hemorrhage?"
TASKS = [
    BenchmarkTask("c-1", "How many women have a recorded asthma?", "condition", "compositional", "SELECT 1", "from(x)"),
    BenchmarkTask("c-2", "How many men have had a stroke?", "condition", "compositional", "SELECT 2"),
    BenchmarkTask("v-1", "How long is an inpatient visit on average?", "visit", "simple", "SELECT 3"),
    BenchmarkTask("c-3", QUESTION, "condition", "compositional", "SELECT 4"),
]


@pytest.fixture(scope="module")
def grounding(cdm):
    return Grounding(cdm, TASKS)


def test_it_says_what_it_shows(cdm):
    assert repr(Grounding(cdm, TASKS, k_examples=2)) == "Grounding(target='sql', k_examples=2, k_schema=4, k_concepts=5, k_docs=0)"


def kinds(hits):
    return [hit.metadata["kind"] for hit in hits]


def test_kinds_come_in_order(cdm):
    hits = Grounding(cdm, TASKS, k_docs=1, docs=[Chunk("Bleeding", {"source": "n"}), Chunk("Visits")])(QUESTION)
    assert kinds(hits) == sorted(kinds(hits), key=["concept", "schema", "doc", "example"].index)
    assert {"concept", "schema", "doc", "example"} == set(kinds(hits))
    for kind in ("concept", "doc", "example"):
        scores = [hit.score for hit in hits if hit.metadata["kind"] == kind]
        assert scores == sorted(scores, reverse=True)
    assert len({hit.id for hit in hits}) == len(hits)


def test_the_carried_question(grounding):
    hits = grounding(QUESTION, exclude={"c-3"})
    text = {hit.id: hit.text for hit in hits}
    assert text["concept:192671"].startswith("192671 | Gastrointestinal hemorrhage | Condition | SNOMED | standard | 479 rows in condition_occurrence")
    assert "gender_concept_id" in text["schema:person"] and "condition_concept_id" in text["schema:condition_occurrence"]
    example = next(hit for hit in hits if hit.metadata["kind"] == "example")
    assert example.metadata["task_id"] == "c-1" and example.metadata["sql"] == "SELECT 1" and example.text == example.metadata["question"]


def test_a_task_never_retrieves_itself(grounding):
    for task in TASKS:
        ids = [hit.metadata.get("task_id") for hit in grounding(task.question, exclude={task.id})]
        assert task.id not in ids and sum(i is not None for i in ids) == 3
    assert grounding(QUESTION)[-3].metadata["task_id"] == "c-3"


def test_excluding_everything_leaves_no_example(grounding):
    assert "example" not in kinds(grounding(QUESTION, exclude=[task.id for task in TASKS]))


def test_target_chooses_examples(cdm):
    hits = Grounding(cdm, TASKS, target="funsql")(QUESTION)
    assert [hit.metadata["funsql"] for hit in hits if hit.metadata["kind"] == "example"] == ["from(x)"]


@pytest.mark.parametrize("name", ["k_examples", "k_schema", "k_concepts"])
def test_zero_leaves_a_kind_out(cdm, name):
    hits = Grounding(cdm, TASKS, **{name: 0})(QUESTION)
    left_out = {"k_examples": "example", "k_schema": "schema", "k_concepts": "concept"}[name]
    assert left_out not in kinds(hits) and len(set(kinds(hits))) == 2
    with pytest.raises(ValueError, match=name):
        Grounding(cdm, **{name: -1})


@pytest.mark.parametrize("question", ["", "  \n", None, 1])
def test_a_blank_question_is_refused(grounding, question):
    with pytest.raises(ValueError, match="empty"):
        grounding(question)


def test_unknown_target_and_store(cdm):
    with pytest.raises(ValueError, match="funsql"):
        Grounding(cdm, target="cypher")
    with pytest.raises(ValueError, match="store"):
        Grounding(cdm, store="nowhere")


def test_the_same_question_gives_the_same(cdm, grounding):
    again = Grounding(cdm, reversed(TASKS))(QUESTION)
    assert [(hit.id, hit.text, hit.score) for hit in grounding(QUESTION)] == [(hit.id, hit.text, hit.score) for hit in again]


def test_hostile_questions(grounding):
    for question in ("'; DROP TABLE person; --", "x" * 5000, "\0\ud800", "多少病人", "<num> <date>"):
        assert all(hit.text for hit in grounding(question))


def test_masking_finds_the_same_shape(cdm):
    shapes = [
        BenchmarkTask("age", "How many patients older than 65 have had a stroke?", "condition", "simple", "SELECT 1"),
        BenchmarkTask("name", "Which patients have asthma and gastrointestinal hemorrhage in 1990?", "condition", "simple", "SELECT 2"),
    ]
    hits = Grounding(cdm, shapes, mask=True, k_examples=1)("How many patients older than 40 have asthma?")
    assert hits[-1].metadata["task_id"] == "age" and hits[-1].text == shapes[0].question


def test_benchmark_questions_get_short_context_with_what_they_need(cdm, project_root):
    tasks = [json.loads(line) for line in (project_root / "data/benchmark/tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    grounding = Grounding(cdm)
    lengths, gender = [], 0
    for task in tasks:
        hits = grounding(task["query"])
        assert sum(kind == "schema" for kind in kinds(hits)) <= 4 and sum(kind == "concept" for kind in kinds(hits)) <= 5
        lengths.append(sum(count_tokens(hit.text) for hit in hits))
        gender += "= 8532" in task["sql_query"] and "concept:8532" not in [hit.id for hit in hits]
    assert max(lengths) <= 420 and sorted(lengths)[len(lengths) // 2] <= 250 and gender == 0


def test_every_table_has_a_line(cdm):
    catalog = Catalog.cdm_v54()
    for table in catalog.tables.values():
        line = table_line(table)
        assert line.startswith(f"{table.name}(") and line.endswith(")") and "_source_value" not in line
        named = {part.split()[0] for part in line[len(table.name) + 1 : -1].split(", ")}
        assert named <= set(catalog.columns(table.name)) and (table.primary_key is None or table.primary_key in named)


def test_a_line_shows_keys_and_only_what_is_filled(cdm):
    table = cdm.catalog.table("condition_occurrence")
    line = table_line(table)
    assert "condition_occurrence_id int pk" in line and "person_id int -> person" in line and "condition_concept_id int," in line
    assert table_line(table, filled={"condition_start_date"}) == "condition_occurrence(condition_occurrence_id int pk, condition_start_date date)"
    assert "visit_occurrence_id" not in table_line(table, empty={"visit_occurrence"})
    assert "condition_source_value" in table_line(table, question="by source value") and "_type_" in table_line(table, question="record types")


def test_empty_tables_are_never_offered(cdm):
    schema = SchemaIndex(cdm)
    empty = {name for name, count in cdm.row_counts().items() if not count}
    assert {"death", "note", "visit_detail"} <= empty
    for question in ("How many patients died?", "notes", "visit_detail", "which specimens and devices were used"):
        assert not {table for table, *_ in schema.find(question)} & empty


@pytest.mark.parametrize(
    ("question", "table"),
    [
        ("What is the longest observation period?", "observation_period"), ("How many drug eras are there?", "drug_era"),
        ("how many rows has visit_occurrence", "visit_occurrence"), ("How many prescriptions per year?", "drug_exposure"),
        ("Which surgeries were done most?", "procedure_occurrence"), ("Return concept_name of all diagnoses", "concept"),
        ("the average hemoglobin test per patient", "measurement"), ("people born in 1960", "person"),
        ("min_levels_of_separation above one", "concept_ancestor"),
    ],
)  # fmt: skip
def test_words_lead_to_tables(cdm, question, table):
    assert table in [found for found, *_ in SchemaIndex(cdm).find(question)]


def test_foreign_databases_work(tmp_path):
    path = tmp_path / "other.duckdb"
    with duckdb.connect(path) as con:
        con.execute("CREATE TABLE patient_log (log_id INT, \"when\" DATE, note TEXT)")
        con.execute("INSERT INTO patient_log VALUES (1, DATE '2020-01-01', 'x')")
    with open_omop(path) as cdm:
        hits = Grounding(cdm)("What is in the log?")
        assert [hit.id for hit in hits] == ["schema:patient_log"] and hits[0].text == "patient_log(log_id int, when date, note text)"


def test_examples_with_the_same_id_are_refused():
    with pytest.raises(ValueError, match="twice"):
        ExampleIndex([TASKS[0], TASKS[0]])


def test_documents():
    schema = SourceDocument("grounding:omop_cdm_schema.md", "", "", "# Tables\n\nIntro.\n\n## person\n\nOne row per patient.\n\nMore.\n")
    notes = [SourceDocument("grounding:vocabularies.md", "", "", "# A\n\nx\n\n# B\n\ny\n"), SourceDocument("grounding:funsql_reference.md", "", "", "# F\n\nz\n\n# G\n\nz2\n")]
    assert schema_sections([schema, *notes])["person"] == "One row per patient."
    assert {c.metadata["source"] for c in grounding_notes("sql", [schema, *notes])} == {"grounding:vocabularies.md"}
    assert len({c.metadata["source"] for c in grounding_notes("funsql", [schema, *notes])}) == 2


def test_the_table_of_hits_says_why(grounding):
    table = hits_table(grounding(QUESTION, trace=True))
    assert table.columns == ("kind", "id", "score", "why", "text") and all(row[3] for row in table.rows)
    assert "dense 1" in next(row[3] for row in table.rows if row[0] == "example")
