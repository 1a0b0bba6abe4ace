"""Rows from SQLite, PostgreSQL and MariaDB: complete, read-only, without identifying columns, resumable."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

sa = pytest.importorskip("sqlalchemy")

from database_servers import mariadb, postgresql
from healthrag.ingestion.databases import _connected, plan_tables, read_database
from healthrag.ingestion.documents import LabelledDocument, Skipped
from healthrag.retrieval.update import ingest_to_index

PLANTED = ("Byron", "123-45-6789", "ada@example.org", "12 Elm", "1950-03-02", "555-0100", "MRN-7788")


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def server(request, tmp_path_factory):
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("clinic") / "clinic.db"
        sqlite3.connect(path).close()
        yield f"sqlite:///{path}"
    else:
        with {"postgresql": lambda: postgresql("postgresql+psycopg"), "mariadb": mariadb}[request.param]() as url:
            yield url


@pytest.fixture(scope="module")
def url(server):
    engine = sa.create_engine(server)
    meta = sa.MetaData()
    sa.Table(
        "person", meta, sa.Column("person_id", sa.Integer, primary_key=True), sa.Column("gender", sa.String(10)),
        sa.Column("full_name", sa.String(80)), sa.Column("ssn", sa.String(20)), sa.Column("email", sa.String(80)),
        sa.Column("street_address", sa.String(80)), sa.Column("birth_date", sa.Date), sa.Column("homephone", sa.String(20)),
        sa.Column("person_source_value", sa.String(20)), sa.Column("year_of_birth", sa.Integer),
    )  # fmt: skip
    sa.Table(
        "visit", meta, sa.Column("site", sa.String(20), primary_key=True), sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("reason", sa.Text), sa.Column("cost", sa.Numeric(10, 2)), sa.Column("at", sa.DateTime), sa.Column("scan", sa.LargeBinary),
    )  # fmt: skip
    sa.Table("Order By", meta, sa.Column("select", sa.Integer, primary_key=True), sa.Column('dr"ug; DROP', sa.String(80)))
    sa.Table("heap", meta, sa.Column("a", sa.Integer), sa.Column("b", sa.String(10)))
    meta.create_all(engine)
    import datetime as dt
    from decimal import Decimal

    with engine.begin() as c:
        c.execute(meta.tables["person"].insert(), [
            {"person_id": i, "gender": "F", "full_name": "Ada Byron", "ssn": "123-45-6789", "email": "ada@example.org", "street_address": "12 Elm Street",
             "birth_date": dt.date(1950, 3, 2), "homephone": "555-0100", "person_source_value": "MRN-7788", "year_of_birth": 1950} for i in range(1, 1204)
        ])  # fmt: skip
        c.execute(meta.tables["visit"].insert(), [
            {"site": site, "number": n, "reason": f"Ménière 🩸 {site}{n}", "cost": Decimal("10.50"), "at": dt.datetime(2020, 2, 29, 12), "scan": b"\x00\x01"}
            for site in ("a", "b,c") for n in range(-3, 4)
        ])  # fmt: skip
        c.execute(meta.tables["Order By"].insert(), [{"select": 1, 'dr"ug; DROP': "aspirin"}])
        c.execute(meta.tables["heap"].insert(), [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}])
    engine.dispose()
    return server


def rows(*args, **options):
    return [item for item in read_database(*args, **options) if isinstance(item, LabelledDocument)]


@pytest.mark.parametrize("page_rows", [1, 2, 100, 500])
def test_every_row_comes_once_whatever_the_page(url, page_rows):
    table = "visit" if page_rows < 100 else "person"
    found = rows(url, [table], name="db", page_rows=page_rows)
    wanted = 14 if table == "visit" else 1203
    assert len({d.source for d in found}) == len(found) == wanted


def test_keys_of_several_columns_text_and_negative_numbers(url):
    found = [d.source for d in rows(url, ["visit"], name="db", page_rows=3)]
    assert found[0] == "db:visit:a,-3" and found[-1] == "db:visit:b\\,c,3" and len(found) == 14


def test_values_are_written_as_people_write_them(url):
    first = rows(url, ["visit"], name="db", most_rows=1)[0]
    assert first.content.split("\n") == ["site: a", "number: -3", "reason: Ménière 🩸 a-3", "cost: 10.50", "at: 2020-02-29 12:00:00"]
    assert first.metadata == {"kind": "row", "table": "visit", "row": "a,-3", "database": "db"}


def test_reading_resumes_behind_any_row(url):
    all_of_it = [d.source for d in rows(url, ["visit"], name="db")]
    assert [d.source for d in rows(url, ["visit"], name="db", after={"visit": ["a", 3]})] == all_of_it[7:]
    assert rows(url, ["visit"], name="db", after={"visit": ["b,c", 3]}) == []


def test_identifying_columns_are_never_read(url):
    everything = " ".join(str(item) for item in read_database(url, ["person", "visit"]))
    assert "year_of_birth: 1950" in everything and not [p for p in PLANTED if p in everything]
    said = [i.reason for i in read_database(url, ["person"]) if isinstance(i, Skipped)]
    assert len(said) == 1 and all(c in said[0] for c in ("full_name", "ssn", "email", "street_address", "birth_date", "homephone", "person_source_value"))


def test_identifying_columns_are_not_even_selected(url):
    sent = []
    sa.event.listen(sa.engine.Engine, "before_cursor_execute", hook := lambda c, cur, statement, *a: sent.append(statement))
    try:
        list(read_database(url, ["person"], most_rows=2))
    finally:
        sa.event.remove(sa.engine.Engine, "before_cursor_execute", hook)
    read = [s for s in sent if "year_of_birth" in s and "gender" in s and "FROM" in s.upper() and "LIMIT" in s.upper()]
    assert read and not any("ssn" in s or "full_name" in s for s in read)
    assert all(s.lstrip().upper().startswith(("SELECT", "PRAGMA", "SHOW", "SET", "WITH")) for s in sent), sent


def test_an_allowed_column_is_read_and_a_denied_one_is_not(url):
    text = rows(url, {"person": ["person_id", "email"]}, allow=["email"], most_rows=1)[0].content
    assert "ada@example.org" in text
    assert "gender" not in rows(url, ["person"], deny=["gender"], most_rows=1)[0].content


def test_names_that_need_quoting(url):
    assert rows(url, ["Order By"])[0].content == 'select: 1\ndr"ug; DROP: aspirin'


def test_a_table_without_a_key_is_skipped_or_given_one(url):
    plans = {getattr(p, "table", getattr(p, "source", "")): p for p in plan_tables(url)}
    assert isinstance(next(p for name, p in plans.items() if name.endswith("heap")), Skipped)
    with pytest.raises(ValueError, match="gaps or doubles"):
        plan_tables(url, ["heap"], keys={"heap": "a"})
    assert len(rows(url, ["heap"], keys={"heap": ["a", "b"]}, page_rows=1)) == 2


@pytest.mark.parametrize("statement", ["DELETE FROM visit", "CREATE TABLE made (a INT)", "UPDATE person SET gender = 'M'"])
def test_the_connection_can_only_read(url, statement):
    with pytest.raises(ConnectionError, match=r"read.?only|READ ONLY"), _connected(url) as (connection, _):
        connection.execute(sa.text(statement))
    assert len(rows(url, ["visit"])) == 14


def test_an_index_of_a_database_follows_it_and_holds_no_identifier(url, tmp_path):
    index = ingest_to_index(tmp_path / "i", f"db={url}", tables=["visit"], store="local")
    assert index.last_ingest.kept == 14 and index.search("Ménière a3", 1)[0].metadata["table"] == "visit"
    engine = sa.create_engine(url)
    try:
        with engine.begin() as c:
            c.execute(sa.text("UPDATE visit SET reason = 'stroke' WHERE site = 'a' AND number = 1"))
            c.execute(sa.text("DELETE FROM visit WHERE site = 'a' AND number = 2"))
        done = ingest_to_index(index, f"db={url}", tables=["visit"]).last_ingest
        assert (done.changed, done.deleted, done.added, len(done.unchanged)) == (("db:visit:a,1",), ("db:visit:a,2",), (), 12)
        assert "stroke" in index.get("db:visit:a,1:0")[0].text
    finally:
        with engine.begin() as c:
            c.execute(sa.text("UPDATE visit SET reason = 'x' WHERE site = 'a' AND number = 1"))
            c.execute(sa.text("INSERT INTO visit (site, number, reason) VALUES ('a', 2, 'back')"))
        engine.dispose()
    index = ingest_to_index(tmp_path / "p", f"db={url}", tables=["person"], most_rows=3, store="local")
    held = b"".join(path.read_bytes() for path in (tmp_path / "p").rglob("*") if path.is_file())
    assert len(index) == 3 and not [p for p in PLANTED if p.encode() in held]


def test_rows_beyond_a_limit_are_not_taken_for_deleted(url, tmp_path):
    index = ingest_to_index(tmp_path / "i", f"db={url}", tables=["visit"], store="local")
    done = ingest_to_index(index, f"db={url}", tables=["visit"], most_rows=5).last_ingest
    assert done.deleted == () and len(index) == 14


def test_a_server_that_is_down_deletes_nothing(tmp_path):
    with closing(sqlite3.connect(tmp_path / "c.db")) as db, db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
        db.execute("INSERT INTO t VALUES (1, 'bleeding')")
    source = f"sqlite:///{tmp_path / 'c.db'}"
    index = ingest_to_index(tmp_path / "i", source, store="local")
    (tmp_path / "c.db").rename(tmp_path / "away.db")
    done = ingest_to_index(index, source).last_ingest
    assert done.deleted == () and len(index) == 1 and done.skipped[0].temporary
    assert not (tmp_path / "c.db").exists(), "reading must not create a database"


def test_rows_without_a_key_are_counted(tmp_path):
    with closing(sqlite3.connect(tmp_path / "c.db")) as db, db:
        db.execute("CREATE TABLE t (id TEXT PRIMARY KEY, v TEXT)")
        db.executemany("INSERT INTO t VALUES (?, ?)", [("a", "x"), (None, "y"), (None, "z")])
    found = list(read_database(f"sqlite:///{tmp_path / 'c.db'}"))
    assert [str(i) for i in found if isinstance(i, Skipped)] == ["c:t: 2 rows have no key and can't be named"] and len(found) == 2
