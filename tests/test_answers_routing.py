"Where messages go: whole words only, terms that look like markers put aside, and no guess where there is nothing to go by."

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthrag.answers.intents import find_markers, find_meta, find_talk, is_about_care, without_confusables
from healthrag.answers.routing import INTENTS, Route, Router, read_route, route, route_by_rules, route_prompt
from healthrag.records import Reply


@pytest.fixture(scope="module")
def labelled(project_root):
    return [json.loads(line) for line in (project_root / "data" / "routing" / "questions.jsonl").read_text().splitlines()]


def test_the_labelled_set_is_what_its_card_says(labelled):
    assert len(labelled) >= 150 and len({row["id"] for row in labelled}) == len({row["question"] for row in labelled}) == len(labelled)
    for row in labelled:
        assert row["kind"] in INTENTS and (row["intent"] in INTENTS[row["kind"]] if row["intent"] else not INTENTS[row["kind"]])
        assert row["id"].startswith("h" if row["held_out"] else "w")
    assert {row["kind"] for row in labelled if row["held_out"]} == {row["kind"] for row in labelled if not row["held_out"]} == set(INTENTS)


@pytest.mark.parametrize(("held_out", "least"), [(False, 0.97), (True, 0.88)])
def test_the_rules_are_as_good_as_their_notebook_says(labelled, held_out, least):
    rows = [row for row in labelled if row["held_out"] == held_out]
    found = [route_by_rules(row["question"], history=row["history"]) for row in rows]
    assert sum((f.kind, f.intent) == (r["kind"], r["intent"]) for f, r in zip(found, rows, strict=True)) / len(rows) >= least


CONFUSABLES = [
    "Tell me about the operation of the patient", "What is the duration of the treatment?", "How is the registration of patients done?", "What concentration has the infusion?", "What is the administration route of insulin?",
    "Should she stop aspirin?", "Did he stop taking warfarin?", "Which specialist saw her?", "Is the patient listless?", "Did the patient listen to the nurse?", "Does the accountant see patient records?",
    "What did the encounter note say?", "Was the patient in Trendelenburg position?", "Did she consume alcohol?", "Is the wound separated?", "Was the infection moderate?", "Did the patient tolerate the drug?",
    "What is the heart rate of PT-0003?", "What was the respiratory rate on admission?", "What is the white blood cell count of PT-0012?", "Is the platelet count of PT-0055 low?", "What is the total cholesterol of PT-0009?",
    "Why was the total knee replacement done?", "Is the median nerve involved?", "What is the mean corpuscular volume of PT-0001?", "What does ratio mean in the lab report?", "What is the albumin/creatinine ratio of PT-0002?",
    "What is on the medication list of PT-0003?", "Is there pain at the top of the foot?", "What is the most recent blood pressure of PT-0011?", "What is the phone number of the clinic?", "What is the maximum dose of paracetamol?",
    "Is the tablet taken every 8 hours?", "Was the daily dose of insulin changed?", "Is the drug given per os?", "Does the patient have urinary frequency?", "Is he allergic to anything at all?", "What is the weekly dose of methotrexate?",
]  # fmt: skip


@pytest.mark.parametrize("question", CONFUSABLES)
def test_words_that_look_like_markers_are_none(question):
    assert route_by_rules(question).kind == "semantic"


@pytest.mark.parametrize(
    ("question", "intent"),
    [
        ("What is the ratio of men to women?", "aggregation"), ("Top 10 diagnoses", "aggregation"), ("List patients with asthma", "enumeration"), ("Count the visits", "aggregation"), ("Trend of admissions", "trend"),
        ("Mean age of patients", "aggregation"), ("Median length of stay", "aggregation"), ("Mortality rate in the ICU", "aggregation"), ("Total number of prescriptions", "aggregation"), ("Sum of costs", "aggregation"),
        ("How many patients had an operation?", "aggregation"), ("List specialists seen by patients", "enumeration"), ("HOW MANY PATIENTS?", "aggregation"),
    ],
)  # fmt: skip
def test_the_markers_themselves_still_count(question, intent):
    assert (route_by_rules(question).kind, route_by_rules(question).intent) == ("structured", intent)


@pytest.mark.parametrize("word", ["hello", "Hi!", "  bonjour  ", "Olá", "ＨＥＬＬＯ", "hi hi", "thanks 😀", "ok, bye", "Who are you?"])
def test_talk_is_the_whole_message(word):
    assert route_by_rules(word).kind == "conversational"
    assert route_by_rules(f"{word} which patients have asthma?").kind != "conversational"


@pytest.mark.parametrize("question", ["hide", "history of PT-0004", "okapi", "thankful patients", "yesterday's visits", "night sweats of PT-0004", "highest creatinine", "Fine needle aspiration result?", "cheers me up"])
def test_beginnings_are_no_talk(question):
    assert not find_talk(question)


