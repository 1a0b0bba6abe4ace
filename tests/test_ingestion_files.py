"""Files of every kind, whole and hostile: what is read, what is left out, and what is said about it."""

from __future__ import annotations

import io
import json
import os
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pypdf")
pytest.importorskip("trafilatura")

from healthrag.ingestion.audit import audit_document, audit_sources
from healthrag.ingestion.documents import LabelledDocument, Skipped, decode_text, document_key
from healthrag.ingestion.fhir import fhir_documents
from healthrag.ingestion.files import load_grounding_docs
from healthrag.ingestion.identifying import IDENTIFYING_COLUMNS, is_identifying, permitted_columns
from healthrag.ingestion.readers import FILE_FORMATS, pdf_documents, read_data, read_file, read_folder
from healthrag.ingestion.rows import RowChunk, csv_rows, flat_fields, jsonl_rows, row_documents
from healthrag.records import SourceDocument


def kept(items):
    return [item for item in items if isinstance(item, LabelledDocument)]


def reasons(items):
    return [item.reason for item in items if isinstance(item, Skipped)]


def pdf(*pages: str, password: str | None = None) -> bytes:
    "Write a PDF with a line of text on each page."
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    for text in pages:
        page = writer.add_blank_page(200, 200)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode("latin-1"))
        font = DictionaryObject({NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"), NameObject("/BaseFont"): NameObject("/Helvetica")})
        page[NameObject("/Contents")] = writer._add_object(stream)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252", "shift_jis", "gb18030", "koi8-r"])
def test_declared_and_marked_encodings_are_read(encoding):
    text = {"shift_jis": "日本語の記録", "gb18030": "中文记录", "koi8-r": "Запись"}.get(encoding, "Ménière’s naïve")
    data = text.encode(encoding)
    declared = encoding if encoding not in ("utf-8-sig", "utf-16", "utf-32") else None
    assert decode_text(data, declared) == text


@pytest.mark.parametrize("declared", ["x-unknown", "", "base64", "rot13", "hex", "utf-8\n", "../../etc", "ascii", "iso-8859-1", None])
def test_wrong_declarations_do_no_harm(declared):
    assert decode_text("Ménière".encode(), declared) == "Ménière"


@given(st.binary(max_size=200), st.sampled_from([None, "utf-8", "utf-16", "latin-1", "shift_jis", "nonsense"]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_text_or_a_clear_error(data, declared):
    try:
        text = decode_text(data, declared)
    except ValueError as error:
        assert "binary" in str(error) or "neither" in str(error)
    else:
        assert "\x00" not in text and "\r" not in text


@given(st.text(max_size=100))
@settings(max_examples=200, deadline=None)
def test_text_survives(text):
    clean = "".join(c for c in text if c >= " " or c in "\n\t")
    assert decode_text(clean.encode("utf-8", "ignore")) == clean.encode("utf-8", "ignore").decode().removeprefix("\ufeff")


# ---------------------------------------------------------------- any bytes under any name


@given(st.binary(max_size=300), st.sampled_from(sorted(set(FILE_FORMATS.values()))))
@settings(max_examples=400, deadline=None)
def test_no_content_is_an_exception(data, form):
    for item in read_data(data, form, "f"):
        assert isinstance(item, LabelledDocument | Skipped) and (not isinstance(item, LabelledDocument) or item.content.strip())


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 100_000, b"[" * 200_000 + b"]" * 200_000, b'"' + b"\\" * 100_001, b"NaN", b"nullnull", b"1e999999", b"\xef\xbb\xbf[]"])
@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_hostile_json_is_a_reason(data, form):
    items = list(read_data(data, form, "f"))
    assert kept(items) == []
    assert all(len(reason) < 500 for reason in reasons(items))


# ---------------------------------------------------------------- folders


def test_a_folder_is_read_in_a_fixed_order_with_reasons(tmp_path):
    root = tmp_path / "notes"
    (root / "sub" / ".git").mkdir(parents=True)
    for name, data in {
        "z.MD": b"# Z\r\n\r\nlast", "a.txt": "Ménière".encode("cp1252"), "sub/b.html": b"<h1>T</h1><p>x</p>", "sub/.git/config.txt": b"x", ".hidden.md": b"x",
        "empty.md": b" \n", "binary.txt": b"\x00\x01", "photo.png": b"x", "sub/rows.jsonl": b'{"id": "q1", "a": 1}\nbroken\n',
    }.items():  # fmt: skip
        (root / name).write_bytes(data)
    os.mkfifo(root / "pipe.md")
    (tmp_path / "outside.md").write_text("secret")
    (root / "link.md").symlink_to(tmp_path / "outside.md")
    (root / "inside.md").symlink_to(root / "z.MD")
    (root / "dangling.md").symlink_to(root / "nothing.md")
    (root / "loop").symlink_to(root)
    items = list(read_folder(root))
    assert [d.source for d in kept(items)] == ["notes:a.txt", "notes:inside.md", "notes:z.MD", "notes:sub/b.html", "notes:sub/rows.jsonl:q1"]
    said = {i.source: i.reason for i in items if isinstance(i, Skipped)}
    assert set(said) == {f"notes:{n}" for n in ("binary.txt", "dangling.md", "empty.md", "link.md", "photo.png", "pipe.md", "sub/rows.jsonl:2")}
    assert "out of the folder" in said["notes:link.md"] and "regular file" in said["notes:pipe.md"] and "secret" not in str(items)


def test_size_exclusion_and_names(tmp_path):
    (tmp_path / "big.txt").write_bytes(b"x" * 2000)
    (tmp_path / "drafts").mkdir()
    (tmp_path / "drafts" / "d.md").write_text("draft")
    (tmp_path / "ok.md").write_text("fine")
    items = list(read_folder(tmp_path, name="n", max_bytes=1000, exclude=["drafts/*"]))
    assert [d.source for d in kept(items)] == ["n:ok.md"] and "MB large" in reasons(items)[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_locked_files_and_folders_are_skipped_for_now(tmp_path):
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "a.md").chmod(0)
    (tmp_path / "sub").mkdir(mode=0)
    items = list(read_folder(tmp_path))
    assert all(i.temporary for i in items) and len(items) == 2


def test_an_unreadable_file_is_temporary(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("x")
    monkeypatch.setattr(os, "open", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    (item,) = read_file(tmp_path / "a.md")
    assert item.temporary and "Permission denied" in item.reason


# ---------------------------------------------------------------- PDF


def test_a_pdf_is_read_page_by_page():
    found = kept(pdf_documents(pdf("Gastrointestinal hemorrhage", "", "Second page"), "notes:a.pdf"))
    assert [(d.source, d.title, d.content, d.metadata["page"]) for d in found] == [
        ("notes:a.pdf:1", "a.pdf, page 1", "Gastrointestinal hemorrhage", 1), ("notes:a.pdf:3", "a.pdf, page 3", "Second page", 3)
    ]  # fmt: skip


def test_pdfs_that_cannot_be_read_say_why():
    whole = pdf("text")
    assert "password" in reasons(pdf_documents(pdf("x", password="p"), "f"))[0]
    assert "optical character recognition" in reasons(pdf_documents(pdf(""), "f"))[0]
    for broken in (b"", b"%PDF-1.4", whole[: len(whole) // 2], whole.replace(b"/Pages", b"/Pagez"), b"%PDF-1.4\n" + b"<<" * 5000, random.Random(5).randbytes(5000)):
        items = list(pdf_documents(broken, "f"))
        assert items and all(isinstance(i, Skipped | LabelledDocument) for i in items)


@pytest.mark.timeout(300)
def test_a_pdf_bomb_is_not_blown_up():
    from pypdf import PdfWriter
    from pypdf.generic import NameObject, NumberObject, StreamObject

    writer = PdfWriter()
    page = writer.add_blank_page(100, 100)
    stream = StreamObject()
    stream._data = zlib.compress(b"0 " * 150_000_000, 9)
    stream[NameObject("/Filter")], stream[NameObject("/Length")] = NameObject("/FlateDecode"), NumberObject(len(stream._data))
    page[NameObject("/Contents")] = writer._add_object(stream)
    out = io.BytesIO()
    writer.write(out)
    items = list(pdf_documents(out.getvalue(), "f"))
    assert kept(items) == [] and items


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_damaged_pdf_never_raises(at, junk):
    data = bytearray(pdf("Some text", "More"))
    at %= len(data)
    data[at : at + len(junk)] = junk
    assert all(isinstance(i, Skipped | LabelledDocument) for i in pdf_documents(bytes(data), "f"))


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separated_values_in_their_dialects(separator):
    text = separator.join(["id", "reason"]) + "\n" + separator.join(["1", '"a ""quoted"", long\nreason"']) + "\n\n"
    assert [row for _, row in csv_rows(text)] == [{"id": "1", "reason": 'a "quoted", long\nreason'}]


@pytest.mark.parametrize(("text", "said"), [("", "no line of column names"), (",,\n1,2,3", "no line of column names"), ("a,b,a\n", "double or blank"), ("a,,b\n1,2,3", "double or blank"),
                                            ('a,b\n"1,2', "not readable as CSV"), ('a\n"x"y\n', "not readable as CSV"), ("a\n" + "x" * 200_000, "field larger")])  # fmt: skip
def test_bad_tables_say_why(text, said):
    assert said in reasons(read_data(text.encode(), "csv", "f"))[0]


def test_a_missing_a_double_and_an_identifying_key_are_refused():
    rows = "id,mrn,v\n1,7,a\n1,8,b\n"
    for key, said in (("id", "missing, blank or double"), ("no", "missing, blank or double"), ("mrn", "identifying")):
        assert said in reasons(read_data(rows.encode(), "csv", "f", key=key))[0]
    assert [d.source for d in kept(read_data(rows.encode(), "csv", "f"))] == ["f:1", "f:2"], "numbers, as the ids are double"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3), max_leaves=12))
@settings(max_examples=200, deadline=None)
def test_any_json_value_makes_rows_or_reasons(value):
    lines = json.dumps(value) + "\n" + json.dumps({"v": value})
    items = list(row_documents(jsonl_rows(lines), "f"))
    assert items and all(d.content.strip() for d in kept(items))


def test_nested_identifying_fields_go_with_all_below_them():
    fields, denied = flat_fields({"visit": {"reason": "x", "contact": {"phones": [{"number": "555"}]}}, "PatientName": {"first": "Ada"}})
    assert fields == {"visit.reason": "x"} and denied == {"visit.contact", "PatientName"}


@given(st.text(alphabet="ab: \n.", max_size=400), st.integers(20, 120))
@settings(max_examples=200, deadline=None)
def test_pieces_of_a_row_hold_all_of_it(text, length):
    content = f"id: 1\nnote: {text}"
    chunks = RowChunk(length, 9).chunk(content)
    covered = [False] * len(content)
    for chunk in chunks:
        start, end = chunk.metadata["start"], chunk.metadata["end"]
        assert chunk.text.endswith(content[start:end]) and chunk.text.startswith("id: 1")
        covered[start:end] = [True] * (end - start)
    missing = "".join(c for c, seen in zip(content, covered, strict=True) if not seen)
    assert missing.strip() in ("", "id: 1")


# ---------------------------------------------------------------- identifying


@pytest.mark.parametrize("name", sorted(IDENTIFYING_COLUMNS))
def test_every_listed_name_is_denied_in_every_spelling(name):
    for spelling in (name, name.upper(), name.title().replace("_", ""), f"patient_{name}", f"{name}_1"):
        assert is_identifying(spelling), spelling


@pytest.mark.parametrize("name", "person_id gender_concept_id drug_concept_name condition_start_date value_as_number unit year_of_birth race note_text visit_type dose "
                         "birth_weight family_history drug_name test_name concept_code vocabulary_id death_date observation_period_end_date".split())  # fmt: skip
def test_clinical_names_are_kept(name):
    assert not is_identifying(name)


def test_permission_is_by_name_and_denial_wins():
    assert permitted_columns(["zip", "a"], allow=["ZIP"], deny=["zip", "A"]) == ((), ("zip", "a"))
    assert permitted_columns(["zip_code"], allow=["zip"]).denied == ("zip_code",)


# ---------------------------------------------------------------- FHIR

PLANTED = ("Byron", "Ada", "1950-03-02", "555-0100", "Elm Street", "MRN-7788", "ada@example.org", "02138")


def patient_bundle():
    return {"resourceType": "Bundle", "type": "collection", "entry": [
        {"fullUrl": "urn:uuid:1", "resource": {
            "resourceType": "Patient", "id": "p1", "active": True, "gender": "female", "birthDate": "1950-03-02", "identifier": [{"value": "MRN-7788"}],
            "name": [{"family": "Byron", "given": ["Ada"]}], "telecom": [{"system": "phone", "value": "555-0100"}, {"value": "ada@example.org"}],
            "address": [{"line": ["12 Elm Street"], "postalCode": "02138"}], "contact": [{"name": {"text": "Lord Byron"}}], "photo": [{"data": "xx"}],
            "text": {"status": "generated", "div": "<div>Ada Byron, 12 Elm Street</div>"},
            "extension": [{"url": "http://x/mothersMaidenName", "valueString": "Byron"}], "maritalStatus": {"text": "married"}}},
        {"resource": {
            "resourceType": "Observation", "id": "o1", "status": "final", "subject": {"reference": "Patient/p1", "display": "Ada Byron"},
            "performer": [{"display": "Dr Byron"}], "code": {"coding": [{"system": "http://loinc.org", "code": "718-7", "display": "Hemoglobin"}]},
            "valueQuantity": {"value": 7.9, "unit": "g/dL"}, "effectivePeriod": {"start": "2020-01-01", "end": "2020-01-02"},
            "component": [{"code": {"text": "systolic"}, "valueQuantity": {"value": 90, "unit": "mmHg"}}]}},
        {"resource": {"resourceType": "Observation", "id": "o1", "status": "final"}}, {"resource": {"id": "x"}}, {"request": {}}, "junk", None,
        {"resource": {"resourceType": "Bundle", "entry": [{"resource": {"resourceType": "Condition", "id": "c1", "code": {"text": "GI bleed"}, "subject": {"reference": "urn:uuid:p1"}}}]}},
    ]}  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_a_bundle_becomes_resources_without_identifiers(form):
    data = json.dumps(patient_bundle()) if form == "json" else "\n".join(json.dumps(e["resource"]) for e in patient_bundle()["entry"] if isinstance(e, dict) and "resource" in e)
    items = list(read_data(data.encode(), form, "ward:b"))
    found = {d.source: d for d in kept(items)}
    assert set(found) == {"ward:b:Patient:p1", "ward:b:Observation:o1", "ward:b:Condition:c1"}
    assert not [p for p in PLANTED for d in found.values() if p in d.content + d.title + str(d.metadata)]
    hemoglobin = found["ward:b:Observation:o1"].content
    for part in ("code: Hemoglobin (LOINC 718-7)", "valueQuantity: 7.9 g/dL", "effectivePeriod: 2020-01-01 to 2020-01-02", "component.code: systolic", "subject: Patient/p1"):
        assert part in hemoglobin
    assert {d.metadata["patient"] for d in found.values()} == {"p1"} and "maritalStatus: married" in found["ward:b:Patient:p1"].content
    assert any("twice" in r for r in reasons(items)) and any("resourceType" in r for r in reasons(items)) and any("Patient.name" in r for r in reasons(items))


def test_an_allowed_element_is_kept():
    found = kept(fhir_documents(patient_bundle(), "b", allow=["birthDate"]))
    assert "birthDate: 1950-03-02" in found[0].content and "Byron" not in found[0].content


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=6), lambda c: st.lists(c, max_size=3) | st.dictionaries(
    st.sampled_from(["resourceType", "entry", "resource", "id", "code", "coding", "system", "display", "subject", "reference", "text", "value", "unit", "start", "Bundle"]), c, max_size=4), max_leaves=15))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_any_structure_is_read_as_fhir_without_an_error(value):
    resource = {"resourceType": "Observation", "status": "final", "x": value, "code": value, "subject": value, "entry": value}
    assert list(fhir_documents([resource, {"resourceType": "Bundle", "entry": value}], "f"))


