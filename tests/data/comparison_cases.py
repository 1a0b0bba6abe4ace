"""Cases for the comparison of results: what a careful reader would say, with the reason.

A case has a kind, the two results (columns as a text of names, rows), the verdict, the beginning of the reason that a
mismatch must give, and why the verdict is right. Written by hand; nothing here was computed by the comparator.
"""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

NAN, INF = float("nan"), float("inf")
UTC = dt.UTC


@dataclass(frozen=True)
class Case:
    kind: str
    gold: tuple[str, list[tuple[Any, ...]]]  # names separated by blanks, rows
    pred: tuple[str, list[tuple[Any, ...]]]
    match: bool
    why: str
    reason: str = ""  # how the reason of a mismatch begins
    options: dict[str, Any] = field(default_factory=dict)
    lenient: bool | None = None  # the lenient verdict where it differs from `match`
    leniencies: tuple[str, ...] = ()


def one(kind: str, gold: Any, pred: Any, match: bool, why: str, **more: Any) -> Case:
    "A single value against a single value."
    return Case(kind, ("x", [(gold,)]), ("x", [(pred,)]), match, why, "" if match else "value: column 1, row 1", **more)


def rows(kind: str, gold: list[Any], pred: list[Any], match: bool, why: str, reason: str = "", **more: Any) -> Case:
    "Rows of one table shape, columns a b c …, on both sides."
    width = len((gold or pred)[0])
    names = " ".join("abcdefghij"[:width])
    return Case(kind, (names, gold), (names, pred), match, why, reason, more.pop("options", {}), **more)


def nest(depth: int, value: Any = 1) -> Any:
    "A value inside many lists."
    for _ in range(depth):
        value = [value]
    return value


DAY, NOON = dt.date(2020, 2, 29), dt.datetime(2020, 2, 29, 12)
MIDNIGHT = dt.datetime(2020, 2, 29)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")

