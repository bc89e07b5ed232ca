"""Large pastes, folded: the input shows one short line for each, and the message holds all of it.

An input of a megabyte would take seconds to lay out, and nobody could read it there.
"""

from __future__ import annotations

import re

from chatkv.words import count, plural, size

# What still fits an input: more than a screen of it is in the way.
MAX_CHARS, MAX_LINES = 2_000, 20


class Folds:
    """The pastes behind the marks in one input."""

    def __init__(self) -> None:
        self._pasted: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """What is put into the input for a paste: itself where it is small, else a mark."""
        lines = text.count("\n") + 1
        if len(text) <= MAX_CHARS and lines <= MAX_LINES:
            return text
        number = len(self._pasted) + 1
        what = f"{size(len(text.encode('utf-8', 'replace')))}, {plural(lines, 'line')}"
        mark = f"[paste {count(number)}: {what}]"
        self._pasted[mark] = text
        return mark

    def unfold(self, typed: str) -> str:
        """`typed` with every mark replaced by what it stands for."""
        if not self._pasted:
            return typed
        marks = "|".join(map(re.escape, self._pasted))
        return re.sub(marks, lambda found: self._pasted[found[0]], typed)

    def mark_before(self, line: str, column: int) -> str | None:
        """The mark that ends at `column` of `line`, which a backspace there takes away whole."""
        before = line[:column]
        return next((mark for mark in self._pasted if before.endswith(mark)), None)

    def clear(self) -> None:
        self._pasted.clear()
