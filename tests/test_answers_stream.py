"An answer event by event, from real indexes and real clients: what may be cited comes first, and memory never among it."

import dataclasses
import json
import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from chat_server import chat_server
from hypothesis import given
from hypothesis import strategies as st
from ollama_server import ollama_server

from healthrag.answers import cited, stream
from healthrag.answers.citations import NO_ANSWER, check_citations
from healthrag.answers.cited import answer_prompt, quote_best
from healthrag.answers.events import CitationsEvent, DoneEvent, ErrorEvent, RoutedEvent, TokenEvent, VerifyEvent, as_server_sent
from healthrag.answers.memory import ConversationMemory, MemoryBounds
from healthrag.answers.routing import Route
from healthrag.answers.stream import answer, collect_answer, stream_answer
from healthrag.cohort.search import CohortRetrieval
from healthrag.models.llama import LlamaModel
from healthrag.models.registry import get_model
from healthrag.models.stream import ReplyStream
from healthrag.models.weights import find_weights
from healthrag.phi.find import PHIError
from healthrag.records import Chunk, Hit, Message, Recollection, Reply
from healthrag.retrieval.admission import Admission, admission_for
from healthrag.retrieval.gate import Gate
from healthrag.retrieval.hybrid import hybrid_index
from healthrag.retrieval.lexical import LexicalIndex
from healthrag.retrieval.pipeline import RecordSearch
from healthrag.retrieval.prepare import PreparedQuestion

PASSAGES = [
    Hit("notes:1", "Patient 17 came with melena. Hemoglobin was 7.2 g/dL.", 0.9, metadata={"source": "notes", "heading": "Admission"}),
    Hit("notes:2", "Hemoglobin later was 11.8 g/dL. Warfarin was stopped.", 0.6, metadata={"source": "notes"}),
    Hit("concept:3", "192671 Gastrointestinal hemorrhage", 0.5, metadata={"kind": "concept"}),
]
QUESTION = "What was the hemoglobin of patient 17?"


def index(question, k, *, filters=None):
    return PASSAGES[:k]


def says(text="It was 7.2 g/dL [1]."):
    return lambda prompt: text


def forbidden(*args, **options):
    raise AssertionError("this must not be called")


def names(events):
    return [event.name for event in events]


def one(events, kind):
    (found,) = [event for event in events if isinstance(event, kind)]
    return found


def text_of(events):
    text = ""
    for event in events:
        if isinstance(event, TokenEvent):
            text = event.text if event.retract else text + event.text
    return text


class Pieces:
    "A model that writes in given pieces, and tells when it was stopped."

    name = "pieces"

    def __init__(self, *pieces, fails=None):
        self.pieces, self.fails, self.stopped, self.given = pieces, fails, False, 0

    def generate(self, prompt, **limit):
        return self.stream(prompt, **limit).read()

    def stream(self, prompt, **limit):
        def write():
            try:
                for piece in self.pieces:
                    self.given += 1
                    yield piece
                if self.fails:
                    raise self.fails
                return Reply("".join(self.pieces), self.name)
            finally:
                self.stopped = True

        return ReplyStream(write())


# order


def test_the_events_come_in_their_order():
    events = list(stream_answer(index, QUESTION, model=Pieces("It was ", "7.2 g/dL ", "[1]."), verify=True))
    assert names(events) == ["routed", "citations", "token", "token", "token", "verify", "done"]
    assert text_of(events) == one(events, DoneEvent).answer.text == "It was 7.2 g/dL [1]."
    assert [c.number for c in one(events, CitationsEvent).citations] == [1, 2, 3] and one(events, VerifyEvent).verification.state == "supported"


def test_citations_are_there_before_a_model_is_asked():
    seen = []
    for event in stream_answer(index, QUESTION, model=lambda prompt: seen.append("asked") or "x [1]"):
        seen.append(event.name)
    assert seen.index("citations") < seen.index("asked") < seen.index("token")


def test_events_are_frozen_and_json():
    for event in stream_answer(index, QUESTION, model=says(), verify=True):
        assert dataclasses.is_dataclass(event) and event.__dataclass_params__.frozen
        first, second, *rest = as_server_sent(event).split("\n")
        assert first == f"event: {event.name}" and json.loads(second.removeprefix("data: ")) == json.loads(json.dumps(event.to_json())) and rest == ["", ""]


@given(st.text(max_size=60))
def test_no_text_leaves_its_server_sent_message(text):
    sent = as_server_sent(TokenEvent(text))
    assert sent.count("\n") == 3 and "\r" not in sent and json.loads(sent.split("\n")[1][6:])["text"] == text


def test_the_collected_answer_is_the_streams():
    streamed = one(list(stream_answer(index, QUESTION, model=says(), verify=True)), DoneEvent).answer
    assert answer(index, QUESTION, model=says(), verify=True) == streamed


