"""The PostgreSQL store on a real server: one that the tests start, or the one at HEALTHRAG_TEST_PG_URL."""

import gc
import os
import socket
import threading
import uuid
from typing import ClassVar

import numpy as np
import pytest
from database_servers import needs_postgresql, postgresql
from hypothesis import given, settings
from test_filters import filters as any_filters, metadata as any_metadata

pytest.register_assert_rewrite("healthrag.storage.searchcontract", "healthrag.storage.contract")
psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pgvector")

from healthrag.embeddings import DimensionMismatchError
from healthrag.storage import LocalVectorStore, PgVectorStore, compile_filter, open_store
from healthrag.storage import search_embeddings_pgvector, store_embeddings_pgvector, validate_embeddings_inputs
from healthrag.storage.contract import StoreContract
from healthrag.storage.searchcontract import IDS, META, ROWS, TEXTS


@pytest.fixture(scope="module")
def url():
    if given_url := os.environ.get("HEALTHRAG_TEST_PG_URL"):
        yield given_url
        return
    with postgresql() as found:
        yield found


class OnPostgres(StoreContract):
    own: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _connected(self, url):
        self.url, self.made = url, []
        yield
        for store in self.made:
            store.close()

    def make(self, dim, **options):
        self.made.append(PgVectorStore(dim, url=self.url, **self.own, **options))
        return self.made[-1]

    def place(self):
        return {"url": self.url}


class TestPgVector(OnPostgres):
    "The contract, every search a scan."


class TestPgVectorWithAGraph(OnPostgres):
    "The contract, with a graph at 10,000 rows: on small tables it must make no difference."

    own: ClassVar[dict[str, str]] = {"index": "hnsw"}
    queries = 1000


@pytest.fixture
def table():
    return f"t_{uuid.uuid4().hex}"


@pytest.fixture
def connection(url):
    with psycopg.connect(url, autocommit=True) as opened:
        yield opened


def tables(connection):
    return {name for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE tablename ~ '^(scratch_|t_)'").fetchall()}


@given(any_filters, any_metadata)
@settings(max_examples=150, deadline=None)
def test_sql_filters_mean_what_python_filters_mean(url, chosen, row):
    store = shared(url)
    store.replace([[1.0, 0.0]], ["x"], metadata=[row])
    assert bool(store.search([1.0, 0.0], filters=chosen)) == compile_filter(chosen)(row), (chosen, row)


@pytest.mark.parametrize("chosen", [
    {"a": float("inf")}, {"a": {"lt": float("inf")}}, {"a": {"gt": float("-inf")}}, {"a": {"gt": float("nan")}}, {"a": [float("nan"), 1]},
    {"a": "nul \0"}, {"a": {"gt": "b\0"}}, {"a": {"lte": "b\0"}}, {"a": {"gte": "b\ud800"}}, {"a": {"lt": "b\ud800"}}, {"nul \0": None},
    {"nul \0": 1}, {"half \ud800": {"exists": True}}, {"a": [object(), "b"]}, {"a": {"gte": 0.1}}, {"a": {"gt": 0.1}}, {"a": 1e300}, {"a": 10**30},
    {"a": {"gt": 10**30}}, {"a": list(range(100))}, {"a": [*map(str, range(100)), None]}, {"a": [[1, 2]]}, {"a": [[1]]}, {"a'b\"c%s": 1},
    {"a": {"gt": "Z"}}, {"a": {"lt": "a"}}, {"a": {"gte": "ä"}}, {"a": "\\u0000"}, {"a": {"gt": "\U0001f600"}},
])
def test_hard_filters_mean_the_same(url, chosen):
    values = [None, True, False, 0, 1, 0.1, -0.0, 1e300, 10**30, 10**30 + 1, "", "b", "b\ue000", "bb", "B", "ä", "\U0001f601", "\\u0000", "inf", [1], [1, 2], {}]
    meta = [{"a": value} for value in values] + [{}, {"a'b\"c%s": 1}]
    store = shared(url).replace(np.eye(2)[[0] * len(meta)], ["x"] * len(meta), ids=[str(i) for i in range(len(meta))], metadata=meta)
    found = {hit.id for hit in store.search([1.0, 0.0], k=100, filters=chosen)}
    assert found == {str(i) for i, row in enumerate(meta) if compile_filter(chosen)(row)}


STORES = {}


def shared(url):
    if url not in STORES:
        STORES[url] = PgVectorStore(2, url=url)
    return STORES[url]


def test_a_graph_finds_nearly_what_a_scan_finds_and_survives_writing(url):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1500, 16)).astype(np.float32)
    ids, meta = [f"{i:04}" for i in range(1500)], [{"part": i % 250} for i in range(1500)]
    local = LocalVectorStore(16).add(rows, ids, ids=ids, metadata=meta)
    with PgVectorStore(16, url=url, index="hnsw", exact_below=500) as store:
        store.add(rows[:400], ids[:400], ids=ids[:400], metadata=meta[:400])
        store.add(rows[400:], ids[400:], ids=ids[400:], metadata=meta[400:])
        for _ in range(2):
            with store._connections.connection() as connection:
                assert len(store._table.graphs(connection)) == 1
            pairs = [(store.search(q, k=10), local.search(q, k=10)) for q in rows[:60]]
            assert sum(len({h.id for h in a} & {h.id for h in b}) for a, b in pairs) >= 0.97 * 600
            for part in range(0, 250, 10):  # 0.4 % of the rows
                found = [[(h.id, h.score) for h in s.search(rows[0], k=5, filters={"part": part})] for s in (store, local)]
                assert found[0] == found[1]
            wide = [[{h.id for h in s.search(q, k=10, filters={"part": {"lt": 125}})} for q in rows[:30]] for s in (store, local)]
            assert sum(len(a & b) for a, b in zip(*wide, strict=True)) >= 0.95 * 300
            store.replace(rows, ids, ids=ids, metadata=meta)


