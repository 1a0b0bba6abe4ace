"Preparing a question: whatever a model says, what is searched for is the question as asked or something that kept what matters."

import itertools
import re
import string
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from healthrag.models.llama import LlamaModel
from healthrag.models.weights import find_weights
from healthrag.reasoning import ReasoningFilter, strip_reasoning
from healthrag.records import Message, Prompt, Reply
from healthrag.retrieval.focus import Focus, find_focus, find_identifiers, find_quotations, is_reset, leans_on_context, resolve_focus
from healthrag.retrieval.gate import question_scope
from healthrag.retrieval.prepare import PreparedQuestion, prepare_prompt, prepare_question, read_prepared, rewrite_fault, skip_expansion

HER = Focus("patient PT-0004", "person", "How many visits did patient PT-0004 have in 2022?")
SAID = (Message("user", "Which allergies does PT-0004 have?"), Message("assistant", "Penicillin, unlike PT-0009 [1]."))


def says(*lines):
    return lambda prompt: "\n".join(lines)


class Recorder:
    def __init__(self, reply: str = ""):
        self.prompts: list[Prompt] = []
        self.reply = reply

    def __call__(self, prompt):
        self.prompts.append(prompt)
        return Reply(self.reply, "test")


# identifiers


@pytest.mark.parametrize("text", ["PT-00042", "ENC-2023-0001", "patient 42", "MRN: 00451238", "E11.9", "e11.9", "I10", "4548-4", "0093-1048-01", "44054006", "visit #3"])
def test_records_and_codes_are_identifiers(text):
    assert find_identifiers(f"what of {text} then") == (text,)
    assert skip_expansion(f"which notes of last year say something about {text}")


@pytest.mark.parametrize(
    "text",
    ["2024", "in 1998", "2024-01-05", "10:30", "20/120mg", "10mg", "3.5", "1,000,000", "50-year-old", "2nd", "type-2", "B12", "COVID-19", "HbA1c", "H1N1", "CA-125", "IL-6",
     "X1", "T4", "SARS-CoV-2", "120/80", "stage 4", "omega-3", "24h", "q8h", "p53", "CD4", "FEV1", "vitamin D3", "top 10", "patient 42 years old"],
)  # fmt: skip
def test_years_ages_doses_and_names_are_not(text):
    assert find_identifiers(f"effects of {text} on the liver") == ()
    assert not skip_expansion(f"effects of {text} on the liver")


@given(st.text(max_size=300))
def test_identifiers_and_quotations_are_parts_of_the_text(text):
    assert all(found in text for found in (*find_identifiers(text), *find_quotations(text)))


@pytest.mark.parametrize("question", ["asthma", "list all allergies", "a, b; c!"])
def test_three_words_are_short(question):
    assert skip_expansion(question)


@pytest.mark.parametrize("question", ['say "no known allergies" anywhere', "say “no known allergies” anywhere", "notes with 'chest pain' in them"])
def test_quotations_are_not_expanded(question):
    assert skip_expansion(question)


@pytest.mark.parametrize("question", ["patients' and doctors' notes on falls", 'wounds wider than 5" in adults', "the patient's wife's notes on falls"])
def test_apostrophes_and_inches_are_no_quotations(question):
    assert not skip_expansion(question)


# focus


@pytest.mark.parametrize(
    ("question", "resolved"),
    [
        ("Is she diabetic?", "Is patient PT-0004 diabetic?"),
        ("List his drugs", "List patient PT-0004's drugs"),
        ("What was given to her after that visit?", "What was given to patient PT-0004 after that visit?"),
        ("Does this patient smoke?", "Does patient PT-0004 smoke?"),
        ("And in 2021?", "How many visits did patient PT-0004 have in 2021?"),
        ("what about PT-0007", "How many visits did patient PT-0007 have in 2022?"),
        ("and his allergies?", "patient PT-0004's allergies"),
    ],
)
def test_what_is_certain_is_written_out(question, resolved):
    assert resolve_focus(question, HER) == resolved


@pytest.mark.parametrize(
    "question",
    [
        "Do women with asthma take their inhalers?", "Does her mother know PT-0007?", "Which patients had their gallbladder out?", "New topic: is she well?",
        "Is it common that patients fall?", "Which drugs interact?", "and in 2020 or 2021?", "why?", "Whose notes mention PT-0008 and her fall?",
        "Another patient: what did he take?", "and last year?",
    ],
)  # fmt: skip
def test_what_is_not_certain_stays(question):
    assert resolve_focus(question, HER) == question
    assert resolve_focus(question, None) == question


def test_a_thing_is_not_a_person():
    drug = Focus("metformin", "thing", "What is metformin for?")
    assert resolve_focus("Does she take it?", drug) == "Does she take metformin?" and resolve_focus("Is he well?", drug) == "Is he well?"
    assert resolve_focus("Is it safe?", HER) == "Is it safe?"


def test_the_assistant_never_sets_the_focus():
    assert find_focus([Message("assistant", "PT-0009 has it.")]) is None
    focus = find_focus([*SAID, Message("assistant", "Now about PT-0009.")])
    assert focus is not None and focus.subject == "patient PT-0004"


