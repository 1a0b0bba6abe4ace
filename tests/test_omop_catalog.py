"""The catalog says what the CDM v5.4 specification says, and reads any DuckDB database."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthrag.omop.catalog import Catalog, ColumnInfo, nearest, nearness, with_published_keys

CDM = Catalog.cdm_v54()
MEASURED = Path(__file__).resolve().parents[2] / "shared" / "data" / "omop" / "omop_real_v54.duckdb"
COLUMNS = [(table.name, column) for table in CDM.tables.values() for column in table.columns]


def test_counts_of_the_specification():
    assert len(CDM) == 39
    assert len(COLUMNS) == 432
    assert sum(column.required for _, column in COLUMNS) == 180
    assert sum(column.primary_key for _, column in COLUMNS) == 27
    assert len(CDM.foreign_keys()) == 178
    kinds = Counter(column.type.split("(")[0] for _, column in COLUMNS)
    assert kinds == {"integer": 222, "varchar": 118, "date": 45, "float": 25, "datetime": 22}


def test_names_are_unique_and_lower_case():
    for table in CDM.tables.values():
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names) and all(name == name.lower() for name in names)


def test_foreign_keys_point_at_columns_of_the_same_type():
    for table, column, to, key in CDM.foreign_keys():
        assert CDM.table(table).column(column).sql_type == CDM.table(to).column(key).sql_type


@pytest.mark.parametrize(
    ("table", "column", "target"),
    [
        ("person", "gender_concept_id", "concept.concept_id"),
        ("visit_detail", "parent_visit_detail_id", "visit_detail.visit_detail_id"),
        ("note_nlp", "note_id", "note.note_id"),
        ("cost", "cost_domain_id", "domain.domain_id"),
        ("cost", "payer_plan_period_id", None),  # no foreign key in the specification
        ("cohort", "subject_id", None),
        ("relationship", "reverse_relationship_id", None),
    ],
)
def test_some_keys_as_published(table, column, target):
    assert CDM.table(table).column(column).foreign_key == target


def test_tables_without_a_key_as_published():
    without = {table.name for table in CDM.tables.values() if table.primary_key is None}
    assert {"death", "vocabulary", "concept_ancestor", "cohort", "cdm_source"} <= without and len(without) == 12


@pytest.mark.skipif(not MEASURED.exists(), reason="the measuring database is not here")
def test_agrees_with_a_real_v54_database():
    with duckdb.connect(MEASURED, read_only=True) as connection:
        real = Catalog.from_duckdb(connection)
    assert real.to_dict().keys() == CDM.to_dict().keys()
    for table in CDM:
        assert real.columns(table) == CDM.columns(table)
        for ours, theirs in zip(CDM.table(table).columns, real.table(table).columns, strict=True):
            assert ours.required == theirs.required
            assert theirs.sql_type in (ours.sql_type, "DECIMAL(18,3)" if ours.type == "float" else ours.sql_type)


def test_lookups_take_any_case():
    assert "Person" in CDM and "PERSON" in CDM and "people" not in CDM and 3 not in CDM
    assert CDM.columns("DEATH") == CDM.columns("death")
    assert CDM.table("Person").column("PERSON_ID").primary_key


def test_unknown_names_say_what_is_near():
    with pytest.raises(KeyError, match="no table patient; did you mean person"):
        CDM.columns("patient")
    with pytest.raises(KeyError, match="no column sex in person"):
        CDM.table("person").column("sex")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("patients", "person"), ("condition", "condition_occurrence"), ("drugs", "drug_exposure"), ("labs", "measurement"),
        ("encounters", "visit_occurrence"), ("vocab", "vocabulary"), ("condition_occurence", "condition_occurrence"),
        ("insurance", "payer_plan_period"), ("hospitals", "care_site"), ("DEATHS", "death"),
    ],
)  # fmt: skip
def test_nearest_table(wrong, right):
    assert CDM.nearest_table(wrong) == right


@pytest.mark.parametrize(
    ("table", "wrong", "right"),
    [
        ("person", "sex", "gender_concept_id"), ("person", "age", "year_of_birth"), ("person", "id", "person_id"),
        ("concept", "name", "concept_name"), ("drug_exposure", "start_date", "drug_exposure_start_date"),
        ("visit_occurrence", "admission_date", "visit_start_date"),
    ],
)  # fmt: skip
def test_nearest_column(table, wrong, right):
    assert CDM.nearest_columns(table, wrong)[0] == right


@given(st.text(max_size=30))
def test_nearest_names_are_real_and_never_raise(text):
    table = CDM.nearest_table(text)
    assert table is None or table in CDM
    assert set(CDM.nearest_columns("person", text)) <= set(CDM.columns("person"))
    assert 0 <= nearness(text, "person") <= 1


@given(st.sampled_from(sorted(CDM)))
def test_a_real_name_is_nearest_to_itself(table):
    assert CDM.nearest_table(table) == table == CDM.nearest_table(table.upper())


def test_nearest_limits():
    assert nearest("person", ["person"] * 5, n=2) == ["person", "person"]
    assert nearest("person", ["zzz"]) == [] and nearest("person", []) == []


@pytest.fixture
def database():
    with duckdb.connect() as connection:
        yield connection


def test_reads_schemas_views_and_mixed_case(database):
    database.execute("""
        CREATE TABLE "Patient" ("ID" INTEGER PRIMARY KEY, "Weight kg" DECIMAL(5, 1) NOT NULL);
        CREATE TABLE stay ("Patient" INTEGER REFERENCES "Patient" ("ID"));
        CREATE SCHEMA "Cdm"; CREATE TABLE "Cdm"."Patient" (x INTEGER); CREATE VIEW "Cdm".v AS SELECT 1 AS "One";
        ATTACH ':memory:' AS elsewhere; CREATE TABLE elsewhere.hidden (x INTEGER);
    """)
    catalog = Catalog.from_duckdb(database)
    assert catalog.to_dict() == {"patient": ["id", "weight kg"], "stay": ["patient"], "cdm.patient": ["x"], "cdm.v": ["one"]}
    assert catalog.table("patient").column("weight kg") == ColumnInfo("weight kg", "DECIMAL(5,1)", required=True)
    assert catalog.foreign_keys() == [("stay", "patient", "patient", "id")]
    assert set(catalog.sqlglot_schema()) == {"patient", "stay"}


def test_bare_names_follow_the_current_schema(database):
    database.execute("CREATE SCHEMA cdm; CREATE TABLE cdm.person (person_id INTEGER); CREATE TABLE main.other (x INTEGER); USE cdm")
    assert set(Catalog.from_duckdb(database)) == {"person", "main.other"}


def test_an_empty_database_has_an_empty_catalog(database):
    catalog = Catalog.from_duckdb(database)
    assert len(catalog) == 0 and catalog.nearest_table("person") is None and catalog.to_dict() == {}
    with pytest.raises(KeyError, match="there are 0 tables"):
        catalog.table("person")


def test_published_keys_complete_what_is_declared(database):
    database.execute("CREATE TABLE death (person_id INTEGER, extra INTEGER); CREATE TABLE mine (person_id INTEGER)")
    catalog = with_published_keys(Catalog.from_duckdb(database))
    assert catalog.foreign_keys() == [("death", "person_id", "person", "person_id")]
    assert catalog.table("death").column("person_id").type == "INTEGER"


def test_shows_itself():
    assert repr(CDM) == "Catalog(39 tables, 432 columns)"
    assert "<td>note_nlp</td><td>14</td>" in CDM._repr_html_()


def test_names_of_a_strange_database_are_no_markup(tmp_path):
    from healthrag.omop import CDM

    evil = '<img src=x onerror="alert(1)">'
    with duckdb.connect(str(tmp_path / "evil.duckdb")) as connection:
        connection.execute(f"""CREATE TABLE "{evil.replace('"', '""')}" ("{evil.replace('"', '""')}" INTEGER PRIMARY KEY)""")
        connection.execute(f"""INSERT INTO "{evil.replace('"', '""')}" VALUES (1)""")
    with CDM(tmp_path / "evil.duckdb", name=evil) as cdm:
        for shown in (cdm._repr_html_(), cdm.catalog._repr_html_(), cdm.execute(f"""SELECT 1 AS "{evil.replace('"', '""')}", '{evil}'""")._repr_html_()):
            assert "onerror" in shown and "<img" not in shown
