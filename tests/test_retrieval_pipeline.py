"""The record search: order of its stages, failures of its parts, time, admission, concurrency, and what the trace says."""

from __future__ import annotations

import hashlib
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.embeddings.checks import DimensionMismatchError
from healthrag.ingestion.documents import LabelledDocument
from healthrag.records import Chunk, Hit
from healthrag.retrieval import HybridIndex, KnowledgeIndex, LexicalIndex
from healthrag.retrieval.admission import ADMISSION_LIMITS, Admission, BusyError, admission_for
from healthrag.retrieval.cut import adaptive_cut, affordable
from healthrag.retrieval.dedupe import dedupe_rows, drop_near_duplicates, near_duplicates, repeated_rows
from healthrag.retrieval.encode import CachedEncoder
from healthrag.retrieval.fulltext import FullTextIndex
from healthrag.retrieval.gate import RECORD_NUMBERS, Gate
from healthrag.retrieval.pipeline import RecordSearch
from healthrag.retrieval.sides import LateError, fuse_lists
from healthrag.retrieval.update import ingest_to_index
from healthrag.storage import LocalVectorStore

DIM = 64


def encode(texts):  # a bag of words: shared words, close vectors
    rows = []
    for text in texts:
        row = np.full(DIM, 1e-3, dtype=np.float32)
        for word in re.findall(r"\w+", text.lower()):
            row[int(hashlib.sha256(word.encode()).hexdigest(), 16) % DIM] += 1
        rows.append(row)
    return np.array(rows)


def row(number, text, patient="PT-1", date="2020-01-01", chunk=0):
    return f"clinic:notes:{number}:{chunk}", Chunk(text, {"source": "clinic", "table": "notes", "row": number, "patient": patient, "date": date, "chunk": chunk})


def filled(rows, lexical=None):
    index = HybridIndex(LocalVectorStore(DIM), lexical if lexical is not None else FullTextIndex(), encode)
    return index.add([chunk for _, chunk in rows], ids=[name for name, _ in rows])


ROWS = [
    row(1, "fever and cough for two days"), row(2, "gastrointestinal bleeding after apixaban", "PT-0004"), row(3, "bleeding ulcer clipped", "PT-00042", "2021-01-01"),
    row(4, "E11.9 diabetes, metformin 500 mg", "PT-4"), row(5, "ankle fracture, cast"), row(6, "no bleeding, no fever", "PT-0004", "2021-06-01"),
]  # fmt: skip


@pytest.fixture
def open_search():
    made = []

    def make(index=None, **options):
        options.setdefault("admission", Admission(99))
        made.append(RecordSearch(index if index is not None else filled(ROWS), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Scorer:
    "A reranker that prefers long texts."

    scale = "sigmoid"

    def __init__(self, work=lambda question, hits: [min(1.0, len(hit.text) / 100) for hit in hits]):
        self.work, self.seen = work, []

    def __call__(self, question, hits):
        self.seen.append((question, [hit.id for hit in hits]))
        return self.work(question, hits)


def fails(*_, **__):
    raise ConnectionError("gone")


# --- the whole way ---------------------------------------------------------------------------------------------------


def test_the_stages_come_in_order(open_search):
    search = open_search(reranker=Scorer(), gate=Gate("sigmoid", 0.1), expand=lambda hits, index: hits, prepare=lambda q, history: _Prepared(q))
    names = [stage.name for stage in search.search("bleeding", filters={"table": "notes"}).trace.stages]
    assert names == ["prepare", "wait", "filter", "encode", "dense", "lexical", "fuse", "rows", "duplicates", "cut", "rerank", "gate", "top", "expand"]


def test_a_search_and_what_it_found_can_be_printed(open_search):
    search = open_search(top_k=2)
    found = search.search("bleeding")
    assert "object at" not in repr(search) and "top_k=2" in repr(search)
    assert str(found).splitlines()[0] == repr(found)
    assert [line.split()[:2] for line in str(found).splitlines()[1:]] == [[f"[{i}]", hit.id] for i, hit in enumerate(found.hits, 1)] != []


@pytest.mark.parametrize("lexical", [FullTextIndex, LexicalIndex])
def test_either_lexical_side_will_do(open_search, lexical):
    found = open_search(filled(ROWS, lexical()), lexicon=["apixaban"]).search("bleeding apixaban", k=3)
    assert found.hits[0].id == "clinic:notes:2:0" and found.degraded == ()


def test_it_finds_what_the_hybrid_index_finds(open_search):
    index = filled(ROWS)
    for question in ("bleeding", "E11.9", "fever cough", "ankle"):
        assert [hit.id for hit in open_search(index, duplicates=0).search(question, k=6)] == [hit.id for hit in index.search(question, 6)]


def test_an_index_of_documents_will_do(open_search):
    index = KnowledgeIndex(store="local", embedder=encode)
    ingest_to_index(index, docs=[LabelledDocument(f"clinic:notes:{n}", "", "", chunk.text, {**chunk.metadata, "kind": "row"}) for n, (_, chunk) in enumerate(ROWS)])
    found = open_search(index).search("gastrointestinal bleeding", k=2, filters={"patient": "PT-0004"})
    assert [hit.metadata["patient"] for hit in found] == ["PT-0004", "PT-0004"]
    assert open_search(index)("ankle", 1)[0].text.startswith("ankle")


@pytest.mark.parametrize("question", ["", "  \n", None, 7])
def test_a_blank_question_is_refused(open_search, question):
    with pytest.raises(ValueError, match="empty"):
        open_search().search(question)


@pytest.mark.parametrize(("options", "said"), [({"k": 0}, "k is"), ({"filters": {"a": {}}}, "filter"), ({"deadline": 0}, "deadline"), ({"deadline": -1.0}, "deadline")])
def test_wrong_arguments_are_errors_and_no_degradation(open_search, options, said):
    with pytest.raises(ValueError, match=said):
        open_search().search("x", **options)


@pytest.mark.parametrize("options", [{"sides": []}, {"sides": ["left"]}, {"fusion": "sum"}, {"top_k": 0}, {"per_side": 0}, {"candidates": 0}, {"deadline": 0}])
def test_wrong_settings_are_refused(options):
    with pytest.raises(ValueError):
        RecordSearch(filled(ROWS), **options)


def test_an_empty_index_finds_nothing(open_search):
    found = open_search(filled([]), gate=Gate("rrf", 0.03)).search("fever")
    assert found.hits == () and found.refused


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1, max_size=80).filter(str.strip))
def test_any_question_is_answered(question):
    with RecordSearch(filled(ROWS), admission=Admission(9)) as search:
        found = search.search(question, filters={"patient": "PT-0004"})
    assert {hit.metadata["patient"] for hit in found} <= {"PT-0004"} and found.degraded == ()


