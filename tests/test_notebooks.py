"""Notebooks are executed on a machine that is busy with other work, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from healthrag.notebooks import KERNEL, run_notebook

SHY = """
import os, pathlib, sys
starts, deaths = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with starts.open("a") as file: file.write("x")
if starts.stat().st_size > deaths: os.execv(sys.executable, [sys.executable, "-m", "ipykernel_launcher", *sys.argv[3:]])
sys.exit(1)
"""


def shy_kernel(folder: Path, deaths: int) -> Path:  # where its starts are counted
    "Install a kernel that dies so often before it comes up."
    starts, place = folder / "starts", folder / "share" / "kernels" / KERNEL["name"]
    place.mkdir(parents=True)
    argv = [sys.executable, "-c", SHY, str(starts), str(deaths), "-f", "{connection_file}"]
    (place / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "shy", "language": "python"}))
    return starts


@pytest.fixture
def template(tmp_path: Path) -> Path:
    cells = [new_code_cell("n = 1", metadata={"tags": ["parameters"]}), new_code_cell("n + 1")]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), tmp_path / "template.ipynb")
    return tmp_path / "template.ipynb"


def test_a_kernel_that_did_not_come_up_is_started_again(tmp_path: Path, template: Path, monkeypatch):
    starts = shy_kernel(tmp_path, deaths=2)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    made = nbformat.read(run_notebook(template, tmp_path / "out.ipynb", {"n": 2}), 4)
    assert made.cells[-1].outputs[0]["data"]["text/plain"] == "3" and starts.read_text() == "xxx"


def test_a_kernel_that_never_comes_up_is_an_error(tmp_path: Path, template: Path, monkeypatch):
    starts = shy_kernel(tmp_path, deaths=9)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    with pytest.raises(RuntimeError, match=r"Kernel died"):
        run_notebook(template, tmp_path / "out.ipynb", {"n": 2})
    assert starts.read_text() == "xxx" and not (tmp_path / "out.ipynb").exists()


@pytest.mark.parametrize("name", ["latency", "retrieval_quality", "stores"])
def test_what_is_measured_multiplies_on_one_thread(name, project_root):
    pytest.importorskip("threadpoolctl")
    cells = nbformat.read(project_root / "nbs" / "bench" / f"{name}.ipynb", 4).cells
    sources = {key: next(c.source for c in cells if (c.cell_type == "code" and part in c.source) or part in c.metadata.get("tags", []))
               for key, part in (("parameters", "parameters"), ("imports", "import numpy"))}  # fmt: skip
    shown = "from threadpoolctl import threadpool_info\nprint({p['num_threads'] for p in threadpool_info() if p['user_api'] == 'blas'})"
    plain = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    script = "\n".join([*sources.values(), shown])
    done = subprocess.run([sys.executable, "-c", script], env=plain, cwd=project_root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "{1}", done.stderr
