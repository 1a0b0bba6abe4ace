"""A row-by-row interpreter of FunSQL over lists, written only to check the compiler against.

It knows nothing of SQL: a row is a dict of values and records, and carries its group or window with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from healthrag.funsql.columns import label
from healthrag.funsql.nodes import AggNode, FunNode, GetNode, LitNode, Node, SortNode
from healthrag.funsql.tabular import (
    AppendNode, AsNode, DefineNode, FromNode, GroupNode, JoinNode, LimitNode, OrderNode, PartitionNode, SelectNode, WhereNode, WithNode,
)


@dataclass(frozen=True, eq=False)
class Row:
    "One row: values, records, and what aggregates speak of."
    fields: dict[str, Any] = field(default_factory=dict)
    group: list[Row] | None = None
    window: list[Row] | None = None  # the partition, in order; this row is in it
    base: Row | None = None  # this row as the partition knows it
    absent: bool = False  # stands for a missing partner


def run(node: Node | None, tables: dict[str, list[Row]]) -> list[Row]:
    "Produce the rows of a query."
    match node:
        case None: return [Row()]
        case FromNode(): return list(tables[node.source]) if node.source is not None else [Row()]
        case WithNode():
            for arg in node.args:
                tables = {**tables, label(arg): run(arg.over, tables)}
            return run(node.over, tables)
    rows = run(node.over, tables)
    match node:
        case SelectNode(): return [Row({label(arg): value(arg, row, tables) for arg in node.args}) for row in rows]
        case DefineNode(): return [replace(row, fields={**row.fields, **{label(arg): value(arg, row, tables) for arg in node.args}}) for row in rows]
        case WhereNode(): return [row for row in rows if value(node.condition, row, tables) is True]
        case AsNode(): return [Row({node.name: row}) for row in rows]
        case LimitNode():
            start = node.offset or 0
            return rows[start:] if node.limit is None else rows[start : start + node.limit]
        case OrderNode(): return sorted(rows, key=functools.cmp_to_key(lambda a, b: compare(node.by, a, b, tables)))
        case GroupNode(): return grouped(node, rows, tables)
        case PartitionNode(): return partitioned(node, rows, tables)
        case JoinNode(): return joined(node, rows, tables)
        case AppendNode():
            parts = [rows, *(run(arg, tables) for arg in node.args)]
            shared = node_columns(parts)
            return [Row({name: row.fields[name] for name in shared}) for part in parts for row in part]
    raise NotImplementedError(type(node))


def node_columns(parts: list[list[Row]]) -> list[str]:
    "List the columns that all non-empty parts have."
    filled = [part[0].fields for part in parts if part]
    return [name for name in filled[0] if all(name in other for other in filled)] if filled else []


def grouped(node: GroupNode, rows: list[Row], tables: Any) -> list[Row]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(value(key, row, tables) for key in node.by), []).append(row)
    if not node.by:
        return [Row({}, group=rows)]
    return [Row(dict(zip(map(label, node.by), keys, strict=True)), group=members) for keys, members in groups.items()]


def partitioned(node: PartitionNode, rows: list[Row], tables: Any) -> list[Row]:
    parts: dict[tuple, list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(value(key, row, tables) for key in node.by), []).append(row)
    out = []
    for members in parts.values():
        ordered = sorted(members, key=functools.cmp_to_key(lambda a, b: compare(node.order_by, a, b, tables)))
        out += [replace(row, window=ordered, base=row) for row in ordered]
    return out


def joined(node: JoinNode, rows: list[Row], tables: Any) -> list[Row]:
    others, out, matched = run(node.joinee, tables), [], set()
    shape = others[0] if others else None
    for row in rows:
        found = False
        for position, other in enumerate(others):
            both = Row({**row.fields, **other.fields}, group=other.group or row.group)
            if value(node.on, both, tables) is True:
                out.append(both)
                matched.add(position)
                found = True
        if node.left and not found:
            missing = empty_like(shape) if shape is not None else Row({label(node.joinee): Row(absent=True)}, absent=True)
            out.append(Row({**row.fields, **missing.fields}, group=row.group))
    return out


def empty_like(row: Row) -> Row:
    "Make the row that stands for a missing partner."
    return Row({name: empty_like(item) if isinstance(item, Row) else None for name, item in row.fields.items()}, absent=True)


def compare(keys: Any, one: Row, two: Row, tables: Any) -> int:
    "Order two rows; missing values come last."
    for key in keys:
        down = isinstance(key, SortNode) and key.direction == "desc"
        inner = key.over if isinstance(key, SortNode) else key
        a, b = value(inner, one, tables), value(inner, two, tables)
        if a == b:
            continue
        if a is None or b is None:
            return 1 if a is None else -1
        return (-1 if a < b else 1) * (-1 if down else 1)
    return 0


def value(node: Node, row: Row, tables: Any) -> Any:
    "Compute an expression for a row."
    match node:
        case LitNode(): return node.value
        case AsNode(): return value(node.over, row, tables)
        case GetNode():
            found: Any = row
            for name in node._path:
                found = None if found.absent and name not in found.fields else found.fields[name]
                if found is None:
                    return None
            return found
        case AggNode(): return aggregate(node, row.fields[node.over._path[0]] if node.over is not None else row, tables)
        case FunNode(): return function(node, row, tables)
    rows = run(node, tables)
    return next(iter(rows[0].fields.values())) if rows else None


def aggregate(node: AggNode, row: Row, tables: Any) -> Any:
    if row.absent:
        return None
    rows = row.window if row.window is not None else row.group
    assert rows is not None
    if node.name == "row_number":
        return next(position for position, item in enumerate(rows, 1) if item is row.base)
    if node.filter is not None:
        rows = [item for item in rows if value(node.filter, item, tables) is True]
    if node.name == "count" and not node.args:
        return len(rows)
    found = [item for item in (value(node.args[0], item, tables) for item in rows) if item is not None]
    match node.name:
        case "count": return len(found)
        case "count_distinct": return len(set(found))
        case "sum": return sum(found) if found else None
        case "min": return min(found, default=None)
        case "max": return max(found, default=None)
    raise NotImplementedError(node.name)


def function(node: FunNode, row: Row, tables: Any) -> Any:
    "Compute a function, with SQL's logic of missing values."
    if node.name == "case":
        for position in range(0, len(node.args) - 1, 2):
            if value(node.args[position], row, tables) is True:
                return value(node.args[position + 1], row, tables)
        return value(node.args[-1], row, tables) if len(node.args) % 2 else None
    if node.name == "in" and len(node.args) == 2 and node.args[1].tabular:
        options = [next(iter(item.fields.values())) for item in run(node.args[1], tables)]
        return member(value(node.args[0], row, tables), options)
    args = [value(arg, row, tables) for arg in node.args]
    match node.name:
        case "and": return False if False in args else None if None in args else True
        case "or": return True if True in args else None if None in args else False
        case "is_null": return args[0] is None
        case "is_not_null": return args[0] is not None
        case "coalesce": return next((arg for arg in args if arg is not None), None)
        case "in": return member(args[0], args[1:])
        case "between":
            ends = [None if None in pair else pair[0] <= pair[1] for pair in ((args[1], args[0]), (args[0], args[2]))]
            return False if False in ends else None if None in ends else True
    if None in args:
        return None
    match node.name:
        case "not": return not args[0]
        case "=": return args[0] == args[1]
        case "<>": return args[0] != args[1]
        case "<": return args[0] < args[1]
        case "<=": return args[0] <= args[1]
        case ">": return args[0] > args[1]
        case ">=": return args[0] >= args[1]
        case "+": return args[0] + args[1]
        case "-": return args[0] - args[1] if len(args) == 2 else -args[0]
        case "*": return args[0] * args[1]
    raise NotImplementedError(node.name)


def member(item: Any, options: list[Any]) -> Any:
    "Test membership with SQL's logic."
    if not options:
        return False
    if item is None:
        return None
    return True if item in [option for option in options if option is not None] else None if None in options else False