# --- sides -----------------------------------------------------------------------------------------------------------


class Side:
    def __init__(self, work, n=6):
        self.search, self.n = work, n

    def __len__(self):
        return self.n


@pytest.mark.parametrize("broken", ["dense", "lexical"])
def test_one_side_that_fails_is_left_out_and_named(open_search, broken):
    index = filled(ROWS)
    one = HybridIndex(Side(fails), index.lexical, encode) if broken == "dense" else HybridIndex(index.store, Side(fails), encode)
    found = open_search(one).search("bleeding", k=2)
    assert len(found.hits) == 2 and found.degraded == (f"{broken}: ConnectionError: gone",)
    assert [stage.note for stage in found.trace.stages if stage.name == broken] == ["ConnectionError: gone"]


def test_an_encoder_that_fails_leaves_the_words(open_search):
    found = open_search(encoder=fails).search("bleeding", k=2)
    assert len(found.hits) == 2 and found.degraded == ("dense: ConnectionError: gone",)


def test_when_no_side_answers_there_is_an_error(open_search):
    with pytest.raises(RuntimeError, match=r"no side answered \(lexical: ConnectionError: gone; dense: ConnectionError: gone\)|no side answered \(dense.*lexical"):
        open_search(HybridIndex(Side(fails), Side(fails), encode)).search("x")


def test_a_panic_of_an_engine_is_a_failure_of_its_side(open_search):
    class Panic(BaseException):
        pass

    def panics(*_, **__):
        raise Panic("assertion failed")

    index = filled(ROWS)
    assert open_search(HybridIndex(index.store, Side(panics), encode)).search("bleeding").degraded == ("lexical: Panic: assertion failed",)


def test_both_sides_work_at_the_same_time(open_search):
    index, meet = filled(ROWS), threading.Barrier(2, timeout=60)

    def side(one):
        def work(*args, **options):
            meet.wait()  # broken unless the other side is searched meanwhile
            return one.search(*args, **options)

        return work

    both = HybridIndex(Side(side(index.store)), Side(side(index.lexical)), encode)
    assert open_search(both).search("bleeding").degraded == ()


def test_a_late_side_is_left_out_and_keeps_its_slot(open_search):
    index, release, lane = filled(ROWS), threading.Event(), Admission(1, wait=0)
    late = HybridIndex(index.store, Side(lambda *_, **__: release.wait(60) and []), encode)
    search = open_search(late, admission=lane)
    found = search.search("bleeding", deadline=5.0)
    assert found.hits and found.degraded == ("lexical: LateError: not done in time",) and lane.inside == 1
    with pytest.raises(BusyError):
        search.search("bleeding", deadline=5.0)
    release.set()
    while lane.inside:
        time.sleep(0.01)
    assert lane.acquire()() is None


def test_when_everything_is_late_it_is_a_timeout(open_search):
    release = threading.Event()
    slow = lambda *_, **__: release.wait(60) and []
    with pytest.raises(TimeoutError, match="no side answered"):
        open_search(HybridIndex(Side(slow), Side(slow), encode)).search("x", deadline=0.2)
    release.set()


