"The registry, and the contract that every chat model keeps."

import json
import os
import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthrag.models.nearest import NearestExample
from healthrag.models.registry import (
    CHAT_PROVIDERS,
    ChatModel,
    RecordedModel,
    get_model,
    get_schema,
    list_models,
    pull_model,
    register_models,
    split_model_name,
)
from healthrag.models.tokens import TOKENIZERS, exact_tokens, load_tokenizer
from healthrag.prompt import build_prompt, zero_shot_prompt
from healthrag.records import Hit, Prompt, Reply
from healthrag.replies import ReplyStore

QUESTION = "How many women have a recorded gastrointestinal hemorrhage?"
PROMPT = zero_shot_prompt(QUESTION)
OFFLINE = {  # one of every provider, with what it needs to be made without a server
    "llama": ("llama:qwen2.5-coder-0.5b", {}),
    "ollama": ("ollama:llama3.2", {"digest": "d1", "version": "0.12"}),
    "openai": ("openai:gpt-x", {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-secret"}),
    "hf": ("hf:owner/repo:provider", {"api_key": "hf_secret"}),
    "nearest-example": ("nearest-example", {}),
}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in ("HEALTHRAG_MODEL", "HEALTHRAG_EMBEDDING_MODEL", "HEALTHRAG_EMBEDDING_PROVIDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", str(tmp_path))


class Counter(RecordedModel):
    "A model that counts how often it is asked."

    asked = 0
    version = 1

    def identity(self):
        return {"provider": "counter", "version": self.version}

    def _ask(self, prompt, max_tokens):
        self.asked += 1
        return Reply(f"{self.asked}:{max_tokens}", self.name, 1, 1, 0.1)


# the contract


def test_every_provider_is_covered_here():
    assert set(OFFLINE) == set(CHAT_PROVIDERS)


@pytest.mark.parametrize("provider", CHAT_PROVIDERS)
def test_making_a_model_costs_nothing_and_keeps_the_contract(provider):
    name, options = OFFLINE[provider]
    model = get_model(name, **options)
    assert isinstance(model, ChatModel) and model.name == name and callable(model)
    identity = model.identity()
    assert json.loads(json.dumps(identity, allow_nan=False)) == identity and identity["provider"] == provider
    assert model.count_tokens("") == 0 and 0 < model.count_tokens("one two") == model.count_tokens("one two")
    assert "secret" not in json.dumps(identity) + repr(model) + model.name
    again = get_model(name, **options)
    assert again.identity() == identity


@pytest.mark.parametrize("provider", [p for p in CHAT_PROVIDERS if p != "nearest-example"])
def test_every_provider_replays_offline(provider, tmp_path):
    from healthrag.replies import reply_key

    name, options = OFFLINE[provider]
    store = ReplyStore(tmp_path / "r", "only-read")
    model = get_model(name, replies=store, **options)
    key = reply_key({**model.identity(), "max_tokens": model.max_tokens}, PROMPT.messages)
    ReplyStore(tmp_path / "r", "write").put(key, Reply("SELECT 1", name, 5, 2, 0.5), model.identity())
    reply = get_model(name, replies=ReplyStore(tmp_path / "r", "only-read"), **options)(PROMPT)
    assert reply.cached and reply.text == "SELECT 1" and reply.prompt_tokens == 5
    recorded = "".join(path.read_text() for path in (tmp_path / "r").glob("*.jsonl"))
    assert "secret" not in recorded


# recorded replies


def test_a_recorded_reply_is_not_asked_for_again(tmp_path):
    model = Counter("counter:1", replies=ReplyStore(tmp_path, "write"))
    first, second = model(PROMPT), model.generate(PROMPT)
    assert model.asked == 1 and not first.cached and second.cached and first.text == second.text


@pytest.mark.parametrize(("mode", "asked", "kept"), [("off", 2, 0), ("read", 2, 0), ("write", 1, 1)])
def test_modes(tmp_path, mode, asked, kept):
    store = ReplyStore(tmp_path, mode)
    model = Counter("counter:1", replies=store)
    model(PROMPT), model(PROMPT)
    assert model.asked == asked and len(ReplyStore(tmp_path, "read")) == kept


def test_read_uses_what_is_there(tmp_path):
    Counter("counter:1", replies=ReplyStore(tmp_path, "write"))(PROMPT)
    reader = Counter("counter:1", replies=ReplyStore(tmp_path, "read"))
    assert reader(PROMPT).cached and reader.asked == 0


def test_only_read_names_model_question_and_remedy(tmp_path):
    hits = [Hit("s", "person: one row per patient", 1.0, metadata={"kind": "schema"})]
    model = Counter("counter:1", replies=ReplyStore(tmp_path, "only-read"))
    with pytest.raises(LookupError, match=r"counter:1 on 'How many women have.*--replies write") as caught:
        model(build_prompt(QUESTION, hits))
    assert model.asked == 0 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.generate(zero_shot_prompt("Another question?")),
        lambda m: m.generate(Prompt(PROMPT.system + " ", PROMPT.user)),
        lambda m: m.generate(Prompt(PROMPT.system, PROMPT.user, (("q", "a"),))),
        lambda m: m.generate(PROMPT, max_tokens=7),
        lambda m: (setattr(m, "version", 2), m.generate(PROMPT))[1],
        lambda m: m.generate(PROMPT.prompt),
    ],
    ids=["question", "rules", "turns", "length", "identity", "plain text"],
)
def test_whatever_determines_a_reply_is_part_of_its_key(tmp_path, change):
    model = Counter("counter:1", replies=ReplyStore(tmp_path, "write"))
    model(PROMPT)
    assert not change(model).cached and model.asked == 2


