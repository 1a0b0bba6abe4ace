"""What fails once is run again; what fails twice fails."""

import subprocess
import sys
from pathlib import Path

import pytest

ONCE_MORE = Path(__file__).with_name("once_more.py")
TESTS = """
from pathlib import Path
def test_flaky():
    seen = Path("seen-{name}")
    before = seen.exists()
    seen.touch()
    assert before or {passes}
def test_always():
    assert {always}
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ONCE_MORE), "-q", *options, "--", "few"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def write(folder: Path, name: str, passes: bool = True, always: bool = True) -> None:
    (folder / "few").mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "few" / f"test_{name}.py").write_text(TESTS.format(name=name, passes=passes, always=always))


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadfile")], ids=["alone", "workers"])
def test_only_what_fails_twice_fails(tmp_path, options):
    write(tmp_path, "fine")
    write(tmp_path, "flaky", passes=False)
    done = run(tmp_path, *options)
    assert done.returncode == 0 and "failed, run once more: few/test_flaky.py\n" in done.stdout and "1 failed" in done.stdout
    assert done.stdout.splitlines()[-1] == "passed only the second time: few/test_flaky.py"
    write(tmp_path, "broken", always=False)
    done = run(tmp_path, *options)
    assert done.returncode == 1 and "failed, run once more: few/test_broken.py\n" in done.stdout and done.stdout.count("1 failed") == 2
    assert "passed only the second time" not in done.stdout


def test_many_failures_are_no_accident(tmp_path):
    for number in range(4):
        write(tmp_path, f"flaky_{number}", passes=False)
    done = run(tmp_path)
    assert done.returncode == 1 and "run once more" not in done.stdout


def test_nothing_to_run_and_nothing_failed(tmp_path):
    write(tmp_path, "fine")
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "-k", "nothing").returncode == 5
