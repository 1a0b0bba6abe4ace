"Markers, claims and their verification: what is stated must stand in the passage that is cited."

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from healthrag.answers.citations import NO_ANSWER, Citation, Claim, check_citations, cited_numbers, number_passages, split_claims, without_markers
from healthrag.answers.facts import content_words, missing_facts, read_facts, word_coverage
from healthrag.answers.verify import check_claim, read_verdicts, verify_claims, verify_prompt
from healthrag.records import Hit, Message, Recollection, Reply

PASSAGES = [
    "PT-00042: melena on 2021-03-03. Hemoglobin 7.2 g/dL, transfused 2 units. Warfarin was stopped.",
    "PT-00042: no further bleeding. Hemoglobin 11.8 g/dL. Pantoprazole 40 mg once daily. Denies alcohol.",
]


# markers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a [1]", [1]), ("a [1, 2]", [1, 2]), ("a [1,2;4]", [1, 2, 4]), ("a [1-3]", [1, 2, 3]), ("a [1–3]", [1, 2, 3]), ("a [1]-[3]", [1, 2, 3]), ("a [ 2 ]", [2]),
        ("a [Passage 2 and source 3]", [2, 3]), ("a [sources 1 to 2]", [1, 2]), ("【3†x】", [3]), ("[1][1][2]", [1, 2]), ("[3-1]", [3, 1]), ("[0]", [0]),
        ("x[i] [a1] [1a] [-1] [] [1.5] (1) [70-", []),
    ],
)  # fmt: skip
def test_markers_of_every_kind_are_read(text, numbers):
    assert cited_numbers(text) == numbers


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.sampled_from([", ", ",", "; ", " and "]))
def test_a_group_is_its_members(numbers, sign):
    assert cited_numbers(f"x [{sign.join(map(str, numbers))}].") == list(dict.fromkeys(numbers))


@given(st.integers(1, 50), st.integers(0, 90))
def test_a_range_is_all_between(low, width):
    assert cited_numbers(f"x [{low}-{low + width}]") == list(range(low, low + width + 1))


@given(st.text("[]0123456789,;–-【】 passagetoand", max_size=80))
def test_markers_are_taken_out_whole(text):
    assert not cited_numbers(without_markers(text)) or cited_numbers(text)
    assert len(cited_numbers(text)) <= 100 * (text.count("[") + text.count("【"))


@pytest.mark.parametrize("hostile", ["[" * 50_000, "[1," * 20_000, "[1-" * 20_000, "[" + "1, " * 20_000 + "x", "1" * 50_000, "a. " * 20_000, ". [1] " * 9_000, "[1]-" * 10_000])
def test_hostile_text_takes_no_time(hostile):
    check_citations(hostile, 3)
    without_markers(hostile)


# citations


@pytest.mark.parametrize("thing", ["text", Message("assistant", "x"), Recollection("x"), None, {"text": "x"}])
def test_only_a_passage_can_be_cited(thing):
    with pytest.raises(TypeError, match="no evidence"):
        Citation(1, thing)
    with pytest.raises(TypeError, match="no evidence"):
        number_passages([Hit("a", "x", 1.0), thing])


def test_numbers_start_at_one_and_escape():
    first, second = number_passages([Hit("a", "<b>x</b>", 1.0), Hit("b", "y", 1.0, metadata={"source": "notes"})])
    assert (first.number, second.number) == (1, 2) and second.label == "notes" and "<b>x" not in first._repr_html_() and first.to_json()["id"] == "a"


# claims


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("It bled [1]. It stopped. [2]", [("It bled.", (1,)), ("It stopped.", (2,))]),
        ("Dr. A. Osei gave 2.5 mg vs. 5 mg, i.e. half [1].", [("Dr. A. Osei gave 2.5 mg vs. 5 mg, i.e. half.", (1,))]),
        ("The notes say:\n- melena [1]\n* no pain [2, 3]\n1. fever", [("melena", (1,)), ("no pain", (2, 3)), ("fever", ())]),
        ("# Answer\n\nIs it so? [1]\n\nYes [1]", [("Yes", (1,))]),
        ("**It bled** [1]!", [("It bled!", (1,))]),
        ("", []), ("  \n ", []), ("[1] [2]", []), ("...", []),
    ],
)  # fmt: skip
def test_claims_are_sentences_and_items(text, claims):
    assert [(claim.text, claim.cited) for claim in split_claims(text)] == claims


@given(st.text(max_size=300))
def test_claims_hold_no_marker_and_only_cited_numbers(text):
    numbers = set(cited_numbers(text))
    for claim in split_claims(text):
        assert claim.text and not claim.text.endswith("?") and set(claim.cited) <= numbers


