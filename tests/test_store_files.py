"""What the FAISS and DuckDB stores promise beyond the contract: graphs, files, other processes."""

import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.register_assert_rewrite("healthrag.storage.searchcontract", "healthrag.storage.contract")

from healthrag.embeddings import DimensionMismatchError
from healthrag.storage import DuckDBVectorStore, FaissVectorStore, LocalVectorStore
from healthrag.storage.contract import StoreContract
from healthrag.storage.file import read_store_file, write_store_file
from healthrag.storage.searchcontract import IDS, ROWS, TEXTS

RNG = np.random.default_rng(0)
MANY = RNG.normal(size=(3000, 16)).astype(np.float32)
NAMES = [f"{i:04}" for i in range(len(MANY))]
PARTS = [{"part": i % 250} for i in range(len(MANY))]


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss")


@pytest.mark.usefixtures("faiss")
class TestGraphOnFewRows(StoreContract):
    "A graph makes no difference while a scan is as fast."

    queries = 500

    def make(self, dim, **options):
        return FaissVectorStore(dim, index="hnsw", **options)


@pytest.fixture
def graph(faiss):
    return FaissVectorStore(16, index="hnsw", exact_below=0).add(MANY, NAMES, ids=NAMES, metadata=PARTS)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_a_graph_finds_nearly_all(faiss, metric):
    local = LocalVectorStore(16, metric=metric).add(MANY, NAMES, ids=NAMES)
    graph = FaissVectorStore(16, metric=metric, index="hnsw", exact_below=0).add(MANY, NAMES, ids=NAMES)
    same = [{h.id for h in graph.search(q, k=10)} & {h.id for h in local.search(q, k=10)} for q in MANY[:100]]
    assert sum(map(len, same)) >= 980


def test_a_graph_with_a_rare_filter_finds_all_there_is(graph):
    local = LocalVectorStore(16).add(MANY, NAMES, ids=NAMES, metadata=PARTS)
    for part in range(0, 250, 5):
        wanted = {"part": part}
        assert graph.search(MANY[0], k=12, filters=wanted) == local.search(MANY[0], k=12, filters=wanted)


def test_a_graph_forgets_what_is_removed_and_is_built_anew(graph):
    before = graph._shelf
    graph.delete(NAMES[:1400])
    assert graph._shelf is before and graph.search(MANY[7], k=1)[0].id not in NAMES[:1400] and len(graph) == 1600
    graph.upsert(-MANY[1400:1700], NAMES[1400:1700], ids=NAMES[1400:1700])
    assert graph._shelf is not before and len(graph._shelf.records) == len(graph) == 1600
    assert graph.search(-MANY[1500], k=1)[0].id == NAMES[1500]
    assert graph.delete(NAMES) == 1600 and graph.search(MANY[0]) == []


def test_a_saved_graph_is_not_built_again(graph, tmp_path, monkeypatch):
    graph.delete(NAMES[:10])
    path = graph.save(tmp_path / "graph")
    monkeypatch.setattr(FaissVectorStore, "_swap", None)  # what builds an index
    again = FaissVectorStore.load(path)
    assert [[h.id for h in again.search(q, k=10)] for q in MANY[:50]] == [[h.id for h in graph.search(q, k=10)] for q in MANY[:50]]
    again.add(MANY[:10], NAMES[:10], ids=NAMES[:10])
    assert again.search(MANY[3], k=1)[0].id == NAMES[3] and len(again) == 3000
    monkeypatch.undo()
    assert FaissVectorStore.load(path, index="flat").index == "flat"


def test_a_graph_that_was_tampered_with_is_refused(graph, faiss, tmp_path):
    path = graph.save(tmp_path / "graph")
    with path.open("rb") as file:
        header, parts, rows = read_store_file(file)
    header = {key: value for key, value in header.items() if key not in ("format", "version", "n", "sha256")}
    records = [graph._shelf.records[i] for i in range(len(rows))]

    def tampered(change):
        index = faiss.deserialize_index(parts["graph"].copy(), faiss.IO_FLAG_SKIP_STORAGE)
        change(index)
        return faiss.serialize_index(index, faiss.IO_FLAG_SKIP_STORAGE)

    def far_link(index):
        links = faiss.vector_to_array(index.hnsw.neighbors)
        links[5] = 10**6
        faiss.copy_array_to_vector(links, index.hnsw.neighbors)

    def far_entry(index):
        index.hnsw.entry_point = 10**6

    def other_size(index):
        index.ntotal = 10

    wrong = [tampered(change) for change in (far_link, far_entry, other_size)]
    wrong += [parts["graph"][:200], np.zeros(50, dtype=np.uint8), faiss.serialize_index(faiss.IndexFlatIP(16))]
    wrong.append(faiss.serialize_index(graph._shelf.index))  # with vectors of its own
    for data in wrong:
        write_store_file(path, header, parts["vectors"], records, {"graph": data})
        with pytest.raises(ValueError, match="graph in the file"):
            FaissVectorStore.load(path)
    assert LocalVectorStore.load(path).search(MANY[0], k=1)[0].id == NAMES[0]


