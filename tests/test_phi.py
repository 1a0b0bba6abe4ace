"Protected health information: what is found, what is not, and what the guard says."

import ast
import base64
import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthrag.ingestion.identifying import is_identifying
from healthrag.phi import PHI_KINDS, PHIError, find_phi, redact, require_no_phi
from healthrag.settings import resource

CASES = [json.loads(line) for line in resource("data", "phi", "cases.jsonl").read_text(encoding="utf-8").splitlines()]
TASKS = [json.loads(line) for line in resource("data", "benchmark", "tasks.jsonl").read_text(encoding="utf-8").splitlines() if line.strip()]


def missed(case):
    covered = {i for one in find_phi(case["text"]) for i in range(one.start, one.end)}
    return [span for span in case["phi"] if not all(i in covered for i in range(span[1], span[2]) if case["text"][i].isalnum())]


def test_the_cases_are_many_and_cover_every_class():
    assert len(CASES) >= 200 and len({case["text"] for case in CASES}) == len(CASES)
    assert {kind for case in CASES for kind, *_ in case["phi"]} == set(PHI_KINDS) and len({w[0] for w in PHI_KINDS.values()}) == 18
    assert sum(not case["phi"] for case in CASES) >= 100 and sum(case["held_out"] for case in CASES) >= 50
    assert all(case["text"][a:b].strip() == case["text"][a:b] != "" for case in CASES for _, a, b in case["phi"])


@pytest.mark.parametrize("held_out", [False, True])
def test_recall_and_precision_hold(held_out):
    cases = [case for case in CASES if case["held_out"] is held_out]
    planted = sum(len(case["phi"]) for case in cases)
    wrong = [one for case in cases for one in find_phi(case["text"]) if not any(a < one.end and one.start < b for _, a, b in case["phi"])]
    assert 1 - sum(len(missed(case)) for case in cases) / planted >= (0.92 if held_out else 0.98)
    assert len(wrong) <= 1


@pytest.mark.parametrize("kind", PHI_KINDS)
def test_every_class_is_found(kind):
    cases = [case for case in CASES if any(k == kind for k, *_ in case["phi"])]
    assert cases and sum(kind in {k for k, *_ in missed(case)} for case in cases) <= len(cases) / 5


def test_no_question_and_no_gold_query_is_held_back():
    texts = [t for task in TASKS for t in (task["query"], task["sql_query"], task["description"], task["response"], *task["paraphrases"])]
    assert len(texts) > 500 and [t for t in texts if find_phi(t, identifying=is_identifying)] == []


@pytest.mark.parametrize("path", sorted(resource("grounding").glob("*.md")), ids=lambda p: p.name)
def test_no_grounding_text_is_held_back(path):
    assert find_phi(path.read_text(encoding="utf-8"), identifying=is_identifying) == []


@pytest.mark.parametrize("text", [case["text"] for case in CASES if case["phi"] and not missed(case)])
def test_nothing_is_left_after_redaction(text):
    clean = redact(text, identifying=is_identifying)
    assert find_phi(clean, identifying=is_identifying) == [] and clean != text and redact(clean) == clean


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("ＳＳＮ ０７８－０５－１１２０", ["national-id"]),
        ("SSN 078\u201105\u20111120", ["national-id"]),
        ("SSN 078\u200b-05\u200b-1120", ["national-id"]),
        ("call (617)\u00a0555\u20110199", ["phone"]),
        ("col_ssn_078-05-1120", ["national-id"]),
        ("notes_mrn_0012345_2019", ["record"]),
        ("Seen 2019-03-01.\nSeen 2019-03-02.", ["date", "date"]),
    ],
)
def test_disguises_do_not_help(text, kinds):
    assert [one.kind for one in find_phi(text)] == kinds
    assert [text[one.start : one.end] for one in find_phi(text)] == [one.text for one in find_phi(text)]


