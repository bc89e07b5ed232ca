"""Other libraries' errors, and names out of files, as part of our one line."""

from __future__ import annotations

_MAX_CHARS = 300


def one_line(error: object) -> str:
    """`error`'s text without its line breaks and control characters, shortened where it is long;
    the name of its type where it has no text."""
    words = "".join(c if c.isprintable() else " " for c in str(error)).split()
    text = " ".join(words) or type(error).__name__
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"
