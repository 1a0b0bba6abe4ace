"""Concepts in questions: what must be found, what must not, and what is said about each."""

from __future__ import annotations

import csv
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.omop import open_omop
from healthrag.retrieval import Concept, ConceptIndex, concept_index, find_concepts, read_vocabulary, term_key, terms_of
from healthrag.retrieval.concept_names import common_words, lay_terms, word_key

CASES = list(csv.DictReader((Path(__file__).parent / "data" / "concept_cases.csv").open(encoding="utf-8", newline="")))
GI_BLEED, FEMALE, MALE = 192671, 8532, 8507


@pytest.fixture(scope="module")
def index(cdm):
    return concept_index(cdm)


@pytest.fixture
def small(tmp_path):
    """A database with a hierarchy, a mapping, and no rows in most places."""
    path = tmp_path / "small.duckdb"
    with duckdb.connect(path) as con:
        con.execute("CREATE TABLE concept (concept_id INT, concept_name TEXT, domain_id TEXT, vocabulary_id TEXT, "
                    "concept_class_id TEXT, standard_concept TEXT, concept_code TEXT, invalid_reason TEXT)")  # fmt: skip
        con.executemany("INSERT INTO concept VALUES (?, ?, ?, ?, 'Clinical Finding', ?, ?, NULL)", [
            (0, "No matching concept", "Metadata", "None", None, "0"), (10, "Disorder of foot", "Condition", "SNOMED", "S", "1000001"),
            (11, "Bunion", "Condition", "SNOMED", "S", "1000002"), (12, "Hallux valgus", "Condition", "ICD10CM", None, "M20.1"),
            (13, "Flat foot", "Condition", "SNOMED", "S", "1000003"), (14, "Orphan", "Condition", "ICD9CM", None, "734"),
            (20, "year", "Unit", "UCUM", "S", "a"), (21, "Foot bath", "Procedure", "SNOMED", "S", "1000004"),
            (22, "Cold foot", "Condition", "SNOMED", "S", "1000005"),
        ])  # fmt: skip
        con.execute("CREATE TABLE concept_relationship (concept_id_1 INT, concept_id_2 INT, relationship_id TEXT)")
        con.execute("INSERT INTO concept_relationship VALUES (12, 11, 'Maps to'), (14, 999, 'Maps to'), (11, 11, 'Maps to'), (11, 12, 'Mapped from')")
        con.execute("CREATE TABLE concept_ancestor (ancestor_concept_id INT, descendant_concept_id INT)")
        con.execute("INSERT INTO concept_ancestor VALUES (10, 10), (10, 11), (10, 11), (10, 13), (11, 11), (777, 11)")
        con.execute("CREATE TABLE condition_occurrence (condition_occurrence_id INT, person_id INT, condition_concept_id INT)")
        con.execute("INSERT INTO condition_occurrence SELECT i, i, CASE WHEN i <= 5 THEN 11 WHEN i <= 7 THEN 13 ELSE 0 END FROM range(1, 11) t(i)")
        con.execute("CREATE TABLE person (person_id INT, gender_concept_id INT, year_of_birth INT)")
        con.execute("INSERT INTO person SELECT i, 8532, 1950 FROM range(4) t(i)")
    with open_omop(path) as cdm:
        yield cdm


def words_only(cdm, **floors):
    return ConceptIndex(cdm, meaning=False, **floors)


def test_there_are_enough_cases():
    finding = [case for case in CASES if case["concept_ids"]]
    assert len(finding) >= 60 and len(CASES) - len(finding) >= 20 and len({case["phrase"] for case in CASES}) == len(CASES)
    assert {"lay", "spelling", "brand", "nothing", "absent"} <= {case["kind"] for case in CASES}


def test_every_expected_concept_exists(index):
    ids = {int(i) for case in CASES for group in case["concept_ids"].split("&") if group for i in group.split(";")}
    assert ids <= index.vocabulary.entries.keys()


def _right(index, case):
    found = [concept.concept_id for concept in index.find(case["phrase"])]
    wanted = [{int(i) for i in group.split(";")} for group in case["concept_ids"].split("&") if group]
    if case["kind"] == "question":
        return {next(iter(group)) for group in wanted} == set(found)
    return all(set(found[: len(wanted)]) & group for group in wanted) if wanted else not found


@pytest.mark.parametrize("split", ["tuning", "held out"])
def test_recall_and_silence(index, split):
    cases = [case for case in CASES if case["split"] == split]
    right = {case["phrase"]: _right(index, case) for case in cases}
    naming = [right[case["phrase"]] for case in cases if case["concept_ids"]]
    silent = [right[case["phrase"]] for case in cases if case["kind"] == "nothing"]
    absent = [right[case["phrase"]] for case in cases if case["kind"] == "absent"]
    assert sum(naming) / len(naming) >= 0.9 and all(silent) and sum(absent) / len(absent) >= 0.85


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] in ("name", "synonym", "code", "question")], ids=lambda c: c["phrase"])
def test_names_synonyms_codes_and_questions_are_certain(index, case):
    assert _right(index, case)