# checking


def test_every_fault_is_named():
    check = check_citations("Hemoglobin was 11.8 g/dL [1]. Melena on March 3, 2021 [1, 5]. Warfarin was stopped.", PASSAGES)
    assert check.overflow == (5,) and check.missing == ("Warfarin was stopped.",) and check.cited == (1,) and check.unused == (2,)
    (wrong,) = check.wrong_source
    assert (wrong.cited, wrong.found_in) == ((1,), 2) and not check.ok and not check and "no passage 5" in str(check)


def test_overflow_inside_a_group_is_seen():
    "The reference reads plain [n] alone."
    assert check_citations("x [1, 7]", 2).overflow == (7,) and check_citations("x [1-4]", 2).overflow == (3, 4)


def test_a_good_answer_has_no_fault():
    assert check_citations("Melena on 2021-03-03 [1]. Later 11.8 g/dL hemoglobin [2].", PASSAGES) and check_citations(NO_ANSWER, 0) and check_citations("", 0)


@given(st.text("[]123456789,- abc.\n", max_size=100), st.integers(0, 5))
def test_a_number_is_there_or_not(text, n):
    check = check_citations(text, n)
    assert set(check.cited) | set(check.overflow) == set(cited_numbers(text)) and not set(check.cited) & set(check.overflow)
    assert all(1 <= number <= n for number in check.cited)


# facts


@pytest.mark.parametrize(
    ("claim", "passage"),
    [
        ("1,000 mg", "1000mg"), ("2 units", "two units"), ("twelve months", "12 months"), ("9.1%", "9.1 percent"), ("5 mg", "5 to 10 mg"), ("10 µg", "10 mcg"), ("March 3, 2021", "2021-03-03"),
        ("3 March 2021", "03/03/2021"), ("in 2021", "2021-03-03"), ("March 2021", "3 Mar. 2021"), ("E11.9", "code e11.9"), ("PT-0004", "(PT-0004)"), ("one of them", "nothing"), ("twice", "2 times"),
        ("patient 42", "Patient 42 came"), ("on 2021-03-03T10:00", "March 3, 2021"),
    ],
)  # fmt: skip
def test_the_same_fact_in_another_form_is_found(claim, passage):
    assert missing_facts(claim, [passage]) == []


@pytest.mark.parametrize(
    ("claim", "passage"),
    [
        ("10 mg", "10 ml"), ("10 mg", "100 mg"), ("1.5 mg", "15 mg"), ("7 days", "17 days"), ("2021-03-03", "2021-03-04"), ("March 3, 2021", "March 2021"), ("2021-03-03", "in 2021"), ("E11.9", "E11.90"),
        ("PT-0004", "PT-00042"), ("E11", "E11.9"), ("three", "2"), ("50 %", "50 mg"), ("in 2020", "2021"), ("4 units", "on 2021-04-12"), ("5", ""),
    ],
)  # fmt: skip
def test_another_fact_is_not(claim, passage):
    assert missing_facts(claim, [passage])


@example("２ ½ mg ² 2021-99-99 99/99/2021")
@given(st.text(max_size=200))
def test_a_text_holds_its_own_facts(text):
    assert missing_facts(text, [text]) == [] and word_coverage(text, [text]) == 1.0
    assert read_facts("").numbers == () and all(content_words(text))


# verification


@pytest.mark.parametrize(
    ("claim", "state", "why"),
    [
        ("Hemoglobin was 7.2 g/dL [1].", "supported", "of its words"), ("Hemoglobin was 7.2 g/dL.", "unsupported", "cites no passage"), ("Hemoglobin was 7.2 g/dL [3].", "unsupported", "cites no passage"),
        ("Hemoglobin was 7.2 g/dL [2].", "unsupported", "7.2 g/dL is not in [2]"), ("There was further bleeding [2].", "unsupported", "no further bleeding"), ("He drinks alcohol [2].", "unsupported", "Denies alcohol"),
        ("Warfarin was started [1].", "unsupported", "Warfarin was stopped"), ("PT-0004 had melena [1].", "unsupported", "PT-0004 is not in"), ("Warfarin was stopped and apixaban was begun [1].", "partial", "50%"),
        ("Melena on 2021-03-03 [1, 2, 2, 9].", "supported", "[1][2]"),
    ],
)  # fmt: skip
def test_claims_are_judged_without_a_model(claim, state, why):
    (found,) = verify_claims(claim, PASSAGES).claims
    assert found.state == state and why in found.reason


def test_what_memory_knows_supports_nothing():
    "The number was said in the conversation; no passage has it."
    said = Recollection(tail=(Message("user", "Her potassium was 3.1."),))
    assert said and verify_claims("Potassium was 3.1 [1].", PASSAGES).state == "unsupported"