def test_a_new_generation_of_a_graph_never_shows_half(url):
    rows = np.random.default_rng(0).normal(size=(300, 8))
    with PgVectorStore(8, url=url, index="hnsw", exact_below=100) as store:
        store.add(rows, ["0"] * 300, ids=[f"0:{i}" for i in range(300)])
        stop, problems = threading.Event(), []

        def read():
            while not stop.is_set():
                try:
                    hits = store.search(rows[0], k=20)
                except Exception as error:
                    problems.append(error)
                    return
                if len(hits) != 20 or len({hit.text for hit in hits}) != 1:
                    problems.append([hit.text for hit in hits])

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for generation in range(1, 12):
            store.replace(rows, [str(generation)] * 300, ids=[f"{generation}:{i}" for i in range(300)])
        stop.set()
        for reader in readers:
            reader.join()
        assert not problems


def test_a_named_table_stays_and_is_shared(url, table, connection):
    with PgVectorStore(16, url=url, table=table) as one, PgVectorStore(16, url=url, table=table) as other:
        one.add(ROWS[:5], TEXTS[:5], ids=IDS[:5])
        assert other.ids == IDS[:5]
        with pytest.raises(ValueError, match="already stored"):
            other.add(ROWS[:1], TEXTS[:1], ids=IDS[:1])
        other.delete(IDS[:1])
        assert one.ids == IDS[1:5]
    with PgVectorStore(16, url=url, table=table) as again:
        assert again.ids == IDS[1:5]
    connection.execute(f"DROP TABLE {table}")
    with PgVectorStore(8, url=url, table=table, metric="l2") as new:
        assert len(new) == 0


def test_a_table_that_is_something_else_is_refused(url, table, connection):
    with PgVectorStore(16, url=url, table=table):
        pass
    with pytest.raises(DimensionMismatchError, match="dimension 16, not 8"):
        PgVectorStore(8, url=url, table=table)
    with pytest.raises(ValueError, match="metric 'cosine', not 'dot'"):
        PgVectorStore(16, url=url, table=table, metric="dot")
    connection.execute(f"CREATE TABLE {table}_b(id int)")
    with pytest.raises(ValueError, match="not a store"):
        PgVectorStore(16, url=url, table=f"{table}_b")
    assert connection.execute(f"SELECT count(*) FROM {table}_b").fetchone() == (0,)


