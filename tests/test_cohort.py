"""Questions that need both: who is asked about, the checked query, and a search that never leaves the cohort."""

from __future__ import annotations

import datetime as dt

import pytest
from word_vectors import word_vectors

pytest.importorskip("sqlalchemy")

from healthrag.cohort import CohortClause, cohort_search, plan_cohort, read_days, read_wording
from healthrag.cohort.search import COHORT_LIMIT
from healthrag.execution.check import check_query
from healthrag.omop import CLINIC_READING, clinic_records, open_omop
from healthrag.records import Hit
from healthrag.retrieval.update import ingest_to_index

WORDS = {"notes": {"table": "note"}, "prescribed": {"table": "prescription"}}


@pytest.fixture(scope="module")
def clinic_cdm():
    with open_omop("synthetic:40:11") as opened:
        yield opened


@pytest.fixture(scope="module")
def index(clinic_cdm, tmp_path_factory):
    path = clinic_records(tmp_path_factory.mktemp("clinic") / "clinic.db", clinic_cdm)
    return ingest_to_index(None, f"sqlite:///{path}", store="local", embedder=word_vectors, **CLINIC_READING)


def rows(cdm, sql):
    return [tuple(row) if len(row) > 1 else row[0] for row in cdm.execute(sql, row_limit=10**6).rows]


def found(cdm, question):
    plan = plan_cohort(question, cdm)
    assert not plan.problem, plan.problem
    check = check_query(plan.sql, catalog=cdm.catalog, executor=cdm.execute)
    assert check.ok, check.error
    return [row if len(row) > 1 else row[0] for row in check.result.rows]


# ---- wording


@pytest.mark.parametrize(
    ("question", "clauses", "topic"),
    [
        ("What do notes say about patients with gout after 2015?", ["having gout", "after 2015"], ""),
        ("Is dizziness reported by people taking lisinopril?", ["taking lisinopril"], "Is dizziness reported"),
        ("Since May 2015, what do notes say about sleep in men with asthma?", ["since May 2015", "having asthma"], "what do notes say about sleep"),
        ("trouble with sleep and pain on walking in adults with gout", ["having gout"], "trouble with sleep and pain on walking"),
        ("patients who have never had gout but take warfarin before a stroke", ["lacking gout", "taking warfarin", "before stroke"], ""),
        ("What was noted before the diagnosis of heart failure in women on furosemide?", ["before heart failure", "taking furosemide"], "What was noted"),
        ("notes on patients treated with warfarin, prescribed by telephone", ["taking warfarin"], "notes, prescribed by telephone"),
        ("cooperation of patients during rehabilitation", [], "cooperation during rehabilitation"),
        ("information about rationing for people with gout", ["having gout"], "information about rationing"),
    ],
)
def test_a_question_is_taken_apart(question, clauses, topic):
    wording = read_wording(question)
    assert [f"{c.kind} {c.text}" for c in wording.clauses] == clauses and wording.topic == topic


@pytest.mark.parametrize(
    ("question", "ages"),
    [
        ("women over 60 with gout", (61, None)), ("men under 18", (None, 17)), ("patients aged 40 to 60", (40, 60)), ("people aged 65 or older", (65, None)),
        ("adults between 30 and 50 years with gout", (30, 50)), ("patients on more than 20 mg simvastatin", (None, None)), ("patients older than 80", (81, None)),
        ("patients with gout between 2012 and 2015", (None, None)),
    ],
)  # fmt: skip
def test_ages_are_read_and_doses_and_years_are_not_ages(question, ages):
    wording = read_wording(question)
    assert (wording.least_age, wording.most_age) == ages


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("2015", ("2015-01-01", "2015-12-31")), ("the year 2015", ("2015-01-01", "2015-12-31")), ("February 2016", ("2016-02-01", "2016-02-29")),
        ("29 Feb 2016", ("2016-02-29",) * 2), ("Sept. 2019", ("2019-09-01", "2019-09-30")), ("March 3rd, 2021", ("2021-03-03",) * 2), ("2021-03", ("2021-03-01", "2021-03-31")),
        ("29 February 2015", None), ("2021-13", None), ("E11.9", None), ("1234", None), ("", None), ("the move", None),
    ],
)  # fmt: skip
def test_dates_are_read(text, days):
    assert read_days(text) == (tuple(map(dt.date.fromisoformat, days)) if days else None)


