"""Faults of onprem-health-rag, and of a hasty copy of it, that are not here: preparing, citing, verifying, remembering, routing.

Each test names the fault. C is the inventory of the reference system, F the list of ways in which a re-implementation quietly differs.
"""

from types import SimpleNamespace

import pytest

from healthrag.answers.citations import check_citations, cited_numbers
from healthrag.answers.cited import answer_prompt
from healthrag.answers.events import CitationsEvent, DoneEvent, ErrorEvent, RoutedEvent, TokenEvent
from healthrag.answers.memory import ConversationMemory, MemoryBounds, select_tail
from healthrag.answers.routing import Router, route
from healthrag.answers.stream import answer, stream_answer
from healthrag.answers.verify import verify_claims
from healthrag.models.openai import OpenAIModel
from healthrag.phi.find import PHIError
from healthrag.records import Hit, Message, Recollection
from healthrag.retrieval.focus import Focus, find_identifiers, resolve_focus
from healthrag.retrieval.prepare import prepare_question, skip_expansion

HIT = Hit("notes:1", "Hemoglobin of PT-00042 was 7.2 g/dL.", 0.4)
QUESTION = "What was the hemoglobin of PT-00042?"


def index(question, k, filters):
    return [HIT]


def says(text):
    return lambda prompt: text


def fails(*args, **options):
    raise TimeoutError("no answer")


def forbidden(*args, **options):
    raise AssertionError("this must not be called")


# preparing (C.1.1, F 12)


@pytest.mark.parametrize("question", ["admissions for asthma in 2024", "effects of vitamin B12 deficiency", "courses after COVID-19 in adults", "doses of 10mg in the elderly"])
def test_years_doses_and_names_do_not_count_as_identifiers(question):
    "C.1.1: any token of three characters with a digit does."
    assert not skip_expansion(question)


@pytest.mark.parametrize("question", ["what was found for patient 42 today", "notes and labs of PT-00042 please", "which notes say 'no known allergies' there"])
def test_short_ids_single_quotes_and_current_record_ids_do_count(question):
    "C.1.1, C.1.10: X1 is too short, single quotes are not looked at, and the pattern for ids wants a second group."
    assert skip_expansion(question)


def test_two_apostrophes_and_an_inch_mark_are_no_quotation():
    "C.1.10, F 12."
    assert not skip_expansion("the patients' and the doctors' notes") and not skip_expansion('wounds wider than 5" in adults')


def test_expansion_is_decided_on_the_completed_question():
    "C.1.1: the code looks at the raw question, so that a short follow-up is never expanded."
    said = [Message("user", "How is bleeding of the bowel treated?")]
    model = says("STANDALONE: How is bleeding of the bowel treated in children?\nVARIANT: pediatric gastrointestinal hemorrhage management")
    assert len(prepare_question("And in children?", history=said, ask=model).variants) == 2


def test_variants_lose_neither_dose_nor_year_nor_negation():
    "C.1.1: a dose such as 20/120mg is expanded and may change on the way."
    model = says("STANDALONE: x\nVARIANT: who was not given artemether 20/120mg in 2021\nVARIANT: who got artemether 20/120mg in 2021\nVARIANT: who was not given 40 mg in 2021")
    assert prepare_question("who was not given 20/120mg of it in 2021", ask=model, variants=5).variants[1:] == ("who was not given artemether 20/120mg in 2021",)


def test_a_rewrite_cannot_name_another_patient():
    "PT-0004 is not PT-00042; a model that mixes them up is not believed."
    said = [Message("user", "Show PT-0004"), Message("assistant", "PT-00042 is similar.")]
    assert "PT-00042" not in prepare_question("Is she well?", history=said, ask=says("STANDALONE: Is PT-00042 well?")).standalone
    assert find_identifiers("PT-0004 or PT-00042") == ("PT-0004", "PT-00042")


def test_whatever_fails_the_question_is_searched_for():
    "F 15: rewriting falls open."
    assert prepare_question("Is bleeding common in adults?", ask=fails).variants == ("Is bleeding common in adults?",)


