"""Filters mean the same by themselves and inside a store, and wrong ones are errors."""

import datetime as dt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.storage import LocalVectorStore, compile_filter

values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 1.0, -2.0]), st.sampled_from(["", "a", "b", "2026-01-02"]),
    st.lists(st.integers(0, 1), max_size=2),
)
metadata = st.dictionaries(st.sampled_from(["k", "table", "year"]), values)
bounds = st.one_of(st.integers(-3, 3), st.sampled_from([0.5, "a", "2026-01-01"]))
conditions = st.one_of(
    values.filter(lambda v: not isinstance(v, list)),
    st.lists(values, max_size=3),
    st.fixed_dictionaries({}, optional={
        "in": st.lists(values, max_size=3), "gt": bounds, "gte": bounds, "lt": bounds, "lte": bounds, "exists": st.booleans(),
    }).filter(bool),
)
filters = st.dictionaries(st.sampled_from(["k", "table", "year"]), conditions, max_size=3)


@given(filters, st.lists(metadata, min_size=1, max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_store_finds_exactly_what_the_filter_allows(chosen, rows):
    allowed = compile_filter(chosen)
    store = LocalVectorStore(2).add(np.eye(2)[[i % 2 for i in range(len(rows))]], ["x"] * len(rows),
                                    ids=[str(i) for i in range(len(rows))], metadata=rows)
    found = {hit.id for hit in store.search([1.0, 0.0], k=100, filters=chosen)}
    assert found == {str(i) for i, row in enumerate(rows) if allowed(row)}


@given(filters, metadata)
@settings(max_examples=200, deadline=None)
def test_conditions_are_joined_by_and(chosen, row):
    assert compile_filter(chosen)(row) == all(compile_filter({key: part})(row) for key, part in chosen.items())


@pytest.mark.parametrize("chosen, row, holds", [
    ({"a": 1}, {"a": True}, False), ({"a": True}, {"a": 1}, False), ({"a": 1}, {"a": 1.0}, True), ({"a": "1"}, {"a": 1}, False),
    ({"a": [1, 2]}, {"a": 2}, True), ({"a": (1, 2)}, {"a": 3}, False), ({"a": {"in": {"x"}}}, {"a": "x"}, True), ({"a": []}, {"a": 1}, False),
    ({"a": {"gte": 1, "lt": 3}}, {"a": 3}, False), ({"a": {"gte": 1, "lt": 3}}, {"a": 1}, True), ({"a": {"gt": 1}}, {"a": "2"}, False),
    ({"a": {"gt": 0}}, {"a": True}, False), ({"a": {"lt": 3}}, {}, False), ({"a": {"gt": 0}}, {"a": float("nan")}, False),
    ({"a": {"exists": True}}, {"a": None}, False), ({"a": {"exists": False}}, {}, True), ({"a": None}, {}, True), ({"a": None}, {"a": 0}, False),
    ({"a": {"gte": dt.date(2026, 1, 1)}}, {"a": "2026-01-01"}, True), ({"a": dt.date(2026, 1, 1)}, {"a": "2026-01-01"}, True),
    ({"a": np.int64(3)}, {"a": 3}, True), ({"a": {"lte": np.float32(0.5)}}, {"a": 0.5}, True), ({"a.b": 1}, {"a.b": 1}, True),
])
def test_single_conditions(chosen, row, holds):
    assert compile_filter(chosen)(row) is holds


@pytest.mark.parametrize("wrong", [
    "table", [("a", 1)], {1: 2}, {"a": {}}, {"a": {"ne": 1}}, {"a": {"in": "abc"}}, {"a": {"in": 3}}, {"a": {"gt": None}},
    {"a": {"lt": True}}, {"a": {"gte": [1]}}, {"a": {"exists": 1}}, {"a": {"$gt": 1}},
])
def test_wrong_filters_are_errors(wrong):
    with pytest.raises(ValueError):
        compile_filter(wrong)
    with pytest.raises(ValueError):
        LocalVectorStore(1).search([1.0], filters=wrong)