def test_a_long_question_is_read_in_time():
    read_wording("patients with " + "the a an " * 20_000 + "gout after " + "their first " * 20_000)
    read_wording("patients " * 20_000)


# ---- plan


def test_a_cohort_is_made_of_distinct_patients_not_of_rows(clinic_cdm):
    mine = found(clinic_cdm, "patients with high blood pressure")
    theirs = rows(clinic_cdm, "SELECT person_id FROM condition_occurrence WHERE condition_concept_id = 320128")
    assert len(mine) == len(set(mine)) < len(theirs) and set(mine) == set(theirs)


def test_all_any_and_none(clinic_cdm):
    def sick(concept):
        return set(rows(clinic_cdm, f"SELECT person_id FROM condition_occurrence WHERE condition_concept_id = {concept}"))

    pressure, fat, joints = sick(320128), sick(432867), sick(80180)
    assert set(found(clinic_cdm, "patients with high blood pressure and high cholesterol")) == pressure & fat
    assert set(found(clinic_cdm, "patients with high blood pressure or osteoarthritis")) == pressure | joints
    assert set(found(clinic_cdm, "patients with high blood pressure but without osteoarthritis or high cholesterol")) == pressure - joints - fat
    assert pressure & fat and pressure - joints - fat


@pytest.mark.parametrize(("word", "sign"), [("after", ">"), ("since", ">="), ("before", "<")])
def test_an_event_bounds_each_patients_own_visits(clinic_cdm, word, sign):
    mine = found(clinic_cdm, f"What do notes say about patients with high cholesterol {word} starting simvastatin?")
    theirs = rows(
        clinic_cdm,
        f"""WITH first AS (SELECT person_id, MIN(drug_exposure_start_date) AS day FROM drug_exposure WHERE drug_concept_id = 1539411 GROUP BY person_id)
        SELECT v.person_id, v.visit_occurrence_id FROM visit_occurrence AS v JOIN first ON first.person_id = v.person_id AND v.visit_start_date {sign} first.day
        WHERE v.person_id IN (SELECT person_id FROM condition_occurrence WHERE condition_concept_id = 432867)""",
    )
    assert theirs and sorted(mine) == sorted(theirs)


