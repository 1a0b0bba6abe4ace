"""pytest, with a second chance: files that failed are run once more, alone, and only what fails again is a failure.

    python tests/once_more.py -n 2 --dist loadfile -- tests

A test that starts servers, kernels and processes can fail for want of a processor or a port. What failed is printed both
times. More than MOST files are no such accident and are not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def failed_files(names: Iterable[str], folders: Sequence[str]) -> list[str]:
    "List the files, below the folders, of the tests named."
    files = {name.partition("::")[0] for name in names}
    return sorted(file for file in files if any(file == folder or file.startswith(f"{folder}/") for folder in folders))


def main(options: Sequence[str], folders: Sequence[str]) -> int:
    FAILED.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", *options]
    code = subprocess.run([*pytest, *folders], check=False).returncode
    if code != 1 or not FAILED.exists():  # 1: tests were run, and some failed
        return code
    files = failed_files(json.loads(FAILED.read_text()), folders)
    if not 0 < len(files) <= MOST:
        return code
    print(f"\nfailed, run once more: {' '.join(files)}\n", flush=True)
    code = subprocess.run([*pytest, "-n", "0", *files], check=False).returncode
    if code == 0:
        print(f"\npassed only the second time: {' '.join(files)}", flush=True)
    return code


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(sys.argv[1:split], sys.argv[split + 1 :]))
