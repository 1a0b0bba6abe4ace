#!/usr/bin/env bash
# Clean, export and README must change nothing: the notebooks are the source of the package and of README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}
state() { git status --porcelain; git diff | git hash-object --stdin; }
before=$(state)
"$bin/nbdev-clean"
"$bin/nbdev-export"
"$bin/python" nbs/readme.py
after=$(state)
if [ "$before" != "$after" ]; then
  echo "out of sync; run: make sync, then commit:" >&2
  diff <(echo "$before") <(echo "$after") >&2 || true
  git diff | head -60 >&2
  exit 1
fi
echo "in sync"
