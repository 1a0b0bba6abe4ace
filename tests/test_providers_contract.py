"""The contract of every chat provider, held by the real clients against servers that answer, stall, break, rate-limit and lie."""

import json
import logging
import socket
import traceback
from contextlib import contextmanager

import pytest
from chat_server import chat_server
from ollama_server import ollama_server

from healthrag.models.registry import CHAT_PROVIDERS, ChatModel, get_model
from healthrag.models.stream import ReplyStream, StreamingModel
from healthrag.models.weights import find_weights
from healthrag.prompt import build_prompt, zero_shot_prompt
from healthrag.records import Hit, Prompt, Reply
from healthrag.replies import ReplyStore

pytest.importorskip("openai")
SECRET = "sk-planted-9f8e7d6c5b4a"
QUESTION = "How many women have a recorded gastrointestinal hemorrhage?"
EXAMPLE = Hit("e", "q", 1.0, metadata={"kind": "example", "question": "How many women are there?", "sql": "SELECT COUNT(*) FROM person"})
PROMPT = build_prompt(QUESTION, [EXAMPLE])
ABOUT_ADA = zero_shot_prompt("Why did Ada Byron (MRN 0012345, born 10 December 1935) bleed?")
CHAT_ROUTES = ("/api/chat", "/v1/chat/completions")
SERVED = ("ollama", "openai", "hf")
LOCAL = ("nearest-example", pytest.param("llama", marks=pytest.mark.model))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_BASE_URL", "OLLAMA_HOST", "HEALTHRAG_MODEL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("OPENAI_API_KEY", "OLLAMA_API_KEY", "HF_API_TOKEN"):
        monkeypatch.setenv(name, SECRET if name != "OPENAI_API_KEY" else f"{SECRET}-openai")
    monkeypatch.setenv("HEALTHRAG_REPLIES_DIR", str(tmp_path / "replies"))
    monkeypatch.setenv("HEALTHRAG_REPLIES", "off")
    monkeypatch.setattr("healthrag.remote.time.sleep", lambda s: None)


@pytest.fixture(params=SERVED)
def served(request):
    "(server, make): a provider's server and a function that makes a model of it."
    with started(request.param) as pair:
        yield pair


@contextmanager
def started(provider):
    with ollama_server() if provider == "ollama" else chat_server() as server:

        def make(host="127.0.0.1", **options):
            port = server.server_address[1]
            where = {"host": f"http://{host}:{port}"} if provider == "ollama" else {"base_url": f"http://{host}:{port}/v1"}
            extra = {"ollama": {"digest": "d1", "version": "0.12"}, "hf": {"hub_url": server.address}}.get(provider, {})
            name = {"ollama": "ollama:tiny", "openai": "openai:gpt-x", "hf": "hf:a/b"}[provider]
            return get_model(name, **{"timeout": 60.0, "retries": 1, **where, **extra, **options})

        yield server, make


def make_local(provider, **options):
    if provider == "llama":
        if find_weights("smollm2-135m") is None:
            pytest.skip("no weights here; healthrag models pull llama:smollm2-135m")
        pytest.importorskip("xllamacpp")
        return get_model("llama:smollm2-135m", context=1024, **{"max_tokens": 4, **options})
    return get_model(provider, **options)


def asked(server):
    return [body for path, _, body in server.requests if path in CHAT_ROUTES]


def ask(model, how):
    return model(PROMPT) if how == "generate" else model.stream(PROMPT).read()


both_ways = pytest.mark.parametrize("how", ["generate", "stream"])


def test_every_provider_is_held_to_the_contract():
    assert {*SERVED, "nearest-example", "llama"} == set(CHAT_PROVIDERS)


# answering


