"`healthrag ask --index`: passages first, the answer as it is written, and exit codes that a script can use."

import json

import pytest

from healthrag.cli.answering import show_events
from healthrag.cli.entry import main
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


def test_talk_is_no_answer(folder, capsys):
    assert main(["ask", "Hello!", "--index", folder, "--model", "quote"]) == 1
    assert "Ask a question" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--index", "/no/such/index"], "there is no index at"), (["--index", "{tmp}"], "holds no index"), (["--verify"], "give --index"), (["--index", "{folder}", "--database", "gibleed"], "one or the other"),
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
