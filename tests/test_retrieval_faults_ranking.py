"""Known faults of published hybrid retrieval in ranking, gating, budgets and expansion, each shown not to be here."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from healthrag.embeddings import count_tokens
from healthrag.embeddings.local import minilm_directory
from healthrag.evaluation.ranking import permutation_p
from healthrag.models import exact_tokens
from healthrag.records import Chunk, Hit
from healthrag.retrieval.calibrate import calibrate_gate
from healthrag.retrieval.expand import expand, within_budget
from healthrag.retrieval.fuse import rrf
from healthrag.retrieval.gate import (
    CODES,
    DEFAULT_GATES,
    PERSON_NAMES,
    RECORD_NUMBERS,
    Gate,
    check,
    default_gate,
    gate_signals,
    is_broad_question,
    missing_terms,
    question_scope,
    trim_tail,
)
from healthrag.retrieval.index import searched_text
from healthrag.retrieval.lexical import LexicalIndex
from healthrag.retrieval.rerank import SCALES, CrossEncoderReranker, MaxSimReranker, TokenVectorCache, rerank, score_scale, side_scores

REPORT = Path(__file__).resolve().parent.parent / "reports" / "retrieval_quality"


class Scores:
    "A reranker that gives each hit the score that its id asks for."

    def __init__(self, scale="sigmoid", **scores):
        self.scale, self.scores = scale, scores

    def __call__(self, question, hits):
        return [self.scores[hit.id] for hit in hits]


def hit(name, score=0.5, **metadata):
    return Hit(name, f"text of {name}", score, metadata=metadata)


def fused(count=3):
    return [hit(name, score) for name, score in rrf([list("abc")[:count], list("bac")[:count]])]


# Scales


def test_a_fused_list_is_not_refused_by_a_gate_for_another_scale():
    "The reference compares fused scores, 0.03 at best, with 0.30 when its reranker is off, and refuses every pointed question."
    question = "Why was aspirin stopped?"
    assert max(h.score for h in fused()) < DEFAULT_GATES["sigmoid"].threshold
    for scale in ("sigmoid", "maxsim"):
        with pytest.raises(ValueError, match="not reranked"):
            check(question, fused(), default_gate(scale))
    assert check(question, fused(), default_gate("rrf"))


@pytest.mark.parametrize("scale", SCALES)
def test_a_reranked_list_meets_only_a_gate_of_its_own_scale(scale):
    ranked = rerank("Why?", fused(), Scores(scale, a=0.9, b=0.2, c=0.1))
    assert {score_scale(h) for h in ranked} == {scale}
    for other in SCALES:
        if other == scale:
            assert check("Why?", ranked, Gate(scale, 0.5)).top == 0.9
        else:
            with pytest.raises(ValueError, match=f"the scores are {scale}, the gate is for {other}"):
                check("Why?", ranked, Gate(other, 0.01))


def test_every_scale_has_a_default_that_says_where_it_is_from():
    assert set(DEFAULT_GATES) == set(SCALES)
    for scale, gate in DEFAULT_GATES.items():
        assert gate.scale == scale and gate.source and gate.floor <= gate.threshold


def test_search_scores_and_rerank_scores_are_not_mixed():
    "What is beside a reranker decides the order only; the score stays on the reranker's scale and the gate sees the best of them."
    ranked = rerank("Why?", [hit("a", 0.033), hit("b", 0.001)], Scores(a=0.2, b=0.4), beside=[{"a": 14.0, "b": 2.0}, {"a": 0.9, "b": 0.1}])
    assert [(h.id, h.score) for h in ranked] == [("a", 0.2), ("b", 0.4)]
    assert check("Why?", ranked, Gate("sigmoid", 0.3)).top == 0.4


def test_the_unit_of_a_score_beside_does_not_matter():
    "A weighted sum of raw scores is ruled by the side with the larger numbers; standard scores are not."
    hits = [hit(name) for name in "abcd"]
    reranker, bm25 = Scores(a=0.1, b=0.5, c=0.4, d=0.2), {"a": 3.0, "b": 1.0, "c": 2.5}
    orders = {tuple(h.id for h in rerank("Why?", hits, reranker, beside=[{k: v * unit + 7 for k, v in bm25.items()}])) for unit in (0.01, 1.0, 1000.0)}
    assert len(orders) == 1


# Refusals


def test_a_refusal_leaves_nothing_to_cite():
    "The reference still emits the passages below the gate as citations."
    ranked = rerank("Why was insulin stopped?", fused(), Scores(a=0.29, b=0.1, c=0.05))
    verdict = check("Why was insulin stopped?", ranked, default_gate("sigmoid"))
    assert not verdict and verdict.hits == () and verdict.top == 0.29 and verdict.threshold == 0.30
    assert "0 passages may be cited" in verdict._repr_html_()


def test_nothing_found_is_refused_even_when_the_question_is_broad():
    for gate in (None, default_gate("rrf")):
        assert not check("List all visits", [], gate) and check("List all visits", [], gate).hits == ()


def test_a_score_at_the_gate_passes():
    assert check("Why?", [hit("a", 0.3)], default_gate("sigmoid"), scale="sigmoid")


def test_a_budget_never_changes_the_verdict():
    long = [Hit("a", "word " * 400, 0.9), Hit("b", "short", 0.2)]
    verdict = check("Why?", long, Gate("cosine", 0.5))
    kept = within_budget(verdict.hits, budget=20, count_tokens=count_tokens)
    assert verdict and [h.id for h in kept.kept] == ["b"] and [h.id for h in kept.left_out] == ["a"]
    assert check("Why?", long, Gate("cosine", 0.5)) == verdict


@pytest.mark.parametrize(
    ("question", "patterns", "missing"),
    [
        ("What is PT-0004 allergic to?", RECORD_NUMBERS, ("PT-0004",)),  # PT-00042 is there, which begins alike
        ("What is pt\u201100042 allergic to?", RECORD_NUMBERS, ()),
        ("Who carries the code E11.9?", CODES, ()),
        ("Who carries the code E11?", CODES, ()),  # the category of E11.9
        ("Who carries the code E11.91?", CODES, ("E11.91",)),
        ("Who carries the code B20?", CODES, ("B20",)),
        ("Is vitamin B12 low?", CODES, ()),  # no code unless called one
        ("Show 4548-4 and 2093-3", CODES, ("2093-3",)),
        ("What is Hannah Abara allergic to?", PERSON_NAMES, ()),
        ("What is Hannah Mbeki allergic to?", PERSON_NAMES, ("Hannah Mbeki",)),
        ("Which Patients are there?", PERSON_NAMES, ()),
    ],
)
def test_what_a_question_names_can_be_required(question, patterns, missing):
    "The best passage for a record number that nobody has is somebody else's, and scores well."
    passages = [Hit("a", "Hannah Abara has E11.9; LOINC 4548-4", 0.95, metadata={"patient": "PT-00042"}), Hit("b", "nothing", 0.9)]
    assert missing_terms(question, passages, patterns) == missing
    verdict = check(question, passages, Gate("cosine", 0.5, required=patterns))
    assert verdict.missing == missing and verdict.passed == (not missing) and (verdict.hits == () or not missing)
    assert check(question, passages, Gate("cosine", 0.5)).passed  # only when asked for


def test_the_measured_defaults_are_what_the_report_measured():
    from pandas import read_csv

    measured = read_csv(REPORT / "scifact_defaults.csv").set_index("scale")
    assert set(measured.index) == {"cosine", "maxsim", "rrf"}
    for scale, row in measured.iterrows():
        gate = default_gate(scale)
        assert gate.threshold == pytest.approx(row["threshold"], abs=6e-4) and gate.tail == pytest.approx(row["tail"], abs=6e-4)


def test_reranking_beside_both_sides_beat_the_better_side_and_plain_fusion():
    "The claim of the report, from the scores of each question in it."
    from pandas import read_csv

    scores = read_csv(REPORT / "scifact.csv").pivot(index="question", columns="system", values="nDCG@10")
    mean = scores.mean()
    best = mean["RRF + MaxSim, all scores"]
    assert len(scores) == 300 and best > 0.719 and best > max(mean["dense"], mean["BM25"]) and best > mean["RRF"]
    assert permutation_p((scores["RRF + MaxSim, all scores"] - scores["RRF"]).tolist(), samples=9_999) < 0.01


def test_a_gate_that_weighs_more_than_the_score_answers_more_at_the_same_risk():
    "The claim of the report, from what was measured for each of the clinic's questions; weights and thresholds judge questions that did not choose them."
    from pandas import read_csv

    gates = read_csv(REPORT / "clinic_gates.csv")
    gates = gates[~gates.broad & gates.missing.isna() & gates.maxsim.notna()]
    signals = [{"score": row.maxsim, "margin": row["maxsim margin"], "lexical": row.lexical} for _, row in gates.iterrows()]
    kinds = [[one for one, answerable in zip(signals, gates.answerable, strict=True) if answerable == wanted] for wanted in (True, False)]
    alone, weighed = (calibrate_gate(*given, risk=1 / 6) for given in ([[one["score"] for one in kind] for kind in kinds], kinds))
    assert [len(kind) >= least for kind, least in zip(kinds, (170, 25), strict=True)] == [True, True]
    assert weighed.held_out[0].low > alone.held_out[0].high and weighed.held_out[1].low <= 1 / 6  # of those that the rule lets through
    asked = gates.question.str.startswith("paraphrase")
    areas = {name: np.mean(np.greater.outer(gates.loc[asked, name].to_numpy(), gates.loc[~gates.answerable, name].to_numpy())) for name in ("maxsim", "maxsim margin")}
    assert areas["maxsim"] < 0.5 < areas["maxsim margin"]  # the score of a paraphrase is below that of a question without an answer


# Broad questions


@pytest.mark.parametrize(
    "question",
    [
        "Summarize the medical history of patient PT-00042",
        "summarize the medical history of patient pt-00042",
        "Give me an overview of PT\u201100042",  # a hyphen that does not break
        "List everything on MRN 0012345",
        "List all visits of patient 42",
        "Show all notes with E11.9",
        "Overview of all 4548-4 results",
        "List all notes that mention HIV",
        "List all notes about 'chest pain'",
        "List all notes about “chest pain”",
        "Summarize Jane Doe's history",
        "List all allergies of Maria",
        "What was the most recent creatinine?",
        "Is she on the waiting list?",
        "What does the discharge summary say about warfarin?",
        "Does he drink at all?",
        "Show me the blood pressure",
        "",
        "   ",
    ],
)
def test_pointed_questions_do_not_slip_past_the_gate(question):
    assert not is_broad_question(question)
    assert not check(question or "?", rerank("x", fused(), Scores(a=0.01, b=0.01, c=0.01)), default_gate("sigmoid"))


@pytest.mark.parametrize(
    "question",
    [
        "List the patient's recent visits and the doctor's notes",  # two apostrophes are no quotation
        "List All Recent Visits",  # capitals of a command are no name
        "LIST ALL RECENT VISITS",
        "Show me the latest lab results",
        "What medications are there?",
        "Please list the open prescriptions",
        "Could you summarise the last week?",
        "list every visit in March 2024",
        "I would like an overview of the ward",
    ],
)
def test_broad_questions_are_not_refused_for_their_scores(question):
    assert is_broad_question(question)
    assert check(question, rerank("x", fused(), Scores(a=0.01, b=0.01, c=0.01)), default_gate("sigmoid"))


def test_what_makes_a_question_pointed_can_be_configured():
    question = "List all samples of ward/7 on metformin"
    assert is_broad_question(question)
    assert question_scope(question, lexicon={"Metformin"}) == (False, "names metformin")
    assert question_scope(question, identifiers=(r"\bward/\d+",)) == (False, "names ward/7")
    assert not is_broad_question("List all patients on insulin  glargine", lexicon=["Insulin Glargine"])


@pytest.mark.parametrize(
    "text", ["a-" * 50_000, "1-" * 50_000, "' " * 50_000, "“" * 50_000, "recent " + "a" * 100_000, "please " * 20_000, "what " * 20_000, "\x00" * 9, "🩺" * 9]
)
def test_a_hostile_question_is_judged_in_the_end(text):
    assert isinstance(is_broad_question(text), bool)


def test_a_question_must_be_text():
    for wrong in (None, 3, b"list all"):
        with pytest.raises(ValueError, match="give text"):
            is_broad_question(wrong)


# Order, dedupe, tail


def test_ties_are_broken_by_id_whatever_the_order_given():
    for order in (["b", "a", "c"], ["c", "b", "a"]):
        assert [h.id for h in rerank("Why?", [hit(name) for name in order], Scores(a=0.5, b=0.5, c=0.9))] == ["c", "a", "b"]


def test_the_second_dedupe_sees_the_new_order_and_all_hits():
    "Two chunks of one row: the one that the reranker prefers stays, not the one that search preferred."
    hits = [hit("r1:0", 0.033, row="r1"), hit("r1:1", 0.032, row="r1"), hit("r2:0", 0.016, row="r2")]
    reranker = Scores(**{"r1:0": 0.2, "r1:1": 0.8, "r2:0": 0.5})

    def one_a_row(ranked):
        assert len(ranked) == 3
        seen: set[str] = set()
        return [h for h in ranked if not (h.metadata["row"] in seen or seen.add(h.metadata["row"]))]

    assert [h.id for h in rerank("Why?", hits, reranker, dedupe=one_a_row)] == ["r1:1", "r2:0"]


def test_what_search_knew_is_kept():
    before = {"dense": {"rank": 3, "score": 0.4}, "lexical": None}
    (ranked,) = rerank("Why?", [hit("a", 0.016, trace=before, patient="PT-1")], Scores(a=0.7))
    assert ranked.metadata["trace"]["dense"] == before["dense"] and ranked.metadata["patient"] == "PT-1"
    assert ranked.metadata["trace"]["rerank"] == {"rank": 1, "score": 0.7, "order": 0.7, "scale": "sigmoid", "before": {"rank": 1, "score": 0.016}}
    json.dumps(ranked.metadata)


def test_the_sides_are_read_from_the_trace():
    hits = [hit("a", trace={"dense": {"rank": 1, "score": 0.4}, "lexical": None}), hit("b", trace={"dense": None, "lexical": {"rank": 1, "score": 9.0}}), hit("c")]
    assert side_scores(hits) == [{"a": 0.4}, {"b": 9.0}]
    assert side_scores(rerank("Why?", hits, Scores(a=0.1, b=0.2, c=0.3))) == [{"a": 0.4}, {"b": 9.0}]  # its own note is no side


def test_the_hits_given_are_left_alone():
    hits = fused()
    before = [dict(h.metadata) for h in hits]
    rerank("Why?", hits, Scores(a=0.1, b=0.2, c=0.3), beside=side_scores(hits))
    assert [dict(h.metadata) for h in hits] == before


@pytest.mark.parametrize("scores", [{"a": float("nan"), "b": 1.0, "c": 1.0}, {"a": float("inf"), "b": 1.0, "c": 1.0}])
def test_a_score_that_is_no_number_is_an_error(scores):
    with pytest.raises(ValueError, match="NaN or infinity"):
        rerank("Why?", fused(), Scores(**scores))


def test_a_reranker_that_miscounts_or_makes_up_a_scale_is_an_error():
    class Short(Scores):
        def __call__(self, question, hits):
            return [1.0]

    with pytest.raises(ValueError, match="gave 1 scores for 3 hits"):
        rerank("Why?", fused(), Short())
    with pytest.raises(ValueError, match="scale 'percent'"):
        rerank("Why?", fused(), Scores("percent", a=1, b=2, c=3))


def test_the_tail_is_trimmed_from_the_end_and_one_stays():
    gate = default_gate("sigmoid")
    assert gate.floor == gate.threshold / 2
    ranked = [hit("a", 0.9), hit("b", 0.14), hit("c", 0.2), hit("d", 0.149), hit("e", 0.01)]
    assert [h.id for h in trim_tail(ranked, gate)] == ["a", "b", "c"]  # `b` is not at the end
    assert [h.id for h in trim_tail([hit("x", 0.01), hit("y", 0.0)], gate)] == ["x"]
    assert trim_tail(ranked, None) == ranked


# Late interaction


def test_the_exact_text_is_the_key():
    "The reference lower-cases before it embeds and caches, so US and us are one."
    asked: list[str] = []

    def encode(texts):
        asked.extend(texts)
        return [np.eye(4, dtype=np.float32)[: 1 + (text == "US")] for text in texts]

    late = MaxSimReranker(encode, name="test")
    late("q", [Hit("a", "US", 1.0), Hit("b", "us", 1.0), Hit("c", "US", 1.0)])
    assert asked == ["q", "US", "us"]
    late("q", [Hit("a", "us", 1.0), Hit("b", "US", 1.0)])
    assert asked == ["q", "US", "us", "q"]


def test_a_changed_chunk_is_encoded_again():
    late = MaxSimReranker()
    first = late("zoledronate", [Hit("note:1:0", "The knee is better.", 1.0)])
    second = late("zoledronate", [Hit("note:1:0", "Zoledronate was given.", 1.0)])
    assert second > first


def test_a_long_passage_is_read_to_its_end():
    filler = "The ward was quiet and nothing happened. " * 60
    (without,) = MaxSimReranker()("zoledronate infusion", [Hit("a", filler, 1.0)])
    (found,) = MaxSimReranker()("zoledronate infusion", [Hit("a", filler + "Zoledronate infusion given.", 1.0)])
    assert count_tokens(filler) > 256 and found > without + 0.1


def test_a_score_does_not_depend_on_the_company_or_the_cache():
    hits = [Hit(f"n{i}", text, 1.0) for i, text in enumerate(["Aspirin was stopped.", "The knee is better. " * 40, "Bleeding after aspirin", ""])]
    together = MaxSimReranker()("Why was aspirin stopped?", hits)
    alone = [MaxSimReranker(cache=TokenVectorCache(0))("Why was aspirin stopped?", [h])[0] for h in hits]
    assert together == pytest.approx(alone, abs=1e-6)
    assert together[3] == -1.0


def test_the_cache_is_bounded_and_safe_between_threads():
    cache = TokenVectorCache(40 * 8 * 2)
    rng = np.random.default_rng(0)
    table = {f"t{i}": rng.normal(size=(1 + i % 9, 8)).astype(np.float32) for i in range(60)}
    late = MaxSimReranker(lambda texts: [table[text] for text in texts], name="test", cache=cache)
    errors = []

    def work(seed):
        try:
            for i in np.random.default_rng(seed).integers(0, 60, 200):
                (got,) = late.vectors([f"t{i}"])
                np.testing.assert_array_equal(got, table[f"t{i}"].astype(np.float16))
                assert cache.used <= cache.size
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and 0 < cache.used == sum(kept.nbytes for kept in cache._kept.values()) <= cache.size


# Cross-encoder


@pytest.fixture(scope="module")
def tiny_cross_encoder(tmp_path_factory):
    "A cross-encoder with random weights and the local tokenizer: the real files, the real loader, no meaning."
    pytest.importorskip("sentence_transformers", reason="the cross-encoder needs the extra `st`")
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("cross-encoder")
    tokenizer = AutoTokenizer.from_pretrained(str(minilm_directory()))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1, initializer_range=0.5
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_cross_encoder_gives_the_sigmoid_of_its_raw_output(tiny_cross_encoder):
    import torch

    reranker = CrossEncoderReranker(tiny_cross_encoder, batch_size=2, max_length=64)
    texts = ["aspirin was stopped", "the knee is better", "bleeding", "a longer passage about the ward and the night " * 20]
    scores = reranker("why was aspirin stopped", [Hit(str(i), text, 1.0) for i, text in enumerate(texts)])
    inside = reranker._model
    raw = inside.predict([("why was aspirin stopped", text) for text in texts], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-raw)), rtol=1e-5)
    assert all(0 < score < 1 for score in scores) and len(set(scores)) > 1
    ranked = rerank("why was aspirin stopped", [Hit(str(i), text, 1.0) for i, text in enumerate(texts)], reranker)
    assert [h.score for h in ranked] == sorted(scores, reverse=True) and score_scale(ranked[0]) == "sigmoid"
    assert reranker("why", []) == []


@pytest.mark.parametrize("kind", ["late interaction", "cross-encoder"])
def test_a_reranker_reads_what_search_reads(kind, request):
    "A row is found by the name of its table and a chunk by its headings; a reranker that did not read them would put both back."
    reranker = MaxSimReranker() if kind == "late interaction" else CrossEncoderReranker(request.getfixturevalue("tiny_cross_encoder"))
    question, row, told = "What is Walter Garcia allergic to?", "patient_name: Walter Garcia\nsubstance: latex", {"kind": "row", "table": "allergy"}
    for text, metadata in ((row, told), ("Held after the bleed.", {"headings": ["Aspirin allergy", "Stopping"]})):
        with_it, without, written = reranker(question, [Hit("a", text, 1.0, metadata=metadata), Hit("b", text, 1.0), Hit("c", searched_text(text, metadata), 1.0)])
        assert with_it == pytest.approx(written, abs=1e-6) != without
    if kind == "late interaction":
        rows = [Hit("drug", row, 1.0, metadata={**told, "table": "prescription"}), Hit("allergy", row, 1.0, metadata=told)]
        assert [hit.id for hit in rerank(question, rows, reranker)] == ["allergy", "drug"]


def test_a_model_with_several_outputs_is_no_reranker(tiny_cross_encoder, tmp_path):
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    config = BertConfig.from_pretrained(tiny_cross_encoder)
    config.num_labels = 3
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_cross_encoder).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="3 numbers"):
        CrossEncoderReranker(tmp_path)


def test_missing_weights_are_an_error_that_says_what_to_do(tmp_path):
    pytest.importorskip("sentence_transformers", reason="the cross-encoder needs the extra `st`")
    for model in ("no-such/reranker", tmp_path / "nothing"):
        with pytest.raises(OSError, match=r"no cross-encoder at .* MaxSimReranker"):
            CrossEncoderReranker(model)


def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=re.escape('pip install "healthrag[st]"')):
        CrossEncoderReranker("any")


# Budgets and expansion

ROW = "Seen on Monday.  She bled after aspirin.\n\nAspirin was stopped.\tShe is well   now."


def chunked(text, spans, *, row="7", patient="PT-7", head=""):
    chunks = [Chunk(head + text[a:b], {"row": row, "patient": patient, "table": "note", "source": "clinic", "start": a, "end": b}) for a, b in spans]
    return chunks, [f"clinic:note:{row}:{i}" for i in range(len(spans))]


def index_of(*rows):
    index = LexicalIndex()
    for chunks, ids in rows:
        index.add(chunks, ids=ids)
    return index


def test_white_space_of_a_record_is_kept():
    "The reference joins the words of a row with single spaces."
    index = index_of(chunked(ROW, [(0, 40), (30, 62), (50, len(ROW))]))
    (grown,) = expand(index.get(["clinic:note:7:1"]), index, budget=500, count_tokens=count_tokens)
    assert grown.text == ROW


def test_budgets_count_tokens_and_not_words():
    "One word of a record can be many tokens."
    text = "hydroxychloroquine/pseudoephedrine 12.5mg-0.25mL/kg"
    assert len(text.split()) == 2 < 10 < exact_tokens(text)
    assert within_budget([Hit("a", text, 1.0)], budget=10, count_tokens=exact_tokens).kept == ()


def test_siblings_are_added_and_ids_unchanged():
    index = index_of(chunked(ROW, [(0, 40), (30, 62), (50, len(ROW))]))
    hits = index.get(["clinic:note:7:2", "clinic:note:7:0"])
    grown = expand(hits, index, budget=500, count_tokens=count_tokens)
    assert [h.id for h in grown] == [h.id for h in hits]
    assert grown[0].text == ROW[30:] and grown[1].text == ROW[:40]
    a, b = grown[0].metadata["expanded"]["found"]
    assert grown[0].text[a:b] == hits[0].text and grown[0].metadata["start"] == 30


def test_a_neighbour_by_id_that_is_another_patients_is_never_added():
    chunks, ids = chunked(ROW, [(0, 40), (40, len(ROW))])
    foreign = [chunks[0], Chunk(chunks[1].text, {**chunks[1].metadata, "patient": "PT-00070"})]
    index = index_of((foreign, ids))
    hits = index.get(ids[:1])
    assert expand(hits, index, budget=500, count_tokens=count_tokens) == hits


def test_a_parent_of_another_patient_is_never_taken():
    index = index_of(chunked(ROW, [(0, 40)]))
    index.add([Chunk(ROW, {"row": "7", "patient": "PT-00070", "table": "note", "source": "clinic"})], ids=["clinic:note:7"])
    child = index.get(["clinic:note:7:0"])[0]
    asked = Hit(child.id, child.text, 1.0, metadata={**child.metadata, "parent": "clinic:note:7"})
    assert expand([asked], index, budget=500, count_tokens=count_tokens) == [asked]


def test_a_row_that_belongs_to_another_patient_is_never_put_above():
    visit = {"row": 3, "table": "encounter", "database": "clinic"}
    child = Hit("clinic:lab:9:0", "value: 7.8", 1.0, metadata={"row": 9, "table": "lab", "patient": "PT-0004", "database": "clinic", "parent": "clinic:encounter:3"})
    for patient, shown in (("PT-0004", 1), ("PT-00042", 0), (None, 0)):
        index = index_of(([Chunk("kind: emergency", {**visit, "patient": patient})], ["clinic:encounter:3:0"]))
        (grown,) = expand([child], index, budget=100, count_tokens=count_tokens)
        assert grown.text == "kind: emergency\n\nvalue: 7.8" * shown + child.text * (1 - shown) and grown.id == child.id
        nobodys = Hit(child.id, child.text, 1.0, metadata={**child.metadata, "patient": None})
        assert expand([nobodys], index, budget=100, count_tokens=count_tokens) == [nobodys]
        assert expand([child], index, budget=count_tokens(child.text), count_tokens=count_tokens) == [child]  # no room


def test_offsets_that_lie_change_nothing():
    chunks, ids = chunked(ROW, [(0, 40), (30, 62)])
    lying = [chunks[0], Chunk("x" * 32, chunks[1].metadata)]
    index = index_of((lying, ids))
    hits = index.get(ids[:1])
    assert expand(hits, index, budget=500, count_tokens=count_tokens) == hits


def test_a_repeated_head_is_shown_once():
    index = index_of(chunked(ROW, [(0, 40), (30, 62), (50, len(ROW))], head="patient: PT-7\n"))
    (grown,) = expand(index.get(["clinic:note:7:1"]), index, budget=500, count_tokens=count_tokens)
    assert grown.text == "patient: PT-7\n" + ROW


# Calibration


def test_a_gate_is_calibrated_on_a_corpus_and_not_assumed():
    "Cosines of one corpus lie higher than those of another; a fixed 0.30 lets everything through here."
    rng = np.random.default_rng(1)
    answerable, unanswerable = rng.normal(0.80, 0.05, 60), rng.normal(0.62, 0.05, 60)
    found = calibrate_gate(answerable, unanswerable, risk=0.05, scale="cosine")
    assert (unanswerable >= 0.30).all()
    assert found.risk.number <= 3 and found.refusal_recall.value >= 0.95 and found.recall.value > 0.9
    assert found.gate.scale == "cosine" and "60 answerable" in found.gate.source


def two_levels(seed=3):
    "Questions that score on two levels, with and without a name in them; at each the answerable stand out from their candidates."
    rng = np.random.default_rng(seed)
    kinds = []
    for margin, n in ((0.12, 120), (0.06, 80)):
        level = rng.choice([0.45, 0.65], n) + rng.normal(0, 0.04, n)
        kinds.append([{"score": s, "margin": m, "lexical": x} for s, m, x in zip(level, rng.normal(margin, 0.025, n), rng.normal(8, 2, n), strict=True)])
    return kinds


def test_the_best_score_is_not_all_that_a_gate_sees():
    "A question that names a patient scores high on every record of theirs, and one in other words scores low on the record that answers it."
    good, bad = two_levels()
    alone = calibrate_gate([q["score"] for q in good], [q["score"] for q in bad], risk=0.1)
    found = calibrate_gate(good, bad, risk=0.1)
    assert alone.held_out[0].high < 0.3 < 0.6 < found.held_out[0].low and found.held_out[1].low <= 0.1
    passed = [[found.gate.measure(q) >= found.threshold for q in questions] for questions in (good, bad)]
    assert [sum(part) for part in passed] == [found.recall.number, found.risk.number] and list(dict(found.gate.weights)) == ["score", "margin", "lexical"]


def test_signals_that_say_nothing_gain_nothing_on_unseen_questions():
    "Weights are fitted to the questions that choose the threshold and judged on others."
    rng = np.random.default_rng(5)
    good, bad = ([{"score": a, "margin": b, "lexical": c} for a, b, c in rng.normal(size=(40, 3))] for _ in range(2))
    found = calibrate_gate(good, bad, risk=0.2)
    assert found.held_out[0].low <= found.held_out[1].high and found.held_out[1].low <= found.held_out[0].high
    assert all(weight >= 0 for _, weight in found.gate.weights)


def test_a_gate_of_signals_is_one_number_against_one_threshold():
    hits = [hit("a", 0.7), hit("b", 0.4), hit("c", 0.3)]
    assert gate_signals(hits, [5.0, 7.0]) == pytest.approx({"score": 0.7, "margin": 0.3, "lexical": 7.0}) and "lexical" not in gate_signals(hits)
    moved = gate_signals([hit(h.id, h.score + 0.2) for h in hits], [])
    assert moved["margin"] == pytest.approx(0.3) and moved["lexical"] == 0.0  # what all candidates share is taken out
    gate = Gate("cosine", 0.99, 0.35, weights=(("score", 1.0), ("margin", 1.0)))
    verdict = check("Why?", hits, gate)
    assert verdict and verdict.top == pytest.approx(1.0) and dict(verdict.signals) == gate_signals(hits) and trim_tail(hits, gate) == hits[:2]
    refused = check("Why?", hits[:1], gate, lexical=[9.0])
    assert not refused and refused.hits == () and refused.signals["lexical"] == 9.0 and refused.signals["margin"] == 0.0
    assert trim_tail(hits, Gate("cosine", 9.0, weights=(("score", 1.0),))) == hits  # half of a sum is no score
    with pytest.raises(ValueError, match="weighs lexical, which was not measured"):
        check("Why?", hits, Gate("cosine", 1.0, weights=(("lexical", 1.0),)))
    for wrong in ((("bm25", 1.0),), (("score", float("nan")),)):
        with pytest.raises(ValueError, match="unknown or not finite; known: score, margin, lexical"):
            Gate("cosine", 1.0, weights=wrong)
    with pytest.raises(ValueError, match="measure both by the same search"):
        calibrate_gate([0.5], [{"score": 0.1}])


def test_a_sigmoid_is_not_read_as_a_probability():
    "Overconfident scores near 1 for both kinds: the calibrated probability is what was seen, not what the sigmoid says."
    rng = np.random.default_rng(2)
    answerable, unanswerable = 1 / (1 + np.exp(-rng.normal(5, 1, 100))), 1 / (1 + np.exp(-rng.normal(4, 1, 100)))
    found = calibrate_gate(answerable, unanswerable, scale="sigmoid")
    raw = np.mean([*((1 - answerable) ** 2), *(unanswerable**2)])
    assert raw > 0.4 > 0.26 > found.brier["platt"] and found.brier["isotonic"] < 0.28
    assert float(found.models["platt"](0.97)) < 0.4