@pytest.mark.parametrize("name", ["", "a b", "a;b", 'a"b', "a'b", "1a", "ä", "a\n", "a.b", "x" * 64, None, 3, "healthrag_stores"])
def test_names_that_are_not_safe_are_refused_before_anything_runs(url, name, connection):
    before = tables(connection)
    if name is not None:
        with pytest.raises(ValueError):
            PgVectorStore(2, url=url, table=name)
        with pytest.raises(ValueError):
            store_embeddings_pgvector(connection, [[1.0, 0.0]], ["x"], 2, table=name)
    with pytest.raises(ValueError):
        PgVectorStore(2, url=url, schema=name)
    assert tables(connection) == before


def test_words_of_sql_and_capitals_are_names_like_any_other(url):
    for schema, name in (("Select", "table"), ("public", "User"), ("public", "user")):
        with PgVectorStore(2, url=url, schema=schema, table=name) as store:
            store.replace([[1, 0]], [f"{schema}.{name}"])
    with PgVectorStore(2, url=url, table="User") as store:
        assert store.search([1, 0])[0].text == "public.User"


def test_a_store_of_its_own_leaves_nothing(url, connection):
    gc.collect()  # what others let go of has dropped its table by now
    before = tables(connection)
    stores = [PgVectorStore(2, url=url) for _ in range(2)]
    assert len(tables(connection)) == len(before) + 2
    stores[0].close()
    stores[0].close()
    with pytest.raises(ValueError, match="closed"):
        len(stores[0])
    del stores
    gc.collect()
    assert tables(connection) == before


def test_a_failed_write_leaves_the_old_rows_and_a_usable_store(url, monkeypatch):
    with PgVectorStore(16, url=url) as store:
        store.add(ROWS[:3], TEXTS[:3], ids=IDS[:3])

        def broken(*args):
            raise RuntimeError("the network fails")

        monkeypatch.setattr(store._table, "drop_graphs", broken)
        with pytest.raises(RuntimeError):
            store.replace(ROWS[5:9], TEXTS[5:9], ids=IDS[5:9])
        monkeypatch.undo()
        assert store.ids == IDS[:3] and store.add(ROWS[3:4], TEXTS[3:4], ids=IDS[3:4]).ids == IDS[:4]


def test_a_failed_search_leaves_no_open_transaction(url, monkeypatch):
    with PgVectorStore(16, url=url, index="hnsw") as store:
        store.add(ROWS[:3], TEXTS[:3], ids=IDS[:3])
        monkeypatch.setattr(store._table, "_scan", None)
        with pytest.raises(TypeError):
            store.search(ROWS[0])
        monkeypatch.undo()
        store.add(ROWS[3:4], TEXTS[3:4], ids=IDS[3:4])
        assert store.search(ROWS[3], k=1)[0].id == IDS[3]


def test_a_connection_that_breaks_is_replaced(url, connection):
    with PgVectorStore(16, url=url) as store:
        store.add(ROWS[:3], TEXTS[:3], ids=IDS[:3])
        store._connections._free[0].close()
        assert len(store) == 3
        pid = store._connections._free[0].info.backend_pid
        connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        with pytest.raises(ConnectionError, match=r"PostgreSQL: .*try again"):
            len(store)
        assert len(store) == 3


# ---- what the server refuses


@pytest.fixture
def visitor(url, connection):
    "The address of a new database for a role that may do next to nothing in it, and a connection of its owner."
    name = f"t_{uuid.uuid4().hex}"
    connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'geheim'")
    connection.execute(f"CREATE DATABASE {name}")
    try:
        with psycopg.connect(url, dbname=name, autocommit=True) as owner:
            owner.execute("REVOKE CREATE ON SCHEMA public FROM public")
            yield f"postgresql://{name}:geheim@{owner.info.host}:{owner.info.port}/{name}", owner
    finally:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP ROLE {name}")