# ---------------------------------------------------------------- audit


def test_the_grounding_documents_pass_the_audit():
    report = audit_sources(load_grounding_docs())
    assert report and not report.by_verdict("reject"), str(report)


GOOD = "Gastrointestinal hemorrhage is bleeding anywhere between the esophagus and the rectum, and every second patient takes an anticoagulant. " * 3


@pytest.mark.parametrize(
    ("content", "finding", "verdict"),
    [
        (GOOD, None, "accept"),
        ("", "empty", "reject"),
        ("too short", "short", "reject"),
        ("word " * 30, "short", "review"),
        ("12 34 | 56 78 | " * 40, "symbols", "reject"),
        ("bleeding " * 300, "repetition", "reject"),
        (("A line of some words that is there again\n" * 12) + GOOD, "repeated lines", "review"),
        (GOOD + " " + ("x" * 60 + " ") * 12, "long tokens", "review"),
        (GOOD.replace("e", "Ã©"), "garbled", "reject"),
        (GOOD + " \ufffd\ufffd", "garbled", "review"),
        (GOOD + "Accept all cookies. Privacy policy.", "boilerplate", "review"),
        ("Access denied. Enable JavaScript and sign in to continue. All rights reserved. Privacy policy. " + "Please wait here. " * 15, "boilerplate", "reject"),
        (GOOD + "\n```sql\n" + "SELECT a_1, b_2 FROM t_3 WHERE x_4 = 5;\n" * 30 + "```\n", None, "accept"),
    ],
)  # fmt: skip
def test_findings(content, finding, verdict):
    audit = audit_document(SourceDocument("s", "", "t", content))
    assert audit.verdict == verdict and (finding in {f.name for f in audit.findings} if finding else not audit.findings), audit


def test_titles_origins_topics_and_copies():
    names = lambda a: {f.name for f in a.findings}
    assert names(audit_document(SourceDocument("", "", "", GOOD), terms=["dermatology"])) == {"no title", "no origin", "off topic"}
    assert not names(audit_document(SourceDocument("s", "", "t", GOOD), terms=["Rectum"]))
    report = audit_sources([SourceDocument("a", "", "t", GOOD), SourceDocument("b", "", "t", f" {GOOD.upper()} ")])
    assert [a.verdict for a in report] == ["accept", "reject"] and "copy" in str(report) and "<table>" in report._repr_html_()


def test_documents_are_named_once():
    assert document_key(SourceDocument("web", "https://a.org", "", "")) == "web:https://a.org"
    assert document_key(SourceDocument("web:https://a.org/x.pdf:3", "https://a.org/x.pdf", "", "")) == "web:https://a.org/x.pdf:3"