def test_sources_are_not_part_of_the_key(tmp_path):
    model = Counter("counter:1", replies=ReplyStore(tmp_path, "write"))
    model(PROMPT)
    assert model(Prompt(PROMPT.system, PROMPT.user, sources=(Hit("x", "y", 1.0),))).cached


@pytest.mark.parametrize("prompt", ["", " \n", Prompt("rules", " ")])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt is empty"):
        Counter("counter:1")(prompt)


def test_a_reply_needs_room():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        Counter("counter:1", max_tokens=0)


# names


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("llama:qwen2.5-coder-0.5b", ("llama", "qwen2.5-coder-0.5b")),
        ("qwen2.5-coder-1.5b", ("llama", "qwen2.5-coder-1.5b")),
        (" LLAMA:smollm2-135m ", ("llama", "smollm2-135m")),
        ("llama:/models/mine.gguf", ("llama", "/models/mine.gguf")),
        ("ollama:llama3.2:3b", ("ollama", "llama3.2:3b")),
        ("HF:Qwen/Qwen2.5:novita", ("hf", "Qwen/Qwen2.5:novita")),
        ("huggingface:a/b", ("hf", "a/b")),
        ("openai:gpt-x", ("openai", "gpt-x")),
        ("nearest-example", ("nearest-example", "")),
    ],
)
def test_names_split_at_the_first_colon(name, split):
    assert split_model_name(name) == split


@pytest.mark.parametrize("name", ["", "  ", None, 3, "gpt-5", "llama3.2:3b", "llama", "ollama:", "cohere:x", ":x"])
def test_a_bad_name_gets_one_line_that_lists_the_providers(name):
    with pytest.raises(ValueError, match="provider") as caught:
        get_model(name) if name is not None else split_model_name(name)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=30))
def test_any_name_splits_or_is_refused(name):
    try:
        provider, _ = split_model_name(name)
    except ValueError:
        return
    assert provider in CHAT_PROVIDERS


def test_an_unknown_embedded_model_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown model 'llama-70b'.*qwen2\.5-coder-0\.5b.*gguf"):
        get_model("llama:llama-70b")


def test_the_settings_choose(monkeypatch):
    monkeypatch.setenv("HEALTHRAG_MODEL", "llama:smollm2-135m")
    monkeypatch.setenv("HEALTHRAG_THREADS", "2")
    monkeypatch.setenv("HEALTHRAG_SEED", "5")
    model = get_model()
    assert (model.name, model.threads, model.seed, model.max_tokens) == ("llama:smollm2-135m", 2, 5, 256)
    assert get_model(threads=1, max_tokens=3, seed=6).identity()["threads"] == 1


def test_the_list_names_what_get_model_takes():
    names = [model.name for model in list_models()]
    assert [get_model(name).name for name in names] == names and "nearest-example" in names


@pytest.mark.parametrize("name", ["nearest-example", "hf:a/b", "openai:x"])
def test_only_models_with_weights_can_be_pulled(name):
    with pytest.raises(ValueError, match="no weights to fetch"):
        pull_model(name)


# session defaults