def test_every_wording_is_searched_on_both_sides_and_encoded_in_one_call(open_search):
    calls = []
    search = open_search(encoder=lambda texts: calls.append(list(texts)) or encode(texts))
    found = search.search("blood", variants=["bleeding", "ulcer"])
    assert calls == [["blood", "bleeding", "ulcer"]]
    assert found.trace.lists[:6] == ["dense", "lexical", "dense 2", "lexical 2", "dense 3", "lexical 3"]
    assert found.trace.place("clinic:notes:3:0", "lexical") is None and found.trace.place("clinic:notes:3:0", "lexical 3").rank == 1


def test_scores_mean_the_same_with_more_wordings(open_search):
    search = open_search()
    one, many = search.search("bleeding", k=6), search.search("bleeding", variants=["bleeding", "bleeding"], k=6)
    assert [(hit.id, pytest.approx(hit.score)) for hit in one] == [(hit.id, hit.score) for hit in many]


@pytest.mark.parametrize("fusion", ["rrf", "scores"])
def test_weights_count(open_search, fusion):
    hits = lambda *names: [Hit(name, name, 9.0 - i) for i, name in enumerate(names)]
    lists = {"dense": hits("a", "b", "c"), "lexical": hits("c", "b", "a")}
    assert [hit.id for hit in fuse_lists(lists, fusion=fusion, weights=(3, 1))] == ["a", "b", "c"]
    assert fuse_lists(lists, fusion=fusion, weights=(0, 1))[0].id == "c"
    assert open_search(fusion=fusion, weights=(0.2, 1.0)).search("bleeding").degraded == ()


def test_the_mask_of_an_index_is_applied(open_search):
    index = HybridIndex(LocalVectorStore(DIM), FullTextIndex(), encode, mask=lambda text: text.replace("65", "<num>"))
    index.add([Chunk("older than 65")], ids=["a"])
    assert open_search(index).search("than 65").trace.place("a", "lexical").score > open_search(index).search("than").trace.place("a", "lexical").score


def test_a_generation_that_changes_meanwhile_is_searched_again(tmp_path, open_search):
    writer = KnowledgeIndex(tmp_path / "i", store="local", embedder=encode)
    document = lambda text: [LabelledDocument("clinic:notes:1", "", "", text, {"kind": "row", "row": 1})]
    ingest_to_index(writer, docs=document("old fever"))
    calls = []

    def change(texts):
        calls.append(texts)
        if len(calls) == 1:
            ingest_to_index(writer, docs=document("new fever"))
        return encode(texts)

    found = open_search(KnowledgeIndex(tmp_path / "i", embedder=encode), encoder=change).search("fever")
    assert [hit.text for hit in found] == ["new fever"] and len(calls) == 2 and found.degraded == ()
    assert [stage.name for stage in found.trace.stages].count("fuse") == 1


# --- repetitions and the cut -----------------------------------------------------------------------------------------


def test_repetitions_go_before_the_list_is_cut(open_search):
    windows = [row(1, f"bleeding window {w}", chunk=i) for i, w in enumerate("abcdefgh")]
    others = [row(n, f"bleeding and something else {w}") for n, w in enumerate("pqrs", start=2)]
    found = open_search(filled([*windows, *others]), per_side=50).search("bleeding window", k=5)
    assert len({hit.metadata["row"] for hit in found}) == len(found.hits) == 5


def test_dropping_rows_keeps_the_best_of_each():
    hits = [Hit(f"{i}", f"text {i}", 9.0 - i, metadata={"source": "s", "table": t, "row": r}) for i, (t, r) in enumerate([("a", 1), ("a", 1), ("b", 1), ("a", "1"), ("a", 2)])]
    assert [hit.id for hit in dedupe_rows(hits)] == ["0", "2", "4"] and repeated_rows(hits) == {"1": "0", "3": "0"}


passages = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), st.sampled_from(["same text here", "other text there", "7 mg"])), max_size=12)


@settings(max_examples=60, deadline=None)
@given(passages)
def test_dropping_twice_is_dropping_once_and_leaves_one_of_each(found):
    hits = [Hit(str(i), text, 1.0, metadata={"table": table, "row": number}) for i, (table, number, text) in enumerate(found)]
    for drop in (dedupe_rows, drop_near_duplicates):
        once = drop(hits)
        assert drop(once) == once and [hit for hit in hits if hit in once] == once
        assert bool(once) == bool(hits) and (not hits or once[0] == hits[0])
    assert {(h.metadata["table"], h.metadata["row"]) for h in dedupe_rows(hits)} == {(t, n) for t, n, _ in found}


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        ("Feels well today, no fever at all.", "Feels well today,  no fever at all", True), ("HbA1c 7.1 % in March", "HbA1c 9.1 % in March", False),
        ("patient has a fever and cough today in clinic", "patient has no fever and cough today in clinic", False), ("metformin 500 mg", "metformin 850 mg", False),
        ("on 2020-01-01 seen in clinic", "on 2020-01-02 seen in clinic", False), ("she doesn't smoke at all now", "she does smoke at all now", False), ("", "", True),
    ],
)  # fmt: skip
def test_what_says_the_same(first, second, again):
    hits = [Hit("a", first, 2.0, metadata={"patient": "p"}), Hit("b", second, 1.0, metadata={"patient": "p"})]
    assert near_duplicates(hits, 0.7) == ({"b": "a"} if again else {})
    other = [hits[0], Hit("b", first, 1.0, metadata={"patient": "q"})]
    assert near_duplicates(other, 0.7) == {}  # of another patient it is another fact


