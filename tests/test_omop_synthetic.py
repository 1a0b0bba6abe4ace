"""A made-up database holds together, repeats itself, and shows what its model says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.omop import synthetic
from healthrag.omop.catalog import Catalog
from healthrag.omop.database import CDM, open_omop
from healthrag.omop.population import draw_people, draw_visits, illnesses, model_rows
from healthrag.omop.synthetic import synthetic_cdm, synthetic_path

PUBLISHED = Catalog.cdm_v54()
MEASURED = Path(__file__).resolve().parents[2] / "shared" / "data" / "omop" / "omop_real_v54.duckdb"
FILLED = (
    "person", "observation_period", "visit_occurrence", "condition_occurrence", "drug_exposure", "procedure_occurrence",
    "measurement", "observation", "device_exposure", "death", "location", "care_site", "provider", "payer_plan_period", "cost",
    "condition_era", "drug_era", "dose_era", "visit_detail", "specimen", "fact_relationship", "note", "cdm_source", "concept",
    "vocabulary", "domain", "concept_class", "concept_ancestor", "concept_relationship", "relationship", "concept_synonym",
    "drug_strength",
)  # fmt: skip


# What a concept column holds by its name, or by its table and name where tables differ; Metadata concepts alone are not standard.
DOMAINS = {
    "gender_concept_id": "Gender", "race_concept_id": "Race", "ethnicity_concept_id": "Ethnicity", "visit_concept_id": "Visit",
    "admitted_from_concept_id": "Visit", "discharged_to_concept_id": "Visit", "visit_detail_concept_id": "Visit",
    "place_of_service_concept_id": "Visit", "specialty_concept_id": "Provider", "condition_concept_id": "Condition",
    "cause_concept_id": "Condition", "drug_concept_id": "Drug", "ingredient_concept_id": "Drug", "procedure_concept_id": "Procedure",
    "device_concept_id": "Device", "measurement_concept_id": "Measurement", "observation_concept_id": "Observation",
    "specimen_concept_id": "Specimen", "unit_concept_id": "Unit", "amount_unit_concept_id": "Unit", "currency_concept_id": "Currency",
    "language_concept_id": "Language", "domain_concept_id_1": "Metadata", "domain_concept_id_2": "Metadata",
    "relationship_concept_id": "Metadata", "measurement.value_as_concept_id": "Meas Value",
    "observation.value_as_concept_id": "Observation",
}  # fmt: skip
VOCABULARY = ("concept_ancestor", "concept_relationship", "vocabulary", "domain", "concept_class", "relationship", "concept_synonym")
# Real concepts the measuring database does not hold; their ids, names and codes are those of the published vocabulary.
ELSEWHERE = {
    "44818668", "38004447", "38004451", "38004455", "38004456", "38004458", "38004461", "38004465", "38004469", "38004472", "38004510",
    "8536", "8717", "8756", "8863", "8870", "8940", "32037", "32815", "32817", "45884084", "45878583", "4001225", "4046280", "44814637",
    "44814640", "44814646", "4180186", "21", "36", "44818756", "44818854",
}  # fmt: skip


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    with open_omop(synthetic_cdm(tmp_path_factory.mktemp("thousand") / "thousand.duckdb", persons=1000), row_limit=10**7) as cdm:
        yield cdm


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "5,000 persons in three batches, the last one short."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_BATCH", 2100)
        path = synthetic_cdm(tmp_path_factory.mktemp("synthetic") / "made.duckdb", persons=5000, seed=7)
    with open_omop(path, row_limit=10**7) as cdm:
        yield cdm


def one(cdm: CDM, sql: str):
    return cdm.execute(sql).rows[0][0]


def content(path: Path) -> dict[str, list]:
    with duckdb.connect(path, read_only=True) as connection:
        return {table: connection.execute(f'SELECT * FROM "{table}"').fetchall() for table in PUBLISHED}


def test_has_the_form_of_v54_and_is_filled(made):
    assert made.catalog.sqlglot_schema() == PUBLISHED.sqlglot_schema()
    assert [column.required for t in PUBLISHED for column in made.catalog.table(t).columns] == [
        column.required for t in PUBLISHED for column in PUBLISHED.table(t).columns
    ]
    counts = made.row_counts()
    assert counts["person"] == 5000 and counts["observation_period"] == 5000
    assert {table for table, count in counts.items() if count} == set(FILLED)


@pytest.mark.parametrize(("table", "column", "to", "key"), PUBLISHED.foreign_keys())
def test_every_foreign_key_holds(made, table, column, to, key):
    lost = f'SELECT COUNT(*) FROM "{table}" AS a ANTI JOIN "{to}" AS b ON a."{column}" = b."{key}" WHERE a."{column}" IS NOT NULL'
    assert one(made, lost) == 0


def test_keys_the_specification_does_not_declare_hold_too(made):
    for sql in (
        "SELECT COUNT(*) FROM cost ANTI JOIN payer_plan_period USING (payer_plan_period_id) WHERE payer_plan_period_id IS NOT NULL",
        "SELECT COUNT(*) FROM cost ANTI JOIN visit_occurrence ON cost_event_id = visit_occurrence_id WHERE cost_domain_id = 'Visit'",
        "SELECT COUNT(*) FROM cost ANTI JOIN drug_exposure ON cost_event_id = drug_exposure_id WHERE cost_domain_id = 'Drug'",
        "SELECT COUNT(*) FROM cost ANTI JOIN procedure_occurrence ON cost_event_id = procedure_occurrence_id WHERE cost_domain_id = 'Procedure'",
        "SELECT COUNT(*) FROM cost JOIN visit_occurrence v ON cost_event_id = visit_occurrence_id AND cost_domain_id = 'Visit' "
        "JOIN payer_plan_period p USING (payer_plan_period_id) WHERE p.person_id <> v.person_id "
        "OR v.visit_start_date NOT BETWEEN p.payer_plan_period_start_date AND p.payer_plan_period_end_date",
        "SELECT COUNT(*) FROM fact_relationship ANTI JOIN measurement ON fact_id_1 = measurement_id WHERE domain_concept_id_1 = 21",
        "SELECT COUNT(*) FROM fact_relationship ANTI JOIN specimen ON fact_id_1 = specimen_id WHERE domain_concept_id_1 = 36",
        "SELECT COUNT(*) FROM fact_relationship f ANTI JOIN fact_relationship b ON f.fact_id_1 = b.fact_id_2 AND f.fact_id_2 = b.fact_id_1 "
        "AND f.domain_concept_id_1 = b.domain_concept_id_2 AND f.relationship_concept_id <> b.relationship_concept_id",
        "SELECT COUNT(*) FROM fact_relationship JOIN measurement m ON fact_id_1 = measurement_id JOIN specimen s ON fact_id_2 = specimen_id "
        "WHERE domain_concept_id_1 = 21 AND (m.person_id <> s.person_id OR measurement_date <> specimen_date)",
    ):
        assert one(made, sql) == 0


def concept_columns():
    return [(t.name, c.name) for t in PUBLISHED.tables.values() for c in t.columns if "concept_id" in c.name and t.name not in ("concept", *VOCABULARY)]


@pytest.mark.parametrize(("table", "column"), concept_columns())
def test_every_concept_is_there_standard_and_of_the_right_domain(thousand, table, column):
    found = thousand.execute(f"""SELECT DISTINCT domain_id, standard_concept FROM "{table}" JOIN concept ON concept_id = "{column}"
        WHERE concept_id <> 0""").rows
    assert one(thousand, f'SELECT COUNT("{column}") FROM "{table}" ANTI JOIN concept ON concept_id = "{column}" WHERE "{column}" IS NOT NULL') == 0
    domain = DOMAINS.get(f"{table}.{column}") or DOMAINS.get(column) or "Type Concept"
    assert set(found) <= {(domain, None if domain == "Metadata" else "S")}


def test_every_area_has_rows_at_a_thousand_persons(thousand):
    counts = thousand.row_counts()
    assert {table for table, count in counts.items() if count} == set(FILLED)
    assert min(counts[table] for table in ("device_exposure", "death", "visit_detail", "note", "specimen")) > 20


def test_what_questions_ask_about_has_several_answers(thousand):
    for column, table, least in (
        ("payer_source_value", "payer_plan_period", 5), ("plan_source_value", "payer_plan_period", 8),
        ("sponsor_source_value", "payer_plan_period", 4), ("stop_reason_source_value", "payer_plan_period", 4),
        ("specialty_concept_id", "provider", 11), ("place_of_service_concept_id", "care_site", 4), ("state", "location", 6),
        ("county", "location", 5), ("cost_domain_id", "cost", 3), ("visit_detail_concept_id", "visit_detail", 3),
        ("discharged_to_concept_id", "visit_occurrence", 2), ("measurement_concept_id", "measurement", 21),
        ("value_as_concept_id", "measurement", 2), ("observation_concept_id", "observation", 4), ("specimen_concept_id", "specimen", 2),
        ("device_concept_id", "device_exposure", 3), ("cause_concept_id", "death", 4), ("note_type_concept_id", "note", 3),
        ("procedure_concept_id", "procedure_occurrence", 10), ("drug_concept_id", "dose_era", 10),
    ):  # fmt: skip
        assert one(thousand, f"SELECT COUNT(DISTINCT {column}) FROM {table}") >= least, (table, column)


@pytest.mark.parametrize(
    ("concept", "low", "high"),
    [(3004249, 75, 200), (3012888, 40, 125), (3036277, 135, 205), (3025315, 28, 145), (3027018, 40, 130), (3004410, 3.5, 9),
     (3051825, 0.2, 2.5), (3009966, 30, 225), (3007070, 12, 95), (3000963, 6, 18.5), (3038553, 13, 45), (3020891, 35, 38),
     (3000483, 50, 195), (3027114, 90, 330), (3022192, 20, 280), (3009201, 0.4, 9), (3000905, 2.5, 12)],
)  # fmt: skip
def test_numbers_are_plausible(thousand, concept, low, high):
    least, most, n, units = thousand.execute(f"""SELECT MIN(value_as_number), MAX(value_as_number), COUNT(*), COUNT(DISTINCT unit_concept_id)
        FROM measurement WHERE measurement_concept_id = {concept}""").rows[0]
    assert low <= least < most <= high and n > 500 and units == 1


def test_results_are_positive_where_the_illness_says(made):
    rate = "SELECT AVG((value_as_concept_id = 45884084)::INT) FROM measurement WHERE measurement_concept_id = {} AND person_id {} (SELECT "
    rate += "person_id FROM condition_occurrence WHERE condition_concept_id = {} AND condition_start_date <= measurement_date)"
    for concept, illness in ((3009261, 201826), (3014051, 443597)):
        assert one(made, rate.format(concept, "IN", illness)) > 2 * one(made, rate.format(concept, "NOT IN", illness))
    assert one(made, "SELECT COUNT(*) FROM measurement WHERE (value_as_number IS NULL) = (value_as_concept_id IS NULL)") == 0


def test_coverage_has_gaps_and_switches_and_never_overlaps(made):
    ordered = """(SELECT *, LEAD(payer_plan_period_start_date) OVER turn AS next, LEAD(plan_source_value) OVER turn AS plan
        FROM payer_plan_period WINDOW turn AS (PARTITION BY person_id ORDER BY payer_plan_period_start_date))"""
    assert one(made, f"SELECT COUNT(*) FROM {ordered} WHERE next = payer_plan_period_end_date + 1 "
                     "AND (stop_reason_source_value = 'Plan renewed') <> (plan = plan_source_value)") == 0
    assert one(made, f"SELECT COUNT(*) FROM {ordered} WHERE next <= payer_plan_period_end_date") == 0
    assert one(made, f"SELECT COUNT(*) FROM {ordered} WHERE next > payer_plan_period_end_date + 1") > 100
    assert one(made, f"SELECT COUNT(*) FROM {ordered} WHERE next = payer_plan_period_end_date + 1") > 100
    assert one(made, f"SELECT COUNT(*) FROM {ordered} WHERE next IS NOT NULL AND stop_reason_source_value IS NULL") == 0
    assert one(made, """SELECT COUNT(*) FROM payer_plan_period JOIN observation_period USING (person_id) WHERE payer_plan_period_end_date <
        payer_plan_period_start_date OR payer_plan_period_start_date < observation_period_start_date
        OR payer_plan_period_end_date > observation_period_end_date""") == 0
    assert 0 < one(made, "SELECT COUNT(*) FROM person ANTI JOIN payer_plan_period USING (person_id)") < 500
    medicare = "SELECT AVG((payer_source_value = 'Medicare')::INT) FROM payer_plan_period JOIN person USING (person_id) WHERE year(payer_plan_period_start_date) "
    assert one(made, medicare + "- year_of_birth > 66") > 0.8 > 0.1 > one(made, medicare + "- year_of_birth < 64")


def test_stays_lie_in_their_visit_and_follow_each_other(made):
    assert one(made, """SELECT COUNT(*) FROM visit_detail d JOIN visit_occurrence v USING (visit_occurrence_id) WHERE d.person_id <> v.person_id
        OR visit_detail_start_date < visit_start_date OR visit_detail_end_date > visit_end_date OR visit_detail_end_date < visit_detail_start_date""") == 0
    assert one(made, """SELECT COUNT(*) FROM visit_detail d JOIN visit_detail p ON p.visit_detail_id = d.preceding_visit_detail_id
        WHERE p.visit_occurrence_id <> d.visit_occurrence_id OR p.visit_detail_end_date > d.visit_detail_start_date""") == 0
    assert one(made, "SELECT COUNT(*) FROM visit_occurrence ANTI JOIN visit_detail USING (visit_occurrence_id) WHERE visit_concept_id <> 9202") == 0


def test_notes_say_what_the_rows_say(made):
    assert one(made, """SELECT COUNT(*) FROM note JOIN condition_occurrence USING (visit_occurrence_id) JOIN concept ON concept_id = condition_concept_id
        WHERE NOT contains(note_text, concept_name)""") == 0
    assert one(made, """SELECT COUNT(*) FROM note JOIN person USING (person_id) WHERE
        contains(note_text, '-old woman') <> (gender_concept_id = 8532)""") == 0
    assert one(made, """SELECT COUNT(*) FROM note JOIN (SELECT person_id, value_as_concept_id AS smokes FROM observation
        WHERE observation_concept_id = 43054909) USING (person_id) WHERE contains(note_text, 'smokes tobacco daily') <> (smokes = 42709996)""") == 0


def test_doses_are_those_of_the_drugs(made):
    assert one(made, """SELECT COUNT(*) FROM dose_era ANTI JOIN drug_strength
        ON dose_era.drug_concept_id = ingredient_concept_id AND ABS(dose_value - amount_value) < 0.001""") == 0
    assert one(made, "SELECT COUNT(*) FROM drug_strength JOIN concept ON concept_id = drug_concept_id WHERE NOT contains(concept_name, ' MG')") == 0


def test_ten_persons_are_enough(tmp_path):
    with open_omop(synthetic_cdm(tmp_path / "ten.duckdb", persons=10), row_limit=10**6) as cdm:
        counts = cdm.row_counts()
        assert counts["person"] == 10 and all(counts[table] for table in ("cost", "payer_plan_period", "measurement", "specimen", "note"))
        for table, column, to, key in PUBLISHED.foreign_keys():
            lost = f'SELECT COUNT(*) FROM "{table}" AS a ANTI JOIN "{to}" AS b ON a."{column}" = b."{key}" WHERE a."{column}" IS NOT NULL'
            assert one(cdm, lost) == 0, (table, column)


@pytest.mark.parametrize("table", [table.name for table in PUBLISHED.tables.values() if table.primary_key])
def test_primary_keys_run_from_one_over_all_batches(made, table):
    key = PUBLISHED.table(table).primary_key
    assert one(made, f"SELECT COUNT(*) - COUNT(DISTINCT {key}) FROM {table}") == 0
    if PUBLISHED.table(table).column(key).sql_type == "INTEGER" and table != "concept" and one(made, f"SELECT COUNT(*) FROM {table}"):
        assert made.execute(f"SELECT MIN({key}), MAX({key}) = COUNT(*) FROM {table}").rows == ((1, True),)


def test_events_lie_in_their_visit_and_visits_in_the_observation(made):
    dates = {
        "condition_occurrence": "condition_start_date", "drug_exposure": "drug_exposure_start_date",
        "procedure_occurrence": "procedure_date", "measurement": "measurement_date", "observation": "observation_date",
        "device_exposure": "device_exposure_start_date",
    }  # fmt: skip
    for table, date in dates.items():
        assert one(made, f"""SELECT COUNT(*) FROM {table} AS e JOIN visit_occurrence AS v USING (visit_occurrence_id)
            WHERE e.person_id <> v.person_id OR e.{date} NOT BETWEEN v.visit_start_date AND v.visit_end_date""") == 0
    assert one(made, """SELECT COUNT(*) FROM visit_occurrence JOIN observation_period AS o USING (person_id)
        WHERE visit_start_date < o.observation_period_start_date OR visit_end_date > o.observation_period_end_date
        OR visit_end_date < visit_start_date""") == 0
    assert one(made, "SELECT COUNT(*) FROM death JOIN visit_occurrence USING (person_id) WHERE visit_end_date > death_date") == 0
    assert one(made, "SELECT COUNT(*) FROM condition_occurrence WHERE condition_end_date < condition_start_date") == 0
    assert one(made, "SELECT COUNT(*) FROM drug_exposure WHERE drug_exposure_end_date - drug_exposure_start_date + 1 <> days_supply") == 0


def test_people_are_adults_born_when_they_say(made):
    assert one(made, "SELECT COUNT(*) FROM person WHERE birth_datetime::DATE <> make_date(year_of_birth, month_of_birth, day_of_birth)") == 0
    ages = "date_diff('day', birth_datetime::DATE, observation_period_start_date) / 365.25"
    low, high = made.execute(f"SELECT MIN({ages}), MAX({ages}) FROM person JOIN observation_period USING (person_id)").rows[0]
    assert 17.9 < low < 25 and 85 < high < 93.1
    assert 0.48 < one(made, "SELECT AVG((gender_concept_id = 8532)::INTEGER) FROM person") < 0.54


def by_month(cdm: CDM, sql: str) -> np.ndarray:
    counts = np.zeros(13)
    for month, count in cdm.execute(f"SELECT month(day), COUNT(*) FROM ({sql}) GROUP BY 1").rows:
        counts[month] = count
    return counts[1:]


def test_seasons(made):
    condition = "SELECT condition_start_date AS day FROM condition_occurrence WHERE condition_concept_id = {}"
    bronchitis, hay_fever = by_month(made, condition.format(260139)), by_month(made, condition.format(4280726))
    assert bronchitis[[11, 0, 1]].sum() > 2.5 * bronchitis[[5, 6, 7]].sum()
    assert hay_fever[[3, 4, 5]].sum() > 5 * hay_fever[[9, 10, 11]].sum()
    hypertension = by_month(made, condition.format(320128))
    assert hypertension.max() < 1.5 * hypertension.min()  # a chronic illness has no season
    shots = by_month(made, "SELECT drug_exposure_start_date AS day FROM drug_exposure WHERE drug_concept_id = 40213154")
    assert shots[:8].sum() == 0 and (shots[8:] > 100).all()


@pytest.mark.parametrize(("cause", "effect"), [(201826, 320128), (201826, 443597), (320128, 317576), (317576, 4329847), (313217, 381316)])
def test_comorbidity_at_any_age(made, cause, effect):
    odds = made.execute(f"""
        WITH ill AS (SELECT person_id, 2023 - year_of_birth AS age,
            person_id IN (SELECT person_id FROM condition_occurrence WHERE condition_concept_id = {cause}) AS has,
            person_id IN (SELECT person_id FROM condition_occurrence WHERE condition_concept_id = {effect}) AS gets FROM person)
        SELECT age // 15, SUM((has AND gets)::INT), SUM((has AND NOT gets)::INT), SUM((NOT has AND gets)::INT),
            SUM((NOT has AND NOT gets)::INT), COUNT(*) FROM ill GROUP BY 1""").rows
    mantel_haenszel = sum(a * d / n for _, a, _, _, d, n in odds) / sum(b * c / n for _, _, b, c, _, n in odds)
    assert mantel_haenszel > 1.3


def test_measurements_follow_the_illness(made):
    sugar = """SELECT AVG(value_as_number) FROM measurement WHERE measurement_concept_id = 3004410 AND unit_concept_id = 8554
        AND person_id {} (SELECT person_id FROM condition_era WHERE condition_concept_id = 201826 AND condition_era_start_date < measurement_date)"""
    assert one(made, sugar.format("IN")) - one(made, sugar.format("NOT IN")) > 1.5
    spread = made.execute("""SELECT AVG(s), STDDEV(m) FROM (SELECT STDDEV(value_as_number) AS s, AVG(value_as_number) AS m FROM measurement
        WHERE measurement_concept_id = 3036277 GROUP BY person_id HAVING COUNT(*) > 3)""").rows[0]
    assert spread[0] < spread[1]  # one person's heights are more alike than two persons'
    assert one(made, "SELECT COUNT(*) FROM measurement WHERE value_as_number <= 0") == 0


def test_eras_join_what_is_near_and_keep_every_record(made):
    era, record = "condition_era", "condition_occurrence"
    assert one(made, f"SELECT SUM(condition_occurrence_count) FROM {era}") == one(made, f"SELECT COUNT(*) FROM {record}")
    assert one(made, f"""SELECT COUNT(*) FROM {era} a JOIN {era} b USING (person_id, condition_concept_id) WHERE a.condition_era_id <> b.condition_era_id
        AND b.condition_era_start_date BETWEEN a.condition_era_start_date AND a.condition_era_end_date + 30""") == 0
    assert one(made, f"""SELECT COUNT(*) FROM {record} o ANTI JOIN {era} e ON o.person_id = e.person_id AND o.condition_concept_id = e.condition_concept_id
        AND o.condition_start_date BETWEEN e.condition_era_start_date AND e.condition_era_end_date""") == 0
    classes = {row[0] for row in made.execute("SELECT DISTINCT concept_class_id FROM drug_era JOIN concept ON concept_id = drug_concept_id").rows}
    assert "Ingredient" in classes
    assert one(made, "SELECT COUNT(*) FROM drug_era WHERE gap_days < 0 OR drug_era_end_date < drug_era_start_date") == 0


def test_costs_add_up(made):
    assert one(made, "SELECT COUNT(*) FROM cost WHERE ABS(total_paid - paid_by_payer - paid_by_patient) > 0.005 OR total_paid > total_charge") == 0
    assert one(made, "SELECT COUNT(*) FROM cost WHERE ABS(paid_by_patient - paid_patient_copay - paid_patient_coinsurance) > 0.005") == 0
    assert one(made, "SELECT COUNT(*) FROM cost WHERE LEAST(total_charge, total_cost, amount_allowed) <= 0 OR paid_by_payer < 0 OR paid_by_patient < 0") == 0
    assert one(made, "SELECT COUNT(*) FROM cost WHERE payer_plan_period_id IS NULL AND paid_by_payer > 0") == 0
    assert one(made, "SELECT COUNT(*) FROM cost WHERE (cost_domain_id = 'Drug') <> (paid_dispensing_fee IS NOT NULL)") == 0


def test_who_is_insured_on_the_day_has_a_payer(made):
    days = """SELECT cost_event_id, payer_plan_period_id, person_id, visit_start_date AS day FROM cost JOIN visit_occurrence
        ON cost_event_id = visit_occurrence_id WHERE cost_domain_id = 'Visit'"""
    assert one(made, f"""SELECT COUNT(*) FROM ({days}) AS c JOIN payer_plan_period AS p USING (person_id) WHERE c.payer_plan_period_id IS NULL
        AND day BETWEEN payer_plan_period_start_date AND payer_plan_period_end_date""") == 0


@given(st.integers(0, 2**40), st.integers(10, 60))
@settings(max_examples=4, deadline=None)
def test_the_seed_decides_everything(tmp_path_factory, seed, persons):
    folder = tmp_path_factory.mktemp("seed")
    first, again, other = (content(synthetic_cdm(folder / f"{i}.duckdb", persons, s)) for i, s in enumerate((seed, seed, seed + 1)))
    assert first == again and first["person"] != other["person"]
    assert len(first["person"]) == persons


def test_bounds(tmp_path):
    for persons in (-1, 0, 9, 1_000_001):
        with pytest.raises(ValueError, match="it must be from 10 to 1,000,000"):
            synthetic_cdm(tmp_path / "x.duckdb", persons)
    with pytest.raises(ValueError, match="seed is -1"):
        synthetic_cdm(tmp_path / "x.duckdb", 10, -1)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_never_overwritten(tmp_path):
    there = tmp_path / "mine.duckdb"
    there.write_text("precious")
    with pytest.raises(FileExistsError, match=r"mine\.duckdb exists; remove it or give another path"):
        synthetic_cdm(there, 10)
    assert there.read_text() == "precious"


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "write_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        synthetic_cdm(tmp_path / "x.duckdb", 10)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="GB are needed"):
        patch.setattr(synthetic, "_BYTES", 10**12)
        synthetic_cdm(tmp_path / "x.duckdb", 1_000_000)


def test_the_cache_is_used(tmp_path, monkeypatch):
    path = synthetic_path(12, 5, tmp_path)
    monkeypatch.setattr(synthetic, "_build", lambda *_: pytest.fail("built again"))
    assert synthetic_path(12, 5, tmp_path) == path


def test_two_processes_make_one_database(tmp_path):
    code = f"from healthrag.omop import synthetic_path; from pathlib import Path; print(synthetic_path(500, 1, Path({str(tmp_path)!r})))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in both}
    assert len(paths) == 1 and all(process.returncode == 0 for process in both)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == [Path(paths.pop()).name]


def test_the_model_names_its_concepts_rightly():
    names = {row["concept_id"]: row["concept_name"] for row in model_rows("concepts")}
    for row in model_rows("conditions"):
        assert names[row["concept_id"]] == row["concept_name"]
    for table in ("findings", "specialties", "charges"):
        assert all(names[row["concept_id"]] == row["concept_name"] for row in model_rows(table))
    for row in model_rows("measurements"):
        assert names[row["concept_id"]] == row["concept_name"] and names[row["unit_concept_id"]] == row["unit_name"]


@pytest.mark.skipif(not MEASURED.exists(), reason="the measuring database is not here")
def test_its_concepts_are_real():
    with duckdb.connect(MEASURED, read_only=True) as connection:
        columns = "concept_name, domain_id, vocabulary_id, concept_class_id, standard_concept, concept_code"
        real = {str(row[0]): row[1:] for row in connection.execute(f"SELECT concept_id, {columns} FROM concept").fetchall()}
        ancestors = set(connection.execute("SELECT ancestor_concept_id, descendant_concept_id FROM concept_ancestor").fetchall())
    ours = {row["concept_id"]: tuple(row[name] or None for name in columns.split(", ")) for row in model_rows("concepts")}
    assert {concept for concept in ours if concept not in real} == ELSEWHERE
    assert all(real[concept] == row for concept, row in ours.items() if concept in real)
    assert all((int(row["ancestor_concept_id"]), int(row["descendant_concept_id"])) in ancestors for row in model_rows("ancestors"))


def test_a_rare_illness_is_as_common_as_the_model_says():
    rng = np.random.default_rng(0)
    people = draw_people(rng, 60_000)
    visits, _ = draw_visits(rng, people)
    index, pharyngitis = next((i, ill) for i, ill in enumerate(illnesses()) if ill.concept_id == 4112343)
    years = (people["end"] - people["start"]).sum() / 365.25
    risk = np.exp(pharyngitis.age * (people["age"] - 50) / 10 + pharyngitis.female * people["female"])
    expected = pharyngitis.rate * (risk * (people["end"] - people["start"])).sum() / 365.25
    assert (visits["reason"] == index).sum() == pytest.approx(expected, rel=0.03) and years > 60_000
