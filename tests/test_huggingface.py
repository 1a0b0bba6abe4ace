"Hugging Face: names, keys, providers, vectors and files, against a server that speaks the hub's routes."

import hashlib
import json
import re
import socket
import traceback
import warnings

import httpx
import numpy as np
import pytest
from chat_server import ChatHandler, ChatServer, chat_server, serving
from ollama_server import ollama_server

from healthrag.embeddings import EmbeddingCache, embed
from healthrag.huggingface import (
    HUGGINGFACE_EMBED_TIMEOUT,
    HUGGINGFACE_INFERENCE_URL,
    HUGGINGFACE_KEY_NAMES,
    HUGGINGFACE_ROUTER_URL,
    UNSET,
    HuggingFaceLoadResult,
    create_embeddings,
    embed_timeout,
    hf_model_id,
    huggingface_api_key,
    huggingface_providers,
    load_huggingface_model,
    resolve_huggingface_key,
    set_huggingface_api_key,
    split_provider,
    unsupported_model_hint,
)

SECRET = "hf_planted_9f8e7d6c"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in (*HUGGINGFACE_KEY_NAMES, "OPENAI_API_KEY", "OPENAI_BASE_URL", "HF_ENDPOINT", "OLLAMA_HOST", "OLLAMA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("healthrag.remote.time.sleep", lambda s: None)
    set_huggingface_api_key("")
    yield
    set_huggingface_api_key("")


@pytest.fixture
def server():
    with chat_server() as running:
        yield running


def test_constants_are_the_documented_ones():
    assert HUGGINGFACE_ROUTER_URL == "https://router.huggingface.co/v1" and HUGGINGFACE_EMBED_TIMEOUT == 300
    assert HUGGINGFACE_INFERENCE_URL == "https://router.huggingface.co/hf-inference/models"


@pytest.mark.parametrize(("given", "id"), [("hf:a/b", "a/b"), ("HF:a/b:p", "a/b:p"), ("a/b", "a/b"), ("", ""), ("hf:", ""), ("hfx/b", "hfx/b")])
def test_model_ids(given, id):
    assert hf_model_id(given) == id


@pytest.mark.parametrize(("given", "parts"), [("a/b:p", ("a/b", "p")), ("a/b", ("a/b", "")), ("a:b:c", ("a:b", "c")), ("hf:a/b", ("a/b", "")), ("", ("", ""))])
def test_the_provider_stands_after_the_last_colon(given, parts):
    assert split_provider(given) == parts


def test_the_order_of_keys(monkeypatch):
    assert huggingface_api_key() == "" and not huggingface_api_key()
    for name in reversed(HUGGINGFACE_KEY_NAMES):
        monkeypatch.setenv(name, name.lower())
        assert huggingface_api_key().reveal() == name.lower()
    set_huggingface_api_key("session")
    assert huggingface_api_key().reveal() == "session" and "session" not in repr(huggingface_api_key()) + str(huggingface_api_key())
    assert resolve_huggingface_key("mine").reveal() == "mine"
    set_huggingface_api_key("")
    assert huggingface_api_key().reveal() == "hf_api_token"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    assert resolve_huggingface_key("sk-other").reveal() == "hf_api_token", "OpenAI's key does not count as given"


@pytest.mark.parametrize(("given", "used"), [(UNSET, 300.0), (120.0, 120.0), (30, 30), (900, 900), (None, None)])
def test_a_deliberate_time_limit_is_kept(given, used, server, monkeypatch):
    assert embed_timeout(given) == used
    seen = []
    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: seen.append(options["timeout"]) or real(**options))
    create_embeddings(["a"], "a/b", inference_url=server.address, timeout=given)
    assert seen == [used]


@pytest.mark.parametrize(
    ("mapping", "live"),
    [
        ({"novita": {"status": "live"}, "x": {"status": "staging"}}, ["novita"]),
        ([{"provider": "novita", "status": "live"}, {"provider": "y", "status": "error"}], ["novita"]),
        ({}, []), (None, []), ("nonsense", []), ([1, {}], []), ({"x": "live"}, []),
    ],
)  # fmt: skip
def test_live_providers(server, mapping, live):
    server.mapping = mapping
    assert huggingface_providers("hf:a/b:pinned", hub_url=server.address) == live
    path, headers, _ = server.requests[-1]
    assert path == "/api/models/a/b?expand[]=inferenceProviderMapping" and "authorization" not in headers


