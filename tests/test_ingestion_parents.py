"""Rows that tell whose they are: by foreign keys, declared or given, on real servers, within what may be read."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal

import pytest

sa = pytest.importorskip("sqlalchemy")

from database_servers import mariadb, postgresql
from healthrag.ingestion.databases import plan_tables, read_database
from healthrag.ingestion.documents import LabelledDocument, Skipped
from healthrag.ingestion.links import ParentPlan, TableLink, label_value, ways_up, with_given_links

SECRETS = ("123-45-6789", "555-0100", "1950-03-02", "Dr. Osei", "12 Elm Street")


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def url(request, tmp_path_factory):
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("clinic") / "clinic.db"
        path.touch()
        yield _filled(f"sqlite:///{path}")
    else:
        with {"postgresql": lambda: postgresql("postgresql+psycopg"), "mariadb": mariadb}[request.param]() as server:
            yield _filled(server)


def _filled(url):
    engine, meta = sa.create_engine(url), sa.MetaData()

    def key(name):
        return sa.Column(name, sa.Integer, primary_key=True, autoincrement=False)

    def link(name, to, **more):
        return sa.Column(name, sa.ForeignKey(to), **more)

    patient = sa.Table(
        "patient", meta, key("patient_id"), sa.Column("patient_name", sa.String(40)), sa.Column("record_number", sa.String(20)), sa.Column("ssn", sa.String(20)),
        sa.Column("phone", sa.String(20)), sa.Column("birth_date", sa.Date), sa.Column("street_address", sa.String(40)),
    )  # fmt: skip
    clinician = sa.Table("clinician", meta, key("clinician_id"), sa.Column("clinician_name", sa.String(40)), sa.Column("ward", sa.String(40)))
    visit = sa.Table(
        "visit", meta, key("visit_id"), link("patient_id", "patient.patient_id"), link("clinician_id", "clinician.clinician_id"), link("previous_id", "visit.visit_id"),
        sa.Column("began", sa.DateTime), sa.Column("cost", sa.Numeric(10, 2)),
    )  # fmt: skip
    note = sa.Table("note", meta, key("note_id"), link("visit_id", "visit.visit_id"), sa.Column("said", sa.Text), sa.Column("patient_name", sa.String(40)))
    part = sa.Table(
        "part", meta, sa.Column("site", sa.String(10), primary_key=True), sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(20)),
    )  # fmt: skip
    image = sa.Table(
        "scan", meta, key("scan_id"), sa.Column("site", sa.String(10)), sa.Column("number", sa.Integer), sa.Column("of_patient", sa.Integer), sa.Column("result", sa.Text),
        sa.ForeignKeyConstraint(["site", "number"], ["part.site", "part.number"]),
    )  # fmt: skip
    meta.create_all(engine)
    with engine.begin() as c:
        c.execute(patient.insert(), [
            {"patient_id": i, "patient_name": name, "record_number": number, "ssn": "123-45-6789", "phone": "555-0100", "birth_date": dt.date(1950, 3, 2),
             "street_address": "12 Elm Street"} for i, name, number in ((4, "Ada Byron", "PT-0004"), (42, "Łucja Wójcik", "PT-00042"))
        ])  # fmt: skip
        c.execute(clinician.insert(), [{"clinician_id": 1, "clinician_name": "Dr. Osei", "ward": "Surgery"}])
        c.execute(visit.insert(), [
            {"visit_id": v, "patient_id": p, "clinician_id": 1, "previous_id": before, "began": dt.datetime(2020, 2, 29, 12, 30), "cost": Decimal("10.50")}
            for v, p, before in ((1, 4, None), (2, 42, 1), (3, None, 1))
        ])  # fmt: skip
        c.execute(note.insert(), [{"note_id": n, "visit_id": v, "said": f"note {n}", "patient_name": None} for n, v in ((10, 1), (11, 2), (12, 2), (13, 3), (14, None))])
        c.execute(part.insert(), [{"site": "a,b", "number": 1, "kind": "knee"}, {"site": "c", "number": 1, "kind": "hip"}])
        c.execute(image.insert(), [{"scan_id": 7, "site": "a,b", "number": 1, "of_patient": 42, "result": "torn"}, {"scan_id": 8, "site": "c", "number": 1, "of_patient": 4, "result": "well"}])
    engine.dispose()
    return url


READING = {
    "name": "db", "allow": ["patient.patient_name", "record_number"], "parents": {"patient": ["patient_name", "record_number"], "clinician": ["ward"]},
    "labels": {"patient": "patient.record_number", "person_id": "patient.patient_id", "date": "visit.began", "cost": "visit.cost"},
}  # fmt: skip


def rows(url, tables, **options):
    return {d.source: d for d in read_database(url, tables, **{**READING, **options}) if isinstance(d, LabelledDocument)}


def test_a_child_row_tells_whose_it_is(url):
    found = rows(url, ["note"])
    assert found["db:note:11"].content == "patient_name: Łucja Wójcik\nrecord_number: PT-00042\nward: Surgery\nnote_id: 11\nsaid: note 11"
    assert found["db:note:11"].metadata == {
        "kind": "row", "table": "note", "row": 11, "database": "db", "patient": "PT-00042", "person_id": 42, "date": "2020-02-29", "cost": 10.5,
    }  # fmt: skip


def test_a_row_names_the_row_it_is_part_of_when_that_is_read_too(url):
    found = rows(url, ["note", "visit", "patient"])
    assert found["db:note:12"].metadata["parent"] == "db:visit:2" and found["db:visit:2"].metadata["parent"] == "db:patient:42"
    assert "parent" not in found["db:patient:4"].metadata and "parent" not in rows(url, ["note"])["db:note:12"].metadata


def test_a_row_without_a_parent_is_read_all_the_same(url):
    found = rows(url, ["note"])
    assert len(found) == 5 and found["db:note:14"].content == "note_id: 14\nsaid: note 14"
    assert found["db:note:13"].content == "ward: Surgery\nnote_id: 13\nsaid: note 13" and "patient" not in found["db:note:13"].metadata
    assert found["db:note:13"].metadata["date"] == "2020-02-29"


@pytest.mark.parametrize("page_rows", [1, 2, 500])
def test_pages_do_not_lose_or_double_rows(url, page_rows):
    got = [d.source for d in read_database(url, ["note", "visit"], page_rows=page_rows, **READING) if isinstance(d, LabelledDocument)]
    assert got == [f"db:note:{n}" for n in range(10, 15)] + [f"db:visit:{n}" for n in (1, 2, 3)]
    later = rows(url, ["note"], after={"note": [12]})
    assert list(later) == ["db:note:13", "db:note:14"]


def test_a_key_of_several_columns_is_followed(url):
    found = rows(url, ["scan", "part"], parents={"part": ["kind"]}, labels={"organ": "part.kind"})
    assert found["db:scan:7"].content == "kind: knee\nscan_id: 7\nof_patient: 42\nresult: torn"
    assert found["db:scan:7"].metadata["organ"] == "knee" and found["db:scan:7"].metadata["parent"] == "db:part:a\\,b,1"
    assert found["db:part:c,1"].metadata["organ"] == "hip"


def test_a_link_that_is_not_declared_can_be_given(url):
    with pytest.raises(ValueError, match="no table that is read leads to patient"):
        rows(url, ["scan"])
    given = {"links": {"scan.of_patient": "patient.patient_id"}, "parents": {"patient": ["record_number"]}, "labels": {"patient": "patient.record_number"}}
    assert rows(url, ["scan"], **given)["db:scan:7"].metadata["patient"] == "PT-00042"
    assert "of_patient" not in rows(url, ["scan"], **given)["db:scan:7"].content


def test_a_link_to_what_is_not_unique_is_refused(url):
    with pytest.raises(ValueError, match="gaps or doubles"):
        rows(url, ["scan"], links={"scan.of_patient": "patient.ssn"}, parents={"patient": ["record_number"]}, labels={})
    with pytest.raises(ValueError, match="has no column"):
        rows(url, ["scan"], links={"scan.of_patient": "patient.id"}, parents={"patient": ["record_number"]}, labels={})


@pytest.mark.parametrize("option", [{"parents": {"patient": ["ssn"]}}, {"labels": {"born": "patient.birth_date"}}, {"parents": {"clinician": ["clinician_name"]}}])
def test_an_identifying_column_of_a_parent_needs_permission(url, option):
    with pytest.raises(PermissionError, match="name it in allow"):
        rows(url, ["note"], **option)
    with pytest.raises(PermissionError):
        rows(url, ["note"], deny=["record_number"])
    with pytest.raises(PermissionError):
        rows(url, ["note"], allow=["clinician.patient_name", "record_number"])


def test_nothing_that_was_not_permitted_is_asked_for(url):
    sent = []
    sa.event.listen(sa.engine.Engine, "before_cursor_execute", hook := lambda c, cur, statement, *a: sent.append(statement))
    try:
        got = str(list(read_database(url, ["note", "visit", "patient"], **READING)))
    finally:
        sa.event.remove(sa.engine.Engine, "before_cursor_execute", hook)
    read = [s for s in sent if "LIMIT" in s.upper() and "visit_id" in s]
    assert len(read) == 2 and all("patient_name" in s for s in read)
    assert not any(column in s for s in read for column in ("ssn", "phone", "birth_date", "street_address", "clinician_name"))
    assert "Wójcik" in got and not [secret for secret in SECRETS if secret in got]


def test_the_plan_says_what_will_be_shown(url):
    more = {k: v for k, v in READING.items() if k != "name"}
    plan = plan_tables(url, ["note", "visit"], **more)[0]
    assert [c.name for c in plan.parents] == ["patient_name", "record_number", "ward"] and plan.columns == ("note_id", "said")
    assert {c.name: (c.table, len(c.way)) for c in plan.labels} == {
        "patient": ("patient", 2), "person_id": ("patient", 2), "date": ("visit", 1), "cost": ("visit", 1),
    }  # fmt: skip
    assert plan.parent.parent == "visit" and all(type(name) is str for name in (plan.table, *plan.columns, *plan.key))


def test_a_field_of_the_same_name_keeps_its_own(url):
    found = rows(url, {"note": ["note_id", "patient_name", "said"]}, parents={"patient": ["patient_name"]}, allow=["patient_name", "record_number"])
    assert found["db:note:10"].content == "patient.patient_name: Ada Byron\nnote_id: 10\nsaid: note 10"
    denied = [i.reason for i in read_database(url, ["note"], **READING) if isinstance(i, Skipped)]
    assert denied == ["identifying columns were left out: patient_name; name them in allow to read them"]


# ---- without a database


def chain(*names):
    return [TableLink(a, (f"{b}_id",), b, (f"{b}_id",)) for a, b in itertools.pairwise(names)]


def test_the_shortest_way_is_taken_and_circles_end():
    links = [*chain("a", "b", "c", "d"), *chain("c", "a"), *chain("a", "a")]
    assert {table: len(ways[0]) for table, ways in ways_up(links, "a").items()} == {"b": 1, "c": 2, "d": 3}
    assert {table: len(ways[0]) for table, ways in ways_up([*links, *chain("a", "d")], "a").items()}["d"] == 1


def test_two_ways_of_one_length_are_asked_about():
    links = [*chain("note", "visit", "patient"), *chain("note", "author", "patient")]
    plan = ParentPlan(links, lambda table: ["city"], parents={"patient": ["city"]}, allow=["city"])
    with pytest.raises(ValueError, match=r"links=\{'note.author_id': None\}"):
        plan.shown("note", [])
    left = with_given_links(links, {"note.author_id": None})
    assert len(ParentPlan(left, lambda table: ["city"], parents={"patient": ["city"]}, allow=["city"]).shown("note", [])[0].way) == 2


@pytest.mark.parametrize("wrong", ["visit", "visit.", ".id", "", None, 3])
def test_a_wrong_name_of_a_column_is_refused(wrong):
    with pytest.raises(ValueError, match=r"write it as table\.column"):
        with_given_links([], {wrong: "a.b"})
    with pytest.raises(ValueError, match=r"write it as table\.column"):
        ParentPlan([], lambda table: ["id"], labels={"x": [wrong]})


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("date", dt.datetime(2020, 2, 29, 23, 59), "2020-02-29"), ("date", dt.date(2020, 2, 29), "2020-02-29"), ("date", "2020-02-29 23:59:00", "2020-02-29"),
        ("date", "2020-02-29T23:59:00Z", "2020-02-29"), ("date", "29.2.2020", "29.2.2020"), ("at", dt.datetime(2020, 2, 29, 23, 59), "2020-02-29T23:59:00"),
        ("n", 0, 0), ("n", Decimal("3.0"), 3), ("n", Decimal("3.5"), 3.5), ("n", True, True), ("n", " x\x00 ", "x"), ("n", "", None), ("n", None, None),
    ],
)  # fmt: skip
def test_labels_can_be_compared_by_filters(name, value, label):
    given = label_value(name, value)
    assert given == label and type(given) is type(label)
