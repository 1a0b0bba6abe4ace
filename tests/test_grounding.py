"""The grounding texts agree with the catalog and with the data they speak of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from healthrag.omop import Catalog

COLUMN = re.compile(r"`(\w+)` ([\w()]+)(\*?)( PK)?(?: → (\w+))?")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.cdm_v54()


def page(name: str) -> str:
    from healthrag.settings import resource

    return Path(resource("grounding", name)).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    "The text under each second-level heading."
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SCHEMA = sections(page("omop_cdm_schema.md"))
SNIPPETS = re.findall(r"^```sql\n(.*?)^```", page("omop_vocabularies.md"), flags=re.MULTILINE | re.DOTALL)


def documented(table: str) -> list[tuple[str, str, bool, bool, str | None]]:
    (line,) = re.findall(r"^Columns: (.*)\.$", SCHEMA[table], flags=re.MULTILINE)
    assert COLUMN.sub("", line).replace(",", "").strip() == ""
    return [(name, kind, star == "*", key != "", to or None) for name, kind, star, key, to in COLUMN.findall(line)]


def specified(catalog: Catalog, table: str) -> list[tuple[str, str, bool, bool, str | None]]:
    return [
        (c.name, c.type, c.required, c.primary_key, c.foreign_key.split(".")[0] if c.foreign_key else None)
        for c in catalog.table(table).columns
    ]


def test_every_table_of_the_catalog_is_described_and_no_other(catalog):
    assert len(SCHEMA) == 39
    assert set(SCHEMA) == set(catalog.to_dict())


@pytest.mark.parametrize("table", SCHEMA)
def test_columns_types_and_keys_are_those_of_the_catalog(table, catalog):
    assert documented(table) == specified(catalog, table)


@pytest.mark.parametrize("table", SCHEMA)
def test_a_section_says_what_a_row_is_how_it_joins_and_what_goes_wrong_in_few_words(table):
    kinds = [p.split(":")[0] for p in SCHEMA[table].strip().split("\n\n")]
    assert kinds[0].startswith(("One row per ", "At most one row per "))
    assert kinds[1:] == ["Columns", "Joins", "Mistakes"]
    assert len(SCHEMA[table].split()) <= 250


@pytest.mark.parametrize("table", SCHEMA)
def test_prose_names_no_column_that_does_not_exist(table, catalog):
    prose = re.sub(r"^Columns: .*$", "", SCHEMA[table], flags=re.MULTILINE)
    known = {name for names in catalog.to_dict().values() for name in names} | set(catalog.to_dict())
    absent = {  # named because they do not exist
        "admitting_source_concept_id", "discharge_to_concept_id", "drug_start_date", "procedure_start_date", "lab_id", "death_id",
    }  # fmt: skip
    named = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", prose))
    assert named - known <= absent
    assert not absent & known
    assert set(re.findall(r"\bfrom ([a-z_]+_[a-z_]+)\b", prose)) <= set(catalog.to_dict())


def test_there_are_snippets():
    assert len(SNIPPETS) >= 10
    assert page("omop_vocabularies.md").count("```") == 2 * len(SNIPPETS)


@pytest.mark.parametrize("sql", SNIPPETS)
def test_every_snippet_runs_and_finds_something(sql, cdm):
    result = cdm.execute(sql)
    assert result.rows
    assert any(value not in (None, 0) for row in result.rows for value in row)


@pytest.mark.parametrize("sql", SNIPPETS)
def test_snippets_are_single_selects_on_documented_tables(sql):
    tree = sqlglot.parse_one(sql, dialect="duckdb")
    assert isinstance(tree, exp.Select)
    assert {table.name for table in tree.find_all(exp.Table)} <= set(SCHEMA)


def test_what_the_vocabulary_page_says_is_true_of_the_data(cdm):
    def one(sql: str):
        return cdm.execute(sql).rows[0][0]

    name = "SELECT concept_name FROM concept WHERE concept_id = "
    assert one(name + "192671") == "Gastrointestinal hemorrhage"
    assert one(name + "4283893") == "Sinusitis"
    assert one(name + "1125315") == "Acetaminophen"
    assert one(name + "0") == "No matching concept"
    assert one("SELECT concept_code FROM concept WHERE concept_id = 192671") == "74474003"
    assert one("SELECT COUNT(*) FROM concept WHERE standard_concept = 'N'") == 0
    sinusitis = "SELECT COUNT(DISTINCT person_id) FROM condition_occurrence WHERE condition_concept_id = 4283893"
    assert one(SNIPPETS[6]) > one(sinusitis) > 0
    assert one(SNIPPETS[7]) == one(SNIPPETS[8]) > 0  # the ingredient through its products and through its eras
    assert one("SELECT COUNT(*) FROM person p JOIN concept c ON c.concept_id = p.gender_concept_id") == 0


def test_domains_named_are_domains_and_their_tables_and_columns_exist(cdm, catalog):
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", page("omop_vocabularies.md"), flags=re.MULTILINE)
    rows = [row for row in rows if row[0] != "domain_id"]
    assert len(rows) == 7
    domains = {row[0] for row in cdm.execute("SELECT domain_id FROM domain").rows}
    for domain, table, concept, date in rows:
        assert domain in domains and {concept, date} <= set(catalog.columns(table))


def test_ids_said_to_be_the_same_everywhere_are_the_ones_in_the_data(cdm):
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (\w+)\.(\w+) \|$", page("omop_vocabularies.md"), flags=re.MULTILINE)
    assert len(rows) == 10
    told = {(f"{table}.{column}", int(concept)) for concept, _, table, column in rows}
    for column in ("gender_concept_id", "race_concept_id", "ethnicity_concept_id"):
        found = {row[0] for row in cdm.execute(f"SELECT DISTINCT {column} FROM person").rows} - {0}
        assert {(f"person.{column}", concept) for concept in found} <= told
    found = {row[0] for row in cdm.execute("SELECT DISTINCT visit_concept_id FROM visit_occurrence").rows}
    assert {("visit_occurrence.visit_concept_id", concept) for concept in found} <= told
