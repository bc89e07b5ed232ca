"""What was typed before, walked through with the arrow keys. Nothing of it is written anywhere:
a conversation's own messages fill it when it is opened."""

from __future__ import annotations

from collections.abc import Iterable


class History:
    """Lines, the newest last, and the place where the user is in them. What was being typed when
    the walk began is the newest of them while it lasts."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._lines = list(lines)
        self._at: int | None = None  # None: not walking
        self._draft = ""

    def add(self, line: str) -> None:
        """Something was sent: the walk is over. The same line twice in a row counts once."""
        self._at = None
        if line.strip() and self._lines[-1:] != [line]:
            self._lines.append(line)

    def older(self, typed: str) -> str | None:
        """The line before, None where there is none. `typed` is what stands in the input."""
        if self._at is None:
            self._draft, self._at = typed, len(self._lines)
        if self._at == 0:
            return None
        self._at -= 1
        return self._lines[self._at]

    def newer(self) -> str | None:
        """The line after, at the end what was being typed; None where nobody is walking."""
        if self._at is None:
            return None
        self._at += 1
        if self._at < len(self._lines):
            return self._lines[self._at]
        self._at = None
        return self._draft