def keeps_the_contract(model):
    assert isinstance(model, ChatModel) and isinstance(model, StreamingModel)
    whole, stream = model(PROMPT), model.stream(PROMPT)
    assert isinstance(stream, ReplyStream)
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.reply
    pieces = list(stream)
    assert all(isinstance(piece, str) and piece for piece in pieces)
    assert "".join(pieces) == stream.reply.text == whole.text and whole.text
    assert isinstance(whole, Reply) and whole.model == stream.reply.model == model.name
    counts = (whole.prompt_tokens, whole.completion_tokens, whole.finish_reason)
    assert counts == (stream.reply.prompt_tokens, stream.reply.completion_tokens, stream.reply.finish_reason)
    assert whole.prompt_tokens >= 0 and whole.completion_tokens >= 0 and whole.finish_reason in ("stop", "length")
    for empty in ("", " \n", Prompt("rules", "")):
        if model.name != "nearest-example":
            with pytest.raises(ValueError, match="prompt is empty"):
                model.stream(empty)


def test_a_served_model_answers_whole_and_in_pieces(served):
    server, make = served
    keeps_the_contract(make())
    assert len(asked(server)) == 2 and all(body["messages"] == PROMPT.messages for body in asked(server))


@pytest.mark.parametrize("provider", LOCAL)
def test_a_local_model_answers_whole_and_in_pieces(provider):
    keeps_the_contract(make_local(provider))


@pytest.mark.model
@pytest.mark.timeout(300)
def test_closing_a_stream_stops_the_model_in_this_process():
    model = make_local("llama", max_tokens=900)
    with model.stream(PROMPT) as stream:
        next(stream)
    assert model.generate("Say OK.", max_tokens=1).finish_reason == "length"


@both_ways
def test_a_short_reply_says_that_it_was_cut(served, how):
    _, make = served
    assert ask(make(max_tokens=1), how).finish_reason == "length"


@both_ways
def test_a_reply_is_recorded_once_and_found_either_way(served, how, tmp_path):
    server, make = served
    model = make(replies=ReplyStore(tmp_path / "r", "write"))
    first = ask(model, how)
    assert model(PROMPT).cached and model.stream(PROMPT).read().cached and model(PROMPT).text == first.text
    assert len(asked(server)) == 1 and list(model.stream(PROMPT)) == [first.text]
    offline = make(replies=ReplyStore(tmp_path / "r", "only-read"))
    server.fault = "500"
    assert ask(offline, how).text == first.text
    with pytest.raises(LookupError, match="--replies write"):
        offline.stream("Something else?").read()


# failures


@both_ways
@pytest.mark.parametrize("fault", ["429", "502", "503", "504", "drop"])
def test_what_was_not_answered_is_asked_again(served, how, fault):
    server, make = served
    server.script = [fault]
    assert ask(make(), how).text.startswith("```sql") and len(asked(server)) == 2


@both_ways
@pytest.mark.parametrize("fault", ["429", "503", "drop"])
def test_patience_ends(served, how, fault):
    server, make = served
    server.fault = fault
    with pytest.raises((RuntimeError, ConnectionError)):
        ask(make(retries=1), how)
    assert len(asked(server)) == 2
    with pytest.raises((RuntimeError, ConnectionError)):
        ask(make(retries=0), how)
    assert len(asked(server)) == 3


@both_ways
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("400", RuntimeError, "status 400"),
        ("401", PermissionError, "refused the key"),
        ("404", LookupError, "model"),
        ("500", RuntimeError, "status 500"),
        ("429-later", RuntimeError, "status 429"),
        ("garbage", RuntimeError, "something that is not|broke off"),
        ("empty", RuntimeError, "something that is not|broke off"),
        ("hang", TimeoutError, r"did not answer within 0\.4 s"),
        ("short", ConnectionError, "broke"),
    ],
)
def test_what_may_have_been_answered_is_not_asked_again(served, how, fault, error, says, tmp_path):
    server, make = served
    if how == "stream" and fault in ("garbage", "empty", "short"):
        error, says = (RuntimeError, ConnectionError), "something that is not|broke"
    server.fault = fault
    model = make(timeout=0.4 if fault == "hang" else 60.0, replies=ReplyStore(tmp_path / "r", "write"))
    with pytest.raises(error, match=says) as caught:
        ask(model, how)
    assert server.asked.wait(60)
    assert len(asked(server)) == 1 and "\n" not in str(caught.value)
    assert len(model.replies) == 0 and not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_stream_that_breaks_is_an_error_and_is_not_kept(served, fault, tmp_path):
    server, make = served
    server.fault = fault
    model = make(replies=ReplyStore(tmp_path / "r", "write"))
    stream = model.stream(PROMPT)
    with pytest.raises(ConnectionError, match="broke"):
        list(stream)
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.reply
    assert len(asked(server)) == 1 and len(model.replies) == 0