def test_a_follow_up_is_understood_without_a_model():
    "C.2 plans this; nothing is guessed."
    her = Focus("patient PT-0004", "person", "Visits of PT-0004 in 2022?")
    assert resolve_focus("Is she well?", her) == "Is patient PT-0004 well?" and resolve_focus("Do women take their pills?", her) == "Do women take their pills?"


# citing (C.1.10, C.1.13, C.1.14, C.3, F 14)


def test_a_refusal_shows_no_passage():
    "C.1.10: passages below the gate are still shown as citations."
    refuse = lambda question, hits: SimpleNamespace(passed=False, reason="weak")
    events = list(stream_answer(index, QUESTION, model=forbidden, gate=refuse))
    assert [event.citations for event in events if isinstance(event, CitationsEvent)] == [()] and HIT.text not in repr([event.to_json() for event in events])


def test_nothing_is_generated_without_evidence():
    "C.3: generating on weak evidence."
    assert answer(lambda question, k, filters: [], QUESTION, model=forbidden).declined


def test_citations_come_before_tokens_and_reasoning_never():
    "C.1.13."
    events = list(stream_answer(index, QUESTION, model=says("<think>[9]</think>7.2 g/dL [1]")))
    names = [event.name for event in events]
    assert names == ["routed", "citations", "token", "verify", "done"] and "".join(e.text for e in events if isinstance(e, TokenEvent)) == "7.2 g/dL [1]"


@pytest.mark.parametrize(("text", "numbers"), [("[1, 2]", [1, 2]), ("[1-3]", [1, 2, 3]), ("[1][2]", [1, 2]), ("[2; 5]", [2, 5])])
def test_grouped_markers_are_read_and_checked(text, numbers):
    "C.1.14: only plain [digits] is."
    assert cited_numbers(text) == numbers and check_citations(f"x {text}", 1).overflow == tuple(n for n in numbers if n > 1)


def test_missing_and_wrong_sources_are_seen():
    "C.1.14: overflow alone is."
    check = check_citations("Warfarin was stopped. Hemoglobin was 7.2 g/dL [2].", ["Hemoglobin was 7.2 g/dL.", "The patient walks."])
    assert check.missing == ("Warfarin was stopped.",) and check.wrong_source[0].found_in == 1


def test_no_claims_is_no_pass():
    "F 14."
    assert [verify_claims(text, [HIT]).state for text in ("", "The documents do not say.", "Is it?")] == ["skipped"] * 3


def test_supported_without_a_passage_is_unsupported():
    "F 14; references are clamped, sorted, each once."
    found = verify_claims("The hemoglobin was low [1, 1, 9].", [HIT], ask=says("1: SUPPORTED [4]"))
    assert found.state == "unsupported" and found.claims[0].passages == () and verify_claims("Hemoglobin 7.2 [1, 1, 9].", [HIT]).claims[0].passages == (1,)


def test_a_verifier_that_fails_is_skipped_with_its_reason():
    "F 14; what rules found is told all the same."
    found = verify_claims("The hemoglobin was low [1]. It was 9.9 g/dL [1].", [HIT], ask=fails)
    assert found.state == "skipped" and "TimeoutError" in found.reason and found.reportable


# remembering (C.1.15, C.3, F 13)


def test_memory_cannot_be_cited():
    "C.3: citing memory; here its types don't fit."
    for thing in (Recollection("x"), Message("user", "x")):
        with pytest.raises(TypeError):
            answer_prompt(QUESTION, [thing])
    assert verify_claims("Potassium was 3.1 [1].", [HIT]).state == "unsupported"


def test_the_bounds_are_kept():
    "C.1.15."
    said = [Message("assistant" if i % 2 else "user", "word " * 500) for i in range(20)]
    tail = select_tail(said)
    assert len(tail) <= 8 and sum(len(m.text.split()) for m in tail) <= 1200 and all(len(m.text.split()) <= 201 for m in tail if m.role == "assistant")
    assert len(select_tail([Message("user", "word " * 5000)])) == 1 and MemoryBounds().message_bytes == 32_768