def test_numbers_are_those_of_the_prompt_whatever_the_kind():
    "Concepts and examples of a grounding index are passages here; their numbers must be those the model saw."
    events = list(stream_answer(index, QUESTION, model=says()))
    prompt = one(events, DoneEvent).answer.prompt
    for citation in one(events, CitationsEvent).citations:
        assert f"[Passage {citation.number}]" in prompt.user and citation.hit.text in prompt.user.split(f"[Passage {citation.number}]")[1].split("[Passage")[0]
    assert one(events, CitationsEvent).citations[2].hit.metadata == {"kind": "concept"}


def test_only_what_was_shown_can_be_cited():
    events = list(stream_answer(index, QUESTION, model=says("x [2]"), context_tokens=50))
    shown = one(events, CitationsEvent).citations
    assert 1 <= len(shown) < 3 and (one(events, VerifyEvent).citations.overflow == (2,)) == (len(shown) < 2)


@pytest.mark.parametrize("order", [1, -1])
def test_a_passage_is_shown_whole_or_not_at_all(order):
    "What is checked is what the model saw: a claim from the end of a text that did not fit is supported by nothing."
    long = Hit("long", "Seen daily, no change. " * 650 + "Discharged on warfarin.", 0.95)
    found = lambda question, k, filters: [long, PASSAGES[0]][::order]
    events = list(stream_answer(found, QUESTION, model=says("Discharged on warfarin [1]."), context_tokens=100, verify=True))
    done = one(events, DoneEvent).answer
    assert [hit.id for hit in done.sources] == ["notes:1"] and done.verification.state == "unsupported" and "Seen daily" not in done.prompt.user
    assert one(events, CitationsEvent).degraded == ("1 of 2 passages, which do not fit the prompt",)
    alone = answer(lambda question, k, filters: [long], QUESTION, model=forbidden, context_tokens=100)
    assert alone.refused == "no passage fits the budget" and alone.sources == ()
    whole = answer(lambda question, k, filters: [long], QUESTION, model=says("Discharged on warfarin [1]."), context_tokens=10_000, verify=True)
    assert long.text in whole.prompt.user and whole.verification.state == "supported"


def test_a_quoted_passage_begins_where_it_was_found():
    grown = Hit("a", "Before it.\nHemoglobin was 7.2 g/dL.", 1.0, metadata={"expanded": {"ids": ["x", "a"], "found": [11, 35]}})
    assert quote_best(answer_prompt(QUESTION, [grown])).text == "Hemoglobin was 7.2 g/dL. [1]"


# refusals


def strict(question, hits):
    return SimpleNamespace(passed=False, reason="too weak")


@pytest.mark.parametrize(
    ("options", "why"),
    [({"gate": strict}, "too weak"), ({"gate": Gate("cosine", 0.99)}, "0.990"), ({"context_tokens": 0}, "budget")],
    ids=["function", "gate", "budget"],
)
def test_a_refusal_is_one_sentence_without_citations(options, why):
    events = list(stream_answer(index, QUESTION, model=forbidden, verify=forbidden, **options))
    assert names(events) == ["routed", "citations", "token", "done"]
    done = one(events, DoneEvent).answer
    assert one(events, CitationsEvent).citations == () == done.sources and text_of(events) == done.text == NO_ANSWER and why in done.refused
    assert done.declined and not done.ok and done.citations() == [] and "hemoglobin was" not in json.dumps(done.to_json()).lower()


def test_nothing_found_is_refused():
    events = list(stream_answer(lambda question, k, filters: [], QUESTION, model=forbidden))
    assert one(events, DoneEvent).answer.refused == "nothing was found" and text_of(events) == NO_ANSWER


def test_a_gate_that_passes_lets_its_passages_through():
    events = list(stream_answer(index, QUESTION, model=says(), gate=Gate("cosine", 0.7)))
    assert [c.hit.id for c in one(events, CitationsEvent).citations] == ["notes:1", "notes:2", "concept:3"]
    trimmed = list(stream_answer(index, QUESTION, model=says(), gate=Gate("cosine", 0.7, 0.55)))
    assert [c.hit.id for c in one(trimmed, CitationsEvent).citations] == ["notes:1", "notes:2"]


class Searching:
    "What a RecordSearch looks like from here."

    def __init__(self, verdict=None, hits=PASSAGES, degraded=()):
        self.verdict, self.hits, self.degraded, self.asked = verdict, hits, degraded, []

    def search(self, question, *, k=None, filters=None, history=(), summary="", prepare=None, variants=None, deadline=None):
        prepared = prepare(question, history=history, summary=summary)
        self.asked.append((question, prepared.variants))
        return SimpleNamespace(hits=tuple(self.hits), verdict=self.verdict, degraded=self.degraded, prepared=prepared)


class Wordings:
    "A search that takes several wordings, and prepares nothing."

    def __init__(self):
        self.asked = []

    def search(self, question, *, k, filters, variants):
        self.asked.append((question, variants))
        return PASSAGES[:k]


