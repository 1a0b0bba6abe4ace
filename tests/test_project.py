"""The project keeps its own rules: floors, names, light imports, agreeing metadata."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import healthrag
from healthrag.lazy import public_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "healthrag"
GENERATED = re.compile(r"File to edit: .*?nbs/(\d\d)_")
HEAVY = ("torch", "sentence_transformers", "pandas", "statsmodels", "matplotlib", "duckdb", "onnxruntime", "papermill")


def modules() -> dict[str, Path]:
    "Module name -> file, for every file that a numbered notebook exports."
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_modidx.py"
    }


@cache
def floor(module: str) -> int | None:
    "The tens digit of the notebook that exports the module."
    path = modules().get(module)
    found = GENERATED.search(path.read_text()) if path else None
    return int(found[1]) // 10 if found else None


def imported(path: Path, module: str) -> set[str]:
    "Modules of the package that a file imports, relative imports resolved."
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            out |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in out if name in modules() and name not in ("healthrag", module)}


@pytest.mark.parametrize("module", modules())
def test_every_module_comes_from_a_notebook(module):
    assert floor(module) is not None, f"{module} was not exported from a numbered notebook"


@pytest.mark.parametrize("module", modules())
def test_imports_only_go_down(module):
    up = {name for name in imported(modules()[module], module) if floor(name) > floor(module)}
    assert not up, f"{module} (floor {floor(module)}) imports from above: {sorted(up)}"


def test_every_public_name_is_reachable_and_unique():
    seen: dict[str, str] = {}
    for name in healthrag.PUBLIC_MODULES:
        for public in public_names(importlib.import_module(f"healthrag.{name}")):
            if public in healthrag.PUBLIC_MODULES or (PACKAGE / name / f"{public}.py").exists():
                continue
            assert getattr(healthrag, public) is not None
            assert seen.setdefault(public, name) == name, f"{public} is published by {seen[public]} and {name}"
    assert len(seen) > 100


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = healthrag.no_such_name


@pytest.mark.parametrize("module", ["healthrag", *(f"healthrag.{name}" for name in healthrag.PUBLIC_MODULES)])
def test_importing_a_module_loads_nothing_heavy(module):
    code = f"import {module}, sys; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_settings_ini_and_pyproject_agree():
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(ROOT / "settings.ini")
    metadata = ini["metadata"]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, nbdev = pyproject["project"], pyproject["tool"]["nbdev"]
    assert metadata["lib_name"] == project["name"]
    assert metadata["version"] == project["version"] == healthrag.__version__
    assert metadata["license"].lower() == project["license"].lower()
    assert project["requires-python"] == f">={metadata['min_python']}"
    assert {k: metadata[k] for k in ("nbs_path", "lib_path", "doc_path", "branch")} == {
        k: nbdev[k] for k in ("nbs_path", "lib_path", "doc_path", "branch")
    }
    requirements = metadata["requirements"].split()
    assert requirements == [re.split(r"[<>=~]", r)[0] for r in project["dependencies"]]


def test_settings_ini_sets_what_the_library_would_do_anyway():
    from healthrag.settings import settings_class

    ini = configparser.ConfigParser(interpolation=None)
    ini.read(ROOT / "settings.ini")
    fields = settings_class().model_fields
    for name, value in ini["healthrag"].items():
        assert str(fields[name].default) in (value, f"{value}.0"), f"settings.ini sets {name} = {value}"


def test_citation_and_changelog_name_this_version():
    assert f"version: {healthrag.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {healthrag.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["nbs", "healthrag", "grounding", "data", "reports", "tests"])
def test_the_top_level_is_there(name):
    assert (ROOT / name).is_dir()


def test_make_alone_lists_the_targets():
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"bench", "test", "reports", "record", "sync"} <= {line.split()[1] for line in done.stdout.splitlines()}


def notebooks():
    return sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: str(p.relative_to(ROOT / "nbs")))
def test_a_notebook_opens_with_a_title_and_one_sentence(path):
    import nbformat

    first = nbformat.read(path, 4).cells[0].source
    assert re.match(r"# \S.*\n+> \S", first), f"{path.name} does not open with '# Title' and '> one sentence'"


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: str(p.relative_to(ROOT / "nbs")))
def test_a_notebook_is_short_enough_to_read(path):
    import nbformat

    code = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    exported = sum(source.count("\n") + 1 for source in code if re.search(r"^#\|\s*export", source, re.M))
    assert len(code) <= 70 and exported <= 400


def test_pinned_packages_install_on_every_python_that_is_promised():
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=") + ".0"
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    here = {pin.name: metadata.distribution(pin.name) for pin in pins if (not pin.marker or pin.marker.evaluate()) and next(metadata.Distribution.discover(name=pin.name), None)}
    assert len(here) > 100
    assert {name: asked for name, one in here.items() if (asked := one.metadata.get("Requires-Python")) and lowest not in SpecifierSet(asked)} == {}
