"OpenAI-compatible servers through the official client: a small server with its errors, and llama.cpp's own endpoint."

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from healthrag.models.openai import HuggingFaceModel, OpenAIModel
from healthrag.models.weights import find_weights
from healthrag.prompt import zero_shot_prompt
from healthrag.remote import BusyError
from healthrag.replies import ReplyStore

pytest.importorskip("openai")
PROMPT = zero_shot_prompt("How many women have a recorded gastrointestinal hemorrhage?")
SECRET = "sk-very-secret-key"


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.failures, self.requests, self.released = None, 0, [], threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, value, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        server, request = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, request))
        if server.failures:
            server.failures -= 1
            return self.send(429, {"error": {"message": "rate limited"}}, **{"retry-after-ms": "1"})
        match server.fault:
            case "hang":
                server.released.wait(30)
                self.close_connection = True
            case "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case "garbage":
                self.send(200, b"<html>login</html>", **{"Content-Type": "text/html"})
            case "empty":
                self.send(200, {"id": "x", "object": "chat.completion", "choices": []})
            case int(status):
                self.send(status, {"error": {"message": f"broken; your key {SECRET} was seen\nsecond line"}})
            case _:
                message = {"role": "assistant", "content": "```sql\nSELECT 1\n```"}
                usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self.send(200, {"id": "x", "object": "chat.completion", "created": 1, "model": request["model"], "choices": [choice], "usage": usage})


@pytest.fixture
def server():
    running = Server()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield running
    running.released.set()
    running.shutdown()
    running.server_close()


def model(server, **options):
    return OpenAIModel("gpt-x", **{"base_url": server.url, "api_key": SECRET, "retries": 0, **options})


def test_a_question_is_answered_with_counts(server):
    reply = model(server)(PROMPT)
    assert (reply.text, reply.model, reply.prompt_tokens, reply.completion_tokens) == ("```sql\nSELECT 1\n```", "openai:gpt-x", 11, 7)
    path, headers, sent = server.requests[-1]
    assert path == "/v1/chat/completions" and headers["authorization"] == f"Bearer {SECRET}"
    assert sent == {"model": "gpt-x", "messages": PROMPT.messages, "max_tokens": 256, "temperature": 0.0, "seed": 0}


def test_keys_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    OpenAIModel("gpt-x", retries=0)(PROMPT)
    assert server.requests[-1][1]["authorization"] == "Bearer from-env"
    for name in ("HUGGINGFACE_API_KEY", "HF_TOKEN", "HF_API_TOKEN"):
        monkeypatch.setenv(name, name.lower())
        HuggingFaceModel("a/b:novita", base_url=server.url, retries=0)(PROMPT)
        assert server.requests[-1][1]["authorization"] == f"Bearer {name.lower()}" and server.requests[-1][2]["model"] == "a/b:novita"


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (401, PermissionError, "refused the key; set OPENAI_API_KEY"),
        (403, PermissionError, "refused the key"),
        (404, LookupError, "has no model 'gpt-x'"),
        (400, RuntimeError, "status 400: .*broken"),
        (500, RuntimeError, "status 500"),
        ("garbage", RuntimeError, "not a chat completion"),
        ("empty", RuntimeError, "not a chat completion"),
        ("drop", ConnectionError, "no server answers"),
        ("hang", TimeoutError, r"did not answer within 0\.3 s"),
    ],
)
def test_a_misbehaving_server_gets_one_clear_line_without_the_key(server, fault, error, says, tmp_path):
    server.fault = fault
    store = ReplyStore(tmp_path, "write")
    with pytest.raises(error, match=says) as caught:
        model(server, timeout=0.3 if fault == "hang" else 60.0, replies=store)(PROMPT)
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value) and len(store) == 0


def test_a_busy_server_is_asked_again(server):
    server.failures = 2
    assert model(server, retries=2)(PROMPT).text and len(server.requests) == 3
    server.failures = 2
    with pytest.raises(BusyError, match="status 429") as busy:
        model(server, retries=0)(PROMPT)
    assert busy.value.retry_after == 0.001  # as the server said


def test_no_server_says_so():
    with pytest.raises(ConnectionError, match=r"no server answers at http://127\.0\.0\.1:9/v1; check base_url"):
        OpenAIModel("gpt-x", base_url="http://user:password@127.0.0.1:9/v1", retries=0, api_key=SECRET)(PROMPT)


def test_secrets_stay_out_of_what_is_shown_and_kept(server, tmp_path):
    store = ReplyStore(tmp_path, "write")
    asked = model(server, base_url=server.url.replace("http://", f"http://me:{SECRET}@"), replies=store)
    asked(PROMPT)
    kept = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert kept and SECRET not in kept + repr(asked) + json.dumps(asked.identity()) + repr(vars(asked))
    assert asked.address == asked.base_url == server.url and not asked.hosted


def test_a_key_in_the_place_of_the_user_is_hidden_too(server):
    asked = model(server, base_url=server.url.replace("http://", f"http://{SECRET}@"), api_key="another-key")
    assert asked(PROMPT).text and SECRET not in repr(vars(asked)) + str(vars(asked)) and SECRET in [one.reveal() for one in asked._secrets()]


def test_the_name_of_a_user_with_a_password_may_stand_in_a_reply(server):
    asked = model(server, base_url=server.url.replace("http://", "http://person:pass-word-1@"))
    said = asked._reply("SELECT person_id FROM person -- pass-word-1", 0.1, 1, 1, "stop").text
    assert said.startswith("SELECT person_id FROM person -- ") and "pass-word-1" not in said


@pytest.mark.model
@pytest.mark.skipif(find_weights("smollm2-135m") is None, reason="no weights here; healthrag models pull llama:smollm2-135m")
def test_live_against_the_endpoint_of_llama_cpp():
    runtime = pytest.importorskip("xllamacpp")
    params = runtime.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(find_weights("smollm2-135m")), 1024, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.api_keys = [SECRET]
    server = runtime.Server(params)
    url = f"{server.listening_address}/v1"
    reply = OpenAIModel("any", base_url=url, api_key=SECRET, max_tokens=5)(PROMPT)
    assert reply.completion_tokens == 5 and reply.prompt_tokens > 50 and reply.finish_reason == "length"
    with pytest.raises(PermissionError, match="refused the key"):
        OpenAIModel("any", base_url=url, api_key="wrong", retries=0)(PROMPT)