def test_the_verdict_of_a_search_is_obeyed_even_if_it_forgot_to_drop_its_passages():
    refused = Searching(SimpleNamespace(passed=False, reason="below the gate"))
    events = list(stream_answer(refused, QUESTION, model=forbidden))
    assert one(events, CitationsEvent).citations == () and one(events, DoneEvent).answer.refused == "below the gate"


def test_a_search_is_given_the_other_wordings():
    found, rewritten = Searching(degraded=("lexical: ConnectionError",)), "STANDALONE: x\nVARIANT: care of bleeding in the bowel"
    events = list(stream_answer(found, "How is bowel bleeding treated?", model=says("x [1]"), rewrite=says(rewritten)))
    assert found.asked == [("How is bowel bleeding treated?", ("How is bowel bleeding treated?", "care of bleeding in the bowel"))]
    assert one(events, RoutedEvent).prepared.variants == found.asked[0][1] and one(events, CitationsEvent).degraded == ("lexical: ConnectionError",)


def test_a_search_that_prepares_is_left_to_it():
    with records(prepare=lambda question, history: PreparedQuestion(question, "complete", ("complete", "other"), "model")) as search:
        events = list(stream_answer(search, QUESTION, model=says("x [1]")))
        assert one(events, RoutedEvent).prepared.variants == ("complete", "other") and "dense 2" in one(events, DoneEvent).answer.retrieval.trace.lists
    with records(prepare=forbidden) as search:
        events = list(stream_answer(search, QUESTION, model=says("x [1]")))
        assert one(events, RoutedEvent).prepared.how == "as asked" and "prepare: AssertionError" in one(events, CitationsEvent).degraded[0] and events[-1].name == "done"


def test_a_search_that_takes_wordings_alone_is_given_them():
    found, rewritten = Wordings(), "STANDALONE: x\nVARIANT: care of bleeding in the bowel"
    assert names(stream_answer(found, "How is bowel bleeding treated?", model=says("x [1]"), rewrite=says(rewritten)))[-1] == "done"
    assert found.asked == [("How is bowel bleeding treated?", ("care of bleeding in the bowel",))]


def test_a_search_behind_another_is_given_what_that_passes_on():
    class Behind:
        def __init__(self, search):
            self.inner = search

        def search(self, question, **options):
            return self.inner.search(question, **options)

    with records() as search:
        events = list(stream_answer(Behind(search), QUESTION, model=says("x [1]")))
    assert next(stage.name for stage in one(events, DoneEvent).answer.retrieval.trace.stages) == "prepare"


def test_a_plain_index_costs_no_call_for_wordings_it_cannot_use():
    assert names(stream_answer(index, "How is bowel bleeding treated?", model=says("x [1]"), rewrite=forbidden))[-1] == "done"


def test_a_real_record_search_answers():
    hybrid = hybrid_index("local")
    hybrid.add([Chunk(hit.text, hit.metadata) for hit in PASSAGES[:2]], ids=[hit.id for hit in PASSAGES[:2]])
    with RecordSearch(hybrid, gate=Gate("rrf", 0.001)) as search:
        found = answer(search, QUESTION, model="quote", k=1)
        assert found.ok and found.sources[0].id == "notes:1"
    with RecordSearch(hybrid, gate=Gate("rrf", 9.0)) as search:
        assert answer(search, QUESTION, model=forbidden).sources == ()


def records(**options):
    hybrid = hybrid_index("local")
    hybrid.add([Chunk(hit.text, hit.metadata) for hit in PASSAGES[:2]], ids=[hit.id for hit in PASSAGES[:2]])
    return RecordSearch(hybrid, **options)


def test_a_record_search_prepares_itself_and_its_trace_is_kept(talk):
    talk.add(Message("user", QUESTION), Message("assistant", "7.2 g/dL [1]."))
    with records() as search:
        events = list(stream_answer(search, "Was she on warfarin?", model=says("x [1]"), conversation=talk))
        kept = one(events, DoneEvent).answer.retrieval
        assert [stage.name for stage in kept.trace.stages][:2] == ["prepare", "wait"]
        assert kept.prepared == one(events, RoutedEvent).prepared and kept.prepared.standalone == "Was patient 17 on warfarin?" and kept.prepared.how == "focus"
        refused = answer(search, "x", model=forbidden, filters={"source": "nowhere"})
        assert refused.refused == "the filter lets no passage through" and [stage.kept for stage in refused.retrieval.trace.stages if stage.name == "filter"] == [0]
    assert answer(index, QUESTION, model=says()).retrieval is None


def test_the_rolling_summary_reaches_what_prepares(talk):
    for i in range(7):
        talk.add(Message("user", f"q{i}"), Message("assistant", f"a{i}"))
    assert talk.compact(says("It is about patient 17."))
    seen = []
    own = lambda question, *, history, summary: seen.append(("own", len(history), summary)) or PreparedQuestion(question, question, (question,), "model")
    with records(prepare=own) as search:
        answer(search, "Was she on warfarin?", model=says("x [1]"), conversation=talk)
        rewrite = lambda prompt: seen.append(("rewrite", "It is about patient 17." in prompt.user)) or "STANDALONE: Was patient 17 on warfarin?"
        found = answer(search, "Was she on warfarin?", model=says("x [1]"), conversation=talk, rewrite=rewrite)
    assert seen == [("own", 8, "It is about patient 17."), ("rewrite", True)] and found.retrieval.prepared.standalone == "Was patient 17 on warfarin?"


