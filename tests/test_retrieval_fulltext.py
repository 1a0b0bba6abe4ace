"""Full text that changes while it is read: words, filters that mean what the stores mean, hostile text, deletion, crashes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.records import Chunk
from healthrag.retrieval import LexicalIndex, tokenize
from healthrag.retrieval.exact_terms import ExactTerm, TermLexicon, exact_terms
from healthrag.retrieval.fulltext import FULLTEXT_HEADER, FullTextIndex, copy_fulltext
from healthrag.retrieval.textview import MOST_QUERY_TOKENS
from healthrag.storage.filters import compile_filter

WORDS = ["fever", "cough", "e11.9", "b12", "covid-19", "10", "mg", "aspirin", "no", "bleeding"]


@pytest.fixture(params=["memory", "folder"])
def make(request, tmp_path):
    made = iter(range(99))
    return lambda **options: FullTextIndex(None if request.param == "memory" else tmp_path / str(next(made)), **options)


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found", "passed_over"),
    [
        ("diabetes, E11.9", "E11.9", "E11.95"), ("low B12", "b12", "B1"), ("aspirin 10 mg daily", "10 mg", "110 mg"),
        ("aspirin 10mg daily", "10 MG", "10 ml"), ("COVID-19 positive", "covid-19", "covid-1"), ("LOINC 718-7", "718-7", "718-77"),
        ("seen as PT-00042", "PT-00042", "PT-0004"), ("0.09 MG/ML", "0.09 mg/ml", "0.0"), ("HbA1c 7.1", "hba1c", "hba1"),
        ("消化管出血", "出血", "血管"), ("Ménière", "meniere", "menie"),
    ],
)  # fmt: skip
def test_exact_things_are_found_whole(make, text, found, passed_over):
    index = make().add([text], ids=["a"])
    whole = tokenize(found)[0]
    assert index.search(found)[0].id == "a" and whole in tokenize(text)
    assert tokenize(passed_over)[0] not in tokenize(text)
    assert index.search(found)[0].score > max([hit.score for hit in index.search(passed_over)], default=0.0)


def test_a_longer_code_never_outranks_the_code_itself(make):
    index = make().add(["E11.95 with coma", "E11.9 alone", "E11 in general"], ids=["long", "right", "short"])
    assert index.search("E11.9")[0].id == "right"


def test_what_is_searched_may_differ_from_what_is_shown(make):
    index = make().add([Chunk("shown")], ids=["a"], texts=["searched"])
    assert index.search("shown") == [] and index.search("searched")[0].text == "shown"


documents = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(documents, st.lists(st.sampled_from([*WORDS, "zebra"]), max_size=4).map(" ".join))
def test_finds_what_the_other_engine_finds(texts, query):
    ids = [f"d{i}" for i in range(len(texts))]
    new, old = FullTextIndex().add(texts, ids=ids), LexicalIndex().add(texts, ids=ids)
    hits = new.search(query, 9)
    assert {hit.id for hit in hits} == {hit.id for hit in old.search(query, 9)}
    order = [(-hit.score, hit.id) for hit in hits]
    assert order == sorted(order)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["a b", "b", "b c c", "d"]), min_size=1, max_size=40), st.integers(1, 12), st.randoms())
def test_ties_are_broken_by_id_however_it_was_filled(texts, k, chance):
    ids = [f"{i:02}" for i in range(len(texts))]
    chance.shuffle(ids)
    index = FullTextIndex()
    for text, name in zip(texts, ids, strict=True):  # each its own part of the index
        index.add([text], ids=[name])
    ranked = sorted(index.search("b c", 99), key=lambda hit: (-hit.score, hit.id))
    assert [hit.id for hit in index.search("b c", k)] == [hit.id for hit in ranked[:k]]


def test_many_ties_are_broken_by_id_too():
    names = [f"{i:04}" for i in range(1500)]
    random.Random(0).shuffle(names)
    index = FullTextIndex().add(["same"] * 1000, ids=names[:1000]).add(["same"] * 500, ids=names[1000:])
    assert [hit.id for hit in index.search("same", 7)] == [f"{i:04}" for i in range(7)]


# --- exact terms -----------------------------------------------------------------------------------------------------


def test_exact_terms_raise_and_never_demand():
    texts = ["metformin for diabetes", "diabetes diabetes diabetes", "unrelated E11.9"]
    index = FullTextIndex(boost=8.0).add(texts, ids=["drug", "topic", "code"])
    assert index.search("diabetes E11.9")[0].id == "code"
    assert {hit.id for hit in index.search("diabetes E99.8")} == {"drug", "topic"}
    wanted = index.search("diabetes metformin", exact=[ExactTerm("METFORMIN", "drug")])
    assert wanted[0].id == "drug" and len(wanted) == 2


@pytest.mark.parametrize("written", ["metformin", "Metformin", "METFORMIN", "MetFormin"])
def test_drug_names_are_known_in_any_case(written):
    assert ExactTerm(written, "drug") in exact_terms(f"is {written} given", ["Metformin"])


@pytest.mark.parametrize(
    ("question", "terms"),
    [
        ("E11.9", [("E11.9", "icd10")]), ("icd-10 k92.2", [("k92.2", "icd10")]), ("vitamin B12", [("B12", "identifier")]),
        ("SNOMED 44054006", [("44054006", "snomed")]), ("number 44054007", []), ("HbA1c is 4548-4", [("HbA1c", "identifier"), ("4548-4", "loinc")]),
        ("4548-5", []), ("RxNorm: 6809", [("6809", "rxnorm")]), ("6809 people", []), ("NDC 0002-8215-01", [("0002-8215-01", "ndc")]),
        ("0.5 mg/ml", [("0.5 mg/ml", "dose")]), ("5 µg", [("5 μg", "dose")]), ("10 minutes", []), ("in 2024", []), ("COVID-19", [("COVID-19", "identifier")]),
        ('say "chest pain"', [("chest pain", "phrase")]), ("the patient's and the doctor's", []), ("HIV", []), ("2020-01-15", []),
    ],
)  # fmt: skip
def test_what_an_exact_term_is(question, terms):
    assert [(term.text, term.kind) for term in exact_terms(question)] == terms


def test_a_phrase_counts_where_its_words_stand_together():
    index = FullTextIndex(boost=5.0).add(["pain in the chest, no shortness", "chest pain at night"], ids=["apart", "together"])
    assert [hit.id for hit in index.search('"chest pain"')] == ["together", "apart"]
    assert [hit.id for hit in index.search('"chest" pain', exact=exact_terms('"chest"'))] != []  # one word is no phrase


@given(st.text(max_size=300))
def test_any_text_has_its_exact_terms(text):
    assert exact_terms(text) == exact_terms(text, TermLexicon([]))


# --- filters ---------------------------------------------------------------------------------------------------------


scalar = st.one_of(st.sampled_from(["PT-0004", "PT-00042", "", "a", "2020-01-01", "2020-01-02", "true", "1"]), st.integers(-2, 3),
                   st.sampled_from([0.0, -0.0, 1.0, 1.5, 1e22, 2**53 + 1, float(2**53)]), st.booleans(), st.none())  # fmt: skip
value = st.one_of(scalar, st.lists(scalar, max_size=2), st.dictionaries(st.sampled_from("ab"), st.integers(0, 1), max_size=2), st.just("n" * 1500))
metadata = st.dictionaries(st.sampled_from(["patient", "date", 'k"=', "a.b", "", "n\x00"]), value, max_size=3)
bound = st.one_of(st.sampled_from(["", "2020-01-01", "n", "PT-0004"]), st.integers(-2, 3), st.sampled_from([0.5, 1.0, float("inf")]))
condition = st.one_of(
    value, st.lists(scalar, max_size=3), st.fixed_dictionaries({"in": st.lists(value, max_size=3)}), st.fixed_dictionaries({"exists": st.booleans()}),
    st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), bound, min_size=1, max_size=3),
)  # fmt: skip
filters = st.dictionaries(st.sampled_from(["patient", "date", 'k"=', "a.b", "", "nowhere"]), condition, max_size=2)


def _valid(wanted):
    try:
        compile_filter(wanted)
    except ValueError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(st.lists(metadata, min_size=1, max_size=6), st.lists(filters.filter(_valid), min_size=1, max_size=4))
def test_a_filter_lets_through_what_the_stores_let_through(all_metadata, wanted):
    index = FullTextIndex().add([Chunk("word", m) for m in all_metadata], ids=[str(i) for i in range(len(all_metadata))])
    for each in wanted:
        right = {str(i) for i, m in enumerate(all_metadata) if compile_filter(each)(m)}
        assert {hit.id for hit in index.search("word", 9, filters=each)} == right, each


@settings(max_examples=60, deadline=None)
@given(st.text("0123456789", min_size=1, max_size=5), st.text("0123456789", max_size=2))
def test_a_patient_never_admits_another(number, more):
    other = f"PT-{number}{more}" if more else f"PT-{number}0"
    index = FullTextIndex().add([Chunk("note", {"patient": p}) for p in (f"PT-{number}", other)], ids=["own", "other"])
    assert [hit.id for hit in index.search("note", filters={"patient": f"PT-{number}"})] == ["own"]


def test_filters_come_before_ranking():
    texts = ["fever fever fever"] * 200 + ["a mention of fever among many other words of a long note"]
    index = FullTextIndex().add([Chunk(t, {"patient": "x" if i < 200 else "y"}) for i, t in enumerate(texts)], ids=[f"{i:03}" for i in range(201)])
    assert [hit.id for hit in index.search("fever", 1, filters={"patient": "y"})] == ["200"]


def test_a_filter_changes_no_score():
    index = FullTextIndex().add([Chunk("fever and cough", {"p": i % 2}) for i in range(9)], ids=list("abcdefghi"))
    free = {hit.id: hit.score for hit in index.search("fever", 9)}
    assert all(hit.score == free[hit.id] for hit in index.search("fever", 9, filters={"p": 1}))


def test_distinct_values_are_those_of_now():
    index = FullTextIndex().add([Chunk("x", {"day": "2020-01-01"})], ids=["a"])
    after = {"day": {"gte": "2020-06-01"}}
    assert index.search("x", filters=after) == []
    index.add([Chunk("x", {"day": "2021-01-01"})], ids=["b"])
    assert [hit.id for hit in index.search("x", filters=after)] == ["b"]


# --- hostile text ----------------------------------------------------------------------------------------------------


HOSTILE = [
    '"', "'", "((((", "))", "AND", "OR NOT", "a AND", "body:x", "facts:*", "*", "*:*", "?", "[a TO z]", "{* TO *}", "^", "fever^99", "fever~", "/f.*/", "\\",
    "+-+-", "-fever", "!", "&& ||", "key:a", "\x00", "\n\t", "\ud800", "fever\ud800", "🙂", "a" * 100_000, "fever " * 20_000, '"' * 9999, "(" * 9999, "%s %n {0} ${x}",
    "fever; DROP TABLE notes", "../../etc/passwd", "<script>", "\u202efever", "ﬁ", "ß", "İ", "0" * 5000, "1," * 9999, "1.1" * 9999, "a-" * 9999, "a./" * 9999, '" ' * 9999, "IN [", "fever:", "a:b:c", "\\u0000", "--", ".", ",", "1e999",
]  # fmt: skip


@pytest.mark.parametrize("query", HOSTILE, ids=lambda q: repr(q[:12]))
def test_no_text_is_more_than_words(make, query):
    index = make().add([Chunk("fever", {"patient": "a"}), Chunk("rash", {"patient": "b"})], ids=["a", "b"])
    found = {hit.id for hit in index.search(query, 9)}
    words = set(tokenize(query))
    assert found == {name for name, word in (("a", "fever"), ("b", "rash")) if word in words}
    assert {hit.id for hit in index.search(f"{query} fever rash", 9, filters={"patient": "b"})} <= {"b"}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda q: repr(q[:12]))
def test_any_text_is_kept_as_it_is(make, text):
    index = make().add([Chunk(text, {"note": text, text[:500]: 1})], ids=[text[:500]])
    hit = index.get([text[:500]])[0]
    assert (hit.id, hit.text, hit.metadata) == (text[:500], text, {"note": text, text[:500]: 1})
    assert index.delete([text[:500]]) == 1 and len(index) == 0


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=60), st.text(max_size=60))
def test_any_id_text_and_query_go_through(name, query):
    index = FullTextIndex().add([Chunk(f"anchor {query}", {"q": query})], ids=[name])
    assert [hit.id for hit in index.search(f"{query} anchor", filters={"q": query})] == [name] == index.ids and name in index


def test_a_long_question_is_searched_by_its_rarest_words():
    common = [f"common{i}" for i in range(2 * MOST_QUERY_TOKENS)]
    index = FullTextIndex().add([" ".join(common), " ".join(common), "rare"], ids=["a", "b", "c"])
    assert index.search(" ".join([*common, *(f"absent{i}" for i in range(999)), "rare"]), 9)[-1].id == "c"


def test_an_id_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="characters"):
        FullTextIndex().add(["x"], ids=["i" * 20_000])


# --- changes ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "upsert", "delete"]), st.sampled_from("abcd"), st.sampled_from(WORDS)), max_size=12))
def test_any_changes_leave_what_a_dictionary_would_hold(changes):
    index, held = FullTextIndex(), {}
    for verb, name, word in changes:
        if verb == "delete":
            assert index.delete([name]) == (held.pop(name, None) is not None)
        elif verb == "add" and name in held:
            with pytest.raises(ValueError, match="already"):
                index.add([word], ids=[name])
        else:
            getattr(index, verb)([word], ids=[name])
            held[name] = word
    assert index.ids == sorted(held) and len(index) == len(held)
    for word in WORDS:
        own = tokenize(word)
        assert {hit.id for hit in index.search(word, 9)} == {n for n, w in held.items() if set(own) & set(tokenize(w))}


def test_what_was_deleted_is_found_no_more_and_by_no_filter(make):
    index = make().add([Chunk("fever", {"p": i}) for i in range(50)], ids=[f"{i:02}" for i in range(50)])
    assert index.delete([f"{i:02}" for i in range(0, 50, 2)]) == 25
    assert all(int(hit.id) % 2 for hit in index.search("fever", 99)) and index.search("fever", filters={"p": 4}) == []
    with pytest.raises(KeyError, match="04"):
        index.get(["04"])


def test_an_index_of_mostly_removed_chunks_is_written_anew(make):
    index = make().add(["fever"] * 1500, ids=[f"{i:04}" for i in range(1500)], texts=["fever hidden"] * 1500)
    index.delete([f"{i:04}" for i in range(1400)])
    assert index.view().deleted() == 0 and len(index) == 100
    assert index.search("hidden", 1)[0].id == "1400" and index.search("hidden", 1)[0].text == "fever"


def test_rewriting_leaves_nothing_of_what_was_removed(tmp_path):
    index = FullTextIndex(tmp_path / "i").add(["zebraxylophone", "fever and cough"], ids=["a", "b"])
    held = lambda: [path.name for path in (tmp_path / "i").iterdir() if b"zebraxylophone" in path.read_bytes()]
    index.delete(["a"])
    assert held() and index.view().deleted() == 1
    index.rewrite()
    assert not held() and index.view().deleted() == 0
    fresh = FullTextIndex().add(["fever and cough"], ids=["b"])
    assert [hit.score for hit in index.search("fever")] == [hit.score for hit in fresh.search("fever")]


def test_a_view_stays_as_it_was(make):
    index = make().add(["fever"], ids=["a"])
    view = index.view()
    index.delete(["a"])
    index.add(["fever again"], ids=["b"])
    assert [hit.id for hit in view.search("fever")] == ["a"] == view.ids and view.get(["a"])[0].text == "fever"
    assert [hit.id for hit in index.search("fever")] == ["b"]


def test_changes_become_visible_together_or_not_at_all(make):
    index = make().add(["one"], ids=["a"])
    with index.writing():
        index.delete(["a"])
        index.add(["two"], ids=["b"])
        index.upsert(["two and more"], ids=["b"])
        assert index.ids == ["a"] and index.delete(["a"]) == 0
    assert index.ids == ["b"]
    with pytest.raises(RuntimeError, match="stop"), index.writing():
        index.delete(["b"])
        raise RuntimeError("stop")
    assert index.ids == ["b"] and index.add(["three"], ids=["c"]).ids == ["b", "c"]


def test_readers_see_whole_changes_while_a_writer_works(make):
    index = make().add(["fever 0"] * 20, ids=[f"{i:02}" for i in range(20)])
    wrong, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            view = index.view()
            texts = {hit.text for hit in view.search("fever", 99)}
            if len(texts) != 1 or len(view) != 20:
                wrong.append(texts)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for generation in range(1, 12):
        with index.writing():
            for i in range(20):
                index.upsert([f"fever {generation}"], ids=[f"{i:02}"])
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_two_threads_may_write(make):
    index = make()
    threads = [threading.Thread(target=lambda n=n: [index.add([f"word {n}"], ids=[f"{n}-{i}"]) for i in range(8)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index) == 32


# --- folders ---------------------------------------------------------------------------------------------------------


def test_the_next_process_finds_it(tmp_path):
    FullTextIndex(tmp_path / "i").add([Chunk("fever", {"p": "PT-1"})], ids=["a"])
    again = FullTextIndex(tmp_path / "i")
    assert [(hit.id, hit.metadata) for hit in again.search("fever", filters={"p": "PT-1"})] == [("a", {"p": "PT-1"})]
    FullTextIndex(tmp_path / "i").add(["cough"], ids=["b"])
    assert again.ids == ["a", "b"]  # it sees what another one wrote


def test_a_copy_does_not_touch_its_source(tmp_path):
    FullTextIndex(tmp_path / "i").add(["fever", "rash"], ids=["a", "b"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "i").iterdir() if path.suffix != ".lock"}
    copy = FullTextIndex(copy_fulltext(tmp_path / "i", tmp_path / "j"))
    copy.delete(["a"])
    copy.add(["cough"], ids=["c"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "i").iterdir() if path.suffix != ".lock"} == before
    assert (FullTextIndex(tmp_path / "i").ids, FullTextIndex(tmp_path / "j").ids) == (["a", "b"], ["b", "c"])


def test_one_writer_at_a_time(tmp_path):
    one, two = FullTextIndex(tmp_path / "i"), FullTextIndex(tmp_path / "i")
    one.begin()
    with pytest.raises(RuntimeError, match="another process"):
        two.begin()
    one.rollback()
    two.add(["x"], ids=["a"])
    assert one.ids == ["a"]


@pytest.mark.parametrize("damage", ["header", "version", "meta", "stranger"])
def test_damage_is_said(tmp_path, damage):
    folder = tmp_path / "i"
    if damage == "stranger":
        folder.mkdir()
        (folder / "x").touch()
    else:
        FullTextIndex(folder).add(["x"], ids=["a"])
        name, text = {"header": (FULLTEXT_HEADER, "{"), "version": (FULLTEXT_HEADER, '{"format": "healthrag-fulltext", "version": 0}'), "meta": ("meta.json", "{")}[damage]
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match="build it again"):
        FullTextIndex(folder)


CRASH = """
import sys
from healthrag.retrieval.fulltext import FullTextIndex
index = FullTextIndex(sys.argv[1])
index.begin()
index.delete(["a"])
for i in range(200_000):
    index.add([f"half {i}"], ids=[f"h{i}"])
    if i == 300: print("writing", flush=True)
"""


def test_a_crash_leaves_the_last_whole_state(tmp_path):
    FullTextIndex(tmp_path / "i").add(["whole"], ids=["a"])
    process = subprocess.Popen([sys.executable, "-c", CRASH, str(tmp_path / "i")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "writing"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    index = FullTextIndex(tmp_path / "i")
    assert index.ids == ["a"] and index.search("half") == []
    assert index.add(["after"], ids=["b"]).ids == ["a", "b"]


@pytest.mark.parametrize("wrong", [{"boost": 0}, {"boost": float("nan")}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="boost"):
        FullTextIndex(**wrong)
