"""Choosing and ordering rows: `--filter "size>100MiB"`, `--sort used:asc`, `--limit 10`.

KEY    the name of a column, in lower case
OP     =  !=  >  <  >=  <=
VALUE  a number, a size (100MiB), an age (7d; "used>7d" is: last used more than 7 days ago),
       yes or no; of a text, the exact one in any case
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from chatkv.errors import UsageError

Kind = Literal["text", "number", "size", "age", "flag"]
Keys = Mapping[str, tuple[str, Kind]]  # what a user writes -> a row's key and what it holds

_EXPRESSION = re.compile(r"\s*([a-z_]+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*")
_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdwy])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365.25 * 86_400}


def parse_age(text: str) -> float:
    """Seconds in "90s", "30m", "12h", "7d", "4w", "1y"; UsageError where that is no age."""
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise UsageError(f'"{text}" is no age: write it like 30d (s, m, h, d, w or y)')
    return float(found[1]) * _SECONDS[found[2]]


def parse_bytes(text: str) -> int:
    """Bytes in "20GiB"; UsageError where that is no size."""
    from chatkv_store.budget import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def select(
    rows: Sequence[Mapping[str, Any]],
    keys: Keys,
    filters: Sequence[str],
    sort: str | None,
    limit: int,
    now_s: float,
) -> list[Mapping[str, Any]]:
    """The rows that pass every filter, in the order of `sort`, at most `limit` (0: all)."""
    tests = [_test(expression, keys, now_s) for expression in filters]
    chosen = [row for row in rows if all(test(row) for test in tests)]
    if sort is not None:
        name, _, direction = sort.partition(":")
        if name not in keys or direction not in ("", "asc", "desc"):
            raise UsageError(
                f'--sort "{sort}": write KEY:asc or KEY:desc, KEY of {", ".join(keys)}'
            )
        key, kind = keys[name]
        # Unless asked otherwise: the largest first, the oldest first, texts from A.
        descending = direction == "desc" or (not direction and kind in ("number", "size"))
        chosen.sort(key=lambda row: _comparable(row[key]), reverse=descending)
    return chosen[:limit] if limit else chosen


def _test(expression: str, keys: Keys, now_s: float) -> Callable[[Mapping[str, Any]], bool]:
    found = _EXPRESSION.fullmatch(expression)
    if found is None or found[1] not in keys:
        raise UsageError(
            f'--filter "{expression}": write KEY OP VALUE, KEY of {", ".join(keys)}, '
            "OP of = != > < >= <="
        )
    name, operation, text = found.groups()
    key, kind = keys[name]
    value = _value(text, kind)
    compare = _OPERATIONS[operation]
    if kind == "age":
        return lambda row: compare(now_s - row[key], value)
    return lambda row: compare(_comparable(row[key]), value)


def _value(text: str, kind: Kind) -> Any:
    if kind == "age":
        return parse_age(text)
    if kind == "size":
        return parse_bytes(text)
    if kind == "flag":
        if text.lower() not in ("yes", "no", "true", "false"):
            raise UsageError(f'"{text}" is neither yes nor no')
        return text.lower() in ("yes", "true")
    if kind == "number":
        try:
            return float(text)
        except ValueError:
            raise UsageError(f'"{text}" is no number') from None
    return text.casefold()


def _comparable(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else "" if value is None else value