def test_columns_are_judged_by_the_one_list():
    for column, found in (("last_name", 1), ("person_source_value", 1), ("city", 1), ("concept_name", 0), ("gender_source_value", 0), ("domain_id", 0)):
        query = f"SELECT 1 FROM t WHERE {column} = 'Zqx vwt'"
        assert len(find_phi(query, identifying=is_identifying)) == found == int(is_identifying(column)), column
        assert column == "last_name" or find_phi(query) == []
        assert len(find_phi(json.dumps({column: "Zqx vwt"}), identifying=is_identifying)) == found


def test_every_guard_outside_of_the_package_knows_the_columns(project_root):
    def is_guard(node):
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("find_phi", "redact", "require_no_phi")

    paths = [path for path in (project_root / "healthrag").rglob("*.py") if path.parent.name != "phi"]
    calls = [(path.name, node) for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_guard(node)]
    assert {"served.py", "huggingface.py", "search.py", "encode.py"} <= {name for name, _ in calls}
    assert [(name, node.lineno) for name, node in calls if "identifying" not in [k.arg for k in node.keywords]] == []


def test_the_error_names_classes_and_not_the_text():
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Ada Byron, MRN 0012345, ada@example.org"}]
    with pytest.raises(PHIError, match=r"the text for hf:a/b .*name \(1\), email \(1\), record \(1\); nothing was sent") as caught:
        require_no_phi(messages, to="hf:a/b")
    assert not any(part in str(caught.value) for part in ("Ada", "Byron", "0012345", "example.org"))
    assert isinstance(caught.value, PermissionError) and isinstance(caught.value, ValueError)
    require_no_phi([{"role": "user", "content": "How many women?"}, {"role": "user"}])
    require_no_phi("How many women?")
    require_no_phi([])


def test_a_finding_does_not_show_its_text():
    (found,) = find_phi("MRN 0012345")
    assert "0012345" not in repr(found) and "0012345" not in str(found) and found.text == "0012345"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_and_redacted(text):
    found = find_phi(text)
    assert all(text[one.start : one.end] == one.text and one.text for one in found)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert find_phi(redact(text)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([case["text"] for case in CASES]), min_size=2, max_size=4), st.sampled_from(["\n", " ", "; ", " | "]))
def test_joined_texts_are_redacted_too(texts, separator):
    assert find_phi(redact(separator.join(texts))) == []


@settings(max_examples=40, deadline=None)
@given(st.integers(10**5, 10**12))
def test_a_bare_number_is_nobody(number):
    for text in (f"concept_id {number}", f"WHERE condition_concept_id = {number}", f"SNOMED {number}", f"({number})", f"{number} rows"):
        assert find_phi(text, identifying=is_identifying) == [], text


BASE64 = base64.b64encode(random.Random(5).randbytes(75000)).decode()
UNBROKEN = {  # without a space, so that a pattern that may begin anywhere would read to the end from everywhere
    "DNA": "ACGT" * 25000, "base64": BASE64, "one capital": "A" * 100000, "one capital with an accent": "É" * 30000, "digits": "0123456789" * 5000,
    "one digit": "9" * 50000, "dots": "a.b.c." * 7000, "hyphens": "A-" * 15000, "apostrophes": "O'" * 15000, "underscores": "Ab_" * 10000,
    "names": "John-" * 8000, "a keyword": "dna-print-" * 5000, "addresses": "a@b." * 10000, "slashes": "a/" * 15000,
}  # fmt: skip


@pytest.mark.parametrize("hostile", ["1-" * 15000, "John " * 4000, "a@" * 15000, "May 1 " * 2500, "mrn: " * 6000, "A, B " * 4000, "('" * 10000, "Mr. Ab " * 15000])
@pytest.mark.timeout(300)
def test_long_texts_are_read_to_the_end(hostile):
    assert isinstance(find_phi(hostile, identifying=is_identifying), list)


