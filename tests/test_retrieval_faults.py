"""Faults that the reference system for hybrid record search has, stage by stage; each test shows that one is not here.

Encoding, search, filters, fusion, repetitions, the cut, admission and the pipeline; rows and ranking are in test_retrieval_faults_*.py.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from healthrag.embeddings.checks import DimensionMismatchError
from healthrag.records import Chunk, Hit
from healthrag.retrieval import HybridIndex, LexicalIndex, rrf
from healthrag.retrieval.admission import Admission, BusyError
from healthrag.retrieval.cut import adaptive_cut
from healthrag.retrieval.dedupe import dedupe_rows
from healthrag.retrieval.encode import CachedEncoder
from healthrag.retrieval.exact_terms import exact_terms
from healthrag.retrieval.fulltext import FullTextIndex
from healthrag.retrieval.fuse import fuse_scores
from healthrag.retrieval.gate import Gate, default_gate
from healthrag.retrieval.pipeline import RecordSearch
from healthrag.storage import LocalVectorStore

WORDS = ["fever", "cough", "bleeding", "apixaban", "metformin", "diabetes", "e11.9", "hiv", "ankle", "ulcer"]


def encode(texts):  # one place a word; texts without a known word lie apart
    return np.array([[*(text.lower().count(word) for word in WORDS), 0.01] for text in texts], dtype=np.float32)


def index_of(rows, lexical=None):
    "rows: (id, text, metadata)"
    index = HybridIndex(LocalVectorStore(len(WORDS) + 1), lexical if lexical is not None else FullTextIndex(), encode)
    return index.add([Chunk(text, metadata) for _, text, metadata in rows], ids=[name for name, _, _ in rows])


def search_of(rows, **options):
    return RecordSearch(index_of(rows), admission=Admission(99), **options)


def hits(*scores, **metadata):
    return [Hit(f"{i:02}", f"text {i}", score, metadata=dict(metadata)) for i, score in enumerate(scores)]


def gone(*_, **__):
    raise ConnectionError("gone")


# --- encoding --------------------------------------------------------------------------------------------------------


def test_encoding_does_not_lower_case_what_is_embedded():
    seen = []
    CachedEncoder(lambda texts: seen.extend(texts) or encode(texts), name="m")(["HIV in Ménière"])
    assert seen == ["HIV in Ménière"]


def test_encoding_does_not_mix_texts_that_differ_in_case_or_space():
    encoder = CachedEncoder(lambda texts: np.array([[len(t), t[0] == "A"] for t in texts], dtype=np.float32), name="m")
    assert len({tuple(row) for row in encoder(["A", "a", " a", "A "])}) == 4


def test_encoding_asks_once_for_all_that_is_missing():
    calls = []
    encoder = CachedEncoder(lambda texts: calls.append(len(texts)) or encode(texts), name="m")
    encoder(["a", "b", "c", "a"])
    assert calls == [3]


def test_encoding_refuses_vectors_of_another_width():
    widths = iter((3, 4))
    encoder = CachedEncoder(lambda texts: np.ones((len(texts), next(widths))), name="m")
    encoder(["a"])
    with pytest.raises(DimensionMismatchError):
        encoder(["b"])


# --- exact terms -----------------------------------------------------------------------------------------------------


def test_exact_terms_do_not_become_mandatory():
    index = FullTextIndex().add(["diabetes without a code", "E11.9"], ids=["words", "code"])
    assert {hit.id for hit in index.search('diabetes E11.9 "not in any record" K92.2')} == {"words", "code"}


def test_exact_terms_do_not_stand_before_the_query_and_change_it():
    index = FullTextIndex(boost=1.0).add(["diabetes E11.9", "diabetes"], ids=["a", "b"])
    assert [(hit.id, hit.score) for hit in index.search("diabetes E11.9", exact=[])] == [(hit.id, hit.score) for hit in index.search("diabetes E11.9")]


@pytest.mark.parametrize("written", ["metformin", "Metformin", "METFORMIN"])
def test_exact_terms_know_a_drug_in_any_case(written):
    assert [(t.text, t.kind) for t in exact_terms(f"on {written} since May", ["metformin"])] == [(written, "drug")]


@pytest.mark.parametrize("text", ["E11.9", "e11.9", "K92", "4548-4", "73211009", "RxNorm 6809", "0002-8215-01", "500 mg", "B12"])
def test_exact_terms_know_more_than_upper_case_icd_codes(text):
    assert exact_terms(f"about {text} please")


def test_exact_terms_do_not_take_shouting_for_drugs():
    assert exact_terms("WHAT DOES THE PATIENT TAKE") == ()


def test_exact_terms_do_not_take_two_apostrophes_for_a_quotation():
    assert exact_terms("the patient's notes and the doctor's letters") == ()


def test_short_abbreviations_are_searched_although_they_are_no_exact_term():
    assert [hit.id for hit in FullTextIndex().add(["HIV negative", "influenza"], ids=["a", "b"]).search("HIV")] == ["a"]


def test_the_full_text_engine_does_not_drop_digits():
    index = FullTextIndex().add(["B12", "COVID-19", "E11.9", "10 mg"], ids=["b12", "covid", "icd", "dose"])
    assert [index.search(query)[0].id for query in ("B12", "COVID-19", "E11.9", "10 mg")] == ["b12", "covid", "icd", "dose"]


# --- filters ---------------------------------------------------------------------------------------------------------


PATIENTS = [("a", "bleeding", {"patient": "PT-0004"}), ("b", "bleeding", {"patient": "PT-00042"}), ("c", "bleeding", {"patient": "XPT-0004"})]


def test_a_patient_key_is_not_a_substring():
    with search_of(PATIENTS, duplicates=0) as search:
        assert [hit.id for hit in search.search("bleeding", filters={"patient": "PT-0004"})] == ["a"]


def test_a_filter_is_not_applied_after_the_best_fifty():
    rows = [(f"{i:04}", "bleeding bleeding bleeding", {"patient": "many"}) for i in range(400)]
    rows += [(f"z{i}", f"a little bleeding {word}", {"patient": "few"}) for i, word in enumerate(WORDS)]
    with search_of(rows, duplicates=0) as search:
        found = search.search("bleeding", k=10, filters={"patient": "few"})
    assert len(found.hits) == 10 and found.trace.lists[:2] == ["dense", "lexical"]
    for side in ("dense", "lexical"):
        assert {p.places[side].rank for p in found.trace.passages.values() if side in p.places} == set(range(1, 11))  # no gaps


def test_a_filter_is_applied_although_nobody_calls_it_explicit():
    with search_of(PATIENTS) as search:
        assert [hit.id for hit in search("bleeding", filters={"patient": ["PT-00042"]})] == ["b"]


def test_a_filter_that_lets_nothing_through_is_not_relaxed():
    with search_of(PATIENTS) as search:
        found = search.search("bleeding", filters={"patient": "PT-9"})
    assert found.hits == () and found.degraded == ()


def test_metadata_that_is_stored_is_also_filtered_on_both_sides():
    rows = [("a", "fever", {"date": "2020-01-01", "table": "labs", "n": 1}), ("b", "fever", {"date": "2021-01-01", "table": "notes", "n": 2}), ("c", "fever", {})]
    filters = [{"date": {"gte": "2020-06-01"}}, {"table": "notes"}, {"n": {"gt": 1}}]
    index = index_of(rows)
    for wanted in filters:
        assert [h.id for h in index.store.search(encode(["fever"])[0], 9, filters=wanted)] == ["b"] == [h.id for h in index.lexical.search("fever", 9, filters=wanted)]


# --- fusion ----------------------------------------------------------------------------------------------------------


def test_vector_scores_and_text_scores_are_not_compared():
    lists = [[("a", 0.9), ("b", 0.8)], [("b", 900.0), ("a", 100.0)]]
    assert fuse_scores(lists) == fuse_scores([lists[0], [(name, score / 1000) for name, score in lists[1]]])
    assert rrf([[name for name, _ in one] for one in lists]) == rrf([["a", "b"], ["b", "a"]])


def test_a_passage_gets_nothing_from_a_side_that_did_not_return_it():
    assert dict(rrf([["a"], ["b"]])) == {"a": 1 / 61, "b": 1 / 61} and dict(fuse_scores([[("a", 5.0)], [("b", 2.0)]])) == {"a": 1.0, "b": 1.0}


def test_fused_ties_are_not_left_to_chance():
    assert [name for name, _ in rrf([["b", "a"], ["a", "b"]])] == ["a", "b"]
    assert [name for name, _ in rrf([["z"], ["y"], ["x"]])] == ["x", "y", "z"]


def test_more_wordings_do_not_move_the_scale_of_the_scores():
    with search_of(PATIENTS, gate=Gate("rrf", 0.0325, 0.0)) as search:
        few, many = search.search("bleeding"), search.search("bleeding", variants=["bleeding", "bleeding"])
    assert few.verdict.top == pytest.approx(many.verdict.top) and few.hits[0].score <= 2 / 61 + 1e-12


# --- repetitions and the cut -----------------------------------------------------------------------------------------


def test_rows_are_not_dropped_after_the_cut():
    rows = [(f"r1:{i}", f"bleeding {word}", {"source": "s", "table": "t", "row": 1}) for i, word in enumerate(WORDS)]
    rows += [(f"r{n}:0", f"ulcer and bleeding {WORDS[n]}", {"source": "s", "table": "t", "row": n}) for n in range(2, 9)]
    with search_of(rows, top_k=6) as search:
        assert len(search.search("bleeding")) == 6


def test_rows_of_two_tables_or_sources_are_not_one_row():
    same = [Hit(f"{i}", "x", 1.0, metadata={"source": s, "table": t, "row": 1}) for i, (s, t) in enumerate([("a", "x"), ("a", "y"), ("b", "x")])]
    assert dedupe_rows(same) == same


def test_passages_are_not_repetitions_because_they_begin_alike():  # the second reference system compared the first 100 characters
    head = "Seen in the outpatient clinic of internal medicine on the ward for a routine follow-up after discharge. "
    with search_of([("a", head + "Bleeding stopped.", {"patient": "p"}), ("b", head + "Ankle fracture found, cast, no weight for six weeks.", {"patient": "p"})]) as search:
        assert len(search.search("bleeding ankle").hits) == 2


def test_a_copied_note_does_not_fill_the_list():
    copy = "Feels well, bleeding stopped, continues apixaban as before, next visit planned."
    with search_of([(f"{i}", copy, {"patient": "p", "row": i}) for i in range(9)], top_k=6) as search:
        assert len(search.search("bleeding apixaban").hits) == 1


def test_the_cut_does_not_come_before_the_eighth():
    assert len(adaptive_cut(hits(1, 0.1, *[0.1] * 20), 3)) == 22 and len(adaptive_cut(hits(*[1] * 8, 0.1, *[0.1] * 20), 3)) == 8


def test_the_cut_is_bounded_and_never_below_what_was_asked_for():
    assert len(adaptive_cut(hits(*[1.0] * 99), 6)) == 30 and len(adaptive_cut(hits(*[1.0] * 99), 40)) == 40


# --- gates in the pipeline -------------------------------------------------------------------------------------------


class Reranks:
    scale = "sigmoid"

    def __init__(self, score=0.2):
        self.score = score

    def __call__(self, question, found):
        return [self.score] * len(found)


def test_a_pointed_question_is_not_refused_because_the_reranker_is_off():
    with search_of(PATIENTS, gate=default_gate("sigmoid")) as search:
        found = search.search("Did PT-0004 have bleeding?")
    assert found.hits and found.verdict is None and found.degraded  # and it says so


def test_a_gate_is_not_set_against_a_list_that_half_the_system_made():
    with search_of(PATIENTS, gate=default_gate("rrf"), encoder=gone) as search:
        found = search.search("Did PT-0004 have bleeding?")
    assert found.hits and found.verdict is None and len(found.degraded) == 2


def test_a_refusal_does_not_leave_passages_below_the_gate_as_citations():
    with search_of(PATIENTS, gate=default_gate("sigmoid"), reranker=Reranks()) as search:
        found = search.search("Did PT-0004 have bleeding?")
    assert found.refused and found.hits == () and found.verdict.hits == ()


def test_no_budget_changes_what_the_gate_decides():
    with search_of(PATIENTS, gate=Gate("sigmoid", 0.1), reranker=Reranks(), expand=lambda found, index: [], duplicates=0) as search:
        found = search.search("bleeding")
    assert found.hits == () and not found.refused and found.verdict.top == 0.2


# --- failure and load ------------------------------------------------------------------------------------------------


def test_one_failing_side_does_not_fail_the_search():
    index = index_of(PATIENTS)
    index.lexical.search = gone
    with RecordSearch(index, admission=Admission(9)) as search:
        found = search.search("bleeding")
    assert found.hits and found.degraded == ("lexical: ConnectionError: gone",)


def test_a_hybrid_search_is_not_one_operation_that_hides_its_halves():
    with search_of(PATIENTS) as search:
        names = [stage.name for stage in search.search("bleeding").trace.stages]
    assert {"encode", "dense", "lexical", "fuse"} <= set(names)


def test_both_sides_failing_is_not_an_empty_answer():
    index = index_of(PATIENTS)
    index.lexical.search = gone
    with RecordSearch(index, encoder=gone, admission=Admission(9)) as search, pytest.raises(RuntimeError, match="no side answered"):
        search.search("bleeding")


def test_who_came_first_is_served_first():
    lane, order = Admission(1, wait=60), []
    leave, threads = lane.acquire(), []
    for number in range(5):
        threads.append(threading.Thread(target=lambda n=number: [lane.acquire(), order.append(n)][0]()))
        threads[-1].start()
        while lane.waiting <= number:
            pass
    leave()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_a_crowd_is_told_to_come_again_and_nothing_collapses():
    lane = Admission(1, wait=0)
    with search_of(PATIENTS) as search:
        search.admission = lane
        with lane.enter("retrieval"), pytest.raises(BusyError, match="try again in about"):
            search.search("bleeding")
        assert search.search("bleeding").hits


def test_a_reranker_does_not_take_longer_than_there_is_time():
    release = threading.Event()

    class Slow(Reranks):
        def __call__(self, question, found):
            release.wait(60)
            return super().__call__(question, found)

    with search_of(PATIENTS, reranker=Slow()) as search:
        found = search.search("bleeding", deadline=5.0)
        release.set()
    assert found.hits and found.degraded == ("rerank: LateError: not done in time",)


def test_the_reranker_is_asked_about_the_complete_question():
    seen = []

    class Prepared:
        standalone, variants, note = "bleeding of PT-0004", ("hemorrhage",), ""

    class Sees(Reranks):
        def __call__(self, question, found):
            seen.append(question)
            return super().__call__(question, found)

    with search_of(PATIENTS, reranker=Sees(), prepare=lambda *_, **__: Prepared()) as search:
        search.search("and what about her?")
    assert seen == ["bleeding of PT-0004"]


# --- the index -------------------------------------------------------------------------------------------------------


def test_deleted_passages_are_not_found_on_either_side():
    index = index_of(PATIENTS)
    assert index.delete(["a"]) == 1
    with RecordSearch(index, admission=Admission(9), duplicates=0) as search:
        assert {hit.id for hit in search.search("bleeding")} == {"b", "c"}


def test_a_change_does_not_rebuild_the_full_text():
    made = []
    index = FullTextIndex(tokenizer=lambda text: made.append(text) or text.split()).add([f"fever {i}" for i in range(50)], ids=[str(i) for i in range(50)])
    made.clear()
    index.add(["cough"], ids=["new"])
    index.delete(["3"])
    index.search("cough")
    assert made == ["cough", "cough"]  # the new text, and the question


def test_the_retriever_of_worked_examples_is_as_it_was():
    from healthrag.retrieval.hybrid import hybrid_index

    assert isinstance(hybrid_index("local", encode).lexical, LexicalIndex)