@pytest.mark.parametrize("options", [{"index": "ivf"}, {"index": None}, {"neighbours": 1}, {"build_effort": 0}, {"effort": 1.5}, {"exact_below": -1}])
def test_wrong_options_of_faiss(faiss, options):
    with pytest.raises(ValueError, match=r"unknown index|whole number"):
        FaissVectorStore(4, **options)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r'pip install "healthrag\[faiss\]"'):
        FaissVectorStore(4)


# ---- DuckDB


def test_a_file_is_there_when_opened_again(tmp_path):
    path = tmp_path / "s.duckdb"
    with DuckDBVectorStore(16, path=path) as store:
        store.add(ROWS[:20], TEXTS[:20], ids=IDS[:20]).delete(IDS[:5])
        want = store.search(ROWS[7], k=30)
    with DuckDBVectorStore(16, path=str(path)) as again:
        assert again.search(ROWS[7], k=30) == want and again.ids == IDS[5:20]
        again.save(path)
        copied = again.save(tmp_path / "it's a copy")
    with DuckDBVectorStore.load(copied) as copy:
        copy.add(ROWS[:1], TEXTS[:1], ids=IDS[:1])
    with DuckDBVectorStore.load(path) as old, DuckDBVectorStore.load(copied) as new:
        assert (len(old), len(new)) == (15, 16)


def test_several_stores_share_a_file(tmp_path):
    path = tmp_path / "s.duckdb"
    with DuckDBVectorStore(16, path=path, table="a") as a, DuckDBVectorStore(3, path=path, table="b", metric="l2") as b:
        a.add(ROWS[:2], TEXTS[:2])
        b.add([[1, 2, 3]], ["x"])
        assert (len(a), len(b)) == (2, 1)
    assert (len(DuckDBVectorStore.load(path, table="b")), DuckDBVectorStore.load(path, table="b").metric) == (1, "l2")
    with pytest.raises(ValueError, match="build it again"):
        DuckDBVectorStore.load(path)
    with pytest.raises(DimensionMismatchError):
        DuckDBVectorStore(4, path=path, table="b")
    with pytest.raises(ValueError, match="metric"):
        DuckDBVectorStore(3, path=path, table="b")


def test_two_stores_on_one_table_do_not_lose_rows(tmp_path):
    path = tmp_path / "s.duckdb"
    with DuckDBVectorStore(16, path=path) as one, DuckDBVectorStore(16, path=path) as other:
        def write(store, rows):
            for i in rows:
                store.add(ROWS[i : i + 1], TEXTS[i : i + 1], ids=IDS[i : i + 1])

        writers = [threading.Thread(target=write, args=pair) for pair in ((one, range(0, 40)), (other, range(40, 80)))]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert sorted(one.ids) == sorted(other.ids) == IDS[:80]
        assert {h.index for h in one.search(ROWS[0], k=99)} == set(range(80))
        with pytest.raises(ValueError, match="already"):
            other.add(ROWS[:1], TEXTS[:1], ids=IDS[:1])


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "1a", "a\n", "x" * 64, None, "healthrag_stores", "Healthrag_Stores"])
def test_unsafe_names_are_refused(name):
    with pytest.raises(ValueError, match="table"):
        DuckDBVectorStore(2, table=name)


def test_a_table_of_someone_else_is_left_alone(tmp_path):
    import duckdb

    with duckdb.connect(str(tmp_path / "d")) as connection:
        connection.execute('CREATE TABLE "Mine" AS SELECT 1 AS x')
    with pytest.raises(ValueError, match="not a store"):
        DuckDBVectorStore(2, path=tmp_path / "d", table="mine")
    with duckdb.connect(str(tmp_path / "d")) as connection:
        assert connection.execute("FROM mine").fetchall() == [(1,)]
        assert connection.execute("SELECT count(*) FROM duckdb_tables()").fetchone() == (1,)


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"PK\x03\x04 no archive", b"{}"])
def test_a_damaged_file_is_refused_with_one_line(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match="build it again") as caught:
        DuckDBVectorStore.load(tmp_path / "bad")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "bad").read_bytes() == content


def test_a_file_that_another_process_has_open_says_so(tmp_path):
    path = tmp_path / "s.duckdb"
    code = f"from healthrag.storage import DuckDBVectorStore; s = DuckDBVectorStore(2, path={str(path)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(OSError, match="one process at a time"):
            DuckDBVectorStore(2, path=path)
        other.communicate("\n")
    with DuckDBVectorStore(2, path=path) as store:
        assert len(store) == 0