@pytest.mark.parametrize("hostile", UNBROKEN.values(), ids=UNBROKEN)
@pytest.mark.timeout(60)
def test_long_texts_without_a_break_are_read_to_the_end(hostile):
    text = f"{hostile} MRN 0012345 {hostile}"
    assert "0012345" in [one.text for one in find_phi(text, identifying=is_identifying)]


def test_a_long_word_hides_no_name():
    for text in ("Mr Ada" + "x" * 200, "A" * 5000 + " 90210, Boston, MA 02139", "Patient: " + "Ab" * 300 + " was seen by Dr Byron"):
        assert find_phi(text) and find_phi(redact(text)) == [], text[:20]


def between(inside):
    return lambda text: "".join(c + inside if c.isalnum() else c for c in text)


def digits(zero):
    return lambda text: "".join(chr(ord(zero) + int(c)) if c.isdigit() else c for c in text)


DISGUISES = {  # how the same characters come out of word processors, PDF files, other keyboards, and of those who want them unseen
    **{f"U+{ord(c):04X} between": between(c) for c in "\u00ad\u034f\u115f\u180e\u200b\u200d\u2060\u3164\ufe0f\ufeff\U000e0041\U000e0100\0\b\x1b\x80\u0301"},
    **{f"digits of {c}": digits(c) for c in "\u0660\u0966\uff10\U0001d7ce\U0001d7f6\u2080"},
    "circled digits": lambda text: "".join(chr(0x2460 + int(c) - 1) if c in "123456789" else c for c in text),
    **{f"dash U+{ord(c):04X}": lambda text, c=c: text.replace("-", c) for c in "\u2010\u2011\u2013\u2014\u2043\u2212\u02d7\ufe63\uff0d"},
    **{f"slash U+{ord(c):04X}": lambda text, c=c: text.replace("/", c) for c in "\u2044\u2215\u29f8\uff0f"},
    **{f"space U+{ord(c):04X}": lambda text, c=c: text.replace(" ", c) for c in "\t\xa0\u2003\u202f\u3000\u2800"},
    "wide gaps": lambda text: text.replace(" ", "   "), "dots": lambda text: text.replace(".", "\u2024"), "at": lambda text: text.replace("@", "\ufe6b"),
    "bold letters": lambda text: "".join(chr(0x1D400 + ord(c) - 65) if "A" <= c <= "Z" else chr(0x1D41A + ord(c) - 97) if "a" <= c <= "z" else c for c in text),
    "Cyrillic letters": lambda text: text.translate(str.maketrans("ABEKMHOPCTXSJaeopcxysij", "АВЕКМНОРСТХЅЈаеорсхуѕіј")),
    "wide letters": lambda text: "".join(chr(ord(c) + 0xFEE0) if c.isascii() and c.isalnum() else c for c in text),
}  # fmt: skip
PLAIN = ["SSN 123-45-6789 was noted", "MRN 4482913 seen", "call (617) 555-0142 now", "born on 03/14/1956 in spring", "write to jane.doe@example.org please",
         "Patient Jane Smith was seen", "a 93-year-old woman", "DOB: 1956-03-14", "admitted March 14, 2019 with pain"]  # fmt: skip


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES)
@pytest.mark.parametrize("text", PLAIN)
def test_a_disguise_hides_nothing(text, disguise):
    assert find_phi(text)
    found, hidden = find_phi(disguise(text)), disguise(text)
    assert found and {one.kind for one in found} >= {find_phi(text)[0].kind}
    assert find_phi(redact(hidden)) == []


@given(st.text(alphabet=st.one_of(st.sampled_from("Jane Smith 1956-03/14\t\r\n\u200b\u0301\ufb01½²①ａµ"), st.characters())))
def test_places_are_those_of_the_text_as_given(text):
    for one in find_phi(text + " MRN ４４８２９１３ seen"):
        assert one.text == (text + " MRN ４４８２９１３ seen")[one.start : one.end]
    assert any("４４８２９１３" in one.text for one in find_phi(text + " MRN ４４８２９１３ seen"))
