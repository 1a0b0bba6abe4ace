"""A made-up clinic: its rows are those of the CDM, and its questions are what the data card says."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter

import pytest

from healthrag.omop import clinic_phrases, clinic_records, derive_questions, load_clinic_questions, open_omop, record_number, synthetic_cdm
from healthrag.omop.clinic import CLINIC_CDM, CLINIC_ENCOUNTERS, CLINIC_READING
from healthrag.omop.clinic_questions import MOST_RELEVANT, QUESTION_KINDS

QUESTIONS = load_clinic_questions()


@pytest.fixture(scope="module")
def cdm_path(tmp_path_factory):
    persons, seed = map(int, CLINIC_CDM.split(":")[1:])
    return synthetic_cdm(tmp_path_factory.mktemp("cdm") / "cdm.duckdb", persons, seed)


@pytest.fixture(scope="module")
def path(cdm_path):
    with open_omop(cdm_path) as cdm:
        return clinic_records(cdm_path.parent / "clinic.db", cdm, encounters=CLINIC_ENCOUNTERS)


def rows(path, sql, *values):
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(sql, values).fetchall()


def tables(path):
    return {t: rows(path, f"SELECT * FROM {t} ORDER BY 1") for (t,) in rows(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}


@pytest.fixture(scope="module")
def texts(path):
    "Document -> (patient's number, date, all that its row says)."
    found = {}
    for table, columns in CLINIC_READING["tables"].items():
        joins = {"patient": "", "encounter": "JOIN patient USING (patient_id)", "allergy": "JOIN patient USING (patient_id)"}.get(
            table, "JOIN encounter USING (encounter_id) JOIN patient USING (patient_id)"
        )
        date = {"patient": "''", "note": "note_date", "prescription": "start_date", "allergy": "recorded_date"}.get(table, "encounter_date")
        for key, number, day, *said in rows(path, f"SELECT {table}_id, record_number, {date}, {', '.join(f'{table}.{c}' for c in columns)} FROM {table} {joins}"):
            found[f"clinic:{table}:{key}"] = (number, day, "\n".join(str(v) for v in said if v is not None))
    return found


def test_the_questions_that_ship_are_derived_from_the_records(path):
    derived = derive_questions(path)
    assert derived == QUESTIONS, "the synthetic CDM or data/clinic changed; data/clinic/README.md says how the questions are made again"


def test_the_same_cdm_and_seed_give_the_same_clinic(path, cdm_path, tmp_path):
    with open_omop(cdm_path) as cdm:
        again = clinic_records(tmp_path / "again.db", cdm, encounters=CLINIC_ENCOUNTERS)
        other = clinic_records(tmp_path / "other.db", cdm, encounters=CLINIC_ENCOUNTERS, seed=1)
    first, changed = tables(path), tables(other)
    assert first == tables(again)
    assert [t for t in first if first[t] == changed[t]] == ["department", "lab_result"]
    assert [row[0] for row in first["note"]] != [] and {r[:2] for r in first["encounter"]} == {r[:2] for r in changed["encounter"]}


def test_a_patient_is_told_the_same_in_a_smaller_clinic(path, cdm_path, tmp_path):
    with open_omop(cdm_path) as cdm:
        few = tables(clinic_records(tmp_path / "few.db", cdm, patients=9, encounters=2))
    whole = tables(path)
    assert len(few["patient"]) == 9 and all(set(few[t]) <= set(whole[t]) for t in few) and 0 < len(few["note"]) < len(whole["note"])


def test_every_row_belongs_to_the_same_person_as_in_the_cdm(path, cdm_path):
    joined = "FROM {} JOIN encounter USING (encounter_id)"
    with open_omop(cdm_path, row_limit=10**6) as cdm:
        for table, number, theirs, date in (
            ("diagnosis", "diagnosis_id", "condition_occurrence", "encounter_date"), ("lab_result", "lab_result_id", "measurement", "encounter_date"),
            ("prescription", "prescription_id", "drug_exposure", "start_date"),
        ):  # fmt: skip
            day = {"condition_occurrence": "condition_start_date", "measurement": "measurement_date", "drug_exposure": "drug_exposure_start_date"}[theirs]
            known = {row[0]: (row[1], row[2], str(row[3])) for row in cdm.execute(f"SELECT {theirs}_id, person_id, visit_occurrence_id, {day} FROM {theirs}").rows}
            ours = rows(path, f"SELECT {number}, patient_id, encounter_id, {date} {joined.format(table)}")
            assert ours and all(known[key] == tuple(row) for key, *row in ours)
        visits = {row[0]: row[1] for row in cdm.execute("SELECT visit_occurrence_id, person_id FROM visit_occurrence").rows}
    assert all(visits[e] == p for e, p in rows(path, "SELECT encounter_id, patient_id FROM encounter"))
    assert rows(path, "PRAGMA foreign_key_check") == [] and rows(path, "SELECT MAX(n) FROM (SELECT COUNT(*) n FROM encounter GROUP BY patient_id)") == [(CLINIC_ENCOUNTERS,)]


def test_any_omop_database_will_do(cdm, tmp_path):
    made = tables(clinic_records(tmp_path / "gibleed.db", cdm, patients=120))
    assert len(made["patient"]) == 120 and made["diagnosis"] and made["note"] and made["prescription"]


def test_record_numbers_are_different_and_one_begins_with_another(path):
    numbers = [record_number(i) for i in range(200_000)]
    assert len(set(numbers)) == len(numbers)
    here = [n for (n,) in rows(path, "SELECT record_number FROM patient")]
    assert any(a != b and b.startswith(a) for a in here for b in here)


def test_notes_name_no_patient_and_hold_nothing_that_stays_out(path):
    notes = "\n".join(text for (text,) in rows(path, "SELECT note_text FROM note"))
    for values in rows(path, "SELECT record_number, patient_name, birth_date, phone, email, street_address, national_id FROM patient"):
        assert not [value for value in values if value in notes]


def test_notes_differ_and_call_one_illness_by_several_names(path):
    notes = rows(path, "SELECT note_text, diagnosis.icd10_code FROM note JOIN diagnosis USING (encounter_id)")
    assert len({text for text, _ in notes}) > 0.95 * len(notes)
    names = next(c["names"] for c in clinic_phrases("conditions")["condition"] if c["concept_id"] == 201826)
    told = [{name for name in names if name.lower() in text.lower()} for text, code in notes if code and code.startswith("E11")]
    assert len(set().union(*told)) == len(names) and min(map(len, told)) < len(names)


# ---- questions


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_a_kind_has_at_least_twenty_questions_and_the_card_says_how_many(kind, project_root):
    count = Counter(q.kind for q in QUESTIONS)[kind]
    assert count >= 20
    assert re.search(rf"^\| `{kind}` \| {count} \|", (project_root / "data" / "clinic" / "README.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.id)
def test_a_question_points_to_records_that_are_there(question, texts):
    assert question.question.strip() and not set(question.relevant) & set(question.traps)
    assert {*question.relevant, *question.traps} <= set(texts)
    assert bool(question.relevant) == (question.kind != "unanswerable") and len(question.relevant) <= MOST_RELEVANT
    if question.patient and question.kind != "unanswerable":
        assert {texts[r][0] for r in question.relevant} == {question.patient}
    if question.kind == "trap":
        assert question.traps and question.patient not in {texts[r][0] for r in question.traps}


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q.kind == "code"], ids=lambda q: q.id)
def test_a_code_question_has_all_records_with_the_code(question, texts):
    code = re.search(r"[A-Z]\d\d(?:\.\w+)?|\d{5}-\d{4}-\d\d|\d+-\d\b|\b\d{3,7}\b(?! mg| mcg)", question.question)
    if ": who takes it" in question.question or not code:
        return
    wanted = {d for d, (number, _, said) in texts.items() if re.search(rf"(?<![\w.-]){re.escape(code[0])}(?![\w-]|\.\w)", said) and question.patient in ("", number)}
    assert set(question.relevant) == wanted


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q.filters], ids=lambda q: q.id)
def test_a_dated_question_is_answered_by_what_its_filter_keeps(question, texts):
    from healthrag.storage.filters import compile_filter

    keeps = compile_filter(question.filters)
    assert all(keeps({"date": texts[d][1]}) for d in question.relevant) and not any(keeps({"date": texts[d][1]}) for d in question.traps)
    assert question.kind == "date"


def test_nothing_in_the_records_answers_the_unanswerable(texts):
    everything = "\n".join(said for _, _, said in texts.values())
    asked = {q.question for q in QUESTIONS if q.kind == "unanswerable"}
    topics = [t for t in clinic_phrases("unanswerable")["topics"] if t["question"] in asked]
    assert len(topics) > 10
    assert not [t["question"] for t in topics for pattern in t["absent"] if re.search(pattern, everything, re.I)]
    for question in asked:
        for code in re.findall(r"code ([A-Z]\S+)\?|(PT-\d+)", question):
            assert not [c for c in code if c and c in everything]