def test_a_memory_that_cannot_be_read_is_empty_and_nobody_elses(tmp_path):
    "C.1.15, F 13, F 15."
    ann, eve = ConversationMemory(tmp_path, "ann"), ConversationMemory(tmp_path, "eve")
    ann.add("c", Message("user", "secret"))
    eve._file.path.write_bytes(ann._file.path.read_bytes())
    assert not eve.recall("c") and "another user" in eve.recall("c").note


def test_pruning_one_user_leaves_the_others(tmp_path):
    "Abby's pruning, as stored, deletes everybody's."
    clock = [0.0]
    ann = ConversationMemory(tmp_path, "ann", retention_days=1, now=lambda: clock[0])
    bob = ConversationMemory(tmp_path, "bob", now=lambda: clock[0])
    ann.add("c", Message("user", "old")), bob.add("c", Message("user", "old"))
    clock[0] = 1e9
    assert ann.expire().messages == 1 and bob.messages("c") == [Message("user", "old")]


def test_a_summary_is_written_only_if_nothing_changed(tmp_path):
    "C.1.15: compare-and-swap; an erased conversation does not come back."
    memory = ConversationMemory(tmp_path, "ann")
    memory.add("c", *(Message("user", f"q{i}") for i in range(13)))
    assert not memory.compact("c", lambda prompt: memory.erase("c") and "a summary") and not memory.recall("c")


def test_streaming_remembers_routes_and_checks_what_leaves(tmp_path, monkeypatch):
    "Abby's stream stores no memory, routes nothing and checks nothing; its check elsewhere reads the system prompt alone."
    talk = ConversationMemory(tmp_path, "ann").conversation("c")
    events = list(stream_answer(index, QUESTION, model=says("7.2 g/dL [1]"), conversation=talk))
    assert isinstance(events[0], RoutedEvent) and len(talk.recall().tail) == 2
    hosted = OpenAIModel("gpt-x", base_url="https://away.test/v1", api_key="x")
    talk.add(Message("user", "Ada Byron, MRN 0012345, born 10 December 1935"))
    last = list(stream_answer(lambda question, k, filters: [Hit("a", "Hemoglobin is a protein.", 1.0)], "What is hemoglobin in blood?", model=hosted, conversation=talk))[-1]
    assert isinstance(last, ErrorEvent) and isinstance(last.error, PHIError)


# routing (C.2, F 12)


@pytest.mark.parametrize(
    "question",
    ["Tell me about the operation of the patient", "What was the duration of the fever?", "How is the registration of patients done?", "What concentration was infused in the patient?", "What is the administration route of heparin?",
     "Should the patient stop aspirin?", "Which specialist saw the patient?"],
)  # fmt: skip
def test_parts_of_words_are_no_markers(question):
    "C.2, F 12: ratio in operation, top in stop, list in specialist."
    assert route(question).kind == "semantic"


def test_a_hybrid_question_is_told_as_one():
    "C.2: hybrid is answered as if it were semantic; here whoever can do better is called."
    question = "What do the notes of patients with asthma say about sleep?"
    assert route(question).kind == "hybrid"
    events = list(stream_answer(forbidden, question, model=forbidden, handlers={"hybrid": lambda asked, memory: "3 of 7."}))
    assert isinstance(events[-1], DoneEvent) and events[-1].answer.text == "3 of 7."


def test_the_router_falls_open_to_a_search():
    "F 15; an unknown label is no route."
    assert route("Why did the team change its mind?", ask=fails).search and route("Why did the team change its mind?", ask=says("cohort")).kind == "abstain"


def test_the_route_cache_is_bounded_and_versioned():
    "C.2: 512, cleared when the catalogue changes."
    asked = []
    router = Router(lambda prompt: asked.append(prompt) or "narrative")
    for i in range(600):
        router(f"Why number {i}?")
    assert len(router) == 512
    router.version = "2"
    router("Why number 599?")
    assert len(asked) == 601


def test_the_conversation_is_asked_about_only_when_there_is_one():
    "C.2."
    assert route("What did I just ask?", history=True).kind == "conversation_meta" and route("What did I just ask?").kind == "conversational"
