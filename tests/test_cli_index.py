"`healthrag ask --index`: passages first, the answer as it is written, and exit codes that a script can use."

import json

import pytest

from healthrag.cli.answering import show_events
from healthrag.cli.entry import main
from healthrag.ingestion.documents import LabelledDocument
from healthrag.records import SourceDocument
from healthrag.retrieval.update import ingest_to_index

QUESTION = "Where does hematochezia come from?"
DOCUMENTS = [
    SourceDocument("guide", "", "Guide", "# Bleeding\n\n## Upper\n\nHematemesis comes from above the ligament of Treitz.\n\n## Lower\n\nHematochezia usually comes from the colon.\n"),
    SourceDocument("visits:17", "", "visit 17", "reason: gastrointestinal hemorrhage\nward: surgery"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "index"
    ingest_to_index(path, docs=DOCUMENTS, store="local").close()
    return str(path)


def test_an_index_is_asked(folder, capsys):
    assert main(["ask", QUESTION, "--index", folder, "--model", "quote", "--k", "2", "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.index("[1] guide › Lower") < out.index("usually comes from the colon. [1]") < out.index("answered by quote") and "[3]" not in out


def test_json_is_one_object(folder, capsys):
    assert main(["ask", QUESTION, "-i", folder, "--model", "quote", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["citations"][0]["id"] == "guide:1" and found["citations"][0]["cited"] and not found["refused"]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "index"
    row = lambda number, patient, text: LabelledDocument(f"notes:{number}", "", f"note {number}", text, {"patient": patient, "person_id": number, "checked": True})
    bleeding = "Gastrointestinal bleeding is treated with endoscopy, and with red cells when the hemoglobin is below 7 g/dL."
    ingest_to_index(path, docs=[row(1, "PT-0001", bleeding), row(2, "PT-0002", "Asthma is treated with inhaled corticosteroids."), row(4, "PT-0004", "Hemoglobin of PT-0004 was 7.2 g/dL.")], store="local").close()
    return str(path)


@pytest.mark.parametrize("question", ["How is asthma treated?", "When are red cells given?", "What was the hemoglobin of PT-0004?", "PT-0004"])
def test_what_documents_answer_is_answered(notes, capsys, question):
    assert main(["ask", question, "-i", notes, "-m", "quote"]) == 0 and "answered by quote" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("question", "why"),
    [("What is the capital of France?", "the gate"), ("How is diabetes treated?", "the gate"), ("hemoglobin of PT-00042?", "PT-00042, which no passage"), ("What did Zoltan Farkas inhale?", "Zoltan Farkas")],
)  # fmt: skip
def test_what_documents_do_not_answer_is_refused(notes, capsys, question, why):
    assert main(["ask", question, "-i", notes, "-m", "quote"]) == 1
    out = capsys.readouterr().out
    assert "The documents do not say." in out and f"not answered: {why}" in out.replace("the question names ", "").replace("the best maxsim score is", "the gate") and "[1]" not in out


@pytest.mark.parametrize(
    ("where", "found"),
    [(["patient=PT-0002"], ["notes:2:0"]), (["patient=PT-000"], []), (["person_id=2"], ["notes:2:0"]), (["person_id=2", "person_id=1", "checked=true"], ["notes:2:0", "notes:1:0"]), (["patient=PT-0002", "person_id=1"], [])],
)  # fmt: skip
def test_a_filter_holds_before_anything_is_ranked(notes, capsys, where, found):
    options = [part for one in where for part in ("--where", one)]
    assert main(["ask", "How is asthma treated?", "-i", notes, "-m", "quote", "--json", *options]) == (0 if found else 1)
    said = json.loads(capsys.readouterr().out)
    assert [citation["id"] for citation in said["citations"]] == found and said["refused"] == ("" if found else "the filter lets no passage through")


def test_the_trace_says_where_each_passage_stood(notes, capsys):
    assert main(["ask", "How is asthma treated?", "-i", notes, "-m", "quote", "--trace", "--where", "checked=true"]) == 0
    out = capsys.readouterr().out
    stages = [line.split()[0] for line in out.splitlines() if " ms" in line]
    assert stages == ["prepare", "wait", "filter", "encode", "dense", "lexical", "fuse", "rows", "duplicates", "cut", "rerank", "gate", "top", "expand"]
    way = {line.split()[0]: line for line in out.splitlines() if line.startswith("notes:") and (line.endswith("stayed") or "left at" in line)}
    assert way["notes:2:0"].split()[1:] == ["1", "1", "1", "1", "1", "stayed"] and way["notes:4:0"].endswith("left at gate: scores less than 0.363")
    assert len(way) == 3 and "filter          3 → 3" in out and "checked in ['true', True]" in out
    assert main(["ask", "What is the capital of France?", "-i", notes, "-m", "quote", "--trace", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert {row["left"] for row in said["trace"]["passages"]} == {"gate"} and [row["stage"] for row in said["trace"]["stages"]][-2:] == ["gate", "top"]
    assert main(["ask", "Hello!", "-i", notes, "-m", "quote", "--trace"]) == 1 and "no passages were searched for" in capsys.readouterr().out


def test_another_encoder_goes_by_ranks_and_the_trace_says_so(capsys):
    from word_vectors import word_vectors

    from healthrag.answers import answer

    index = ingest_to_index(docs=DOCUMENTS, store="local", embedder=word_vectors)
    found = answer(index, QUESTION, model="quote")
    notes = {stage.name: stage.note for stage in found.retrieval.trace.stages}
    assert found.ok and "no token vectors" in notes["rerank"] and "rrf score" in notes["gate"]
    assert answer(index, "What is the capital of France?", model="quote").refused.startswith("the best rrf score is 0.016")


def test_talk_is_no_answer(folder, capsys):
    assert main(["ask", "Hello!", "--index", folder, "--model", "quote"]) == 1
    assert "Ask a question" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--index", "/no/such/index"], "there is no index at"), (["--index", "{tmp}"], "holds no index"), (["--verify"], "give --index"), (["--trace"], "give --index"), (["--where", "a=b"], "give --index"),
        (["--index", "{folder}", "--where", "patient"], "is not key=value"), (["--index", "{folder}", "--where", "=x"], "is not key=value"), (["--index", "{folder}", "--database", "gibleed"], "one or the other"),
        (["--index", "{folder}", "--model", "nobody:x"], "provider"), (["--index", "{folder}", "--k", "0"], "k"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(folder, tmp_path, capsys, arguments, said):
    arguments = [argument.format(tmp=tmp_path, folder=folder) for argument in arguments]
    model = [] if "--model" in arguments else ["--model", "quote"]
    assert main(["ask", QUESTION, *model, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no sources"), (["--search", "omop"], "web search is off"), (["--search", "omop", "--provider", "bing"], "known: ddgs"),
        (["no/such/folder"], "no file or folder"), (["{tmp}", "--store", "shelf"], "known: duckdb, faiss"), (["{tmp}", "--index", "{file}"], "is a file"),
        (["{tmp}", "--store", "pgvector", "--url", "postgres:me:s3cret@h/x"], "can't be read"), (["{tmp}", "--store", "local", "--url", "x"], "url"),
        (["postgresql://127.0.0.1:9/x?password=s3cret"], "no documents could be ingested"), (["http://127.0.0.1:9/"], "not a public address"),
        (["{tmp}", "--pages", "0"], "at least 1"), (["{tmp}", "--reading", "no.toml"], "there is no file no.toml"), (["{tmp}", "--reading", "{file}"], "is not TOML"),
        *((["{tmp}", "--reading", f"{{tmp}}/{name}.toml"], f"{name} is") for name in ("tables", "keys", "parents", "labels", "links", "allow", "most_rows")),
        (["{tmp}", "--reading", "{tmp}/colour.toml"], "no option of reading rows"),
    ],
)  # fmt: skip
def test_wrong_input_to_ingest_is_one_line_and_makes_nothing(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.md").write_text("= no TOML")
    for name in ("tables", "keys", "parents", "labels", "links", "allow", "colour"):
        (tmp_path / f"{name}.toml").write_text(f"{name} = 5")
    (tmp_path / "most_rows.toml").write_text("most_rows = true")
    assert main(["ingest", *(argument.format(tmp=tmp_path, file=tmp_path / "note.md") for argument in arguments)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.err.startswith("healthrag: ") and "s3cret" not in shown.err
    assert not list(tmp_path.glob("healthrag-index/manifest.json"))


@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_damaged_store_is_told_in_one_line(tmp_path, capsys, kept):
    ingest_to_index(tmp_path / "index", docs=DOCUMENTS, store="duckdb").close()
    path = tmp_path / "index" / "vectors.duckdb"
    with path.open("r+b") as file:
        file.truncate(int(kept * path.stat().st_size))
    (tmp_path / "note.md").write_text("Melena is black.")
    for arguments in (["ask", QUESTION, "--index", str(tmp_path / "index"), "--model", "quote"],
                      ["ingest", str(tmp_path / "note.md"), "--index", str(tmp_path / "index")]):  # fmt: skip
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("healthrag: ") and "vectors.duckdb is cut off" in error and error.count("\n") == 1


def test_a_fault_of_the_system_says_what_to_check(monkeypatch, capsys, folder):
    monkeypatch.setenv("HEALTHRAG_CACHE_DIR", "/proc/nowhere")
    assert main(["ask", QUESTION, "--model", "nearest-example", "--database", "synthetic:10"]) == 2
    error = capsys.readouterr().err
    assert "/proc/nowhere" in error and "check the path" in error and "Errno" not in error and error.count("\n") == 1


def test_faults_are_shown(capsys):
    from healthrag.answers import stream_answer
    from healthrag.records import Hit

    index = lambda question, k, filters: [Hit("a", "Hemoglobin was 7.2 g/dL.", 1.0)]
    show_events(stream_answer(index, QUESTION, model=lambda prompt: "Hemoglobin was 9.9 g/dL [1, 4].", verify=True))
    out = capsys.readouterr().out
    assert "no passage 4" in out and "unsupported: Hemoglobin was 9.9 g/dL. (9.9 g/dL is not in [1])" in out
    with pytest.raises(TimeoutError):
        show_events(stream_answer(index, QUESTION, model=lambda prompt: (_ for _ in ()).throw(TimeoutError("slow"))))
    with pytest.raises(RuntimeError, match="broke off"):
        show_events([])