@pytest.mark.parametrize("text", ["", NO_ANSWER, NO_ANSWER.lower().rstrip("."), "Is it? [1]", "[1]"])
def test_no_claims_is_skipped_never_a_pass(text):
    found = verify_claims(text, PASSAGES)
    assert found.state == "skipped" and found.reason == "nothing was claimed" and not found.reportable


def test_an_overflow_is_told_even_when_the_rest_is_skipped():
    found = verify_claims("Is it? [9]", PASSAGES)
    assert found.state == "skipped" and found.reportable and found.citations.overflow == (9,)


TEXT = "Melena was seen [1]. Hemoglobin was 9.9 g/dL [1]. He had black stools [1]."


def test_a_model_decides_what_no_rule_does():
    prompts = []

    def ask(prompt):
        prompts.append(prompt)
        return Reply("1: SUPPORTED [1]\n2: PARTIAL [1, 8]", "test")

    found = verify_claims(TEXT, PASSAGES, ask=ask)
    assert [(c.state, c.by) for c in found.claims] == [("supported", "model"), ("unsupported", "rule"), ("partial", "model")] and found.state == "partial"
    assert "9.9" not in prompts[0].user and "[Passage 1]" in prompts[0].user and "[Passage 2]" not in prompts[0].user and found.claims[2].passages == (1,)


@pytest.mark.parametrize("reply", ["1: SUPPORTED\n2: SUPPORTED []", "1: SUPPORTED [7]\n2: SUPPORTED [0]"])
def test_supported_by_no_passage_is_unsupported(reply):
    assert verify_claims(TEXT, PASSAGES, ask=lambda prompt: reply).state == "unsupported"


@pytest.mark.parametrize("reply", ["", "no idea", None, 7, "1: SUPPORTED [1]"])
def test_a_reply_without_a_verdict_skips(reply):
    found = verify_claims(TEXT, PASSAGES, ask=lambda prompt: reply)
    assert found.state == "skipped" and "no verdict" in found.reason and found.reportable  # the wrong number stays told


@pytest.mark.parametrize("error", [TimeoutError("45 s"), ValueError("a\nb"), PermissionError("phi")])
def test_a_failing_model_skips_with_the_reason(error):
    def ask(prompt):
        raise error

    found = verify_claims("Melena was seen [1].", PASSAGES, ask=ask)
    assert found.state == "skipped" and type(error).__name__ in found.reason and "\n" not in found.reason and not found.reportable
    with pytest.raises(KeyboardInterrupt):
        verify_claims("Melena was seen [1].", PASSAGES, ask=lambda prompt: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_model_is_not_asked_about_what_is_decided():
    def ask(prompt):
        raise AssertionError("it was asked")

    assert verify_claims("Hemoglobin was 9.9 g/dL [1].", PASSAGES, ask=ask).state == "unsupported"


def test_too_many_claims_are_skipped_not_passed():
    found = verify_claims("Melena was seen [1]. " * 5, PASSAGES, most_claims=3)
    assert found.state == "skipped" and [c.state for c in found.claims].count("skipped") == 2
    with pytest.raises(ValueError, match="most_claims"):
        verify_claims("x", PASSAGES, most_claims=0)


def test_reasoning_gives_no_verdict():
    assert read_verdicts("<think>1: UNSUPPORTED</think>1. Supported [1]") == {1: ("supported", (1,))}
    assert read_verdicts("1: SUPPORTED [1]\n1: UNSUPPORTED") == {1: ("supported", (1,))}


@given(st.text(max_size=200), st.text(max_size=200))
def test_claims_and_passages_are_data(claim, passage):
    prompt = verify_prompt([check_claim(Claim(claim, (1,)), [passage])], [passage])
    lines = prompt.user.split("\n")
    assert [line for line in lines if line.startswith("# ")] == ["# Passages", "# Claims", "# Verdicts"]
    assert sum(line.startswith("[Passage") for line in lines) == 1 and "<|" not in prompt.user


def test_long_passages_are_cut_for_the_model_only():
    passage = "word " * 2000 + "potassium 3.1"
    assert len(verify_prompt([check_claim(Claim("x", (1,)), [passage])], [passage]).user) < 1500
    assert verify_claims("Potassium 3.1 [1].", [passage]).state == "supported"


@given(st.text(max_size=200))
def test_verifying_any_text_gives_a_state(text):
    found = verify_claims(text, PASSAGES)
    assert found.state in ("supported", "partial", "unsupported", "skipped") and (found.state != "skipped" or found.reason)
    assert str(found) and "<table>" in found._repr_html_()