def test_a_reply_that_is_not_text_is_no_reply(served):
    server, make = served
    server.fault = "list"
    with pytest.raises(RuntimeError, match="something that is not"):
        make()(PROMPT)


@both_ways
def test_impossible_counts_are_not_believed(served, how):
    server, make = served
    server.fault = "lies"
    reply = ask(make(), how)
    assert reply.prompt_tokens is None and reply.completion_tokens is None and reply.model == make().name


@both_ways
def test_redirects_are_not_followed(served, how):
    server, make = served
    with chat_server() as other:
        server.elsewhere, server.fault = other.address, "307"
        with pytest.raises(RuntimeError):
            ask(make(), how)
        assert not other.requests


def test_nobody_there_is_said_at_once(served):
    server, make = served
    model = make(retries=5)
    server.server_close()
    with pytest.raises(ConnectionError, match=f"no .*server answers at {server.address}"):
        model(PROMPT)


def test_proxies_of_the_environment_are_not_used_for_this_machine(served, monkeypatch):
    _, make = served
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert make()(PROMPT).text


# what leaves this machine


@pytest.fixture
def away(monkeypatch):
    "A name that is not this machine, and leads to it all the same."
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kw: real("127.0.0.1" if host == "away.test" else host, *args, **kw))
    return "away.test"


@pytest.mark.parametrize("call", [lambda m, p, **k: m(p, **k), lambda m, p, **k: m.stream(p, **k).read()], ids=["generate", "stream"])
def test_a_person_is_kept_from_a_hosted_model_unless_someone_says_so(served, away, call):
    server, make = served
    model = make(away)
    assert model.hosted and call(model, PROMPT).text and len(asked(server)) == 1
    with pytest.raises(PermissionError, match=r"name.*date.*record") as caught:
        call(model, ABOUT_ADA)
    assert "Ada" not in str(caught.value) and "0012345" not in str(caught.value) and len(asked(server)) == 1
    call(model, ABOUT_ADA, phi="redact")
    sent = json.dumps(asked(server)[-1])
    assert "[NAME]" in sent and "[RECORD]" in sent and not any(part in sent for part in ("Ada", "Byron", "0012345", "1935"))
    call(model, ABOUT_ADA, phi="allow")
    assert "Ada Byron" in json.dumps(asked(server)[-1])
    assert call(make(away, phi="redact"), ABOUT_ADA).text and "Byron" not in json.dumps(asked(server)[-1])
    for wrong in ("yes", "none"):
        with pytest.raises(ValueError, match="one of refuse, redact, allow"):
            call(model, ABOUT_ADA, phi=wrong)
        with pytest.raises(ValueError, match="one of refuse, redact, allow"):
            make(away, phi=wrong)


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt("You treat Mr. John Smith.", QUESTION),
        Prompt("", QUESTION, turns=(("Who has MRN 0012345?", "SELECT 1"),)),
        Prompt("", QUESTION, turns=(("Who?", "SELECT * FROM person WHERE last_name = 'Grzelak'"),)),
        Prompt("Table notes: columns note_text, ssn_078-05-1120.", QUESTION),
        Prompt("", f"# Context\n\nseen on 2019-03-01 by Dr. Okafor\n\n# Question\n\n{QUESTION}"),
    ],
    ids=["rules", "example", "literal", "column", "context"],
)
def test_every_part_of_a_prompt_is_checked(served, away, prompt):
    server, make = served
    with pytest.raises(PermissionError, match="nothing was sent"):
        make(away)(prompt)
    assert not asked(server)
    make(away, phi="redact")(prompt)
    assert not any(part in json.dumps(asked(server)[-1]) for part in ("Smith", "0012345", "Grzelak", "078-05", "Okafor", "2019-03-01"))