def test_descendants_belong_to_a_concept(clinic_cdm):
    above = set(found(clinic_cdm, "patients with disorder of cardiovascular system"))
    assert above >= set(found(clinic_cdm, "patients with high blood pressure")) and above


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("Who sold the most bicycles?", "names no group"), ("What is warfarin?", "names no group"), ("patients with wanderlust", "names no concept"),
        ("patients with gout after the move", "no date and no concept"), ("patients with gout between spring and 2015", "names no date"),
        ("patients without wanderlust and with gout", "names no concept"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_declined(clinic_cdm, question, why):
    plan = plan_cohort(question, clinic_cdm)
    assert why in plan.problem and plan.sql == ""


def test_words_that_were_passed_over_are_said(clinic_cdm):
    plan = plan_cohort("patients with severe uncontrolled asthma", clinic_cdm)
    assert plan.ignored == ("severe", "uncontrolled") and "passed over" in str(plan)


@pytest.mark.parametrize("word", ["'; DROP TABLE person; --", "asthma' OR '1'='1", "asthma) UNION SELECT * FROM person --", "asthma\x00", "asthma \\' \" `"])
def test_nothing_of_a_question_gets_into_the_query(clinic_cdm, word):
    plan = plan_cohort(f"patients with gout and {word}", clinic_cdm)
    assert not plan.sql or (not set("'\"`\\;\x00") & set(plan.sql) and "DROP" not in plan.sql and check_query(plan.sql, catalog=clinic_cdm.catalog).ok)


def test_a_database_without_visits_or_ancestors_is_said_so_by_the_check(tmp_path):
    import duckdb

    with duckdb.connect(tmp_path / "small.duckdb") as db:
        db.execute("CREATE TABLE person (person_id INTEGER, gender_concept_id INTEGER, year_of_birth INTEGER)")
        db.execute("CREATE TABLE condition_occurrence (person_id INTEGER, condition_concept_id INTEGER, condition_start_date DATE)")
        db.execute("CREATE TABLE concept AS SELECT 440674 AS concept_id, 'Gout' AS concept_name, 'Condition' AS domain_id, 'SNOMED' AS vocabulary_id, 'Clinical Finding' AS concept_class_id, 'S' AS standard_concept, '90560007' AS concept_code")
        db.execute("INSERT INTO condition_occurrence VALUES (4, 440674, DATE '2015-01-01')")
        db.execute("INSERT INTO person VALUES (4, 8532, 1950), (42, 8507, 1950)")
    with open_omop(tmp_path / "small.duckdb") as small:
        assert found(small, "patients with gout") == [4]
        done = cohort_search("patients with gout after gout", small, lambda *a, **k: pytest.fail("nothing may be searched"))
        assert "the query for the patients stopped" in done.problem and "visit_occurrence" in done.problem


# ---- search


QUESTIONS = [
    "What do notes say about patients with high blood pressure?", "Is pain mentioned in notes of women over 50?", "What was prescribed to men with high cholesterol?",
    "What do notes say about sleep in patients with osteoarthritis after starting naproxen?", "lab results of people taking simvastatin",
    "What do notes say about patients with high blood pressure or asthma but without high cholesterol?",
]  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_passage_is_about_anybody_else(clinic_cdm, index, question):
    done = cohort_search(question, clinic_cdm, index, words=WORDS, k=20)
    assert done.ok and done.hits and not done.relaxed
    cohort = {row[0] for row in done.check.result.rows}
    assert {hit.metadata["person_id"] for hit in done.hits} <= cohort < set(range(1, 41))
    assert done.patients == len(cohort) and {hit.metadata[done.label] for hit in done.hits} <= set(done.keys)


def test_both_sides_of_the_search_are_restricted(clinic_cdm, index):
    done = cohort_search("Is pain mentioned in notes of men over 50?", clinic_cdm, index, k=6)
    hybrid = index._view().hybrid
    for side in (hybrid.store.search(index.encode([done.topic], "query")[0], 50, filters=done.filters), hybrid.lexical.search(done.topic, 50, filters=done.filters)):
        assert side and {hit.metadata["person_id"] for hit in side} <= set(done.keys)


def test_keys_are_bounded_latest_first_and_the_cut_is_said(clinic_cdm, index):
    question = "What do notes say about patients with high cholesterol since starting simvastatin?"
    whole = cohort_search(question, clinic_cdm, index, k=50, limit=10_000)
    cut = cohort_search(question, clinic_cdm, index, k=50, limit=5)
    assert not whole.truncated and cut.truncated and cut.keys == whole.keys[:5] and "latest of a longer list" in str(cut)
    day = dict(rows(clinic_cdm, "SELECT visit_occurrence_id, visit_start_date FROM visit_occurrence"))
    assert [day[k] for k in whole.keys] == sorted((day[k] for k in whole.keys), reverse=True)
    everybody = cohort_search("notes on women over 1 and men over 1", clinic_cdm, index, limit=COHORT_LIMIT)
    assert len(everybody.keys) <= COHORT_LIMIT == 200


def test_an_inferred_date_is_relaxed_once_and_on_record(clinic_cdm, index):
    done = cohort_search("What do notes say about patients with high cholesterol before 1950?", clinic_cdm, index, words=WORDS)
    assert done.hits and done.relaxed == ("table note", "date lt 1950-01-01") and "relaxed" in str(done)
    assert {hit.metadata["person_id"] for hit in done.hits} <= {row[0] for row in done.check.result.rows}
    assert done.filters == {"person_id": {"in": list(done.keys)}}
    strict = cohort_search("What do notes say about patients with high cholesterol before 1950?", clinic_cdm, index, words=WORDS, relax=False)
    assert strict.hits == () and strict.relaxed == () and strict.filters["date"] == {"lt": "1950-01-01"}


def test_an_event_that_leaves_no_visit_is_relaxed_to_its_patients(clinic_cdm):
    asked = []

    def search(question, k, filters):
        asked.append(filters)
        return [] if "visit_occurrence_id" in filters else [Hit("a", "text", 1.0)]

    done = cohort_search("What do notes say about patients with high cholesterol after starting simvastatin?", clinic_cdm, search)
    assert [list(f) for f in asked] == [["visit_occurrence_id"], ["person_id"]] and len(done.hits) == 1 and done.label == "person_id"
    assert set(done.keys) == {row[0] for row in done.check.result.rows} and len(done.relaxed) == 1


def test_an_explicit_filter_is_never_relaxed(clinic_cdm, index):
    asked = []

    def search(question, k, filters):
        asked.append(filters)
        return []

    explicit = {"date": {"lt": "1950-01-01"}, "person_id": {"in": [1, 2, 3]}}
    done = cohort_search("What do notes say about patients with high cholesterol before 2015?", clinic_cdm, search, words=WORDS, filters=explicit)
    assert len(asked) == 2 and done.hits == ()
    assert all(f["date"]["lt"] == "1950-01-01" and set(f["person_id"]["in"]) <= {1, 2, 3} for f in asked)
    only = cohort_search("What do notes say about patients with high cholesterol?", clinic_cdm, index, filters={"person_id": 999})
    assert only.hits == () and only.filters["person_id"]["in"] == []


def test_the_cohort_is_never_relaxed(clinic_cdm):
    asked = []

    def search(question, k, filters):
        asked.append(filters)
        return []

    cohort_search("What do notes say about patients with gout before 2015?", clinic_cdm, search, words=WORDS)
    cohort = set(found(clinic_cdm, "patients with gout"))
    assert len(asked) == 2 and all(set(f["person_id"]["in"]) == cohort for f in asked)


def test_an_empty_cohort_searches_nothing(clinic_cdm):
    done = cohort_search("notes on women under 2", clinic_cdm, lambda *a, **k: pytest.fail("nothing may be searched"))
    assert done.hits == () and "no patient is like that" in done.problem and not done.ok


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("```sql\nDROP TABLE person\n```", "DROP"), ("```sql\nSELECT COUNT(*) AS n FROM person\n```", "no column"), ("```sql\nSELECT person_id FROM patients\n```", "patients"),
        ("I cannot do that.", ""), ("```sql\nSELECT person_id FROM read_csv('/etc/passwd')\n```", "read_csv"), ("```sql\nSELECT person_id; SELECT 1\n```", "statements"),
    ],
)  # fmt: skip
def test_a_query_that_fails_the_check_is_set_aside(clinic_cdm, index, reply, why):
    done = cohort_search("What do notes say about patients with gout?", clinic_cdm, index, model=lambda prompt: reply)
    assert "set aside" in done.notes[0] and why in done.notes[0]
    assert set(done.keys) == set(found(clinic_cdm, "patients with gout")) and done.plan is not None