def test_a_role_without_rights_is_told_which_it_needs(visitor):
    address, owner = visitor
    role = address.partition("//")[2].partition(":")[0]
    with pytest.raises(PermissionError, match=rf"no pgvector, and the role '{role}' may not add it; have a superuser run CREATE EXTENSION"):
        PgVectorStore(2, url=address)
    owner.execute("CREATE EXTENSION vector")
    for schema in ("public", "new_one"):
        with pytest.raises(PermissionError, match=r"permission denied for .*; have the owner grant this right"):
            PgVectorStore(2, url=address, schema=schema)
    owner.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
    with PgVectorStore(2, url=address, table="mine") as store:
        owner.execute(f"REVOKE INSERT ON mine FROM {role}")
        with pytest.raises(PermissionError, match="permission denied for table mine"):
            store.add([[1.0, 0.0]], ["x"])
        owner.execute(f"GRANT INSERT ON mine TO {role}")
        assert len(store.add([[1.0, 0.0]], ["x"])) == 1


def test_the_command_line_says_so_in_one_line(visitor, tmp_path, monkeypatch, capsys):
    from healthrag.cli import main

    (tmp_path / "note.md").write_text("Hematochezia usually comes from the colon.")
    for said in ("CREATE EXTENSION", "permission denied for schema public"):
        assert main(["ingest", str(tmp_path / "note.md"), "--store", "pgvector", "--url", visitor[0], "--index", str(tmp_path / "index")]) == 2
        error = capsys.readouterr().err
        assert said in error and error.startswith("healthrag: ") and error.count("\n") == 1 and "geheim" not in error
        visitor[1].execute("CREATE EXTENSION IF NOT EXISTS vector")


@pytest.mark.parametrize(("statement", "kind", "said"), [
    ("SET statement_timeout = 1; SELECT pg_sleep(9)", TimeoutError, "raise statement_timeout"),
    ("BEGIN READ ONLY; CREATE TABLE nowhere(id int)", PermissionError, "may only be read"),
    ("SET temp_file_limit = 1; SELECT count(*) FROM (SELECT i FROM generate_series(1, 1000000) AS i ORDER BY -i) AS far", OSError, "may not use more"),
    ("SELECT * FROM nowhere", ValueError, 'relation "nowhere" does not exist'), ("SELECT 1 / 0", ValueError, "division by zero"),
    ("SELECT pg_terminate_backend(pg_backend_pid())", ConnectionError, "is running"),
])
def test_errors_of_the_server_are_errors_of_python(url, statement, kind, said):
    from healthrag.storage.postgres import PostgresConnections

    connections = PostgresConnections(url)
    with pytest.raises(kind, match=f"^PostgreSQL: .*{said}") as caught, connections.connection() as connection:
        connection.execute(statement)
    assert "\n" not in str(caught.value)
    with connections.connection() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    connections.close()


def test_the_url_comes_from_the_environment_and_is_never_shown(url, monkeypatch):
    monkeypatch.setenv("HEALTHRAG_PG_URL", url)
    with open_store("pgvector", 4) as store:
        assert repr(store) == "PgVectorStore(dim=4, metric='cosine', n=0)"
    monkeypatch.delenv("HEALTHRAG_PG_URL")
    with pytest.raises(ValueError, match="HEALTHRAG_PG_URL"):
        PgVectorStore(4)
    with pytest.raises(ConnectionError, match="can't connect") as caught:
        PgVectorStore(4, url="postgresql://me:geheim@127.0.0.1:1/none")
    assert "geheim" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("options", [{"index": "ivf"}, {"neighbours": 1}, {"effort": 1001}, {"effort": True}, {"build_effort": 5}, {"exact_below": -1}, {"build_memory": 0}])
def test_wrong_options_are_errors(url, options):
    with pytest.raises(ValueError, match=r"unknown index|whole number"):
        PgVectorStore(4, url=url, **options)


def test_long_vectors(url):
    rows = np.random.default_rng(0).normal(size=(20, 4096)).astype(np.float32)
    with PgVectorStore(4096, url=url) as store:
        store.add(rows, [f"{i}" for i in range(20)], ids=[f"{i:02}" for i in range(20)])
        assert store.search(rows[7], k=1)[0].id == "07"
    for dim, index in ((16_001, "flat"), (2001, "hnsw")):
        with pytest.raises(ValueError, match="at most"):
            PgVectorStore(dim, url=url, index=index)


