"Ollama through the official client, against a server that speaks its routes, answers as it does and fails as it does."

import json

import pytest
from ollama_server import ollama_server

from healthrag.models.ollama import OllamaModel, ollama_models, pull_ollama
from healthrag.models.registry import get_model, list_models, pull_model
from healthrag.prompt import build_prompt, zero_shot_prompt
from healthrag.records import Hit
from healthrag.replies import ReplyStore

QUESTION = "How many women have a recorded gastrointestinal hemorrhage?"
PROMPT = zero_shot_prompt(QUESTION)


@pytest.fixture
def server():
    with ollama_server() as running:
        yield running


def test_a_question_is_answered_with_counts(server):
    reply = OllamaModel("llama3.2:3b", host=server.url)(PROMPT)
    assert reply.text == "```sql\nSELECT 2\n```" and reply.model == "ollama:llama3.2:3b" and reply.finish_reason == "stop"
    assert reply.prompt_tokens > 10 and reply.completion_tokens == 2 and reply.seconds > 0 and not reply.cached


def test_what_is_sent(server):
    example = Hit("e", "q", 1.0, metadata={"kind": "example", "question": "q", "sql": "SELECT 1"})
    prompt = build_prompt(QUESTION, [example])
    OllamaModel("llama3.2:3b", host=server.url, seed=7, threads=1, context=2048).generate(prompt, max_tokens=99)
    path, _, sent = server.requests[-1]
    assert path == "/api/chat" and sent["messages"] == prompt.messages and sent["stream"] is False
    assert sent["options"] == {"temperature": 0.0, "seed": 7, "num_ctx": 2048, "num_thread": 1, "num_predict": 99}


def test_a_cut_reply_says_so(server):
    assert OllamaModel("llama3.2:3b", host=server.url, max_tokens=1)(PROMPT).finish_reason == "length"


def test_the_identity_is_the_digest_and_the_version(server):
    model = OllamaModel("llama3.2:3b", host=server.url)
    identity = model.identity()
    assert identity["weights"] == server.digest("llama3.2:3b") and identity["runtime"] == "ollama 0.12.6"
    assert json.loads(json.dumps(identity)) == identity and server.url not in json.dumps(identity)
    asked = len(server.requests)
    assert model.identity() == identity and len(server.requests) == asked
    server.models["llama3.2:3b"] = "new weights under the same name"
    assert OllamaModel("llama3.2:3b", host=server.url).identity() != identity


def test_a_bare_name_means_latest(server):
    assert OllamaModel("tiny", host=server.url).identity()["weights"] == server.digest("tiny:latest")


def test_a_server_without_digests_is_told_apart(server, monkeypatch):
    monkeypatch.setattr(server, "digest", lambda name: "")
    with pytest.raises(RuntimeError, match=r"without a digest.*give digest="):
        OllamaModel("tiny", host=server.url).identity()
    assert OllamaModel("tiny", host=server.url, digest="mine").identity()["weights"] == "mine"


def test_recorded_replies_replay_without_the_server(tmp_path):
    with ollama_server() as server:
        live = OllamaModel("tiny", host=server.url, replies=ReplyStore(tmp_path, "write"))
        first, pinned = live(PROMPT), live.identity()
        assert live(PROMPT).cached and sum(path == "/api/chat" for path, *_ in server.requests) == 1
        url = server.url
    options = {"digest": pinned["weights"], "version": "0.12.6", "host": url}
    again = OllamaModel("tiny", replies=ReplyStore(tmp_path, "only-read"), **options)
    assert again(PROMPT).text == first.text and again(PROMPT).cached
    with pytest.raises(LookupError, match="ollama:tiny on 'another question"):
        again(zero_shot_prompt("another question"))


def test_an_unknown_model_says_what_to_run(server):
    with pytest.raises(LookupError, match=r"'gpt-5'.*ollama pull gpt-5"):
        OllamaModel("gpt-5", host=server.url)(PROMPT)
    with pytest.raises(LookupError, match=r"it has: llama3\.2:3b, tiny:latest.*ollama pull gpt-5"):
        OllamaModel("gpt-5", host=server.url).identity()


def test_no_server_says_what_to_start():
    for ask in (lambda m: m(PROMPT), lambda m: m.identity()):
        with pytest.raises(ConnectionError, match=r"no Ollama server answers at http://127\.0\.0\.1:9; start it with: ollama serve"):
            ask(OllamaModel("tiny", host="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("500", RuntimeError, "failed on .tiny. with status 500: llama runner process has terminated"),
        ("garbage", RuntimeError, "not an Ollama reply"),
        ("empty", RuntimeError, "not an Ollama reply"),
        ("drop", ConnectionError, "no Ollama server answers"),
        ("hang", TimeoutError, r"did not answer within 0\.3 s"),
    ],
)
@pytest.mark.parametrize("ask", [lambda m: m(PROMPT), lambda m: m.identity()], ids=["generate", "identity"])
def test_a_misbehaving_server_gets_one_clear_line(server, fault, error, says, ask):
    server.fault = fault
    with pytest.raises(error, match=says) as caught:
        ask(OllamaModel("tiny", host=server.url, timeout=0.3 if fault == "hang" else 60.0))
    assert "\n" not in str(caught.value)


def test_a_failed_question_is_not_recorded(server, tmp_path):
    store = ReplyStore(tmp_path, "write")
    model = OllamaModel("tiny", host=server.url, replies=store)
    model.identity()
    server.fault = "500"
    with pytest.raises(RuntimeError):
        model(PROMPT)
    server.fault = None
    assert len(store) == 0 and not model(PROMPT).cached and len(store) == 1


def test_listing_and_pulling(server, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert [m.name for m in ollama_models(server.url)] == ["ollama:llama3.2:3b", "ollama:tiny:latest"]
    assert "ollama:tiny:latest" in [m.name for m in list_models(host=server.url)]
    assert pull_model("ollama:new", host=server.url) is None and "new:latest" in server.models
    with pytest.raises(RuntimeError, match="failed on 'no-such-model': pull model manifest: file does not exist"):
        pull_ollama("no-such-model", host=server.url)


def test_get_model_uses_the_settings(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HEALTHRAG_REPLIES_DIR", str(tmp_path))
    monkeypatch.setenv("HEALTHRAG_REPLIES", "write")
    model = get_model("ollama:tiny", host=server.url, threads=2, max_tokens=9)
    assert model.options["num_thread"] == 2 and model.max_tokens == 9 and model.replies.directory == tmp_path
    assert not model(PROMPT).cached and get_model("ollama:tiny", host=server.url, threads=2, max_tokens=9)(PROMPT).cached


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("http://me:geheim-pw@127.0.0.1:9", "http://127.0.0.1:9"), ("me:geheim-pw@127.0.0.1", "127.0.0.1"), ("https://geheim-pw@h.org/p?k=geheim-pw", "https://h.org/p"),
        ("127.0.0.1:11434", "127.0.0.1:11434"), ("http://[::1]:80/path", "http://[::1]:80/path"),
        ("http://h.org/a@b", "http://h.org/a@b"), ("http://me:geheim-pw@h.org/a@b?k=c/d", "http://h.org/a@b"),
    ],
)  # fmt: skip
def test_a_login_in_the_address_is_not_kept(given, plain, monkeypatch):
    monkeypatch.setenv("OLLAMA_HOST", given)
    for asked in (OllamaModel("tiny", host=given), OllamaModel("tiny")):
        assert asked.host == asked.address == plain and "geheim-pw" not in repr(vars(asked))
        assert asked.hosted == ("h.org" in given)