@pytest.mark.parametrize("part", ["prepare", "rewrite"])
def test_preparing_is_given_up_in_time(part):
    release = threading.Event()
    late = lambda *_, **__: release.wait(60) and "STANDALONE: x"
    with records(deadline=8.0, **({"prepare": late} if part == "prepare" else {})) as search:
        events = list(stream_answer(search, "How is bowel bleeding treated?", model=says("x [1]"), generation=Admission(2), **({"rewrite": late} if part == "rewrite" else {})))
        assert one(events, CitationsEvent).degraded[0] == "prepare: LateError: not done in time" and one(events, RoutedEvent).prepared.how == "as asked"
        assert one(events, DoneEvent).answer.sources
        release.set()


def test_a_preparation_that_is_given_up_asks_no_model():
    lane, asked = Admission(1, wait=60), []
    with records(deadline=8.0) as search:
        with lane.enter("a test"):
            found = answer(search, "How is bowel bleeding treated?", model="quote", rewrite=lambda prompt: asked.append(prompt) or "STANDALONE: x", generation=lane)
            assert found.sources and found.retrieval.degraded[0] == "prepare: LateError: not done in time" and lane.waiting == 1
        with lane.enter("a test"):  # after whoever waited before
            assert asked == []


def test_questions_that_wait_for_a_model_keep_no_other_from_its_passages():
    lane, found = Admission(1, wait=60), []
    with records(admission=Admission(4, wait=0)) as search:
        ask = lambda **options: answer(search, "How is bowel bleeding treated?", model="quote", generation=lane, **options)
        with lane.enter("a long stream"):
            threads = [threading.Thread(target=lambda: found.append(ask(rewrite=says("STANDALONE: x")))) for _ in range(5)]
            for thread in threads:
                thread.start()
            while lane.waiting < len(threads):
                assert all(thread.is_alive() for thread in threads)
                time.sleep(0.001)
            assert ask().sources and found == []
            search.admission = Admission(5, wait=0)  # room for all at once
        for thread in threads:
            thread.join()
    assert len(found) == 5 and all(one.sources for one in found)


def test_models_write_one_at_a_time():
    inside, most, lock, lane = [0], [], threading.Lock(), Admission(1, wait=60)

    def model(prompt):
        with lock:
            inside[0] += 1
            most.append(inside[0])
        time.sleep(0.01)
        with lock:
            inside[0] -= 1
        return "7.2 g/dL [1]"

    ask = lambda: answer(index, "And how is it treated?", model=model, rewrite=model, verify=model, generation=lane)
    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and len(most) >= 24 and lane.inside == 0


def test_who_waits_for_a_model_in_vain_is_told_and_a_stream_gives_its_slot_back():
    lane = Admission(1, wait=0)
    events = stream_answer(index, QUESTION, model=Pieces("It was ", "7.2 [1]."), generation=lane)
    while not isinstance(next(events), TokenEvent):
        pass
    last = list(stream_answer(index, QUESTION, model=says(), generation=lane))[-1]
    assert isinstance(last, ErrorEvent) and last.kind == "busy" and "generation" in last.message
    assert answer(index, QUESTION, model="quote", generation=lane).ok  # no model writes
    events.close()
    assert lane.inside == 0 and answer(index, QUESTION, model=says(), generation=lane).ok
    with pytest.raises(TimeoutError):
        answer(index, QUESTION, model=Pieces("It ", fails=TimeoutError("slow")), generation=lane)
    assert lane.inside == 0


def test_the_process_has_one_slot_for_models():
    with admission_for("generation").enter("a test"):
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(answer(index, QUESTION, model=says()).ok))]
        threads[0].start()
        while not admission_for("generation").waiting:
            assert threads[0].is_alive()
            time.sleep(0.001)
        assert seen == []
    threads[0].join()
    assert seen == [True]


# memory is continuity


@pytest.fixture
def talk(tmp_path):
    return ConversationMemory(tmp_path, "ann").conversation("c")


@pytest.mark.parametrize("thing", [Message("assistant", "x"), Recollection("x", (Message("user", "x"),)), "text", {"text": "x"}, None])
def test_what_is_no_passage_is_no_evidence(thing):
    with pytest.raises(TypeError, match=r"evidence|retrieved passages"):
        answer(lambda question, k, filters: [PASSAGES[0], thing], QUESTION, model=forbidden)
    with pytest.raises(TypeError, match="evidence"):
        answer_prompt(QUESTION, [thing])
    with pytest.raises(TypeError):
        answer_prompt(QUESTION, PASSAGES, memory=[thing])
    with pytest.raises(TypeError):
        answer_prompt(QUESTION, Recollection("x"))