def test_two_subjects_are_none():
    focus = find_focus([Message("user", "Compare PT-0004 with PT-0009.")])
    assert focus is not None and not focus.subject and resolve_focus("Is she older?", focus) == "Is she older?"


def test_a_lexicon_may_find_the_subject():
    drugs = lambda text: [word for word in ("metformin", "warfarin") if word in text.lower()]
    focus = find_focus([Message("user", "What is Metformin for?")], terms=drugs)
    assert focus == Focus("metformin", "thing", "What is Metformin for?")


@given(st.text(max_size=200), st.text(max_size=40), st.sampled_from(["person", "thing"]), st.text(max_size=100))
def test_resolving_any_text_keeps_its_digits(question, subject, kind, before):
    resolved = resolve_focus(question, Focus(subject, kind, before))
    assert isinstance(resolved, str) and (resolved == "") == (not question.split())
    assert {c for c in question if c.isdigit()} <= {c for c in resolved if c.isdigit()}


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ('list all notes that say "no fever"', "no fever"), ("list all notes of „Sepsis“", "Sepsis"), ("list all notes of `itp`", "itp"), ("list all notes of 'itp'", "itp"),
        ('list all 5" "deep" wounds', "deep"), ('list all 5"  wounds of „ “Sepsis”', "Sepsis"), ("list all patients' and doctors' notes", None), ('list all 5" wounds', None), ('list all " " notes', None),
    ],
)  # fmt: skip
def test_a_quotation_is_the_same_for_preparation_and_gate(text, quoted):
    assert find_quotations(text) == ((quoted,) if quoted else ())
    broad, why = question_scope(text)
    assert broad == (quoted is None) and (broad or why == f'quotes "{quoted}"')


@pytest.mark.parametrize("hostile", ["patient" + " " * 50_000, "a-" + "1" * 50_000, "it is " * 9_000, "and, " * 9_000, "'" * 50_000, "-1" * 30_000, "this " * 9_000, "A1" * 30_000])
def test_hostile_questions_take_no_time(hostile):
    find_identifiers(hostile), find_quotations(hostile), leans_on_context(hostile), is_reset(hostile), skip_expansion(hostile)
    resolve_focus(hostile, Focus("it", "person", hostile))
    prepare_question(hostile, history=[Message("user", hostile)], ask=says(f"STANDALONE: {hostile}", f"VARIANT: {hostile}"))


# preparing


def test_without_a_model_the_question_stays_itself():
    assert prepare_question("  How is bleeding treated? ") == PreparedQuestion("How is bleeding treated?", "How is bleeding treated?", ("How is bleeding treated?",), "as asked")


def test_one_call_rewrites_and_expands():
    model = Recorder("STANDALONE: Was bleeding of the bowel treated with surgery?\nVARIANT: Was surgery done for gastrointestinal hemorrhage?\nVARIANT: bowel bleeding, operation")
    said = [Message("user", "How is bleeding of the bowel treated?"), Message("assistant", "By endoscopy [1].")]
    prepared = prepare_question("And was it ever treated with surgery?", history=said, ask=model)
    assert len(model.prompts) == 1 and prepared.how == "model" and len(prepared.variants) == 3 and prepared.variants[0] == prepared.standalone


def test_a_short_follow_up_is_rewritten_and_then_expanded():
    "The reference decides on the raw question, so that a short follow-up is never expanded."
    reply = says("STANDALONE: What happened after the bleeding of the bowel?", "VARIANT: course after gastrointestinal hemorrhage")
    prepared = prepare_question("And after that?", history=[Message("user", "Tell me about bleeding of the bowel")], ask=reply)
    assert len(prepared.variants) == 2


def test_variants_are_bounded_and_differ():
    lines = ["STANDALONE: x", *(f"VARIANT: {t}" for t in ("bowel bleeding care", "BOWEL  bleeding CARE", "how is bleeding TREATED in adults?", "a b", "c d", "e f"))]
    assert prepare_question("How is bleeding treated in adults?", ask=says(*lines)).variants == ("How is bleeding treated in adults?", "bowel bleeding care", "a b")
    assert len(prepare_question("How is bleeding treated in adults?", ask=says(*lines), variants=5).variants) == 5


@pytest.mark.parametrize("question", ["PT-0004", "find \"chest pain\" in the notes", "which notes of 2023 mention E11.9"])
def test_no_call_is_made_for_nothing(question):
    model = Recorder()
    for history in ((), SAID):
        assert prepare_question(question, history=history, ask=model).standalone == question
    assert not model.prompts


def test_one_wording_and_no_history_needs_no_model():
    model = Recorder()
    prepare_question("How is bleeding treated in adults?", ask=model, variants=1)
    assert not model.prompts


@pytest.mark.parametrize("error", [TimeoutError("slow"), ValueError("refused\nprompt"), PermissionError("phi"), RuntimeError(), MemoryError("no")])
def test_any_failure_falls_back(error):
    def broken(prompt):
        raise error

    prepared = prepare_question("Is she diabetic?", history=SAID, ask=broken)
    assert prepared.standalone == "Is patient PT-0004 diabetic?" and prepared.how == "focus" and type(error).__name__ in prepared.note and "\n" not in prepared.note