def test_a_file_that_another_process_has_open_is_not_called_damaged(tmp_path):
    path = tmp_path / "s.duckdb"
    code = f"from healthrag.storage import DuckDBVectorStore; s = DuckDBVectorStore(2, path={str(path)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(OSError, match="one process at a time") as caught:
            DuckDBVectorStore.load(path)
        other.communicate("\n")
    assert "build it again" not in str(caught.value)
    import duckdb

    with duckdb.connect(str(path), read_only=True), pytest.raises(OSError, match="in this process in another way"):
        DuckDBVectorStore(2, path=path)
    with DuckDBVectorStore.load(path) as store:
        assert len(store) == 0


@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("change", ["cut off", "overwritten"])
def test_damage_is_told_whenever_it_is_met(tmp_path, share, change):
    path = tmp_path / "corrupt permission denied.duckdb"  # words in a path are no cause
    with DuckDBVectorStore(16, path=path) as store:
        store.add(MANY, NAMES, ids=NAMES)
    size = path.stat().st_size
    with path.open("r+b") as file:
        if change == "cut off":
            file.truncate(int(share * size))
        else:
            file.seek(int(share * size) // 4096 * 4096)
            file.write(bytes(range(256)) * 16)
    try:
        with DuckDBVectorStore(16, path=path) as store:
            assert store.ids == NAMES and store.search(MANY[3], k=1)[0].id == NAMES[3]
            assert change == "overwritten"  # the blocks of DuckDB that are free hold nothing
    except ValueError as error:
        said = str(error)
        assert "build it again" in said and ("damaged" in said or "cut off" in said) and "one process" not in said and "\n" not in said


def test_a_place_where_no_file_can_be_says_why(tmp_path):
    (tmp_path / "file").touch()
    for path, kind, said in (
        (tmp_path, IsADirectoryError, "is a folder"), (tmp_path / "none" / "s", FileNotFoundError, "make the folder"),
        (tmp_path / "file" / "s", NotADirectoryError, "no folder"),
    ):  # fmt: skip
        with pytest.raises(kind, match=said) as caught:
            DuckDBVectorStore(2, path=path)
        assert "one process" not in str(caught.value)
    store = DuckDBVectorStore(2, path=tmp_path / "s")
    store.close()
    for use in (lambda: len(store), lambda: store.add([[1.0, 0.0]], ["x"])):
        with pytest.raises(ValueError, match="closed; open it again"):
            use()


def run_apart(before, code):
    "Run code in a process of its own, after limits that it keeps to; give what it printed."
    script = f"import os, signal, sys\nimport duckdb, numpy as np, pandas\nfrom healthrag.storage import DuckDBVectorStore\n{before}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of POSIX")
def test_a_file_without_permission_says_so(tmp_path):
    path = tmp_path / "s.duckdb"
    DuckDBVectorStore(2, path=path).close()
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    said = run_apart("if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)", f"""
for path in ({str(path)!r}, {str(tmp_path / "new.duckdb")!r}):
    try: DuckDBVectorStore(2, path=path)
    except PermissionError as error: print(error)
""")
    assert len(said) == 2 and all("change its permissions" in line and "one process" not in line for line in said)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits of POSIX")
def test_a_full_disk_is_told_and_what_was_stored_stays(tmp_path):
    path = tmp_path / "s.duckdb"
    said = run_apart("import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)", f"""
store = DuckDBVectorStore(64, path={str(path)!r}).add(np.eye(64), ["x"] * 64, ids=[str(i) for i in range(64)])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
for write in (lambda: store.add(np.ones((3000, 64)), ["y" * 50] * 3000, ids=[f"y{{i}}" for i in range(3000)]), lambda: store.save({str(tmp_path / "copy.duckdb")!r})):
    try: write()
    except OSError as error: print(error)
    print(len(store))
""")
    assert len(said) == 4 and said[1] == said[3] == "64"
    assert all("what was stored before stays" in line and "File too large" in line for line in (said[0], said[2]))
    assert not list(tmp_path.glob("*copy*"))
    with DuckDBVectorStore(64, path=path) as store:
        assert len(store.add(np.ones((3000, 64)), ["y" * 50] * 3000, ids=[f"y{i}" for i in range(3000)])) == 3064


def test_a_process_that_dies_while_writing_leaves_a_whole_generation(tmp_path):
    path = tmp_path / "s.duckdb"
    code = (
        "import numpy as np; from healthrag.storage import DuckDBVectorStore\n"
        f"s = DuckDBVectorStore(4, path={str(path)!r}); g = 0\n"
        "while True:\n"
        "    s.replace(np.ones((50, 4)), [str(g)] * 50, ids=[f'{g}:{i}' for i in range(50)]); print(g, flush=True); g += 1\n"
    )
    for stop in (1, 3):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
            while int(writer.stdout.readline()) < stop:
                pass
            writer.kill()
        with DuckDBVectorStore(4, path=path) as store:
            assert len(store) == 50 and len({hit.text for hit in store.search(np.ones(4), k=60)}) == 1


@pytest.mark.parametrize("threads", [0, -1, True, 1.0, "2"])
def test_wrong_threads(threads):
    with pytest.raises(ValueError, match="threads"):
        DuckDBVectorStore(2, threads=threads)