def test_the_carried_question(cdm):
    found = {c.concept_id: c for c in find_concepts("How many women have a recorded gastrointestinal hemorrhage?", cdm=cdm)}
    assert set(found) == {GI_BLEED, FEMALE}
    assert found[GI_BLEED].rows == {"condition_occurrence.condition_concept_id": 479, "condition_era.condition_concept_id": 479}
    assert found[GI_BLEED].tables == ("condition_occurrence",) and "479 rows in condition_occurrence" in found[GI_BLEED].line
    assert found[FEMALE].matched == "women" and found[FEMALE].how == "lay" and not found[FEMALE].listed
    assert "no row in concept" in found[FEMALE].line and "1373 rows in person.gender_concept_id" in found[FEMALE].line


@pytest.mark.parametrize("word", ["patients", "average", "year", "people", "count", "January", "oldest", "per", "each", "database", "rows"])
def test_everyday_words_find_nothing(index, word):
    assert index.find(word) == []


def test_row_counts_agree_with_the_database(cdm, index):
    counted = dict(cdm.execute("SELECT drug_concept_id, COUNT(*) FROM drug_exposure GROUP BY 1").rows)
    ours = {i: rows["drug_exposure.drug_concept_id"] for i, rows in index.vocabulary.rows.items() if "drug_exposure.drug_concept_id" in rows}
    assert ours == {i: n for i, n in counted.items() if i}
    below = cdm.execute("SELECT COUNT(*) FROM drug_exposure WHERE drug_concept_id IN (SELECT descendant_concept_id FROM "
                        "concept_ancestor WHERE ancestor_concept_id = 1112807) AND drug_concept_id <> 1112807")  # fmt: skip
    assert index.vocabulary.below[1112807]["drug_exposure.drug_concept_id"] == below.rows[0][0]


def test_descendants_count_for_a_concept_without_rows(small):
    (concept,) = words_only(small).find("disorder of foot")
    assert concept.rows == {} and concept.below == {"condition_occurrence.condition_concept_id": 7} and concept.only_below
    assert "0 rows in condition_occurrence.condition_concept_id (7 through concept_ancestor)" in concept.line
    (leaf,) = words_only(small).find("bunion")  # listed as its own descendant, which counts no row twice
    assert leaf.rows == {"condition_occurrence.condition_concept_id": 5} and leaf.below == {} and not leaf.only_below


def test_what_is_not_standard_is_mapped(small):
    index = words_only(small)
    for text in ("hallux valgus", "M20.1"):
        assert [(c.concept_id, c.standard) for c in index.find(text)] == [(11, True)]
    assert [(c.concept_id, c.standard) for c in index.find("orphan")] == [(14, False)]
    assert "not standard" in index.find("orphan")[0].line


def test_used_concepts_come_before_unused(small):
    assert [c.concept_id for c in words_only(small, part_floor=0.2).find("foot")] == [10, 13, 21]


def test_units_are_not_clinical(small):
    assert words_only(small).find("the year of onset") == []


def test_a_domain_restricts(small, index):
    assert [c.concept_id for c in words_only(small, part_floor=0.2).find("foot", "procedure")] == [21]
    assert index.find("women with a gastrointestinal hemorrhage", domain="Gender")[0].concept_id == FEMALE
    for wrong in ("", "Body", "cond"):
        with pytest.raises(ValueError, match="known: "):
            words_only(small).find("foot", wrong)


def test_gender_is_named_where_concept_is_silent(small):
    (women,) = words_only(small).find("women")
    assert (women.concept_id, women.name, women.listed) == (FEMALE, "FEMALE", False)
    assert words_only(small).find("men") == []  # nobody is recorded as 8507


def test_a_database_without_a_vocabulary(tmp_path):
    path = tmp_path / "bare.duckdb"
    with duckdb.connect(path) as con:
        con.execute("CREATE TABLE person (person_id INT, gender_concept_id INT)")
        con.execute("INSERT INTO person VALUES (1, 8507)")
    with open_omop(path) as cdm:
        assert [c.concept_id for c in find_concepts("men with asthma", cdm=cdm)] == [MALE]


def test_a_large_vocabulary_is_read_where_it_is_used(small):
    read = read_vocabulary(small, max_concepts=3)
    assert read.entries.keys() == {10, 11, 12, 13, FEMALE}
    assert ConceptIndex(vocabulary=read, meaning=False).find("hallux valgus")[0].concept_id == 11


def test_meaning_needs_the_floor(small):
    vectors = {"bunion": [1, 0, 0], "sore big toe": [1, 0.2, 0]}

    def embedder(texts):
        return np.array([vectors.get(text, [0, 1, 0] if {"toe", "sore", "big"} & set(text.split()) else [0, 0, 1]) for text in texts])

    found = ConceptIndex(small, embedder=embedder).find("patients with a sore big toe")
    assert [(c.concept_id, c.how, c.matched) for c in found] == [(11, "meaning", "sore big toe")] and 0.9 < found[0].score < 1
    assert ConceptIndex(small, embedder=embedder, meaning_floor=0.999).find("a sore big toe") == []


