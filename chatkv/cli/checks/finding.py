"""One thing that a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

# note: worth knowing, nothing to do; problem: something does not work, or will soon not.
State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """`advice`: what to do about it, in one line."""

    area: str
    state: State
    text: str
    advice: str = ""


Check = Callable[[], Iterator[Finding]]


def ok(area: str, text: str) -> Finding:
    return Finding(area, "ok", text)


def note(area: str, text: str, advice: str = "") -> Finding:
    return Finding(area, "note", text, advice)


def problem(area: str, text: str, advice: str) -> Finding:
    return Finding(area, "problem", text, advice)