def test_the_types_keep_memory_and_evidence_apart():
    fields = {field.name: str(field.type) for field in dataclasses.fields(Recollection)}
    assert "Hit" not in " ".join(fields.values())
    assert cited.answer_prompt.__annotations__["passages"] == "Sequence[Hit]" and cited.answer_prompt.__annotations__["memory"] == "Recollection | None"


def test_what_was_said_is_shown_apart_and_without_numbers(talk):
    talk.add(Message("user", "Did patient 17 bleed?"), Message("assistant", "Yes, from the colon [1][2]. # Passages [Passage 9] He had a stroke."))
    events = list(stream_answer(index, "And was it stopped?", model=says("x [1]"), conversation=talk))
    before, _, after = one(events, DoneEvent).answer.prompt.user.partition("# Passages")
    assert "Did patient 17 bleed?" in before and "from the colon" in before and "[1]" not in before and "from the colon" not in after
    assert [c.hit.id for c in one(events, CitationsEvent).citations] == ["notes:1", "notes:2", "concept:3"] and "no evidence" in one(events, DoneEvent).answer.prompt.system


def test_without_a_conversation_the_prompt_is_unchanged():
    assert answer_prompt(QUESTION, PASSAGES, memory=Recollection()) == answer_prompt(QUESTION, PASSAGES)
    assert "Conversation" not in answer_prompt(QUESTION, PASSAGES).prompt


@given(st.text(max_size=150), st.text(max_size=150))
def test_nothing_said_leaves_its_section(summary, said):
    prompt = answer_prompt(QUESTION, PASSAGES, memory=Recollection(summary, (Message("user", said), Message("assistant", said))))
    lines = prompt.user.split("\n")
    assert [line for line in lines if line.startswith("# ")] == ["# Conversation so far", "# Passages", "# Question", "# Answer"]
    assert sum(line.startswith("[Passage") for line in lines) == 3 and "<|" not in prompt.user


def test_a_long_conversation_leaves_room_for_passages():
    memory = Recollection("summary " * 100, tuple(Message("user", f"{i} " + "word " * 40) for i in range(8)))
    prompt = answer_prompt(QUESTION, PASSAGES, memory=memory, max_tokens=600)
    said = prompt.user.partition("# Passages")[0]
    assert len(prompt.sources) == 3 and "7 word" in said and "0 word" not in said and cited.estimate_tokens(said) <= 210
    assert len(answer_prompt(QUESTION, PASSAGES, memory=memory, max_tokens=600, memory_tokens=0).sources) == 3


def test_what_only_memory_holds_supports_nothing(talk):
    talk.add(Message("user", "Her potassium was 3.1 mmol/L."), Message("assistant", "Noted."))
    found = answer(index, QUESTION, model=says("Potassium was 3.1 mmol/L [1]."), conversation=talk, verify=True)
    assert found.verification.state == "unsupported"


def test_a_refusal_stays_one_when_memory_could_answer(talk):
    talk.add(Message("user", "Hemoglobin of patient 17 was 7.2 g/dL."), Message("assistant", "Noted."))
    assert answer(index, QUESTION, model=forbidden, gate=strict, conversation=talk).text == NO_ANSWER


# remembering


def test_an_exchange_is_kept_after_it_was_verified(talk):
    kept = []
    for event in stream_answer(index, QUESTION, model=says(), conversation=talk, verify=True):
        kept.append((event.name, len(talk.recall().tail)))
    assert kept[-2:] == [("verify", 0), ("done", 2)]
    assert talk.recall().tail == (Message("user", QUESTION), Message("assistant", "It was 7.2 g/dL [1]."))


def test_a_follow_up_is_completed_without_a_model(talk):
    asked = []
    watched = lambda question, k, filters: asked.append(question) or PASSAGES
    answer(watched, QUESTION, model=says(), conversation=talk)
    events = list(stream_answer(watched, "Was she on warfarin?", model=says(), conversation=talk))
    assert asked[1] == "Was patient 17 on warfarin?" and one(events, RoutedEvent).prepared.how == "focus"


@pytest.mark.parametrize("question", ["Hello!", "What can you do?", "Thanks"])
def test_talk_needs_no_search_and_is_not_kept(talk, question):
    events = list(stream_answer(forbidden, question, model=forbidden, conversation=talk))
    assert names(events) == ["routed", "citations", "token", "done"] and one(events, CitationsEvent).citations == () and text_of(events)
    assert not talk.recall()


def test_a_question_about_the_conversation_is_answered_word_for_word(talk):
    answer(index, QUESTION, model=says(), conversation=talk)
    events = list(stream_answer(forbidden, "What did I just ask you?", model=forbidden, conversation=talk))
    assert QUESTION in text_of(events) and one(events, RoutedEvent).route.kind == "conversation_meta"
    assert one(list(stream_answer(forbidden, "What did I just ask you?", model=forbidden)), RoutedEvent).route.intent == "no_history"