scores = st.lists(st.floats(0, 1), max_size=60).map(lambda values: sorted(values, reverse=True))


@settings(max_examples=100, deadline=None)
@given(scores, st.integers(1, 40), st.floats(0, 1))
def test_the_cut_keeps_a_beginning_within_its_bounds(values, top_k, ratio):
    hits = [Hit(str(i), "", score) for i, score in enumerate(values)]
    kept = adaptive_cut(hits, top_k, ratio=ratio)
    assert kept == hits[: len(kept)] and len(kept) >= min(len(hits), max(top_k, 8)) and len(kept) <= max(30, top_k)
    if len(kept) < min(len(hits), max(30, top_k)):
        assert hits[len(kept)].score < ratio * kept[-1].score


@pytest.mark.parametrize(("seconds", "each", "n"), [(None, 1.0, 30), (5.0, None, 30), (5.0, 0.5, 10), (0.0, 0.5, 0), (1e9, 0.5, 30)])
def test_the_cut_keeps_what_there_is_time_for(seconds, each, n):
    assert len(adaptive_cut([Hit(str(i), "", 1.0) for i in range(99)], 6, seconds=seconds, each=each)) == n
    assert affordable(-3.0, 1.0) == 0


# --- reranking, gates, expansion -------------------------------------------------------------------------------------


class _Prepared:
    def __init__(self, *wordings):
        self.standalone, self.variants, self.note = wordings[0], wordings[1:], "made complete"


def test_the_standalone_question_is_searched_and_ranked_by(open_search):
    scorer, seen = Scorer(), []
    search = open_search(reranker=scorer, prepare=lambda q, history: seen.append((q, history)) or _Prepared("bleeding under apixaban", "hemorrhage"))
    found = search.search("and under it?", history=["…"])
    assert seen == [("and under it?", ["…"])] and scorer.seen[0][0] == "bleeding under apixaban" and found.prepared.variants == ("hemorrhage",)
    assert found.question == "and under it?" and "dense 2" in found.trace.lists


def test_the_summary_is_given_to_what_takes_one_and_a_prepared_question_is_used(open_search):
    seen = []

    def prepare(question, *, history, summary):
        seen.append((question, history, summary))
        return _Prepared("bleeding under apixaban")

    assert open_search(prepare=prepare).search("and now?", history=["…"], summary="a patient on apixaban").trace.stages[0].note == "made complete"
    assert seen == [("and now?", ["…"], "a patient on apixaban")]
    search = open_search(prepare=fails)
    assert search.search("and now?", prepare=prepare).prepared.standalone == "bleeding under apixaban" and len(seen) == 2
    ready = _Prepared("bleeding ulcer clipped", "hemorrhage")
    found = search.search("and now?", prepare=ready)
    assert found.prepared is ready and found.degraded == () and "dense 2" in found.trace.lists and [s.name for s in found.trace.stages][:2] == ["prepare", "wait"]