@pytest.mark.parametrize("name", ["", "a/../b", "a b", "a/b/c", "http://evil", "a?x=1"])
def test_names_that_are_no_repository_are_not_asked_for(server, name):
    with pytest.raises(ValueError, match="owner/repo"):
        huggingface_providers(name, hub_url=server.address)
    assert not server.requests


def test_the_hint_is_only_for_the_one_error_and_only_unpinned(server):
    assert "live providers: novita, nscale" in unsupported_model_hint("a/b", "x model_not_supported y", hub_url=server.address)
    asked = len(server.requests)
    assert unsupported_model_hint("a/b:novita", "model_not_supported", hub_url=server.address) is None
    assert unsupported_model_hint("a/b", "another error", hub_url=server.address) is None and len(server.requests) == asked


# vectors


@pytest.mark.parametrize(
    ("features", "rows"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ([[[1, 2], [3, 4]], [[5, 6]]], [[2, 3], [5, 6]]),
        ([[[[1, 2]], [[3, 4]]], [[[1, 1]]]], [[2, 3], [1, 1]]),
    ],
    ids=["one a text", "one a token", "deeper"],
)
def test_token_vectors_are_pooled(server, features, rows):
    server.features = lambda texts: features
    vectors = create_embeddings(["ab", "c"], "hf:a/b", api_key=SECRET, inference_url=server.address)
    assert vectors.dtype == np.float32 and vectors.tolist() == rows
    path, headers, body = server.requests[-1]
    assert path == "/a/b/pipeline/feature-extraction" and headers["authorization"] == f"Bearer {SECRET}"
    assert body == {"inputs": ["ab", "c"], "options": {"wait_for_model": True}}


def test_a_flat_answer_is_the_vector_of_the_one_text(server):
    server.features = lambda texts: [1, 2, 3]
    assert create_embeddings(["a"], "a/b", inference_url=server.address).shape == (1, 3)
    with pytest.raises(ValueError, match="3 vectors for 2 texts"):
        create_embeddings(["a", "b"], "a/b", inference_url=server.address)


@pytest.mark.parametrize(
    "features",
    [[[1, 2], [3]], [[1, 2]], [[1, 2], "x"], {"error": "loading"}, [], [[], []], [[1, float("nan")], [1, 2]], None, [[[1, 2], [3]], [1, 2]]],
)
def test_a_lying_encoder_is_found_out(server, features):
    server.features = lambda texts: features
    with pytest.raises(ValueError):
        create_embeddings(["a", "b"], "a/b", inference_url=server.address)


def test_with_a_url_the_openai_route_is_asked(server):
    assert create_embeddings(["a", "bbb"], "a/b", url=server.url).tolist() == [[1, 1, 0], [3, 1, 0]]
    assert server.requests[-1][0] == "/v1/embeddings" and server.requests[-1][2] == {"input": ["a", "bbb"], "model": "a/b"}
    server.fault = "empty"
    with pytest.raises(RuntimeError, match="not a list of embeddings"):
        create_embeddings(["a"], "a/b", url=server.url)


@pytest.mark.parametrize(
    ("url", "given", "sent"),
    [
        ("https://router.huggingface.co/v1", None, SECRET), ("https://x.eu.endpoints.huggingface.cloud/v1", None, SECRET),
        ("https://x.eu.endpoints.huggingface.cloud/v1", "sk-openai-planted", SECRET), ("", None, SECRET), ("", "mine", "mine"),
        ("https://api.openai.com/v1", None, "sk-openai-planted"), ("https://evilhuggingface.co/v1", None, "sk-openai-planted"),
        ("http://127.0.0.1:1/v1", "mine", "mine"),
    ],
)  # fmt: skip
def test_no_company_gets_the_key_of_another(monkeypatch, url, given, sent):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-planted")
    seen = []
    monkeypatch.setattr("healthrag.huggingface._request", lambda *_, key, **__: seen.append(key.reveal()) or {"data": []})
    with pytest.raises(ValueError, match="vectors for 1 texts"):
        create_embeddings(["a"], "a/b", api_key=given, url=url)
    assert seen == [sent]