def test_a_models_query_that_passes_finds_the_patients(clinic_cdm, index):
    asked = []

    def model(prompt):
        asked.append(prompt.prompt)
        return "```sql\nSELECT DISTINCT person_id FROM condition_occurrence WHERE condition_concept_id = 440674 ORDER BY person_id\n```"

    done = cohort_search("What do notes say about sleep in patients with podagra of the big toe?", clinic_cdm, index, model=model)
    assert "List each person_id once" in asked[0] and "podagra" in asked[0]
    assert list(done.keys) == sorted(found(clinic_cdm, "patients with gout")) and done.topic == "What do notes say about sleep" and done.plan is None


def test_a_plan_can_be_given(clinic_cdm, index):
    plan = plan_cohort("patients with gout", clinic_cdm)
    done = cohort_search("whatever was written", clinic_cdm, index, plan=plan)
    assert set(done.keys) == set(found(clinic_cdm, "patients with gout"))


def test_what_the_search_returns_is_kept(clinic_cdm):
    class Result:
        hits = (Hit("a", "x", 1.0), Hit("b", "y", 0.5))
        trace = "the way"

    class Search:
        def search(self, question, *, k=None, filters=None):
            return Result()

    done = cohort_search("notes on patients with gout", clinic_cdm, Search(), k=1)
    assert [hit.id for hit in done.hits] == ["a"] and done.retrieval.trace == "the way"


def test_a_record_search_is_restricted_and_its_trace_kept(clinic_cdm, index):
    from healthrag.retrieval.pipeline import RecordSearch

    with RecordSearch(index, top_k=4) as search:
        done = cohort_search("Is pain mentioned in notes of women over 50?", clinic_cdm, search, words=WORDS, k=4)
    ranked = {row["id"] for row in done.retrieval.trace.rows()}
    everyone = {hit.id: hit.metadata["person_id"] for hit in index._view().hybrid.store.chunks()}
    assert len(done.hits) == 4 and len(ranked) > 4 and {everyone[name] for name in ranked} <= set(done.keys)


def test_a_clause_is_plain_data():
    assert CohortClause("having", "gout") == read_wording("patients with gout").clauses[0]
