"""The contract for every store of the registry, and what the local store promises beyond it."""

import hashlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.register_assert_rewrite("healthrag.storage.searchcontract", "healthrag.storage.contract")

from healthrag.storage import STORE_METRICS, LocalVectorStore, open_store, store_factory, store_names
from healthrag.storage.contract import StoreContract
from healthrag.storage.searchcontract import IDS, ROWS, TEXTS, defined_scores


@pytest.mark.parametrize("name", sorted({*store_names()} - {"pgvector"}))  # which needs a server: test_store_pgvector.py
class TestRegisteredStores(StoreContract):
    "The contract for every store that this environment can open."

    @pytest.fixture(autouse=True)
    def _named(self, name):
        if name == "faiss":
            pytest.importorskip("faiss")
        self.name, self.made = name, []
        yield
        for store in self.made:
            store.close()

    def make(self, dim, **options):
        own = {"threads": 1} if self.name == "duckdb" else {}  # faster on so few rows
        self.made.append(open_store(self.name, dim, **own, **options))
        return self.made[-1]


# ---- the local store alone


def test_it_is_in_the_registry():
    assert "local" in store_names() and store_factory("local") is LocalVectorStore
    for wrong in ("lokal", "", None):
        with pytest.raises(ValueError, match="known: "):
            open_store(wrong, 3)
    with pytest.raises(ValueError, match="options"):
        open_store("local", 3, colour="red")


class Store2(LocalVectorStore):
    pass


def test_a_missing_store_says_where_others_come_from():
    with pytest.raises(ValueError, match=r"unknown store 'mine'; known: duckdb, faiss, local, pgvector; others come with a package"):
        open_store("mine", 3)


def test_another_package_can_add_a_store(monkeypatch):
    from importlib.metadata import EntryPoint

    from healthrag.storage import registry

    point = EntryPoint("mine", f"{__name__}:Store2", "healthrag.stores")
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [point] if name in (None, "mine") else [])
    assert store_names() == ["duckdb", "faiss", "local", "mine", "pgvector"] and type(open_store("mine", 3)).__name__ == "Store2"


vectors = st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3)


@given(st.lists(vectors, min_size=1, max_size=120), vectors, st.integers(1, 8), st.sampled_from(STORE_METRICS), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_fast_path_finds_what_the_definition_finds(rows, query, k, metric, normalize):
    rows = np.array(rows * 3, dtype=np.float32)
    store = LocalVectorStore(3, metric=metric, normalize=normalize).add(rows, ["x"] * len(rows), ids=[f"{i:04}" for i in range(len(rows))])
    hits = store.search(query, k=k)
    want = np.sort(defined_scores(rows, query, metric))[::-1][:k]
    np.testing.assert_allclose([hit.score for hit in hits], want, rtol=1e-5, atol=2e-6)
    assert all(a.score > b.score or (a.score == b.score and a.id < b.id) for a, b in itertools.pairwise(hits))


@pytest.mark.parametrize("metric", STORE_METRICS)
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-20, 1e-12, 1e-9, 1.0, 1e12, 1e18, 1e30])
def test_extreme_lengths_are_ranked_by_the_definition(metric, scale):
    rows = (ROWS.astype(np.float64) * scale).astype(np.float32)
    for normalize in (True, False):
        store = LocalVectorStore(16, metric=metric, normalize=normalize).add(rows, TEXTS, ids=IDS)
        query = ROWS[4].astype(np.float64) * scale
        order = np.argsort(-defined_scores(rows, query, metric), kind="stable")[:5]
        assert [hit.id for hit in store.search(query)] == [IDS[i] for i in order]


def test_vectors_are_kept_as_given_or_at_length_one(tmp_path):
    rows = np.array([[3.0, 4.0], [0.1, 0.2]], dtype=np.float32)
    for normalize in (True, False):
        store = LocalVectorStore(2, normalize=normalize).add(rows, ["a", "b"])
        once, twice = store.save(tmp_path / "1"), LocalVectorStore.load(tmp_path / "1").save(tmp_path / "2")
        assert once.read_bytes() == twice.read_bytes()
        assert store.search([3, 4])[0].score == pytest.approx(1.0)


