"""A server that speaks OpenAI's chat and embedding routes and the Hugging Face hub's, for tests of the real clients: standard library only.

`fault` makes every request go wrong in one way; `script` does so for the next requests, one each, before `fault` is looked at.
"""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

UNSUPPORTED = {"error": {"message": "The requested model 'a/b' is not supported by any provider you have enabled.",
                         "type": "invalid_request_error", "param": "model", "code": "model_not_supported"}}  # fmt: skip


class FaultyServer(ThreadingHTTPServer):
    "What the servers of the tests share: faults, a record of requests, and somewhere to send redirects."

    daemon_threads = True
    elsewhere = "http://127.0.0.1:9"

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.fault: str | None = None
        self.script: list[str] = []
        self.requests: list[tuple[str, dict, dict]] = []  # path, headers in lower case, body
        self.asked = threading.Event()  # there is a request; who gave up waiting may be told before it was read
        self.released = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self) -> str | None:
        return self.script.pop(0) if self.script else self.fault

    def handle_error(self, request, client_address):
        pass


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, *_):
        pass

    def send(self, status, value, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def read(self) -> dict:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.server.asked.set()
        return body

    def misbehaves(self, fault: str | None) -> bool:
        key = self.headers.get("Authorization", "")
        match fault:
            case "429-later":
                self.send(429, {"error": "rate limited"}, Retry_After="3600")
            case "429":
                self.send(429, {"error": "rate limited"}, Retry_After="0")
            case "307":
                self.send(307, {}, Location=f"{self.server.elsewhere}{self.path}")
            case str() if fault.isdigit():
                self.send(int(fault), {"error": f"broken; your key {key} was seen\nsecond line"})
            case "garbage":
                self.send(200, b"<html>proxy login</html>", Content_Type="text/html")
            case "empty":
                self.send(200, {})
            case "hang":
                self.server.released.wait(30)
                self.close_connection = True
            case "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case "short":
                self.send(200, b'{"half": ', Content_Length="4000")
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case _:
                return False
        return True

    def chunks(self, parts, kind: str, cut: bool):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        if cut == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


class ChatHandler(FaultyHandler):
    def do_GET(self):
        self.read()
        if self.misbehaves(self.server.next_fault()):
            return
        if self.path.startswith("/api/models/"):
            return self.send(200, {"id": "a/b", "inferenceProviderMapping": self.server.mapping})
        self.send(404, {"error": "Repository not found"})

    def do_POST(self):
        request, fault = self.read(), self.server.next_fault()
        if fault == "unsupported":
            return self.send(400, UNSUPPORTED)
        if fault == "reasoning" and (wrong := [name for name in ("max_tokens", "temperature") if name in request]):
            code = {"max_tokens": "parameter", "temperature": "value"}[wrong[0]]
            said = f"Unsupported {code}: '{wrong[0]}' is not supported with this model."
            return self.send(400, {"error": {"message": said, "type": "invalid_request_error", "param": wrong[0], "code": f"unsupported_{code}"}})
        if self.misbehaves(fault):
            return
        if self.path.endswith("/chat/completions"):
            return self.chat(request, fault)
        if self.path.endswith("/embeddings"):
            rows = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(map(self.server.vector, request["input"]))]
            return self.send(200, {"object": "list", "data": rows[::-1]})
        if self.path.endswith("/pipeline/feature-extraction"):
            return self.send(200, self.server.features(request["inputs"]))
        self.send(404, {"error": "not found"})

    def chat(self, request, fault):
        text = self.server.answer(request["messages"])
        text = f"your key is {self.headers.get('Authorization', '')}" if fault == "echo" else text
        words = text.split(" ")
        limit = request.get("max_tokens", request.get("max_completion_tokens", 256))
        words, reason = words[:limit], "length" if len(words) > limit else "stop"
        content = ["not", "text"] if fault == "list" else " ".join(words)
        usage = {"prompt_tokens": sum(len(m["content"].split()) for m in request["messages"]), "completion_tokens": len(words), "total_tokens": 0}
        if fault == "lies":
            usage = {"prompt_tokens": -7, "completion_tokens": 10**30, "total_tokens": 1}
        head = {"id": "x", "created": 1, "model": "another-model" if fault == "lies" else request["model"]}
        if not request.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
            return self.send(200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        deltas = [{"role": "assistant", "content": ""}, *({"content": w if i == 0 else f" {w}"} for i, w in enumerate(words))]
        events = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        if fault in ("cut", "reset"):
            events = events[:2]
        else:
            events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **event})}\n\n".encode() for event in events]
        self.chunks(lines if fault in ("cut", "reset") else [*lines, b"data: [DONE]\n\n"], "text/event-stream", fault)


class ChatServer(FaultyServer):
    def __init__(self, answer: Callable[[list[dict]], str]):
        super().__init__(ChatHandler)
        self.answer = answer
        self.mapping = {"novita": {"status": "live"}, "together": {"status": "error"}, "nscale": {"status": "live"}}
        self.vector: Callable[[str], list] = lambda text: [float(len(text)), 1.0, 0.0]
        self.features: Callable[[list[str]], object] = lambda texts: [self.vector(text) for text in texts]

    @property
    def url(self) -> str:
        return f"{self.address}/v1"


@contextmanager
def serving(server):
    "Run a server for the length of a with block."
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def chat_server(answer: Callable[[list[dict]], str] | None = None):
    return serving(ChatServer(answer or (lambda messages: f"```sql\nSELECT {len(messages)} AS n FROM person\n```")))