@pytest.mark.parametrize("deadline", [None, 600.0])
def test_preparations_that_block_keep_no_other_search_from_being_answered(open_search, deadline):
    lane, begun, release, found = Admission(1, wait=60), threading.Semaphore(0), threading.Event(), []

    def blocks(question, history):
        begun.release()
        release.wait(60)
        return _Prepared("ankle")

    search = open_search(admission=lane, threads=2)
    threads = [threading.Thread(target=lambda: found.append(search.search("bleeding", prepare=blocks, deadline=deadline))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert all([begun.acquire(timeout=60) for _ in threads]) and (lane.inside, lane.waiting) == (0, 0)
    for prepare in (None, lambda question, history: _Prepared("fever")):
        answered = search.search("fever", prepare=prepare, deadline=deadline)
        assert answered.hits and answered.degraded == () and found == []
    release.set()
    for thread in threads:
        thread.join()
    assert [one.prepared.standalone for one in found] == ["ankle"] * 3


def test_a_preparation_that_is_given_up_keeps_no_slot(open_search):
    lane, release = Admission(1, wait=0), threading.Event()
    search = open_search(admission=lane)
    assert search.search("bleeding", prepare=lambda *_, **__: release.wait(60), deadline=6.0).degraded[0].startswith("prepare: LateError")
    assert search.search("bleeding").hits and not release.is_set()
    release.set()


@pytest.mark.parametrize("part", ["prepare", "reranker", "expand"])
def test_a_part_that_fails_is_left_out_and_named(open_search, part):
    broken = Scorer(fails) if part == "reranker" else fails
    found, plain = open_search(**{part: broken}).search("bleeding", k=3), open_search().search("bleeding", k=3)
    assert found.hits == plain.hits and found.degraded == (f"{'rerank' if part == 'reranker' else part}: ConnectionError: gone",)


@pytest.mark.parametrize("part", ["prepare", "reranker", "expand"])
def test_a_part_that_is_late_is_left_out(open_search, part):
    release = threading.Event()
    slow = lambda *_, **__: release.wait(60)
    found = open_search(**{part: Scorer(slow) if part == "reranker" else slow}).search("bleeding", k=3, deadline=6.0)
    assert len(found.hits) == 3 and [note.partition(":")[0] for note in found.degraded] == ["rerank" if part == "reranker" else part]
    assert "LateError" in found.degraded[0]
    release.set()


def test_a_search_may_have_a_time_of_its_own(open_search):
    release = threading.Event()
    found = open_search(reranker=Scorer(lambda *_: release.wait(60)), deadline=6.0).search("bleeding", k=3)  # whoever calls need not know of it
    assert len(found.hits) == 3 and "LateError" in found.degraded[0]
    release.set()


def test_a_reranker_for_which_there_is_no_time_is_not_asked(open_search):
    scorer = Scorer()
    search = open_search(reranker=scorer)
    search._each = 100.0
    found = search.search("bleeding", k=3, deadline=5)
    assert scorer.seen == [] and found.degraded[0].startswith("rerank:") and found.hits == open_search().search("bleeding", k=3).hits


def test_a_reranker_sees_the_candidates_and_no_more(open_search):
    scorer = Scorer()
    rows = [row(n, f"bleeding case {chr(97 + n % 26)}{n}") for n in range(60)]
    found = open_search(filled(rows), reranker=scorer, candidates=12).search("bleeding", k=4)
    assert len(scorer.seen[0][1]) == 12 and len(found.hits) == 4
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)


@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_a_gate_refuses_or_lets_through(open_search, threshold):
    found = open_search(reranker=Scorer(), gate=Gate("sigmoid", threshold)).search("bleeding")
    assert found.refused == (threshold == 0.9) and bool(found.hits) != found.refused and found.verdict.threshold == threshold


def test_a_refusal_leaves_nothing_to_cite(open_search):
    found = open_search(reranker=Scorer(), gate=Gate("sigmoid", 0.99), expand=lambda hits, index: ROWS).search("bleeding")
    assert found.hits == () and list(found) == [] and found.verdict.hits == () and {p.left for p in found.trace.passages.values()} == {"gate"}


def test_the_gate_for_the_scale_of_the_scores_is_used(open_search):
    gates = [Gate("sigmoid", 0.9), Gate("rrf", 0.001, 0.0)]
    assert open_search(gate=gates).search("bleeding").verdict.scale == "rrf"
    assert open_search(gate=gates, reranker=Scorer()).search("bleeding").verdict.scale == "sigmoid"
    assert open_search(gate=gates, reranker=Scorer(fails)).search("bleeding").verdict.scale == "rrf"


@pytest.mark.parametrize("options", [{}, {"sides": ["dense"]}, {"fusion": "scores"}, {"encoder": fails}])
def test_scores_that_no_gate_was_made_for_are_not_judged(open_search, options):
    gate = Gate("rrf", 0.03) if options else Gate("sigmoid", 0.3)
    found = open_search(gate=gate, **options).search("bleeding")
    assert found.hits and found.verdict is None and any(part.startswith("gate:") for part in found.degraded)


def test_a_gate_may_weigh_what_both_sides_say(open_search):
    weights = (("score", 1.0), ("margin", 1.0), ("lexical", 1.0))
    found = open_search(reranker=Scorer(), gate=Gate("sigmoid", 0.0, 0.0, weights=weights)).search("bleeding", variants=["bleeding ulcer clipped"])
    best = max(place.score for passage in found.trace.passages.values() if (place := passage.places.get("lexical")))  # of the question itself
    assert found.verdict.signals["lexical"] == best and found.verdict.top == pytest.approx(sum(found.verdict.signals.values()))
    ranked = [place.score for passage in found.trace.passages.values() if (place := passage.places.get("reranked"))]
    assert found.verdict.signals["score"] == max(ranked) and found.verdict.signals["margin"] == pytest.approx(max(ranked) - np.median(ranked))
    assert open_search(reranker=Scorer(), gate=Gate("sigmoid", found.verdict.top + 0.01, 0.0, weights=weights)).search("bleeding").refused


def test_a_gate_that_weighs_a_missing_side_judges_nothing(open_search):
    gate = Gate("sigmoid", 0.0, weights=(("lexical", 1.0),))
    found = open_search(reranker=Scorer(), gate=gate, sides=["dense"]).search("bleeding")
    assert found.hits and found.verdict is None and found.degraded == ("gate: it weighs the lexical side, which is missing, so nothing was refused",)
    nothing = open_search(filled(ROWS), reranker=Scorer(), gate=gate).search("bleeding", filters={"patient": "PT-9"})
    assert nothing.refused and nothing.verdict.reason == "nothing was found"


def test_the_tail_is_trimmed(open_search):
    scorer = Scorer(lambda question, hits: [0.9, *([0.05] * (len(hits) - 1))])
    found = open_search(reranker=scorer, gate=Gate("sigmoid", 0.3)).search("bleeding")
    assert len(found.hits) == 1 and {p.left for p in found.trace.passages.values()} == {"", "gate"}


def test_what_expansion_gives_is_the_result(open_search):
    seen = []
    grow = lambda hits, index: seen.append(index.get([hits[0].id])[0].id) or [Hit(h.id, h.text + "!", h.score) for h in hits[:2]]
    found = open_search(expand=grow).search("bleeding", k=3)
    assert [hit.text[-1] for hit in found] == ["!", "!"] and seen == [found.hits[0].id]
    assert [p.why for p in found.trace.passages.values() if p.left == "expand"] == ["no room in the budget"]


def test_passages_are_whole(open_search):
    long = "bleeding " + "word " * 3000
    assert open_search(filled([row(1, long)])).search("bleeding").hits[0].text == long


# --- the trace -------------------------------------------------------------------------------------------------------


def test_the_trace_accounts_for_every_passage(open_search):
    rows = [*ROWS, row(2, "gastrointestinal bleeding after apixaban, second window", "PT-0004", chunk=1), row(9, "bleeding ulcer clipped", "PT-00042")]
    found = open_search(filled(rows), reranker=Scorer(), top_k=2, gate=Gate("sigmoid", 0.01)).search("bleeding ulcer apixaban")
    trace, stayed = found.trace, [p.id for p in found.trace.passages.values() if not p.left]
    assert sorted(stayed) == sorted(hit.id for hit in found) and len(trace.rows()) == len(trace.passages) == len(rows)
    assert all(p.why for p in trace.passages.values() if p.left)
    assert trace.passages["clinic:notes:9:0"].why == "says the same as clinic:notes:3:0"
    assert all(0 < stage.seconds <= trace.seconds for stage in trace.stages) and trace.stages[-1].kept == len(found)
    for name in trace.lists:
        ranks = sorted(p.places[name].rank for p in trace.passages.values() if name in p.places)
        assert ranks == list(range(1, len(ranks) + 1))
    for hit, place in zip(found, (trace.place(hit.id, "final") for hit in found), strict=True):
        assert place.score == hit.score


@pytest.mark.parametrize("lexical", [FullTextIndex, LexicalIndex])
def test_the_trace_says_what_a_filter_lets_through(open_search, lexical):
    found = open_search(filled(ROWS, lexical())).search("bleeding", filters={"patient": "PT-0004", "date": {"gte": "2021-01-01"}})
    (stage,) = [stage for stage in found.trace.stages if stage.name == "filter"]
    assert (stage.given, stage.kept) == (6, 1) and stage.note == "patient in ['PT-0004'] and date gte '2021-01-01'" and [hit.metadata["row"] for hit in found] == [6]
    nothing = open_search(filled(ROWS, lexical())).search("bleeding", filters={"patient": "PT-000"})
    assert [stage.kept for stage in nothing.trace.stages if stage.name == "filter"] == [0] and nothing.hits == ()
    assert "filter" not in [stage.name for stage in open_search(filled(ROWS)).search("bleeding").trace.stages]


class Uncounted:
    "A full-text side that can search, and cannot count."

    def __init__(self, lexical, count, search=None):
        self.count, self.search, self.get, self.n = count, search or lexical.search, lexical.get, len(lexical)

    def __len__(self):
        return self.n


class Panic(BaseException):
    pass


def panics(*_, **__):
    raise Panic("assertion failed")


@pytest.mark.parametrize(("sides", "degraded"), [(("dense",), ()), (("dense", "lexical"), ("lexical: ConnectionError: gone",))])
@pytest.mark.parametrize("deadline", [None, 600.0])
def test_a_filter_does_not_make_a_failing_side_fatal(open_search, sides, degraded, deadline):
    index = filled(ROWS)
    one = HybridIndex(index.store, Uncounted(index.lexical, fails, fails), encode)
    found = open_search(one, sides=sides).search("bleeding", filters={"patient": "PT-0004"}, deadline=deadline)
    assert sorted(hit.metadata["row"] for hit in found) == [2, 6] and found.degraded == degraded
    (stage,) = [stage for stage in found.trace.stages if stage.name == "filter"]
    assert (stage.given, stage.kept, stage.note) == (6, 6, "patient in ['PT-0004'] (not counted: ConnectionError: gone)")


def test_a_filter_that_cannot_be_counted_is_applied_all_the_same(open_search):
    index, release, lane = filled(ROWS), threading.Event(), Admission(1, wait=0)
    note = lambda found: [stage.note for stage in found.trace.stages if stage.name == "filter"]
    ask = lambda count, **options: open_search(HybridIndex(index.store, Uncounted(index.lexical, count), encode), admission=lane).search("bleeding", filters={"table": "notes"}, **options)
    assert note(ask(panics)) == ["table in ['notes'] (not counted: Panic: assertion failed)"] and lane.inside == 0
    late = ask(lambda _: release.wait(60), deadline=12.0)
    assert note(late) == ["table in ['notes'] (not counted: LateError: not done in time)"] and late.hits and lane.inside == 1  # it is still being counted
    release.set()


def test_the_trace_says_what_was_left_out_and_why(open_search):
    notes = lambda found: {stage.name: stage.note for stage in found.trace.stages if stage.name in ("rerank", "gate")}
    assert notes(open_search().search("bleeding")) == {"rerank": "left out: there is none", "gate": "left out: there is none"}
    assert notes(open_search(notes={"rerank": "no weights"}).search("bleeding"))["rerank"] == "left out: no weights"
    assert notes(open_search(reranker=Scorer(fails), gate=Gate("sigmoid", 0.1)).search("bleeding")) == {
        "rerank": "left out: ConnectionError: gone", "gate": "left out: there is none for rrf scores",
    }  # fmt: skip
    hurried = open_search(reranker=Scorer())
    hurried._each = 100.0
    assert "s a passage are needed" in notes(hurried.search("bleeding", deadline=5))["rerank"]


def test_the_trace_tells_the_wait_for_a_slot(open_search):
    lane = Admission(1, wait=60)
    search, leave, found = open_search(admission=lane), lane.acquire(), []
    thread = threading.Thread(target=lambda: found.append(search.search("bleeding")))
    thread.start()
    while not lane.waiting:
        assert thread.is_alive()
        time.sleep(0.001)
    leave()
    thread.join()
    stage = found[0].trace.stages[0]
    assert (stage.name, stage.given, stage.kept, stage.note) == ("wait", 1, 1, "for one of 1 slots") and 0 < stage.seconds < found[0].trace.seconds


def test_passages_about_another_record_are_no_answer(open_search):
    gate = Gate("sigmoid", 0.0, 0.0, required=RECORD_NUMBERS)
    found = open_search(reranker=Scorer(), gate=gate).search("bleeding of PT-0004")
    assert "PT-00042" not in {hit.metadata["patient"] for hit in found} and "PT-0004" in {hit.metadata["patient"] for hit in found}
    assert found.trace.passages["clinic:notes:3:0"].why == "is about PT-00042"
    assert open_search(reranker=Scorer(), gate=gate).search("bleeding of PT-0005").verdict.missing == ("PT-0005",)
    assert "PT-00042" in {hit.metadata["patient"] for hit in open_search(reranker=Scorer(), gate=Gate("sigmoid", 0.0, 0.0)).search("bleeding of PT-0004")}


def test_trace_and_result_show_themselves(open_search):
    found = open_search(filled([row("<b>", "fever <script>")]), gate=Gate("rrf", 0.5)).search("fever <i>")
    for shown in (found._repr_html_(), found.trace._repr_html_(), found.trace.figure().svg):
        assert "<script>" not in shown and "<i>" not in shown and "<b>:" not in shown
    assert "refused" in repr(found)


# --- encoding --------------------------------------------------------------------------------------------------------


def test_a_text_is_encoded_once_and_as_it_is():
    calls = []
    encoder = CachedEncoder(lambda texts: calls.append(list(texts)) or encode(texts), name="bag")
    first = encoder(["Metformin", "metformin", " metformin", "Metformin"])
    assert calls == [["Metformin", "metformin", " metformin"]] and np.array_equal(first, encode(["Metformin", "metformin", " metformin", "Metformin"]))
    encoder(["metformin", "new"])
    assert calls[1:] == [["new"]] and encoder.counts.hits == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.text(max_size=3), max_size=5), max_size=8), st.integers(0, 4))