def test_every_damaged_file_is_refused_with_one_line(tmp_path):
    whole = LocalVectorStore(4).add(ROWS[:20, :4], TEXTS[:20]).save(tmp_path / "good").read_bytes()
    path, rng = tmp_path / "bad", np.random.default_rng(3)
    cases = [whole[:n] for n in range(0, len(whole), 97)]
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        cases.append(bytes(changed))
    good = LocalVectorStore.load(tmp_path / "good").search(ROWS[0, :4], k=20)
    for content in [*cases, b"", b"\x80\x04K\x01.", b"PK\x03\x04", b"{}" * 100]:
        path.write_bytes(content)
        try:
            loaded = LocalVectorStore.load(path)
        except ValueError as error:
            assert "build it again" in str(error) and "\n" not in str(error)
        else:  # a flipped bit in unused bytes of the container
            assert loaded.search(ROWS[0, :4], k=20) == good


def test_a_file_that_carries_code_is_not_run(tmp_path):
    np.savez(tmp_path / "evil.npz", header=np.array([object()], dtype=object), vectors=np.zeros(1), records=np.zeros(1))
    with pytest.raises(ValueError, match="build it again"):
        LocalVectorStore.load(tmp_path / "evil.npz")


def forged(path, *, compressed=False, header=(), **parts):
    "Write a store's file with right checksums and wrong contents."
    with np.load(LocalVectorStore(4).add(ROWS[:2, :4], TEXTS[:2]).save(path)) as file:
        arrays = {name: file[name] for name in file.files} | parts
    told = json.loads(arrays.pop("header").tobytes()) | dict(header)
    told["sha256"] = {name: hashlib.sha256(np.ascontiguousarray(part).data).hexdigest() for name, part in arrays.items()}
    (np.savez_compressed if compressed else np.savez)(path, header=np.frombuffer(json.dumps(told).encode(), dtype=np.uint8), **arrays)
    path.with_name(f"{path.name}.npz").replace(path)
    return path


@pytest.mark.parametrize("how", [
    {"compressed": True, "filler": np.zeros(50_000_000, dtype=np.uint8)}, {"vectors": np.full((2, 4), np.nan, dtype=np.float32)}, {"vectors": np.eye(4)[:2]},
    {"vectors": np.zeros((2, 4, 1), dtype=np.float32)}, *({"header": {"dim": dim}} for dim in (True, 4.0, -4, "4", None, [4])), *({"header": {"metric": metric}} for metric in ("none", None, ["cosine"], {})),
    *({"records": np.frombuffer(rows, dtype=np.uint8)} for rows in (b"1\n2", b'["a", "b", {}]\n["a", "b", {}]', b'["a", "b", []]\n["b", null, {}]', b"[" * 100_000 + b"\n1")),
])  # fmt: skip
def test_a_forged_file_with_right_checksums_is_refused(tmp_path, how):
    assert len(LocalVectorStore.load(forged(tmp_path / "fair"))) == 2
    path = forged(tmp_path / "forged", **how)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(ValueError, match=r"forged is not a healthrag store or is damaged .*build it again"):
        LocalVectorStore.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = LocalVectorStore(4).add(ROWS[:2, :4], TEXTS[:2]).save(tmp_path / "s")
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        LocalVectorStore(4).add(ROWS[:3, :4], TEXTS[:3]).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("metric", STORE_METRICS)
def test_near_ties_that_float32_cannot_tell_apart_are_ranked_exactly(metric):
    rng = np.random.default_rng(11)
    rows = (rng.normal(size=384) + 1e-6 * rng.normal(size=(3000, 384))).astype(np.float32)
    query = rng.normal(size=384) + rows[0]
    ids = [f"{i:04}" for i in range(len(rows))]
    store = LocalVectorStore(384, metric=metric, normalize=False).add(rows, ids, ids=ids)
    order = np.argsort(-defined_scores(rows, query, metric), kind="stable")[:5]
    assert [hit.id for hit in store.search(query)] == [ids[i] for i in order]


def test_a_state_once_seen_never_changes():
    store = LocalVectorStore(2).add([[1, 0], [0, 1]], ["a", "b"], ids=["a", "b"])
    seen = store._state
    before = seen.vectors[: seen.n].copy()
    store.upsert([[0, 1], [1, 1]], ["changed", "c"], ids=["a", "c"])
    store.delete(["b"])
    assert np.array_equal(seen.vectors[: seen.n], before) and seen.n == 2 and seen.row("c") is None
    assert [record.text for record in seen.records[: seen.n]] == ["a", "b"] and seen.row("b") == 1
    assert [hit.text for hit in store.search([0, 1])] == ["changed", "c"]