# ---- HealthLLM.jl's functions


def test_the_plain_table(connection, table):
    store_embeddings_pgvector(connection, ROWS[:50], TEXTS[:50], 16, table=table)
    store_embeddings_pgvector(connection, ROWS[50:60], TEXTS[50:60], 16, table=table)
    for metric in ("cosine", "dot", "l2"):
        local = LocalVectorStore(16, metric=metric).add(ROWS[:60], TEXTS[:60], ids=IDS[:60])
        found = search_embeddings_pgvector(connection, ROWS[3], 5, table=table, metric=metric)
        want = local.search(ROWS[3], k=5)
        assert [(i - 1, text) for i, text, _ in found] == [(hit.index, hit.text) for hit in want]
        np.testing.assert_allclose([d for *_, d in found], [hit.distance for hit in want], atol=1e-5)
    assert len(search_embeddings_pgvector(connection, ROWS[3], 500, table=table)) == 60


def test_the_plain_table_keeps_all_or_nothing(connection, table):
    store_embeddings_pgvector(connection, ROWS[:2], TEXTS[:2], 16, table=table)
    with pytest.raises(DimensionMismatchError, match="dimension 16, not 8"):
        store_embeddings_pgvector(connection, ROWS[:2, :8], TEXTS[:2], 8, table=table)
    for rows, chunks in ((ROWS[:2], ["a"]), (np.full((1, 16), np.nan), ["a"]), (ROWS[:1], ["nul \0"]), (ROWS[:1], [None])):
        with pytest.raises((ValueError, psycopg.Error)):
            store_embeddings_pgvector(connection, rows, chunks, 16, table=table)
    assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (2,)
    for wrong in ({"k": 0}, {"k": True}, {"metric": "ip"}, {"table": "a b"}):
        with pytest.raises(ValueError):
            search_embeddings_pgvector(connection, ROWS[0], **{"table": table, **wrong})


def test_inputs_are_validated_in_the_order_of_the_reference():
    assert validate_embeddings_inputs(ROWS[:2], ["a", "b"], 16) is None
    with pytest.raises(DimensionMismatchError, match="dimension"):
        validate_embeddings_inputs(ROWS[:2], ["a"], 15)
    with pytest.raises(DimensionMismatchError, match="2 embeddings for 1 chunks"):
        validate_embeddings_inputs(ROWS[:2], ["a"], 16)
    assert len(META) == len(ROWS)


def test_a_server_with_an_older_pgvector_is_refused_with_the_remedy(url):
    from healthrag.storage.postgres import PostgresConnections

    connections = PostgresConnections(url, at_least=(99, 1))
    with pytest.raises(NotImplementedError, match=r"pgvector \d+\.\d+.*, and 99\.1 is needed; update it with ALTER EXTENSION"):
        with connections.connection():
            pass
    connections.close()


def test_a_server_whose_port_was_taken_meanwhile_takes_another(monkeypatch):
    from healthrag.storage import pgserver

    needs_postgresql()
    choose = pgserver._free_port
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = iter([taken, taken])
        monkeypatch.setattr(pgserver, "_free_port", lambda: next(ports, None) or choose())
        with pgserver.PostgresServer() as server, psycopg.connect(server.url) as connection:
            assert server.port != taken and connection.execute("SELECT 1").fetchone() == (1,)
    assert next(ports, None) is None, "both were tried"


def test_a_server_that_does_not_start_is_no_reason_to_skip(monkeypatch):
    from healthrag.storage import pgserver

    needs_postgresql()
    monkeypatch.setattr(pgserver, "_STARTS", 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(pgserver, "_free_port", lambda: other.getsockname()[1])
        with pytest.raises((OSError, pytest.skip.Exception)) as caught, postgresql():
            pass
    assert isinstance(caught.value, OSError) and "pg_ctl failed" in str(caught.value)