def test_the_conversation_needs_one():
    assert route("What did I just ask?", history=True).kind == "conversation_meta"
    assert route("What did I just ask?") == Route("conversational", "no_history", "rule", 1.0)
    assert not find_meta("What did the patient say?") and not find_meta("Repeat the test of PT-0004?") and not find_meta("Can you list my patients with asthma?")


@pytest.mark.parametrize("question", ["asdf", "???", "12", "What is the capital of France?", "Write a poem", "🙂", "SELECT 1", "x" * 5000])
def test_without_anything_to_go_by_it_abstains(question):
    found = route(question)
    assert found == Route("abstain", None, "abstained", 0.0) and found.search


def test_hybrid_needs_patients_and_texts():
    assert route("What do the notes of patients with asthma say about sleep?").kind == "hybrid"
    assert route("What do the notes of PT-0004 say about sleep?").kind == "semantic" and route("How many patients with asthma are there?").kind == "structured"


@given(st.text(max_size=300), st.booleans())
def test_any_message_has_a_route(message, history):
    found = route_by_rules(message, history=history)
    assert found.kind in INTENTS and (found.score is None or 0 <= found.score <= 1) and str(found)
    find_markers(message), is_about_care(message)
    if message.strip():
        assert route(message, history=history) == found


@pytest.mark.parametrize("hostile", ["how many " * 3000, "show me " + "a " * 20_000, "hello " * 9000, "what " + "x " * 20_000 + "after the", "is " * 9000 + "increasing", "-" * 50_000, "the list of " * 5000, "a/b " * 9000])
def test_hostile_messages_take_no_time(hostile):
    route(hostile, history=True), without_confusables(hostile)


@pytest.mark.parametrize("wrong", ["", " \n", None, 7])
def test_an_empty_message_is_refused(wrong):
    with pytest.raises(ValueError, match="ask something"):
        route(wrong)


# the model behind


class Small:
    def __init__(self, reply):
        self.reply, self.prompts = reply, []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        return Reply(self.reply, "test")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("lookup", ("semantic", "lookup")), ("Label: **Multi-hop**", ("semantic", "multi_hop")), ("hybrid", ("hybrid", None)), ("<think>trend?</think>narrative", ("semantic", "narrative")), ("none", ("abstain", None)),
        ("capital", ("abstain", None)), ("", ("abstain", None)), ("structured", ("abstain", None)), ("DROP TABLE", ("abstain", None)),
    ],
)  # fmt: skip
def test_a_model_decides_by_a_known_label_or_not_at_all(reply, expected):
    found = route("Why did the team change its mind?", ask=Small(reply))
    assert (found.kind, found.intent) == expected and found.how == ("abstained" if expected[0] == "abstain" else "model")


@pytest.mark.parametrize("question", ["hello", "How many patients?", "What can you do?", "What is PT-0004 allergic to?", "???", "7"])
def test_a_model_is_asked_only_when_the_rules_abstain_about_words(question):
    small = Small("trend")
    route(question, ask=small)
    assert not small.prompts


def test_a_failing_model_leaves_the_abstention_and_is_asked_again():
    calls = []

    def fails(prompt):
        calls.append(prompt)
        raise TimeoutError

    router = Router(fails)
    assert router("Why did the team change its mind?") == router("Why did the team change its mind?") == Route("abstain", None, "abstained", 0.0)
    assert len(calls) == 2 and len(router) == 0


def test_the_cache_keeps_the_last_used_by_message_history_and_version():
    small = Small("narrative")
    router = Router(small, size=2)
    for message in ("Why so?", "WHY   so?", "Why now?", "Why so?", "Why then?", "Why so?"):
        router(message)
    assert len(small.prompts) == 3 and len(router) == 2
    router("Why now?")
    assert len(small.prompts) == 4  # it was the least recently used
    router("Why now?", history=True)
    router.version = "2"
    router("Why now?")
    assert len(small.prompts) == 6
    nothing = Router(small, size=0)
    nothing("Why now?"), nothing("Why now?")
    assert len(small.prompts) == 8 and len(nothing) == 0
    with pytest.raises(ValueError, match="size"):
        Router(size=-1)


def test_threads_share_a_router():
    router, barrier = Router(Small("narrative"), size=8), threading.Barrier(4)

    def work(n):
        barrier.wait()
        return [router(f"Why {i}?").intent for i in range(40)]

    with ThreadPoolExecutor(4) as pool:
        assert {intent for intents in pool.map(work, range(4)) for intent in intents} == {"narrative"}
    assert len(router) == 8


@given(st.text(max_size=300))
def test_the_message_is_data(message):
    lines = route_prompt(message).user.split("\n")
    assert [line for line in lines if line.startswith("# ")] == ["# Message", "# Label"] and len(lines) == 5
    read_route(message)


@pytest.mark.parametrize("wrong", [{"kind": "x"}, {"kind": "semantic", "intent": "trend"}, {"kind": "abstain", "intent": "lookup"}])
def test_a_route_is_one_of_those_there_are(wrong):
    with pytest.raises(ValueError):
        Route(**wrong)