def test_a_cache_changes_no_vector(batches, size):
    encoder = CachedEncoder(encode, name="bag", size=size)
    for texts in batches:
        rows = encoder(texts)
        assert np.array_equal(rows, encode(texts) if texts else np.empty((0, encoder.dim)))
        rows += 1  # a copy
    assert len(encoder) <= size


def test_threads_share_one_call_for_the_same_text():
    calls, started, go = [], threading.Event(), threading.Event()

    def slow(texts):
        calls.append(list(texts))
        started.set()
        go.wait(60)
        return encode(texts)

    encoder, out = CachedEncoder(slow, name="bag"), []
    threads = [threading.Thread(target=lambda: out.append(encoder(["fever"]))) for _ in range(5)]
    for thread in threads:
        thread.start()
    started.wait(60)
    go.set()
    for thread in threads:
        thread.join()
    assert calls == [["fever"]] and len(out) == 5


def test_an_encoder_that_changes_its_width_is_an_error():
    widths = iter([3, 4])
    encoder = CachedEncoder(lambda texts: np.ones((len(texts), next(widths))), name="m")
    encoder(["a"])
    with pytest.raises(DimensionMismatchError, match="expected"):
        encoder(["b"])
    assert encoder(["a"]).shape == (1, 3)


def test_a_failed_call_is_not_remembered():
    answers = iter([ConnectionError("down"), None])

    def flaky(texts):
        if error := next(answers):
            raise error
        return encode(texts)

    encoder = CachedEncoder(flaky, name="m")
    with pytest.raises(ConnectionError):
        encoder(["a"])
    assert encoder(["a"]).shape == (1, DIM)