def test_everyday_words_never_reach_the_encoder(small):
    asked = []

    def embedder(texts):
        asked.extend(texts)
        return np.ones((len(texts), 4))

    ConceptIndex(small, embedder=embedder).find("How many patients are there per year on average?")
    assert asked == []


def test_names_are_embedded_once(small):
    calls = []

    def embedder(texts):
        calls.append(len(texts))
        return np.ones((len(texts), 4), dtype=np.float32)

    index = ConceptIndex(small, embedder=embedder)
    index.find("quinsy")
    index.find("catarrh")
    assert len(calls) == 3 and calls.count(1) == 2


def test_the_index_of_a_cdm_is_built_once(cdm):
    assert concept_index(cdm) is concept_index(cdm)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("Gastrointestinal haemorrhages", "gastrointestinal hemorrhage"), ("vitamin B12", "Vitamin B 12"), ("Ménière", "meniere"),
        ("Alzheimer's disease", "alzheimer disease"), ("Fracture of the ankle", "ankle fractures"), ("Tumour", "tumors"),
        ("without", "no"), ("X-ray", "x ray"), ("DIARRHOEA", "diarrhea"),
    ],
)  # fmt: skip
def test_writings_of_the_same_term(one, two):
    assert term_key(one) == term_key(two) != ()


def test_what_differs_stays_different():
    assert term_key("hepatitis A vaccine") != term_key("hepatitis B vaccine")
    assert term_key("Concussion with loss of consciousness") != term_key("Concussion with no loss of consciousness")
    assert term_key("type 1") != term_key("type 2")


def test_terms_inside_a_name():
    assert ("Celebrex", "synonym") in terms_of("celecoxib 200 MG Oral Capsule [Celebrex]", domain="Drug", is_name=True)
    assert ("creatinine", "synonym") in terms_of("creatinine serum/plasma", domain="Measurement")
    assert list(terms_of("CF - Cystic fibrosis (disorder)")) == [("CF", "synonym"), ("Cystic fibrosis", "synonym")]
    assert {kind for _, kind in terms_of("Random; Serum; TSH")} == {"related"}


def test_lay_terms_are_few_distinct_and_not_everyday():
    said = [term for term, _ in lay_terms()]
    assert len(said) == len(set(said)) < 200
    everyday = {w for w, kind in common_words().items() if kind == "generic"}
    assert {term for term in said if word_key(term) in everyday} == {"hospitalization", "hospitalized"}


def test_a_stem_shared_with_an_everyday_word_is_not_enough(index):
    assert index.find("Which hospital has most patients?") == []
    assert [c.name for c in index.find("How many were hospitalized?")] == ["Inpatient Visit"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=120))
def test_no_text_breaks_it(index, text):
    words = ConceptIndex(vocabulary=index.vocabulary, meaning=False) if not hasattr(index, "_words") else index._words
    index._words = words
    found = words.find(text, k=3)
    assert len(found) <= 3 and all(isinstance(c, Concept) and 0 < c.score <= 1 for c in found)


@settings(max_examples=60, deadline=None)
@given(st.permutations(["asthma", "women", "aspirin", "stroke"]), st.sampled_from([" and ", ", ", " with ", "; not "]))
def test_order_and_joints_do_not_matter(index, words, joint):
    assert {c.concept_id for c in index.find(joint.join(words))} == {317009, FEMALE, 1112807, 381316}


@pytest.mark.parametrize("text", ["", " ", "\0", "'; DROP TABLE concept; --", "(((" * 500, "asthma " * 2000])
def test_hostile_text(index, text):
    assert len(index.find(text)) <= 1


@pytest.mark.parametrize("k", [0, -1, True, 2.0])
def test_k_is_checked(index, k):
    with pytest.raises(ValueError, match="k is"):
        index.find("asthma", k=k)


@pytest.mark.parametrize("name", ["part_floor", "spelling_floor"])
def test_floors_are_shares(index, name):
    with pytest.raises(ValueError, match=name):
        ConceptIndex(vocabulary=index.vocabulary, **{name: 0})


def test_real_data_with_more_vocabulary(project_root):
    path = project_root.parent / "shared" / "data" / "omop" / "omop_real_v54.duckdb"
    if not path.exists():
        pytest.skip("the larger OMOP database is not at hand")
    with open_omop(path) as cdm:
        index = ConceptIndex(cdm, meaning=False)
        assert index.find("patients") == index.find("year") == index.find("average") == []
        (women,) = index.find("women")
        assert women.concept_id == FEMALE and women.listed
        assert index.find("gastrointestinal bleeding")[0].concept_id == GI_BLEED