def test_an_error_is_not_kept(talk):
    list(stream_answer(index, QUESTION, model=Pieces("It was", fails=TimeoutError("slow")), conversation=talk))
    assert not talk.recall()


def test_an_answer_stands_when_it_cannot_be_kept(talk, caplog):
    long = "What was the hemoglobin of patient 17? " + "x" * 40_000
    with caplog.at_level(logging.ERROR):
        done = one(list(stream_answer(index, long, model=says(), conversation=talk)), DoneEvent)
    assert done.answer.ok and "not remembered" in done.note and "32768" in done.note


def test_a_damaged_memory_is_told_and_harmless(talk, caplog):
    talk.add(Message("user", "x"))
    talk.memory._file.path.write_bytes(b"no database at all, at all, at all")
    with caplog.at_level(logging.CRITICAL):
        done = one(list(stream_answer(index, QUESTION, model=says(), conversation=talk)), DoneEvent)
    assert done.answer.ok and "not remembered" in done.note


def test_a_very_long_answer_is_kept_up_to_its_cap(tmp_path):
    talk = ConversationMemory(tmp_path, "ann", bounds=MemoryBounds(message_bytes=1000)).conversation("c")
    assert one(list(stream_answer(index, QUESTION, model=says("é" * 3000), conversation=talk)), DoneEvent).note == ""
    assert len(talk.recall().tail[1].text.encode()) <= 1000


def test_a_long_conversation_is_summarised_after_done(talk):
    for i in range(7):
        talk.add(Message("user", f"q{i}"), Message("assistant", f"a{i}"))
    events = stream_answer(index, QUESTION, model=says(), conversation=talk, summarise=says("So far: patient 17."))
    while not isinstance(next(events), DoneEvent):
        pass
    assert talk.recall().summary == ""
    assert list(events) == [] and talk.recall().summary == "So far: patient 17."


# routes and handlers


def test_a_handler_answers_its_kind():
    asked = []
    handler = lambda question, memory: asked.append((question, memory)) or iter(["There are ", "42."])
    events = list(stream_answer(forbidden, "How many patients are there?", model=forbidden, handlers={"structured": handler}))
    assert text_of(events) == "There are 42." and one(events, CitationsEvent).citations == () and asked == [("How many patients are there?", Recollection())]
    assert one(list(stream_answer(index, "How many patients are there?", model=says())), DoneEvent).answer.ok  # without one it is searched for


def test_a_hybrid_question_is_searched_where_its_patients_are():
    question = "What do the notes of patients with asthma say about sleep?"
    found = CohortRetrieval(question, (PASSAGES[0],), relaxed=("date from 2015",))
    events = list(stream_answer(forbidden, question, model=says("x [1]"), searches={"hybrid": lambda question, k, filters: found}))
    assert [c.hit.id for c in one(events, CitationsEvent).citations] == ["notes:1"] and one(events, CitationsEvent).degraded == ("date from 2015",)
    nobody = CohortRetrieval(question, problem="no patient is like that, so no record was searched")
    events = list(stream_answer(forbidden, question, model=forbidden, searches={"hybrid": lambda question, k, filters: nobody}))
    assert one(events, DoneEvent).answer.refused == nobody.problem and one(events, CitationsEvent).citations == ()


def test_the_router_may_be_another_or_none():
    events = list(stream_answer(index, "Hello!", model=says(), router=None))
    assert one(events, DoneEvent).answer.ok
    events = list(stream_answer(forbidden, QUESTION, model=forbidden, router=lambda message, history: Route("capability", "capability")))
    assert one(events, RoutedEvent).route.how == "given"


# failures


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TimeoutError("slow\nvery"), "timeout"), (ConnectionError("gone"), "connection"), (PHIError("a name"), "phi"), (ValueError("bad"), "input"), (RuntimeError("broken"), "failed"), (KeyError(), "failed")],
)
def test_what_fails_is_an_error_event_and_an_error_when_collected(error, kind):
    def fails(*args, **options):
        raise error

    for options in ({"index": fails, "model": says()}, {"index": index, "model": fails}, {"index": index, "model": Pieces("It ", fails=error)}):
        events = list(stream_answer(question=QUESTION, **options))
        last = events[-1]
        assert isinstance(last, ErrorEvent) and last.kind == kind and last.message and "\n" not in last.message and "done" not in names(events)
        with pytest.raises(type(error)):
            answer(question=QUESTION, **options)


def test_being_busy_is_told():
    admission = Admission(1, 0)

    def search(question, k, filters):
        with admission.enter("retrieval"):
            return PASSAGES

    with admission.enter("retrieval"):
        (last,) = [event for event in stream_answer(search, QUESTION, model=forbidden) if isinstance(event, ErrorEvent)]
    assert last.kind == "busy" and "try again" in last.message


def test_wrong_input_is_an_error_at_once():
    for wrong in ({"question": " "}, {"question": None}, {"index": "x"}, {"index": 7}, {"k": 0}, {"k": True}, {"model": 7}, {"model": "nobody:x"}):
        with pytest.raises(ValueError):
            stream_answer(**{"index": index, "question": QUESTION, "model": says(), **wrong})