@pytest.mark.parametrize(
    ("given_names", "chat", "encoder", "place"),
    [
        (("ollama:llama3.2", "ollama:nomic-embed-text"), "ollama:llama3.2", "nomic-embed-text", "ollama"),
        (("llama3.2", "nomic-embed-text", "OllamaSchema"), "ollama:llama3.2", "nomic-embed-text", "ollama"),
        (("hf:a/b", "hf:BAAI/bge-m3"), "hf:a/b", "BAAI/bge-m3", "huggingface"),
        (("qwen2.5-coder-0.5b", "all-minilm"), "llama:qwen2.5-coder-0.5b", "all-minilm", "local"),
        (("nearest-example", "local:all-minilm"), "nearest-example", "all-minilm", "local"),
    ],
)
def test_registered_models_become_the_defaults(monkeypatch, given_names, chat, encoder, place):
    from healthrag.settings import get_settings

    for name in ("HEALTHRAG_MODEL", "HEALTHRAG_EMBEDDING_MODEL", "HEALTHRAG_EMBEDDING_PROVIDER"):
        monkeypatch.setenv(name, "")  # so that what is set is undone afterwards
    registered = register_models(*given_names)
    settings = get_settings()
    assert (registered.chat, registered.embedding, registered.embedding_provider) == (chat, encoder, place)
    assert (settings.model, settings.embedding_model, settings.embedding_provider) == (chat, encoder, place)


def test_registering_nothing_changes_nothing():
    for wrong in (("", "all-minilm"), ("llama:gpt", " ")):
        with pytest.raises(ValueError):
            register_models(*wrong)
    assert "HEALTHRAG_MODEL" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "provider"),
    [
        (("ollama",), "ollama"), (("huggingface",), "hf"), (("OllamaSchema",), "ollama"), (("HuggingFaceOpenAISchema",), "hf"),
        (("OpenAISchema",), "openai"), ((None, "hf:a/b"), "hf"), ((None, "HF:a/b"), "hf"), ((None, "org/hf-model"), "hf"),
        ((None, "my-HF-model"), "hf"), ((None, "ollama:my-hf-model"), "ollama"),
        ((None, "hf-model"), "hf"), ((None, "my-huggingface-model"), "hf"), ((None, "hf/x"), "hf"), ((None, "llama3.2"), "ollama"),
        ((None, "llama:x"), "llama"), ((None, None), "ollama"),
    ],
)  # fmt: skip
def test_get_schema(arguments, provider):
    assert get_schema(*arguments) == provider


def test_an_unknown_schema_is_not_ignored_silently():
    with pytest.raises(ValueError, match="unknown provider 'cohere'; known: llama"):
        get_schema("cohere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert get_schema("cohere", "hf:a/b") == "hf"
    assert ["cohere" in str(w.message) for w in caught] == [True]


# the baseline


def test_the_baseline_copies_the_first_example():
    hits = [Hit(f"e{i}", f"q{i}", 1.0, metadata={"kind": "example", "question": f"q{i}", "sql": f"SELECT {i}", "funsql": f"From(:t{i})"}) for i in range(3)]
    schema = Hit("s", "person", 2.0, metadata={"kind": "schema", "sql": "SELECT 9"})
    model = NearestExample()
    assert model(build_prompt(QUESTION, [schema, *hits])).text == "```sql\nSELECT 0\n```"
    assert model(build_prompt(QUESTION, [schema, *hits], examples="text")).text == "```sql\nSELECT 0\n```"
    assert model(build_prompt(QUESTION, [schema, *hits], target="funsql")).text == "```julia\nFrom(:t0)\n```"
    assert NearestExample("funsql")(build_prompt(QUESTION, hits)).text == "```julia\nFrom(:t0)\n```"


@pytest.mark.parametrize("prompt", [PROMPT, "text", build_prompt(QUESTION), build_prompt(QUESTION, ["a note"])])
def test_the_baseline_has_nothing_to_copy(prompt):
    reply = NearestExample()(prompt)
    assert reply.text == "" and reply.completion_tokens == 0


# tokens


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_lose_nothing(name):
    tokenizer = load_tokenizer(name)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    for text in ("SELECT COUNT(*) AS n\n\tFROM person", "Müller's 中文 😀", "a  b\r\n\r\nc", "192671", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("name", "text", "count"), [("qwen2", "192671", 6), ("smollm", "192671", 6), ("qwen2", "SELECT COUNT(*)", 3)])
def test_known_counts(name, text, count):
    assert exact_tokens(text, name) == count


def test_an_unknown_tokenizer_is_named():
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt2'; known: qwen2, smollm"):
        exact_tokens("x", "gpt2")


def test_the_package_imports_nothing_heavy():
    code = "import sys, healthrag.prompt, healthrag.models.registry as r; r.get_model('nearest-example'); r.get_model('llama:smollm2-135m').identity(); " \
           "print(sorted(set(sys.modules) & {'torch', 'pandas', 'duckdb', 'sqlglot', 'statsmodels', 'ollama', 'openai', 'xllamacpp', 'huggingface_hub', 'tokenizers', 'onnxruntime'}))"  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