def test_a_stop_is_no_failure():
    def stopped(prompt):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_question("Is she diabetic?", history=SAID, ask=stopped)


@pytest.mark.parametrize("reply", [None, 3, b"STANDALONE: x", "", "STANDALONE:", "STANDALONE: ?", "VARIANT: x\nVARIANT", "STANDALONE: " + "x" * 9000])
def test_a_reply_of_any_kind_falls_back(reply):
    assert prepare_question("Is she diabetic?", history=SAID, ask=lambda prompt: reply).standalone == "Is patient PT-0004 diabetic?"


def test_a_model_cannot_swap_the_patient():
    swapped = says("STANDALONE: Is PT-0009 diabetic?")
    prepared = prepare_question("Is she diabetic?", history=SAID, ask=swapped)
    assert prepared.standalone == "Is patient PT-0004 diabetic?" and "PT-0004" in prepared.note


QUESTION = "Which patients seen in 2023 with type 2 diabetes were not given 500 mg of metformin?"


@example("STANDALONE: x\nVARIANT: drop 2023 2 500 not")
@given(st.lists(st.text(string.ascii_letters + string.digits + " :-'\n", max_size=60), max_size=6).map("\nVARIANT: ".join))
def test_every_variant_keeps_numbers_and_negation(reply):
    for variant in prepare_question(QUESTION, ask=says(reply)).variants:
        assert not rewrite_fault(variant, QUESTION) and {"2023", "2", "500"} <= set(map(str, re.findall(r"\d+", variant)))


@given(st.text(max_size=400))
def test_any_reply_leaves_a_question_to_search_for(reply):
    prepared = prepare_question("Was she ever given that?", history=SAID, summary="PT-0004 bled.", ask=says(reply))
    assert 1 <= len(prepared.variants) <= 3 and prepared.variants[0] == prepared.standalone and "PT-0004" in prepared.standalone
    assert len({v.casefold() for v in prepared.variants}) == len(prepared.variants)


@given(st.text(max_size=400), st.text(max_size=100))
def test_the_prompt_holds_what_was_said_as_data(text, question):
    prompt = prepare_prompt(question, [Message("user", text), Message("assistant", text)], text)
    lines = prompt.user.split("\n")
    assert [line for line in lines if re.match(r"#{1,2}(\s|$)", line)] == ["# Conversation", "# Last question", "# Lines"]
    assert "<|" not in prompt.user and sum(line.startswith(("User:", "Assistant:")) for line in lines) >= 2


def test_long_messages_are_clipped():
    assert len(prepare_prompt("x", [Message("user", "word " * 5000)]).user.split()) < 230


def test_reading_lines():
    assert read_prepared("- **Standalone**: `a b`\n2) VARIANT 2 : «c»\nvariant： d\nNote: e") == ("a b", ["c", "d"])
    assert read_prepared("STANDALONE: first\nSTANDALONE: second") == ("first", [])


@pytest.mark.model
@pytest.mark.skipif(find_weights("smollm2-135m") is None, reason="the weights of smollm2-135m are not here")
def test_a_real_model_leaves_a_question_to_search_for():
    "The smallest model follows no format to speak of; that must do no harm."
    with LlamaModel("smollm2-135m", max_tokens=60) as model:
        prepared = prepare_question("Was she ever given 500 mg of it?", history=SAID, ask=model)
    assert "PT-0004" in prepared.standalone and "500" in prepared.standalone and "failed" not in prepared.note


# reasoning


def pieced(pieces: Sequence[str], inside: bool) -> tuple[str, ReasoningFilter]:
    one = ReasoningFilter(inside)
    return "".join(map(one.feed, pieces)) + one.finish(), one


PARTS = st.sampled_from(["<think>", "</think>", "<Thinking lang='x'>", "</THINKING>", "<", "<thi", "a", " ", "\n", "b < c", "</", "[1]", "<b>", "think>", "é😀"])


@given(st.lists(PARTS, max_size=12).map("".join), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_reasoning_is_filtered_the_same_wherever_a_reply_is_cut(reply, cuts, inside):
    places = sorted({0, len(reply), *(cut % (len(reply) + 1) for cut in cuts)})
    shown, one = pieced([reply[a:b] for a, b in itertools.pairwise(places)], inside)
    assert one.text == strip_reasoning(reply, inside=inside) == one.text.strip()
    assert one.retracted or shown == one.text
    assert "<think>" not in one.text and "</think>" not in one.text


def test_reasoning_that_never_ends_leaves_nothing():
    shown, one = pieced(["<th", "ink>I think [1]", " and 10 mg"], inside=False)
    assert shown == one.text == "" and one.inside


def test_signs_that_are_no_tags_are_not_held_back():
    one = ReasoningFilter()
    assert [one.feed(piece) for piece in ("a <", " b", "<b>", "<th", "e>")] == ["a", " < b", "<b>", "", "<the>"]