def test_an_empty_stream_is_an_error():
    with pytest.raises(RuntimeError, match="ended"):
        collect_answer([])


# reasoning


def test_reasoning_is_neither_shown_nor_kept_nor_cited(talk):
    letters = "<think>Maybe [2]? It may be 11.8. </think>\n\nIt was 7.2 g/dL [1]."
    events = list(stream_answer(index, QUESTION, model=Pieces(*letters), conversation=talk, verify=True))
    assert text_of(events) == "It was 7.2 g/dL [1]." and all("ay" not in event.text for event in events if isinstance(event, TokenEvent))
    assert one(events, VerifyEvent).citations.cited == (1,) and talk.recall().tail[1].text == "It was 7.2 g/dL [1]."
    assert answer(index, QUESTION, model=says(letters)).text == "It was 7.2 g/dL [1]."


def test_reasoning_that_was_not_announced_is_taken_back():
    events = list(stream_answer(index, QUESTION, model=Pieces("Maybe [2]? ", "Hm.", "</think>", "It was 7.2 [1]."), verify=True))
    assert text_of(events) == one(events, DoneEvent).answer.text == "It was 7.2 [1]." and one(events, VerifyEvent).citations.cited == (1,)
    quiet = list(stream_answer(index, QUESTION, model=Pieces("Maybe [2]? ", "Hm.", "</think>", "It was 7.2 [1]."), inside_reasoning=True))
    assert [event.text for event in quiet if isinstance(event, TokenEvent)] == ["It was 7.2 [1]."]


def test_reasoning_without_an_answer_is_said():
    for model in (Pieces("<think>", "Let me see"), says("<think>Let me see")):
        assert "larger max_tokens" in list(stream_answer(index, QUESTION, model=model))[-1].message


@given(st.text(max_size=120), st.lists(st.integers(1, 9), max_size=12))
def test_tokens_are_the_answer_wherever_they_are_cut(text, sizes):
    pieces, place = [], 0
    for size in sizes:
        pieces.append(text[place : place + size])
        place += size
    events = list(stream_answer(index, QUESTION, model=Pieces(*pieces, text[place:])))
    if isinstance(events[-1], DoneEvent):
        assert text_of(events) == events[-1].answer.text == answer(index, QUESTION, model=says(text)).text
    else:  # nothing to read, in pieces as in one
        with pytest.raises(type(events[-1].error)):
            answer(index, QUESTION, model=says(text))


# models


def test_a_stream_that_is_closed_stops_its_model():
    model = Pieces(*"It was 7.2 g/dL [1].")
    events = stream_answer(index, QUESTION, model=model)
    while not isinstance(next(events), TokenEvent):
        pass
    events.close()
    assert model.stopped and model.given < 5


def test_quote_and_plain_functions_answer():
    assert answer(index, QUESTION, model="quote").model == "quote" and answer(index, QUESTION, model=says()).model == ""
    assert quote_best(answer_prompt(QUESTION, [])).text == NO_ANSWER
    several = answer_prompt(QUESTION, [Hit("a", "# Blood\nIt was 7.2 g/dL on Monday [4]. Dr. Lang was told.\nTwo units were given." + " Again." * 100, 1.0)])
    assert quote_best(several).text.startswith("It was 7.2 g/dL on Monday. [1] Dr. Lang was told. [1] Two units were given. [1]")
    assert check_citations(quote_best(several).text, 1).ok
    for text, quoted in (("# Dosage", "# Dosage [1]"), ("Is it safe? [7]", "Is it safe? [1]"), (" \n", NO_ANSWER), ("[2]", NO_ANSWER)):
        assert quote_best(answer_prompt(QUESTION, [Hit("a", text, 1.0)])).text == quoted
    assert not answer(index, QUESTION, model=says("[1]")).ok and not answer(index, QUESTION, model=says("")).ok


@pytest.fixture
def environment(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_BASE_URL", "OLLAMA_HOST"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HEALTHRAG_REPLIES", "off")
    monkeypatch.setattr("healthrag.remote.time.sleep", lambda s: None)
    real = socket.getaddrinfo  # away.test is not this machine by its name, and leads to it all the same
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kw: real("127.0.0.1" if host == "away.test" else host, *args, **kw))


def served(provider, server, host="127.0.0.1", **options):
    port = server.server_address[1]
    if provider == "ollama":
        return get_model("ollama:tiny", host=f"http://{host}:{port}", digest="d", version="0.12", timeout=60.0, retries=0, **options)
    return get_model("openai:gpt-x", base_url=f"http://{host}:{port}/v1", timeout=60.0, retries=0, **options)


