"""FunSQL.jl's own documentation and tests as records, and rows compared without their order."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "funsql"
RECORDS: list[dict[str, Any]] = []
if (FOLDER / "conformance.jsonl").exists():
    RECORDS = [json.loads(line) for line in (FOLDER / "conformance.jsonl").read_text(encoding="utf-8").splitlines()]
needs_corpus = pytest.mark.skipif(not RECORDS, reason="the conformance corpus is not beside the checkout")


# Where DuckDB and PostgreSQL differ from SQLite, on which FunSQL.jl's guide and examples run: `date(day, "-1 year")` moves a day, and neither has
# such a function. `sqlite_date` of testdb.sql stands in for it. Here: the records that call it.
SQLITE_DATE = {"guide-022", "examples-025", "examples-026", "examples-029"}
# What only PostgreSQL can run, because these functions make rows there; on DuckDB their SQL is made, not run. Here: the rows by hand.
POSTGRES_ONLY = {
    "nodes-140": [[10, 20], [30, 40], [50, 60]],  # regexp_split_to_table and regexp_matches
    "from-007": [[2], [3], [5], [7], [11]],  # regexp_matches
}


def executable(record: dict[str, Any], sql: str) -> str:
    "SQL that a database without SQLite's date() can run; a record that is not named is left as it is."
    return re.sub(r"\bdate\(", "sqlite_date(", sql) if record["id"] in SQLITE_DATE else sql


def _plain(value: Any) -> Any:
    match value:
        case decimal.Decimal() | float(): return round(float(value), 6)
        case dt.date(): return value.isoformat()
    return value


def bag(rows: Any) -> collections.Counter:
    "Rows as they can be compared between databases: how often each is there."
    return collections.Counter(json.dumps([_plain(value) for value in row], default=str) for row in rows)
