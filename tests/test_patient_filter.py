"""A filter on a patient keeps out everybody else: 10,000 random filtered queries on every store and on the lexical side.

The patients are those of a made-up clinic, where PT-0004 is the beginning of PT-00042 and two patients share a name. What
may be found is decided here by comparing values, not by the code under test.
"""

from __future__ import annotations

import contextlib
import operator
import random

import numpy as np
import pytest
from database_servers import postgresql

pytest.importorskip("sqlalchemy")

from healthrag.ingestion.databases import read_database
from healthrag.ingestion.documents import LabelledDocument
from healthrag.omop import clinic_records
from healthrag.omop.clinic import CLINIC_READING
from healthrag.records import Chunk
from healthrag.storage import open_store

QUERIES = 10_000
PER_PATIENT = 3  # rows kept of each patient, so that 10,000 queries take seconds
COMPARE = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = clinic_records(tmp_path_factory.mktemp("clinic") / "clinic.db", "synthetic:80:7", encounters=2)
    kept: dict[str, list[LabelledDocument]] = {}
    for item in read_database(f"sqlite:///{path}", **CLINIC_READING):
        if isinstance(item, LabelledDocument):
            kept.setdefault(item.metadata["patient"], []).append(item)
    return [d for own in kept.values() for d in own[:: max(len(own) // PER_PATIENT, 1)][:PER_PATIENT]]


def holds(value, name, operand) -> bool:
    "Does one condition hold of one value?"
    if name == "in":
        return any(type(value) is type(choice) and value == choice for choice in operand)
    return value is not None and COMPARE[name](value, operand)


class Oracle:
    "Which rows a filter allows, by looking at every row once for each condition."

    def __init__(self, documents):
        self.rows = {d.source: d.metadata for d in documents}
        self._known: dict[str, frozenset[str]] = {}

    def __call__(self, filters) -> frozenset[str]:
        found = frozenset(self.rows)
        for key, wanted in filters.items():
            for name, operand in (wanted if isinstance(wanted, dict) else {"in": [wanted]}).items():
                term = repr((key, name, operand))
                if term not in self._known:
                    self._known[term] = frozenset(row for row, metadata in self.rows.items() if holds(metadata.get(key), name, operand))
                found &= self._known[term]
        return found


class Draw:
    "Random filters on the clinic's rows: who, and sometimes what and when."

    def __init__(self, documents, seed: int):
        self.random = random.Random(seed)
        self.numbers = sorted({d.metadata["patient"] for d in documents})
        self.people = sorted({d.metadata["person_id"] for d in documents})
        self.days = sorted({d.metadata["date"] for d in documents if "date" in d.metadata})
        self.tables = sorted({d.metadata["table"] for d in documents})

    def who(self):
        number = self.random.choice(self.numbers)
        kind = self.random.random()
        if kind < 0.55:
            return {"patient": number}
        if kind < 0.7:  # what looks like a number, and is none
            return {"patient": self.random.choice([number[:-1], number + "0", number.lower(), number + " ", "PT-", "%", "PT-0%", "*", ""])}
        if kind < 0.85:
            return {"patient": {"in": self.random.choices(self.numbers, k=self.random.randint(1, 5))}}
        person = self.random.choice(self.people)
        return {"person_id": self.random.choice([person, person, str(person), float(person) + 0.5])}

    def __call__(self):
        filters = self.who()
        if self.random.random() < 0.15:
            filters["table"] = self.random.choice(self.tables)
        if self.random.random() < 0.1:
            filters["date"] = {self.random.choice(list(COMPARE)): self.random.choice(self.days)}
        return filters


@contextlib.contextmanager
def opened(name):
    if name == "pgvector":
        with postgresql() as url:
            store = open_store(name, 8, url=url)
            yield store
            store.close()
        return
    if name == "faiss":
        pytest.importorskip("faiss")
    store = open_store(name, 8, **({"threads": 1} if name == "duckdb" else {}))
    yield store
    store.close()


@pytest.mark.parametrize("name", ["local", "faiss", "duckdb", "pgvector"])
def test_no_store_lets_a_foreign_row_through(name, documents):
    rng, draw = np.random.default_rng(5), Draw(documents, 5)
    vectors = rng.normal(size=(len(documents), 8)).astype(np.float32)
    allowed, foreign, missing, found = Oracle(documents), 0, 0, 0
    with opened(name) as store:
        store.add(vectors, [Chunk(d.title, d.metadata) for d in documents], ids=[d.source for d in documents])
        for _ in range(QUERIES):
            filters, k = draw(), int(rng.integers(1, 6))
            hits = store.search(vectors[rng.integers(len(vectors))], k, filters=filters)
            may = allowed(filters)
            foreign += len({hit.id for hit in hits} - may)
            missing += len(hits) != min(k, len(may))
            found += len(hits)
    assert (foreign, missing) == (0, 0) and found > QUERIES


def _lexical(name):
    if name == "bm25":
        from healthrag.retrieval.lexical import LexicalIndex

        return LexicalIndex()
    pytest.importorskip("tantivy")
    from healthrag.retrieval.fulltext import FullTextIndex

    return FullTextIndex()


@pytest.mark.parametrize("name", ["bm25", "tantivy"])
def test_the_lexical_side_lets_no_foreign_row_through(name, documents):
    index, draw, words = _lexical(name), Draw(documents, 6), random.Random(6)
    index.add([Chunk(d.content, d.metadata) for d in documents], ids=[d.source for d in documents])
    allowed, foreign, found = Oracle(documents), 0, 0
    for _ in range(QUERIES):
        filters = draw()
        asked = words.choice(documents)
        hits = index.search(f"patient {asked.metadata['patient']} {words.choice(asked.content.split())}", 5, filters=filters)
        foreign += len({hit.id for hit in hits} - allowed(filters))
        found += len(hits)
    assert foreign == 0 and found > QUERIES


def test_the_oracle_itself_tells_rows_apart(documents):
    allowed = Oracle(documents)
    short, long = ({d.source for d in documents if d.metadata["patient"] == number} for number in ("PT-0004", "PT-00042"))
    assert short and long and allowed({"patient": "PT-0004"}) == short and allowed({"patient": {"in": ["x", "PT-00042"]}}) == long
    assert allowed({"person_id": 42}) == long and not allowed({"person_id": "42"}) and not allowed({"ward": "a"})
    assert allowed({"patient": "PT-00042", "date": {"gte": "2010-01-01"}}) == {d.source for d in documents if d.source in long and "date" in d.metadata}
