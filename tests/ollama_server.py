"""A small server that speaks Ollama's HTTP routes, for tests of the official client: standard library only.

It answers /api/version, /api/tags, /api/ps, /api/show, /api/chat, /api/generate, /api/embed and /api/pull with the fields, counts and
errors of the real one (404 "model 'x' not found"). `fault` makes it misbehave in one of several ways.
"""

import hashlib
import json
import time
from collections.abc import Callable

from chat_server import FaultyHandler, FaultyServer, serving

NOW = "2026-01-01T00:00:00.000000Z"


class OllamaServer(FaultyServer):
    def __init__(self, models: dict[str, str], answer: Callable[[list[dict]], str], version: str = "0.12.6"):
        super().__init__(Handler)
        self.models, self.answer, self.version = dict(models), answer, version
        self.dim = 768  # of embeddings

    @property
    def url(self) -> str:
        return self.address

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.models[name].encode()).hexdigest()

    def find(self, name: str) -> str | None:
        full = name if ":" in name else f"{name}:latest"
        return full if full in self.models else None

class Handler(FaultyHandler):
    server: OllamaServer

    def send_json(self, value, status=200):
        self.send(status, value)

    def send_lines(self, values, cut=False):
        self.chunks([json.dumps(value).encode() + b"\n" for value in values], "application/x-ndjson", cut)

    def misbehaves(self, fault):
        if fault == "500":
            self.send_json({"error": "llama runner process has terminated: exit status 2"}, 500)
            return True
        return super().misbehaves(fault)

    def do_GET(self):
        self.read()
        if self.misbehaves(self.server.next_fault()):
            return
        if self.path == "/api/version":
            self.send_json({"version": self.server.version})
        elif self.path in ("/api/tags", "/api/ps"):
            listed = [
                {"name": name, "model": name, "modified_at": NOW, "size": len(content), "digest": self.server.digest(name),
                 "details": {"format": "gguf", "family": "llama", "parameter_size": "1B", "quantization_level": "Q4_0"}}
                for name, content in self.server.models.items()
            ]  # fmt: skip
            self.send_json({"models": listed})
        else:
            self.send_json(b"404 page not found", 404)

    def do_POST(self):
        request, fault = self.read(), self.server.next_fault()
        if self.misbehaves(fault):
            return
        name = request.get("model") or request.get("name") or ""
        if not name:
            self.send_json({"error": "model is required"}, 400)
        elif self.path == "/api/pull":
            self.pull(name, request.get("stream", True))
        elif (found := self.server.find(name)) is None:
            self.send_json({"error": f"model '{name}' not found"}, 404)
        elif self.path == "/api/chat":
            self.reply(request, lambda text: {"message": {"role": "assistant", "content": text}}, request["messages"], fault)
        elif self.path == "/api/generate":
            self.reply(request, lambda text: {"response": text}, [{"role": "user", "content": request["prompt"]}])
        elif self.path == "/api/embed":
            texts = [request["input"]] if isinstance(request["input"], str) else request["input"]
            rows = [[float(len(text)), 1.0, *[0.0] * (self.server.dim - 2)] for text in texts]
            counts = {"total_duration": 5_000_000, "load_duration": 1_000_000, "prompt_eval_count": sum(len(t.split()) for t in texts)}
            self.send_json({"model": request["model"], "embeddings": rows, **counts})
        elif self.path == "/api/show":
            self.send_json({"modelfile": f"FROM {found}", "details": {"format": "gguf"}, "model_info": {}, "capabilities": ["completion"]})
        else:
            self.send_json(b"404 page not found", 404)

    def reply(self, request, wrap, messages, fault=None):
        text = self.server.answer(messages)
        if fault == "echo":
            text = f"your key is {self.headers.get('Authorization', '')}"
        words, limit = text.split(" "), request.get("options", {}).get("num_predict", -1)
        cut = 0 <= limit < len(words)
        shown = " ".join(words[:limit]) if cut else text
        counts = {"total_duration": 5_000_000, "load_duration": 1_000_000, "prompt_eval_duration": 1_000_000, "eval_duration": 2_000_000}
        counts |= {"prompt_eval_count": sum(len(m["content"].split()) for m in messages), "eval_count": len(shown.split(" "))}
        if fault == "lies":
            counts |= {"prompt_eval_count": -7, "eval_count": 10**30}
        shown = ["not", "text"] if fault == "list" else shown
        last = {"model": request["model"], "created_at": NOW, "done": True, "done_reason": "length" if cut else "stop", **counts}
        if request.get("stream", True):
            parts = [{"model": request["model"], "created_at": NOW, "done": False, **wrap(word if i == 0 else f" {word}")} for i, word in enumerate(shown.split(" "))]
            self.send_lines(parts[:1] if fault in ("cut", "reset") else [*parts, {**last, **wrap("")}], fault)
        else:
            self.send_json({**last, **wrap(shown)})

    def pull(self, name, stream):
        if name.startswith("no-such"):
            failed = {"error": "pull model manifest: file does not exist"}
            return self.send_lines([{"status": "pulling manifest"}, failed]) if stream else self.send_json(failed, 500)
        self.server.models[name if ":" in name else f"{name}:latest"] = "pulled"
        digest = f"sha256:{'0' * 64}"
        steps = [{"status": "pulling manifest"}, *({"status": "pulling 000", "digest": digest, "total": 100, "completed": c} for c in (0, 60, 100))]
        steps += [{"status": "verifying sha256 digest"}, {"status": "success"}]
        return self.send_lines(steps) if stream else self.send_json(steps[-1])


def ollama_server(models: dict[str, str] | None = None, answer: Callable[[list[dict]], str] | None = None):
    "Run a server for the length of a with block."
    default = {"llama3.2:3b": "weights", "tiny:latest": "other weights"}
    return serving(OllamaServer(default if models is None else models, answer or (lambda messages: f"```sql\nSELECT {len(messages)}\n```")))


if __name__ == "__main__":
    with ollama_server() as running:
        print(running.url)
        while True:
            time.sleep(1)
