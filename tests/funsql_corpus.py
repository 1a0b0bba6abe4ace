"""FunSQL.jl's own documentation and tests as records, and rows compared without their order."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "funsql"
RECORDS: list[dict[str, Any]] = []
if (FOLDER / "conformance.jsonl").exists():
    RECORDS = [json.loads(line) for line in (FOLDER / "conformance.jsonl").read_text(encoding="utf-8").splitlines()]
needs_corpus = pytest.mark.skipif(not RECORDS, reason="the conformance corpus is not beside the checkout")


def _plain(value: Any) -> Any:
    match value:
        case decimal.Decimal() | float(): return round(float(value), 6)
        case dt.date(): return value.isoformat()
    return value


def bag(rows: Any) -> collections.Counter:
    "Rows as they can be compared between databases: how often each is there."
    return collections.Counter(json.dumps([_plain(value) for value in row], default=str) for row in rows)