def test_embed_goes_through_an_openai_compatible_server(server, monkeypatch, away, tmp_path):
    server.vector = lambda text: [float(len(text)), *[0.0] * 383]
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-planted")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    cache = EmbeddingCache(tmp_path / "e.sqlite")
    rows = embed(["ab", "abc"], "all-minilm", provider="openai", cache=cache)
    assert rows.shape == (2, 384) and np.allclose(rows[:, 0], 1)
    path, headers, body = server.requests[-1]
    assert path == "/v1/embeddings" and headers["authorization"] == "Bearer sk-openai-planted"
    assert body == {"input": ["ab", "abc"], "model": "sentence-transformers/all-MiniLM-L6-v2"}
    embed(["ab", "abc"], "all-minilm", provider="openai", cache=cache)
    assert len(server.requests) == 1
    monkeypatch.setenv("OPENAI_BASE_URL", server.url.replace("127.0.0.1", away))
    embed(["ab"], "all-minilm", provider="openai", cache=cache)
    assert len(server.requests) == 2, "another server may have another model of that name"
    with pytest.raises(PermissionError, match="nothing was sent"):
        embed("Ada Byron, MRN 0012345", "all-minilm", provider="openai", cache=False)
    assert len(server.requests) == 2
    server.fault = "401"
    with pytest.raises(PermissionError, match="set OPENAI_API_KEY to a valid one"):
        embed("x", "all-minilm", provider="openai", cache=False)
    with pytest.raises(ValueError, match="without a client"):
        embed("x", "all-minilm", provider="openai", cache=False, client=object())


def test_texts_for_an_ollama_here_do_not_go_through_a_proxy(monkeypatch):
    with ollama_server({"nomic-embed-text:latest": "w"}) as server, ollama_server() as proxy:
        for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        assert embed("Ada Byron, MRN 0012345", "nomic-embed-text", provider="ollama", cache=False).shape == (1, 768)
        assert len(server.requests) == 1 and not proxy.requests


@pytest.mark.parametrize(("fault", "error", "says"), [("401", PermissionError, "OLLAMA_API_KEY"), ("429", RuntimeError, "status 429"), ("418", ConnectionError, "broken")])
def test_ollama_embeds_or_says_why_without_the_key(monkeypatch, fault, error, says):
    with ollama_server({"nomic-embed-text:latest": "w"}) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        monkeypatch.setenv("OLLAMA_API_KEY", SECRET)
        server.fault = fault
        with pytest.raises(error, match=says) as caught:
            embed("x", "nomic-embed-text", provider="ollama", cache=False)
    assert SECRET not in "".join(traceback.format_exception(caught.value)) and "\n" not in str(caught.value)
    assert server.requests[-1][1]["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize("docs", [[], "one text", ()])
def test_there_must_be_texts(docs):
    with pytest.raises(ValueError, match="no texts"):
        create_embeddings(docs, "a/b")


@pytest.mark.parametrize(
    ("fault", "error", "says", "tries"),
    [
        ("401", PermissionError, "HF_API_TOKEN", 1), ("404", LookupError, "does not exist", 1), ("500", RuntimeError, "status 500", 1),
        ("503", RuntimeError, "status 503", 2), ("429", RuntimeError, "status 429", 2), ("429-later", RuntimeError, "status 429", 1),
        ("307", RuntimeError, "redirects", 1), ("garbage", RuntimeError, "not JSON", 1), ("drop", ConnectionError, "no answer", 2),
        ("hang", TimeoutError, r"within 0\.3 s; the model may still be loading", 1), ("short", ConnectionError, "no answer", 1),
    ],
)  # fmt: skip
def test_failures_get_one_line_without_the_key(server, fault, error, says, tries):
    server.fault = fault
    with pytest.raises(error, match=says) as caught:
        create_embeddings(["a"], "a/b", api_key=SECRET, inference_url=server.address, timeout=0.3 if fault == "hang" else 60.0, retries=1)
    assert server.asked.wait(60)
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value) and len(server.requests) == tries


@pytest.fixture
def away(monkeypatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real("127.0.0.1" if host == "away.test" else host, *a, **k))
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return "away.test"


def test_a_person_is_kept_from_a_hosted_encoder(server, away):
    url = server.address.replace("127.0.0.1", away)
    for docs in (["fine", "Ada Byron, MRN 0012345"], ["col ssn_078-05-1120"]):
        with pytest.raises(PermissionError, match="nothing was sent"):
            create_embeddings(docs, "a/b", inference_url=url)
    assert not server.requests
    create_embeddings(["Ada Byron, MRN 0012345"], "a/b", inference_url=url, phi="redact")
    assert server.requests[-1][2]["inputs"] == ["[NAME], MRN [RECORD]"]
    create_embeddings(["Ada Byron, MRN 0012345"], "a/b", inference_url=url, phi="allow")
    assert server.requests[-1][2]["inputs"] == ["Ada Byron, MRN 0012345"]
    create_embeddings(["Ada Byron, MRN 0012345"], "a/b", inference_url=server.address)
    with pytest.raises(ValueError, match="one of refuse, redact, allow"):
        create_embeddings(["a"], "a/b", inference_url=url, phi="maybe")