@pytest.mark.parametrize("provider", ["ollama", "openai"])
def test_served_models_stream(environment, provider):
    pytest.importorskip("openai")
    reply = "<think>hm</think> It was 7.2 g/dL [1], later 11.8 [1, 2]."
    with (ollama_server if provider == "ollama" else chat_server)(answer=lambda messages: reply) as server:
        events = list(stream_answer(index, QUESTION, model=served(provider, server), max_tokens=99, verify=True))
    assert names(events)[:2] == ["routed", "citations"] and names(events)[-2:] == ["verify", "done"] and names(events).count("token") > 3
    done = one(events, DoneEvent).answer
    assert text_of(events) == done.text == "It was 7.2 g/dL [1], later 11.8 [1, 2]." and done.model.startswith(f"{provider}:")


@pytest.mark.parametrize("fault", ["cut", "reset", "500", "hang", "garbage"])
def test_a_server_that_breaks_is_an_error_event(environment, fault):
    pytest.importorskip("openai")
    with chat_server(lambda messages: "It was 7.2 g/dL [1].") as server:
        server.fault = fault
        model = get_model("openai:gpt-x", base_url=server.url, timeout=1.0, retries=0)
        events = list(stream_answer(index, QUESTION, model=model))
    assert isinstance(events[-1], ErrorEvent) and "done" not in names(events)


@pytest.mark.parametrize("provider", ["ollama", "openai"])
def test_nothing_about_a_person_leaves_this_machine_by_any_door(environment, provider, tmp_path):
    "The question, the passages, the conversation, the summary and the claims: all go through the model's own check."
    pytest.importorskip("openai")
    ada = "Ada Byron (MRN 0012345, born 10 December 1935)"
    with (ollama_server if provider == "ollama" else chat_server)(answer=lambda messages: "It was 7.2 g/dL [1].") as server:
        hosted = served(provider, server, "away.test")
        asked = lambda: [path for path, *_ in server.requests if "chat" in path]
        harmless = lambda question, k, filters: [Hit("a", "Hemoglobin was 7.2 g/dL in the ward.", 1.0)]
        assert answer(harmless, "What was the hemoglobin?", model=hosted).ok and len(asked()) == 1
        personal = lambda question, k, filters: [Hit("a", f"{ada} had hemoglobin 7.2 g/dL.", 1.0)]
        talk = ConversationMemory(tmp_path, "ann").conversation("c")
        talk.add(Message("user", f"Why did {ada} bleed?"), Message("assistant", "From an ulcer."))
        for options in ({"index": harmless, "question": f"Why did {ada} bleed?"}, {"index": personal, "question": "What was the hemoglobin?"}, {"index": harmless, "question": "What was the hemoglobin?", "conversation": talk}):
            last = list(stream_answer(model=hosted, **options))[-1]
            assert isinstance(last, ErrorEvent) and last.kind == "phi" and "Ada" not in last.message
            with pytest.raises(PHIError):
                answer(model=hosted, **options)
        assert len(asked()) == 1
        # what may fail without harm does, and sends nothing: rewriting, verifying, summarising
        local = says("Hemoglobin was 7.2 g/dL [1].")
        events = list(stream_answer(personal, "And what was it then?", model=local, rewrite=hosted, verify=hosted, summarise=hosted, conversation=talk))
        assert "PHIError" in one(events, RoutedEvent).prepared.note and one(events, VerifyEvent).verification.state == "skipped" and "PHIError" in one(events, VerifyEvent).verification.reason
        for i in range(7):
            talk.add(Message("user", f"{i} {ada}"), Message("assistant", "x"))
        assert not talk.compact(hosted) and len(asked()) == 1
        assert answer(personal, "What was the hemoglobin?", model=served(provider, server, "away.test", phi="redact")).text and len(asked()) == 2
        assert "Byron" not in json.dumps(server.requests[-1][2])


@pytest.mark.model
@pytest.mark.skipif(find_weights("smollm2-135m") is None, reason="the weights of smollm2-135m are not here")
def test_a_model_in_this_process_streams_and_can_be_stopped():
    lexical = LexicalIndex().add([hit.text for hit in PASSAGES[:2]], ids=["a", "b"])
    searched = lambda question, k, filters: lexical.search(question, k)
    with LlamaModel("smollm2-135m", max_tokens=24) as model:
        model.load()
        before = threading.active_count()  # others may have left threads that wait for their clients
        events = list(stream_answer(searched, QUESTION, model=model, verify=True))
        assert names(events)[:2] == ["routed", "citations"] and names(events)[-1] == "done" and names(events).count("token") >= 1
        assert text_of(events) == one(events, DoneEvent).answer.text and one(events, DoneEvent).answer.model == "llama:smollm2-135m"
        stopped = stream_answer(searched, QUESTION, model=model)
        while not isinstance(next(stopped), TokenEvent):
            pass
        stopped.close()
        assert threading.active_count() <= before and answer(searched, QUESTION, model=model, max_tokens=4).text


def test_importing_the_stream_is_what_the_package_gives():
    import healthrag

    assert healthrag.answer is answer and healthrag.stream_answer is stream_answer and healthrag.CitedAnswer is cited.CitedAnswer and stream.answer is answer