# --- admission -------------------------------------------------------------------------------------------------------


def test_no_more_are_inside_than_there_is_room_for():
    lane, most, lock = Admission(3, wait=60), [], threading.Lock()

    def work():
        with lane.enter("test"):
            with lock:
                most.append(lane.inside)
            time.sleep(0.002)

    threads = [threading.Thread(target=work) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 3 and len(most) == 30 and (lane.inside, lane.waiting) == (0, 0)


def test_who_waits_in_vain_is_told_when_to_come_again():
    lane = Admission(1, wait=0.05)
    with lane.enter("retrieval"):
        with pytest.raises(BusyError, match=r"1 of 1 slots for retrieval.*try again in about \d+ s") as error:
            lane.acquire("retrieval")
    assert error.value.retry_after >= 1 and isinstance(error.value, RuntimeError) and (lane.inside, lane.waiting) == (0, 0)
    with lane:
        assert lane.inside == 1


def test_a_full_queue_refuses_at_once():
    lane = Admission(1, wait=60, queue=1)
    leave = lane.acquire()
    waiter = threading.Thread(target=lambda: lane.acquire()())
    waiter.start()
    while not lane.waiting:
        assert waiter.is_alive()
        time.sleep(0.001)
    with pytest.raises(BusyError, match="no room in the queue"):
        lane.acquire()
    leave()
    waiter.join()
    assert lane.inside == 0


def test_a_slot_is_given_back_when_the_work_fails_and_only_once():
    lane = Admission(1, wait=0)
    with pytest.raises(KeyError), lane.enter():
        raise KeyError("x")
    leave = lane.acquire()
    leave()
    leave()
    assert lane.inside == 0


def test_limits_are_the_reference_systems():
    assert {name: (lane["limit"], lane["wait"]) for name, lane in ADMISSION_LIMITS.items()} == {"retrieval": (4, 2.0), "generation": (1, 300.0)}
    assert admission_for("generation").limit == 1
    with pytest.raises(ValueError, match="known"):
        admission_for("lunch")


def test_many_searches_at_once_are_answered_or_told_that_it_is_busy():
    index, lane, answers = filled(ROWS), Admission(2, wait=0.05, queue=3), []
    with RecordSearch(index, admission=lane) as search:

        def ask():
            try:
                answers.append(len(search.search("bleeding", k=2).hits))
            except BusyError:
                answers.append("busy")

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 40 and set(answers) <= {2, "busy"} and 2 in answers and lane.inside == 0


def test_a_late_error_is_a_timeout():
    assert issubclass(LateError, TimeoutError)


# --- several wordings, one pass --------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 9), st.sampled_from(["cosine", "dot", "l2"]), st.sampled_from([None, {"a": 1}, {"a": {"in": [0, 1]}}, {"a": 9}]))
def test_several_vectors_at_once_find_what_each_finds(n, m, k, metric, filters):
    rng = np.random.default_rng(n * 100 + m)
    store = LocalVectorStore(5, metric=metric)
    rows = rng.integers(-3, 4, (n, 5)).astype(np.float32)  # many ties
    store.add(rows, [f"{i}" for i in range(n)], ids=[f"{i:03}" for i in range(n)], metadata=[{"a": i % 3} for i in range(n)])
    queries = rng.integers(-3, 4, (m, 5)).astype(np.float32)
    assert store.search_many(queries, k, filters=filters) == [store.search(query, k, filters=filters) for query in queries]


def test_several_vectors_at_once_are_checked():
    store = LocalVectorStore(3).add(np.ones((1, 3)), ["a"])
    for wrong in ({"k": 0}, {"filters": {"a": {}}}):
        with pytest.raises(ValueError):
            store.search_many(np.ones((2, 3)), **wrong)
    with pytest.raises(DimensionMismatchError):
        store.search_many(np.ones((2, 4)))
    assert LocalVectorStore(3).search_many(np.ones((2, 3))) == [[], []]


@pytest.mark.parametrize("one_pass", [True, False])
def test_wordings_find_the_same_with_and_without_one_pass(open_search, one_pass):
    index = filled(ROWS)
    if not one_pass:
        index.store.one_pass = False
    found = open_search(index, duplicates=0).search("bleeding", variants=["fever", "ankle"], k=6)
    for i, wording in enumerate(["bleeding", "fever", "ankle"]):
        name = "dense" if i == 0 else f"dense {i + 1}"
        places = sorted((p.places[name].rank, p.id) for p in found.trace.passages.values() if name in p.places)
        assert [one for _, one in places] == [hit.id for hit in index.store.search(encode([wording])[0], 50)]


def test_one_pass_that_fails_leaves_the_words(open_search):
    index = filled(ROWS)
    index.store.search_many = fails
    found = open_search(index).search("bleeding", variants=["fever"])
    assert found.hits and found.degraded == ("dense: ConnectionError: gone", "dense 2: ConnectionError: gone")