@pytest.mark.parametrize(
    ("name", "hosted"),
    [
        ("ollama:gpt-oss:120b-cloud", True), ("ollama:gemma4:cloud", True), ("openai:qwen3-coder:480b-Cloud", True),
        ("ollama:gpt-oss:20b", False), ("ollama:cloudy:1b", False), ("ollama:cloud", True), ("openai:my-cloud-notes", False),
    ],
)  # fmt: skip
def test_a_model_that_a_local_ollama_passes_on_counts_as_hosted(monkeypatch, name, hosted):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:11434/v1")
    model = get_model(name)
    assert model.hosted is hosted
    if hosted:
        with pytest.raises(PermissionError, match="nothing was sent"):
            model(ABOUT_ADA)


def test_this_machine_may_know(served):
    server, make = served
    assert not make().hosted and make()(ABOUT_ADA).text and "Ada Byron" in json.dumps(asked(server)[-1])


def test_a_replay_sends_nothing_and_is_not_refused(served, away, tmp_path):
    server, make = served
    make(away, phi="allow", replies=ReplyStore(tmp_path / "r", "write"))(ABOUT_ADA)
    server.requests.clear()
    assert make(away, replies=ReplyStore(tmp_path / "r", "only-read"))(ABOUT_ADA).cached and not asked(server)


def test_hosted_models_are_off_until_named(monkeypatch):
    from healthrag.models.registry import list_models

    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert get_model().name.startswith("llama:") and not any(m.name.startswith(("openai:", "hf:")) for m in list_models())
    assert get_model("openai:gpt-x").hosted and get_model("hf:a/b").hosted and not get_model("ollama:tiny").hosted
    monkeypatch.setenv("OLLAMA_HOST", "gpu.example.org:11434")
    assert get_model("ollama:tiny").hosted
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
    assert not get_model("openai:gpt-x").hosted


# secrets


@pytest.mark.parametrize("fault", [None, "echo", "400", "401", "403", "404", "429", "500", "503", "garbage", "drop", "cut", "unsupported"])
def test_a_planted_key_is_nowhere_to_be_found(served, fault, tmp_path, caplog, capsys, recwarn, cdm):
    from healthrag.evaluation import run_benchmark
    from healthrag.records import BenchmarkTask

    server, make = served
    server.fault = fault
    caplog.set_level(logging.DEBUG)
    model = make(replies=ReplyStore(tmp_path / "r", "write"))
    shown = [repr(model), str(vars(model)), json.dumps(model.identity(), default=repr), model.name]
    for how in ("generate", "stream"):
        try:
            shown.append(repr(ask(model, how)))
        except Exception as error:
            shown += [*traceback.format_exception(error), repr(error)]
    task = BenchmarkTask("t1", QUESTION, "condition", "simple", "SELECT 1 AS n")
    options = {"model": model, "executor": cdm.execute, "catalog": cdm.catalog, "log": tmp_path / "run.jsonl", "progress": False}
    try:
        shown.append(repr(run_benchmark([task], modes=("zero_shot",), **options)))
    except Exception as error:
        shown += traceback.format_exception(error)
    shown += [caplog.text, *(str(w.message) for w in recwarn.list), *capsys.readouterr()]
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert any(SECRET in headers.get("authorization", "") for _, headers, _ in server.requests), "the key was sent, and only there"
    assert written
    for text in (*shown, *written):
        assert SECRET not in text


