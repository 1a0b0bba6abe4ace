"""The full text of an index: in step with the vectors through changes, crashes, damage and older versions."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest

from healthrag.ingestion.documents import LabelledDocument
from healthrag.records import SourceDocument
from healthrag.retrieval.fulltext import FullTextIndex
from healthrag.retrieval.generations import MANIFEST
from healthrag.retrieval.index import KnowledgeIndex
from healthrag.retrieval.lexical import LexicalIndex
from healthrag.retrieval.update import ingest_to_index


def encode(texts):
    return np.array([[1.0, len(text) % 7, text.count("e")] for text in texts], dtype=np.float32)


def row(number, patient, text, date="2020-01-01"):
    marks = {"kind": "row", "table": "notes", "row": number, "patient": patient, "date": date}
    return LabelledDocument(f"clinic:notes:{number}", "", f"note {number}", text, marks)


@pytest.fixture(params=["memory", "local", "duckdb"])
def opened(request, tmp_path):
    if request.param == "memory":
        index = KnowledgeIndex(store="local", embedder=encode)
        return lambda: index
    return lambda: KnowledgeIndex(tmp_path / "index", store=request.param, embedder=encode)


def sides(index, question, **options):
    return index.reading(lambda h: ([x.id for x in h.store.search(encode([question])[0], 99, **options)], [x.id for x in h.lexical.search(question, 99, **options)]))


def test_both_sides_hold_the_same_after_every_change(opened):
    with opened() as index:
        for texts in (["fever one", "fever two"], ["fever two", "fever three"], ["fever four"], ["fever one", "fever two", "fever five"]):
            ingest_to_index(index, docs=[row(text, "PT-1", text) for text in texts])
            dense, lexical = sides(index, "fever")
            assert set(dense) == set(lexical) and sorted(hit.text for hit in index.search("fever", 99)) == sorted(texts)


def test_filters_hold_on_both_sides_by_whole_keys(opened):
    with opened() as index:
        ingest_to_index(index, docs=[row(i, patient, "fever", f"202{i}-01-01") for i, patient in enumerate(["PT-0004", "PT-00042", "PT-4"])])
        for filters, wanted in (({"patient": "PT-0004"}, {0}), ({"date": {"gte": "2021-01-01"}}, {1, 2}), ({"row": {"in": [0, 2]}, "table": "notes"}, {0, 2}), ({"patient": []}, set())):
            for side in sides(index, "fever", filters=filters):
                assert set(side) == {f"clinic:notes:{n}:0" for n in wanted}, filters


def test_both_sides_give_the_same_hit(opened):
    with opened() as index:
        ingest_to_index(index, docs=[row(1, "PT-1", "fever")])
        dense, lexical = index.reading(lambda h: (h.store.search(encode(["fever"])[0], 1)[0], h.lexical.search("fever", 1)[0]))
        assert (dense.id, dense.text, dict(dense.metadata)) == (lexical.id, lexical.text, dict(lexical.metadata))


def test_a_change_writes_what_it_changes_and_shares_the_rest(tmp_path):
    index = KnowledgeIndex(tmp_path, store="local", embedder=encode)
    ingest_to_index(index, docs=[row(i, "p", f"fever {i}") for i in range(50)])
    before = {path.name: path.stat().st_ino for path in (tmp_path / "text-1").iterdir() if path.suffix not in (".json", ".lock")}
    ingest_to_index(index, docs=[row(i, "p", f"fever {i}") for i in range(51)])
    after = {path.name: path.stat().st_ino for path in (tmp_path / "text-2").iterdir()}
    assert before and before.items() <= after.items()
    assert sorted(path.name for path in tmp_path.glob("text-*")) == ["text-2"]


def test_nothing_of_a_removed_row_stays_on_disk(tmp_path):
    index = KnowledgeIndex(tmp_path, store="local", embedder=encode)
    held = lambda word: [path.name for path in tmp_path.rglob("*") if path.is_file() and word in path.read_bytes()]
    ingest_to_index(index, docs=[row(1, "p", "zebraxylophone was here"), row(2, "p", "fever")])
    assert held(b"zebraxylophone")
    assert index.search("zebraxylophone")  # and a reader has it open
    ingest_to_index(index, docs=[row(2, "p", "fever")])
    assert held(b"zebraxylophone") == [] and held(b"fever")


def test_ranking_forgets_what_was_removed(opened):
    index, fresh = opened(), KnowledgeIndex(store="local", embedder=encode)
    kept = [row(1, "p", "fever and cough"), row(2, "p", "cough")]
    ingest_to_index(index, docs=[*kept, *(row(i, "p", "fever fever") for i in range(3, 30))])
    ingest_to_index(index, docs=kept)
    ingest_to_index(fresh, docs=kept)
    scores = [[(hit.id, hit.score) for hit in one.reading(lambda h: h.lexical.search("fever cough"))] for one in (index, fresh)]
    assert scores[0] == scores[1]


def test_words_are_not_tokenised_again_to_search(tmp_path):
    ingest_to_index(tmp_path, docs=[row(1, "p", "fever")], store="local", embedder=encode)
    index = KnowledgeIndex(tmp_path, embedder=encode)
    assert index.reading(lambda h: h.lexical).view is not None and not isinstance(index.reading(lambda h: h.lexical), LexicalIndex)
    assert (tmp_path / json.loads((tmp_path / MANIFEST).read_text())["text"]).is_dir()


@pytest.mark.parametrize("when", ["text", "vectors"])
def test_a_failure_between_the_sides_shows_nothing_of_the_change(opened, when, monkeypatch):
    index = opened()
    ingest_to_index(index, docs=[row(1, "p", "fever old")])
    keeper = index.texts if when == "text" else index.keeper

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(keeper, "commit", fail)
    with pytest.raises(OSError, match="no space"):
        ingest_to_index(index, docs=[row(1, "p", "fever new"), row(2, "p", "fever more")])
    monkeypatch.undo()
    assert [hit.text for hit in index.search("fever", 9)] == ["fever old"]
    again = opened()
    assert [hit.text for hit in again.search("fever", 9)] == ["fever old"]
    ingest_to_index(again, docs=[row(1, "p", "fever new"), row(2, "p", "fever more")])
    dense, lexical = sides(again, "fever")
    assert set(dense) == set(lexical) and len(dense) == 2


@pytest.mark.parametrize("loss", ["version 1", "gone", "damaged", "other engine"])
def test_full_text_that_cannot_be_read_is_made_again(tmp_path, loss):
    ingest_to_index(tmp_path, docs=[row(1, "p", "fever one"), row(2, "q", "fever two")], store="local", embedder=encode)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    folder = tmp_path / manifest["text"]
    if loss == "version 1":
        del manifest["text"]
        (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "version": 1}))
    if loss in ("version 1", "gone"):
        shutil.rmtree(folder)
    elif loss == "damaged":
        (folder / "meta.json").write_text("{")
    else:
        (folder / "fulltext.json").write_text('{"format": "healthrag-fulltext", "version": 0}')
    index = KnowledgeIndex(tmp_path, embedder=encode)
    assert {hit.text for hit in index.search("fever", 9)} == {"fever one", "fever two"} and index.get("clinic:notes:1:0")[0].text == "fever one"
    assert [hit.text for hit in index.search("fever", 9, filters={"patient": "q"})] == ["fever two"]
    ingest_to_index(index, docs=[row(1, "p", "fever one"), row(3, "q", "fever three")])
    again = KnowledgeIndex(tmp_path, embedder=encode)
    assert {hit.text for hit in again.search("fever", 9)} == {"fever one", "fever three"}
    assert (tmp_path / json.loads((tmp_path / MANIFEST).read_text())["text"]).is_dir()


def test_readers_never_see_two_generations_at_once(opened):
    writer, reader = opened(), opened()
    make = lambda generation: [row(i, "p", f"fever {generation} {i}") for i in range(6)]
    ingest_to_index(writer, docs=make(0))
    wrong, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            found = {hit.text.split()[1] for hit in reader.search("fever", 12)}
            if len(found) != 1:
                wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for generation in range(1, 6):
        ingest_to_index(writer, docs=make(generation))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(reader.search("fever", 12)) == 6


def test_an_index_is_emptied_and_filled_again(opened):
    index = opened()
    ingest_to_index(index, docs=[row(1, "p", "fever")])
    ingest_to_index(index, docs=[])
    assert len(index) == 0 and index.search("fever") == []
    ingest_to_index(index, docs=[row(1, "p", "fever")])
    assert [hit.text for hit in index.search("fever")] == ["fever"]


def test_headings_are_searched_and_not_shown(opened):
    index = opened()
    ingest_to_index(index, docs=[SourceDocument("notes", "", "t", "# Bleeding\n\n## Lower\n\nComes from the colon.")])
    hit = index.search("bleeding colon", 1)[0]
    assert "Bleeding" not in hit.text and index.reading(lambda h: h.lexical.search("bleeding"))


def test_full_text_is_the_lexical_side():
    index = KnowledgeIndex(store="local", embedder=encode)
    ingest_to_index(index, docs=[row(1, "p", "fever E11.9"), row(2, "p", "fever fever")])
    assert isinstance(index.texts._memory, FullTextIndex)
    assert index.reading(lambda h: h.lexical.search("fever E11.9"))[0].text == "fever E11.9"