CASES = [
    # integers
    one("integer", 1373, 1373, True, "equal"),
    one("integer", 1373, 1374, False, "counts are exact: one patient more is another answer"),
    one("integer", 1_000_000, 1_000_001, False, "a relative tolerance must not blur large counts"),
    one("integer", 2**53, 2**53 + 1, False, "64-bit ids differ in their last digit; floats would not see it"),
    one("integer", 9223372036854775807, 9223372036854775806, False, "the largest 64-bit id is exact"),
    one("integer", -5, 5, False, "the sign counts"),
    one("integer", 0, 0, True, "zero is zero"),
    one("integer", 2**70, 2**70, True, "larger than 64 bits (HUGEINT)"),
    one("integer", 2**70, 2**70 + 1, False, "larger than 64 bits and exact"),
    # floats
    one("float", 0.31, 0.31, True, "equal"),
    one("float", 0.31, 0.33, False, "a difference of two hundredths is not rounding"),
    one("float", 0.1 + 0.2, 0.3, True, "rounding noise of binary floats"),
    one("float", 1 / 3, 0.3333, True, "rounded to four digits, within the relative tolerance"),
    one("float", 1 / 3, 0.333, False, "rounded to three digits, outside of it"),
    one("float", 1e12, 1e12 * (1 + 1e-5), True, "relative tolerance grows with the value"),
    one("float", 0.0, 1e-7, True, "absolute tolerance near zero"),
    one("float", 0.0, 1e-5, False, "outside of the absolute tolerance"),
    one("float", 0.0, -0.0, True, "negative zero is zero"),
    one("float", -0.5, 0.5, False, "the sign counts"),
    one("float", INF, INF, True, "infinite on both sides"),
    one("float", INF, -INF, False, "opposite infinities"),
    one("float", INF, 1e308, False, "nothing finite is near infinity"),
    one("float", 100.0, 100.009, True, "within 1e-4 of the larger"),
    one("float", 100.0, 100.02, False, "beyond 1e-4 of the larger"),
    one("float", 1e-9, 2e-9, True, "both are zero within the absolute tolerance"),
    one("float", 5.0, 5.0004, False, "a stricter tolerance was asked for", options={"rtol": 1e-6}),
    one("float", 5.0, 5.4, True, "a looser tolerance was asked for", options={"rtol": 0.1}),
    one("float", 0.3, 0.1 + 0.2, False, "no tolerance was asked for", options={"rtol": 0.0, "atol": 0.0}),
    # integers against floats
    one("integer and float", 1373, 1373.0, True, "a count cast to a float"),
    one("integer and float", 5, 5.000000000000001, True, "rounding noise of a mean that is whole"),
    one("integer and float", 3, 3.1, False, "not the same number"),
    one("integer and float", 0, 1e-7, True, "zero within the absolute tolerance"),
    one("integer and float", 3, 3.0002, False, "a count of 3 is not 3.0002, however small the relative difference"),
    one("integer and float", 8507, 8507.5, False, "a concept id is exact on both sides, though half a unit is within 1e-4 of it"),
    one("integer and float", 40481087, 40481088.0, False, "another id, cast to a float"),
    one("integer and float", 8507.0, 8507.5, True, "two floats have the tolerance of floats"),
    one("integer and float", 10_000, 10_000.5, True, "a looser absolute tolerance was asked for", options={"atol": 0.5}),
    one("integer and float", 10_000, 10_001.0, False, "a looser relative tolerance is for floats only", options={"rtol": 0.1}),
    one("integer and float", 2**53 + 1, float(2**53), False, "the float cannot hold the id's last digit, so it is another"),
    one("integer and float", 2**60, float(2**60), True, "a power of two is exact as a float"),
    one("integer and float", 10**400, INF, False, "too large for a float is still finite"),
    rows("integer and float", [(8507,), (0.5,)], [(8507.5,), (0.5,)], False, "also where a column mixes both", "value:"),
    rows("integer and float", [(8507, 1), (8532, 2)], [(8532.0, 2), (8507.0, 1)], True, "ids cast to floats"),
    # decimals
    one("decimal", Decimal("0.10"), Decimal("0.1"), True, "trailing zeros do not change the value"),
    one("decimal", Decimal("0.1"), 0.1, True, "the same number in two types"),
    one("decimal", Decimal("12.345"), 12.345, True, "a decimal against the nearest float"),
    one("decimal", Decimal("12.3"), Decimal("12.4"), False, "a tenth is not rounding"),
    one("decimal", Decimal("1373"), 1373, True, "a whole decimal is an integer"),
    one("decimal", Decimal("40481087"), 40481088, False, "a whole decimal is exact, like an integer"),
    one("decimal", Decimal("33.3333"), Decimal("33.33"), True, "fractions have the tolerance of floats"),
    one("decimal", Decimal("NaN"), None, True, "a decimal NaN is NULL"),
    one("decimal", Decimal("1E+3"), 1000, True, "the notation does not matter"),
    one("decimal", Decimal("Infinity"), INF, True, "infinite on both sides"),
    one("decimal", Decimal("-Infinity"), INF, False, "opposite infinities"),
    one("decimal", Decimal("Infinity"), Decimal("1E+308"), False, "nothing finite is near infinity"),
    one("decimal", Decimal("1373.00"), 1373, True, "decimal places that are zero"),
    one("decimal", Decimal("8507.50"), 8507, False, "a count is exact against a decimal too"),
    one("decimal", Decimal("5.0000001"), 5, True, "within the absolute tolerance of a whole number"),
    one("decimal", Decimal("1E+400"), 10**400, True, "too large for a float, equal by value"),
    one("decimal", Decimal("1E+400"), Decimal("2E+400"), False, "too large for a float, and twice as large"),
    one("decimal", Decimal("1E+400"), INF, False, "too large for a float is not infinite"),
    one("decimal", Decimal("1E-400"), 0, True, "too small for a float is zero within the absolute tolerance"),
    one("decimal", Decimal("-0.00"), 0, True, "negative zero is zero"),
    one("decimal", Decimal("0.1000000000000000000001"), Decimal("0.1"), False, "no tolerance was asked for", options={"rtol": 0.0, "atol": 0.0}),
    rows("decimal", [(Decimal("1E+400"), 0.5), (Decimal("3E+400"), 0.5)], [(Decimal("3E+400"), 0.5), (Decimal("1.00001E+400"), 0.5)], True,
         "large decimals are matched within the tolerance"),
    # booleans
    one("boolean", True, True, True, "equal"),
    one("boolean", True, False, False, "opposites"),
    one("boolean", True, 1, False, "a flag is not a count"),
    one("boolean", 0, False, False, "nor is a count a flag"),
    one("boolean", False, None, False, "unknown is not false"),
    one("boolean", "true", True, False, "a text is not a flag"),
    one("boolean", 1.0, True, False, "nor is a float"),
    # text
    one("text", "Aspirin", "Aspirin", True, "equal"),
    one("text", "Aspirin", "aspirin", False, "upper and lower case differ", lenient=True, leniencies=("text form",)),
    one("text", "Aspirin", "Aspirin ", False, "a blank more", lenient=True, leniencies=("text form",)),
    one("text", "007", "7", False, "a code keeps its zeros", lenient=True, leniencies=("text form",)),
    one("text", "007", 7, False, "a code is not a number", lenient=True, leniencies=("text form",)),
    one("text", "1373", 1373, False, "a number written as text", lenient=True, leniencies=("text form",)),
    one("text", "", None, False, "an empty text is not NULL"),
    one("text", "NULL", None, False, "nor is the word"),
    one("text", "None", None, False, "nor is Python's word for it"),
    one("text", "nan", NAN, False, "nor is the text nan"),
    one("text", "Ménière", "Menie\u0300re", False, "other letters"),
    one("text", "caf\u00e9", "cafe\u0301", False, "text is compared as it is stored"),
    one("text", "0.10", "0.1", False, "text is exact", lenient=True, leniencies=("text form",)),
    one("text", "e10", "E10", False, "codes keep their case", lenient=True, leniencies=("text form",)),
    # NULL
    one("null", None, None, True, "NULL equals NULL in an answer"),
    one("null", None, NAN, True, "NaN is how some drivers write NULL"),
    one("null", NAN, NAN, True, "NaN on both sides"),
    one("null", None, 0, False, "no value is not zero"),
    one("null", NAN, 0.0, False, "nor is NaN"),
    one("null", 0, None, False, "zero is a value"),
    rows("null", [(1, None), (None, 1)], [(None, 1), (1, None)], True, "rows with NULLs are matched like others"),
    rows("null", [(1, None), (2, None)], [(1, None), (None, 2)], False, "a NULL in another column", "value:"),
    rows("null", [(None,), (None,)], [(None,)], False, "rows of NULL count too", "row count 2 ≠ 1", lenient=True, leniencies=("duplicate rows",)),
    rows("null", [(0.5, None), (None, 0.5)], [(None, 0.5), (0.5, NAN)], True, "NULL and NaN mixed"),
    # dates
    one("date", DAY, DAY, True, "equal"),
    one("date", DAY, MIDNIGHT, True, "a date is the timestamp at its midnight"),
    one("date", DAY, NOON, False, "noon is not midnight"),
    one("date", DAY, "2020-02-29", True, "ISO text of the date"),
    one("date", MIDNIGHT, "2020-02-29", True, "ISO text of a midnight"),
    one("date", NOON, "2020-02-29 12:00:00", True, "ISO text with a blank"),
    one("date", NOON, "2020-02-29T12:00", True, "ISO text with a T and no seconds"),
    one("date", DAY, "29.02.2020", False, "other ways to write a date are not ISO"),
    one("date", DAY, "2020-03-01", False, "the next day"),
    one("date", DAY, 20200229, False, "a number is not a date"),
    one("date", DAY, 2020, False, "a year is not a date"),
    one("date", "2020-02-29", "2020-02-29 00:00:00", False, "two texts are compared as texts"),
    one("date", NOON, dt.datetime(2020, 2, 29, 12, 0, 0, 1), False, "a microsecond later"),
    one("date", dt.datetime(2020, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))), dt.datetime(2020, 1, 1, tzinfo=UTC), True, "one instant"),
    one("date", dt.datetime(2020, 1, 1, tzinfo=UTC), dt.datetime(2020, 1, 1, 1, tzinfo=UTC), False, "another instant"),
    one("date", dt.time(10, 30), "10:30:00", True, "ISO text of a time of day"),
    rows("date", [(DAY, 1), (dt.date(2021, 1, 1), 2)], [("2021-01-01", 2), (MIDNIGHT, 1)], True, "forms mixed within a column"),
    one("date", None, "2020-02-30", False, "a day that does not exist is text"),
    # other types
    one("other", ID, str(ID), True, "a UUID is its text"),
    one("other", b"ab", bytearray(b"ab"), True, "the same bytes"),
    one("other", b"ab", "ab", False, "bytes are not text"),
    one("other", dt.timedelta(days=1), dt.timedelta(hours=24), True, "the same length of time"),
    # lists and structs
    one("nested", [1, 2], [1, 2], True, "equal lists"),
    one("nested", [1, 2], (1, 2), True, "a list from another driver"),
    one("nested", [1, 2], [2, 1], False, "lists are ordered"),
    one("nested", [1, 2], [1, 2, 2], False, "another length"),
    one("nested", [0.1 + 0.2], [0.3], True, "tolerance inside a list"),
    one("nested", [1, None], [1, NAN], True, "NULL inside a list"),
    one("nested", [], [], True, "empty lists"),
    one("nested", [], None, False, "an empty list is not NULL"),
    one("nested", [[1], [2]], [[1], [2]], True, "lists of lists"),
    one("nested", {"a": 1, "b": 2}, {"b": 2, "a": 1}, True, "the order of a struct's fields does not matter"),
    one("nested", {"a": 1}, {"b": 1}, False, "another field"),
    one("nested", {"a": 1}, {"a": 1, "b": None}, False, "a field more"),
    one("nested", {"a": [1.0]}, {"a": [1.00001]}, True, "tolerance deep inside"),
    one("nested", {"day": DAY}, {"day": "2020-02-29"}, True, "dates deep inside"),
    one("nested", [True], [1], False, "flags stay flags inside lists"),
    one("nested", "[1, 2]", [1, 2], False, "a printed list is a text"),
    one("nested", {}, {}, True, "empty structs"),
    one("nested", [10_000], [10_001], False, "integers are exact inside lists"),
    one("nested", [10_000], [10_000.5], False, "an integer is exact against a float inside a list"),
    one("nested", [[1], 2], [[1, 2]], False, "the same numbers in other brackets"),
    one("nested", [[], 1], [[1]], False, "an empty list before the number, not around it"),
    one("nested", {"a": {"b": [1]}}, {"a": {"b": [1]}}, True, "structs of structs"),
    one("nested", {"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}, False, "a field at another depth"),
    one("nested", nest(3000), nest(3000), True, "deeper than Python calls functions"),
    one("nested", nest(3000), nest(3001), False, "a bracket more, deeper than Python calls functions"),
    one("nested", nest(3000, {"a": 0.5}), nest(3000, {"a": 0.50001}), True, "tolerance at that depth"),
    rows("nested", [([1.0], 1), ([2.0], 2)], [([2.00001], 2), ([0.99999], 1)], True, "rows matched by nested values"),
    # bags of rows
    rows("rows", [(1,), (2,), (3,)], [(3,), (1,), (2,)], True, "no order was asked for"),
    rows("rows", [(1,), (1,), (2,)], [(1,), (2,), (2,)], False, "duplicates count", "", lenient=True, leniencies=("duplicate rows",)),
    rows("rows", [(1,), (1,)], [(1,)], False, "a missing duplicate", "row count 2 ≠ 1", lenient=True, leniencies=("duplicate rows",)),
    rows("rows", [(1,), (2,)], [(1,), (2,), (3,)], False, "a row too many", "row count 2 ≠ 3"),
    rows("rows", [(1,), (2,)], [], False, "no rows", "row count 2 ≠ 0"),
    rows("rows", [], [(1,)], False, "rows where there should be none", "row count 0 ≠ 1"),
    Case("rows", ("a", []), ("b", []), True, "both empty"),
    rows("rows", [("F", 1), ("M", 2)], [("F", 2), ("M", 1)], False, "values swapped between rows", "value: column 2"),
    rows("rows", [("F", 1, 5), ("M", 2, 6)], [("M", 2, 6), ("F", 1, 5)], True, "whole rows move together"),
    rows("rows", [(0.0,), (-0.9,)], [(0.0,), (0.9,)], True, "near values are matched: 0 with 0.9, -0.9 with 0", options={"atol": 1.0, "rtol": 0.0}),
    rows("rows", [(0.0,), (-0.9,)], [(0.9,), (1.8,)], False, "no matching exists", "value:", options={"atol": 1.0, "rtol": 0.0}),
    rows(
        "rows", [(1.0, 9.0), (1.00009, 1.0)], [(1.00005, 1.0), (0.99996, 9.0)], True,
        "sorted by the first column the rows would be paired crosswise",
    ),
    rows("rows", [(0.1 + 0.2, "a"), (0.3, "b")], [(0.3, "a"), (0.3, "b")], True, "tolerance beside exact keys"),
    rows("rows", [(i, i / 7) for i in range(30)], [(i, i / 7 + 1e-9) for i in reversed(range(30))], True, "many rows with noise"),
    rows("rows", [(i / 7, i / 3) for i in range(30)], [(i / 7, (i + 1) / 3) for i in range(30)], False, "many rows, one column shifted", "value:"),
    rows("rows", [(1, "a")] * 3 + [(2, "b")], [(1, "a")] * 2 + [(2, "b")] * 2, False, "the same rows, not as often", "duplicates", lenient=True,
         leniencies=("duplicate rows",)),
    rows("rows", [(5.0,), (5,)], [(5,), (5.0,)], True, "integers and floats mixed in a column"),
    rows("rows", [(10_000,), (0.5,)], [(10_001,), (0.5,)], False, "integers stay exact beside floats", "value:"),
    # order
    rows("order", [(1,), (2,)], [(1,), (2,)], True, "as asked", options={"ordered": True}),
    rows(
        "order", [(1,), (2,)], [(2,), (1,)], False, "the order was asked for", "row order", options={"ordered": True}, lenient=True,
        leniencies=("row order",),
    ),
    rows(
        "order", [("x", 9), ("y", 5), ("z", 5)], [("x", 9), ("z", 5), ("y", 5)], True, "rows that tie on the key are free",
        options={"ordered": True, "order_by_columns": ["b"]},
    ),
    rows(
        "order", [("x", 9), ("y", 5), ("z", 5)], [("y", 5), ("x", 9), ("z", 5)], False, "only rows that tie are free", "row order",
        options={"ordered": True, "order_by_columns": ["b"]}, lenient=True, leniencies=("row order",),
    ),
    rows(
        "order", [(1, "x"), (1, "y"), (2, "z")], [(1, "y"), (2, "z"), (1, "x")], False, "the row that is named is not one that ties",
        "row order: row 2 is (1, 'y'), the answer has (2, 'z')", options={"ordered": True, "order_by_columns": ["a"]}, lenient=True, leniencies=("row order",),
    ),
    rows(
        "order", [("x", 9), ("y", 5), ("z", 5)], [("x", 9), ("z", 5), ("y", 5)], False, "without a key every row has its place", "row order",
        options={"ordered": True}, lenient=True, leniencies=("row order",),
    ),
    rows(
        "order", [("x", 9), ("y", 5)], [("x", 9), ("y", 6)], False, "a wrong value is not a wrong order", "value: column 2",
        options={"ordered": True, "order_by_columns": ["b"]},
    ),
    Case(
        "order", ("name n", [("x", 9), ("y", 5), ("z", 5)]), ("cnt drug", [(9, "x"), (5, "z"), (5, "y")]), True,
        "ties are free also under other names", options={"ordered": True, "order_by_columns": ["n"]},
    ),
    rows(
        "order", [(1, None), (2, None)], [(2, None), (1, None)], True, "NULLs tie with each other",
        options={"ordered": True, "order_by_columns": ["b"]},
    ),
    rows(
        "order", [("x", 1.0), ("y", 1.0 + 1e-15)], [("y", 1.0), ("x", 1.0)], True, "keys that differ by rounding noise tie",
        options={"ordered": True, "order_by_columns": ["b"]},
    ),
    rows(
        "order", [("x", 1, 2), ("y", 1, 1)], [("y", 1, 1), ("x", 1, 2)], False, "two keys: the second decides", "row order",
        options={"ordered": True, "order_by_columns": ["b", "c"]}, lenient=True, leniencies=("row order",),
    ),
    rows("order", [(1,), (2,)], [(2,), (1,)], True, "a key means nothing when no order was asked for", options={"order_by_columns": ["a"]}),
    rows("order", [("x", 1), ("y", 2)], [("y", 2), ("x", 1)], False, "a key by position", "row order",
         options={"ordered": True, "order_by_columns": [1]}, lenient=True, leniencies=("row order",)),
    # columns by name
    Case("names", ("a b", [(1, 2)]), ("b a", [(2, 1)]), True, "the same names in another order"),
    Case("names", ("a b", [(1, 2)]), ("b a", [(1, 2)]), False, "names agree, so b is 2 and not 1", "value:"),
    Case("names", ("Name N", [("x", 2)]), ("n NAME", [(2, "x")]), True, "upper and lower case of names do not matter"),
    Case("names", ("men women", [(5, 7)]), ("women men", [(5, 7)]), False, "named counts are not interchangeable", "value:"),
    # columns by content
    Case("content", ("gender n", [("F", 5), ("M", 7)]), ("cnt sex", [(7, "M"), (5, "F")]), True, "other names, other order"),
    Case("content", ("a b", [(1, 2), (2, 1)]), ("p q", [(1, 1), (2, 2)]), False, "columns agree one by one, rows do not", "value:"),
    Case("content", ("a b c", [(1, 1, 2), (3, 4, 4)]), ("p q r", [(2, 1, 1), (4, 3, 4)]), True, "columns that share values"),
    Case("content", ("a a", [(1, 2)]), ("a a", [(2, 1)]), True, "a name used twice says nothing, content decides"),
    Case("content", ("a a b", [(1, 2, 3)]), ("b a a", [(3, 2, 1)]), True, "of three names one is clear"),
    Case("content", ("a a b", [(1, 2, 3)]), ("b a a", [(2, 3, 1)]), False, "the clear name must fit", ""),
    Case("content", ("a b", [(1, 2)]), ("a c", [(2, 1)]), True, "one name in common does not bind"),
    Case("content", ("x y", [(0.5, 1), (0.25, 2)]), ("u v", [(1, 0.50001), (2, 0.24999)]), True, "content with tolerance"),
    Case("content", ("x y", [(0.5, 1), (0.25, 2)]), ("u v", [(1, 0.5), (2, 0.26)]), False, "content beyond the tolerance", "value:"),
    Case("content", ("a b", [(10_000.0, 1)]), ("p q", [(1, 10_000)]), True, "an integer column for a float column"),
    Case("content", ("a b", [(10_000.5, 1)]), ("p q", [(1, 10_000)]), False, "an integer column that rounds a float column", "value:"),
    Case("content", ("a b", [(1, 0.5), (2, 0.25)]), ("p q", [(0.25, 2), (0.5, 1.0)]), True, "a column with integers and floats for one of integers"),
    Case("content", ("a b c", [(1.0, 2.0, 3.0), (4.0, 5.0, 9.0)]), ("p q r", [(9.00001, 4.0, 5.0), (3.0, 1.0, 2.00001)]), True, "floats with noise"),
    Case("content", ("a b", [(1.0, 2.0), (3.0, 4.0)]), ("p q", [(4.0, 1.0), (2.0, 3.0)]), False, "the sums of the columns fit, the rows do not", "value:"),
    Case("content", ("a b", [(True, 1)]), ("p q", [(1, True)]), True, "a flag finds the flag"),
    Case("content", ("a b", [(True, 1)]), ("p q", [(1, 1)]), False, "a count is no flag", "value:"),
    Case("content", ("d n", [(DAY, 1)]), ("p q", [(1, "2020-02-29")]), True, "a date finds its text"),
    Case("content", ("a", [(None,)]), ("b", [(NAN,)]), True, "NULL under another name"),
    Case("content", ("a b", [(ID, 1), (None, 2)]), ("p q", [(2, None), (1, str(ID))]), True, "a UUID finds its text, and NULL finds NULL"),
    Case("content", ("a b", [(Decimal("0.5"), "x"), (None, None)]), ("p q", [(None, None), ("x", 0.5)]), True, "decimals, texts and NULLs"),
    Case(
        "content", (" ".join(f"c{k}" for k in range(8)), [tuple((i + k) % 8 for k in range(8)) for i in range(8)]),
        (" ".join(f"d{k}" for k in range(8)), [tuple((i + 3 * k) % 8 for k in range(8)) for i in reversed(range(8))]), True,
        "eight columns, more than can be tried in every order",
    ),
    Case(
        "content", (" ".join(f"c{k}" for k in range(26)), [tuple(range(26))]),
        (" ".join(f"d{k}" for k in range(26)), [tuple(reversed(range(26)))]), True, "twenty-six columns",
    ),
    Case(
        "content", (" ".join(f"c{k}" for k in range(26)), [(0,) * 13 + (1,) * 13]),
        (" ".join(f"d{k}" for k in range(26)), [(0,) * 12 + (1,) * 14]), False, "twenty-six columns, one value too many", "value:",
    ),
    # numbers of columns
    Case("columns", ("n", [(5,)]), ("sex n", [("F", 5)]), False, "a column too many", "column count 1 ≠ 2", lenient=True, leniencies=("extra columns",)),
    Case("columns", ("sex n", [("F", 5)]), ("n", [(5,)]), False, "a column too few", "column count 2 ≠ 1", lenient=True, leniencies=("missing columns",)),
    Case("columns", ("n", [(5,)]), ("sex k", [("F", 6)]), False, "a column too many and a wrong value", "column count 1 ≠ 2"),
    Case("columns", ("n", [(5,)]), ("", [()]), False, "no columns at all", "column count 1 ≠ 0"),
    Case("columns", ("a b", [(1, 2), (1, 2)]), ("a b c", [(2, 1, 0)]), False, "columns and rows that do not fit", "column count 2 ≠ 3"),
    Case("columns", ("a b", [("X", 2), ("X", 2)]), ("b a c", [(2, "x", 0)]), False, "three leniencies at once, each named", "column count 2 ≠ 3",
         lenient=True, leniencies=("extra columns", "duplicate rows", "text form")),
    Case(
        "columns", ("a b", [(1, 2), (3, 4)]), ("x y z", [(9, 4, 3), (9, 2, 1)]), False, "a column too many under other names", "column count 2 ≠ 3",
        lenient=True, leniencies=("extra columns",),
    ),
    Case(
        "columns", ("a b", [(1, 2), (3, 4)]), ("x y z", [(9, 4, 1), (9, 2, 3)]), False, "the rows do not fit even without the extra column",
        "column count 2 ≠ 3",
    ),
    Case(
        "columns", ("n name", [(2, "A"), (1, "B")]), ("name", [("a",), ("b",)]), False, "a column too few, in lower case", "column count 2 ≠ 1",
        lenient=True, leniencies=("missing columns", "text form"),
    ),
]