def test_a_key_in_the_address_is_hidden_too(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with chat_server() as server:
        url = server.url.replace("http://", f"http://me:{SECRET}@")
        model = get_model("openai:gpt-x", base_url=url, api_key="k", replies=ReplyStore(tmp_path, "write"))
        model(PROMPT)
        assert server.requests[-1][1]["authorization"].startswith("Basic ")
    text = caplog.text + repr(model) + json.dumps(model.identity()) + "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert SECRET not in text
    with pytest.raises(ValueError, match="has a query") as caught:
        get_model("openai:gpt-x", base_url=f"{server.url}?key={SECRET}")
    assert SECRET not in str(caught.value)


# what only some have


@pytest.mark.parametrize("provider", ["openai", "hf"])
@both_ways
def test_what_a_reasoning_model_does_not_take_is_left_out(provider, how, caplog):
    with started(provider) as (server, make):
        server.fault = "reasoning"
        model = make(max_tokens=2)
        before = model.identity()
        assert ask(model, how).finish_reason == "length" and model.identity() == before
        sent = asked(server)
        assert len(sent) == 3 and sent[-1]["max_completion_tokens"] == 2 and sent[-1]["seed"] == 0
        assert not {"max_tokens", "temperature"} & set(sent[-1]) and "does not take temperature" in caplog.text
        ask(model, how)
        assert len(asked(server)) == 4, "it is not tried again"


def test_the_router_names_live_providers():
    with started("hf") as (server, make):
        server.script = ["unsupported"]
        with pytest.raises(LookupError, match=r"live providers: novita, nscale\. Pin one: hf:a/b:novita"):
            make()(PROMPT)
        server.script, server.mapping = ["unsupported"], {}
        with pytest.raises(LookupError, match="no provider serves 'a/b' at the moment"):
            make()(PROMPT)
        server.script = ["unsupported", "500"]
        with pytest.raises(LookupError, match="the hub could not be asked"):
            make()(PROMPT)
        before = len(server.requests)
        server.script = ["unsupported"]
        with pytest.raises(RuntimeError, match="status 400"):
            get_model("hf:a/b:novita", base_url=server.url, hub_url=server.address)(PROMPT)
        assert len(server.requests) == before + 1, "a pinned model costs no look-up"


def test_the_router_never_gets_the_key_of_openai(monkeypatch):
    monkeypatch.delenv("HF_API_TOKEN")
    for name in ("HF_TOKEN", "HUGGINGFACE_API_KEY", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with started("hf") as (server, make):
        make(api_key=f"{SECRET}-openai")(PROMPT)
        assert SECRET not in json.dumps(server.requests[-1][1])


@pytest.mark.parametrize(("reply", "cost"), [
    (Reply("x", "openai:gpt-4.1-mini", 1_000_000, 1_000_000), 2.0), (Reply("x", "openai:gpt-4.1-mini", None, 5), None),
    (Reply("x", "llama:any", None, None), 0.0), (Reply("x", "nearest-example", 0, 0), 0.0), (Reply("x", "ollama:tiny", 5, 5), None),
    (Reply("x", "openai:gpt-4.1-mini-tuned", 5, 5), None),
])  # fmt: skip
def test_costs(reply, cost):
    from healthrag.models.prices import reply_cost

    assert reply_cost(reply) == (pytest.approx(cost) if cost is not None else None)


def test_the_newest_price_of_the_day_and_the_exact_name_win():
    import datetime as dt

    from healthrag.models.prices import Price, find_price

    day = dt.date
    prices = [Price("a:*", 9, 9, day(2026, 1, 1), ""), Price("a:b", 1, 1, day(2025, 1, 1), ""), Price("a:b", 2, 2, day(2026, 1, 1), "")]
    assert [find_price("a:b", prices, on=on).input for on in (None, day(2025, 6, 1), day(2026, 1, 1))] == [2, 1, 2]
    assert find_price("a:c", prices).input == 9 and find_price("z:c", prices) is None and find_price("a:b", prices, on=day(2024, 1, 1)) is None