def test_embed_goes_through_the_hub(server, monkeypatch):
    monkeypatch.setattr("healthrag.huggingface.create_embeddings.__kwdefaults__", {**create_embeddings.__kwdefaults__, "inference_url": server.address})
    server.vector = lambda text: [[float(len(text)), *[0.0] * 383]] * 2
    rows = embed(["ab", "abc"], "all-minilm", provider="huggingface", cache=False)
    assert rows.shape == (2, 384) and np.allclose(np.linalg.norm(rows, axis=1), 1)
    assert server.requests[-1][0] == "/sentence-transformers/all-MiniLM-L6-v2/pipeline/feature-extraction"


def test_embed_goes_through_the_real_client_of_ollama(monkeypatch, away):
    with ollama_server({"nomic-embed-text:latest": "w"}) as server:
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        server.script = ["503"]
        assert embed(["ab", "abc"], "nomic-embed-text", provider="ollama", cache=False).shape == (2, 768) and len(server.requests) == 2
        assert embed("Ada Byron, MRN 0012345", "nomic-embed-text", provider="ollama", cache=False).shape == (1, 768)
        with pytest.raises(ConnectionError, match="ollama pull bge-m3"):
            embed("x", "bge-m3", provider="ollama", cache=False)
        server.fault = "empty"
        with pytest.raises((RuntimeError, ConnectionError, ValueError)):
            embed("x", "nomic-embed-text", provider="ollama", cache=False)
        server.fault = None
        monkeypatch.setenv("OLLAMA_HOST", server.url.replace("127.0.0.1", away))
        server.requests.clear()
        with pytest.raises(PermissionError, match="nothing was sent"):
            embed("Ada Byron, MRN 0012345", "nomic-embed-text", provider="ollama", cache=False)
        assert not server.requests
        embed("Ada Byron, MRN 0012345", "nomic-embed-text", provider="ollama", cache=False, phi="redact")
        assert "Byron" not in json.dumps(server.requests[-1][2])


# files


FILES = {"config.json": b'{"hidden_size": 3}'}


class Hub(ChatHandler):
    "Just enough of the hub for one repository with one file."

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.read()
        if self.misbehaves(self.server.next_fault()):
            return
        if found := re.match(r"/a/b/resolve/\w+/(.+)", self.path):
            body = FILES[found[1]]
            etag = hashlib.sha1(body, usedforsecurity=False).hexdigest()
            self.send_response(200)
            for name, text in {"ETag": f'"{etag}"', "X-Repo-Commit": "c" * 40, "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
            return
        if "/tree/" in self.path:
            return self.send(200, [{"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in FILES.items()])
        if self.path.startswith("/api/models/a/b"):
            return self.send(200, {"id": "a/b", "sha": "c" * 40, "siblings": [{"rfilename": name} for name in FILES]})
        self.send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")


@pytest.fixture
def hub():
    running = ChatServer(lambda messages: "")
    running.RequestHandlerClass = Hub
    with serving(running):
        yield running


def test_files_are_downloaded_with_the_real_client(hub, tmp_path):
    result = load_huggingface_model("hf:a/b", token=SECRET, endpoint=hub.address, cache_dir=tmp_path)
    assert isinstance(result, HuggingFaceLoadResult) and result.downloaded and result.path
    assert json.loads((tmp_path / "models--a--b" / "snapshots" / ("c" * 40) / "config.json").read_text()) == {"hidden_size": 3}
    assert all(SECRET not in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("model", ["x/y", "not a model", "", "a/../b", None, 5])
def test_loading_never_throws(hub, tmp_path, model):
    for action in ("always", "error"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            result = load_huggingface_model(model, token=SECRET, endpoint=hub.address, cache_dir=tmp_path)
        assert result == HuggingFaceLoadResult(None, None, False)
        if action == "always":
            messages = [str(w.message) for w in caught]
            assert any("was not downloaded" in m for m in messages) and not any(SECRET in m for m in messages)


def test_nobody_there_is_a_warning_too(tmp_path):
    with pytest.warns(UserWarning, match=r"a/b was not downloaded"):
        assert not load_huggingface_model("a/b", endpoint="http://127.0.0.1:9", cache_dir=tmp_path).downloaded
