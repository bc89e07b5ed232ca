"""Reading large JSON files value by value: no more than one value is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from chatkv.formats.told import NotUnderstood

CHUNK_CHARS = 1 << 20
# An error this near to the end of what was read may be gone when more has been.
_END_CHARS = 16


def values(file: TextIO, chunk_chars: int = CHUNK_CHARS) -> Iterator[Any]:
    """The elements of a list, or all values that stand one behind the other (JSON lines).

    Raises NotUnderstood where it is no JSON. Memory is that of the largest value; what was read in
    vain doubles, so that the whole takes time in proportion to the file.
    """
    decoder = json.JSONDecoder()
    text = file.read(chunk_chars).lstrip("\ufeff")
    at, in_list = _skip(text, 0, ""), False
    if text[at : at + 1] == "[":
        at, in_list = at + 1, True
    while True:
        at = _skip(text, at, ",")
        if in_list and text[at : at + 1] == "]":
            return
        more = ""
        if at < len(text):
            try:
                value, end = decoder.raw_decode(text, at)
                # A number that ends where the text does may go on; lists and objects cannot.
                if end < len(text) or isinstance(value, (dict, list)):
                    yield value
                    at = end
                    continue
            except json.JSONDecodeError as error:
                if not _may_go_on(error, text):
                    raise _no_json(error.msg, error.pos, text) from None
            except RecursionError:
                raise NotUnderstood("its JSON is nested too deeply") from None
        text, at = text[at:], 0
        more = file.read(max(chunk_chars, len(text)))
        if not more:
            break
        text += more
    if in_list:
        raise NotUnderstood("its JSON is cut short")
    if text:
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            raise _no_json(error.msg, error.pos, text) from None


def _may_go_on(error: json.JSONDecodeError, text: str) -> bool:
    return error.pos >= len(text) - _END_CHARS or error.msg.startswith("Unterminated string")


def _no_json(reason: str, position: int, text: str) -> NotUnderstood:
    near = text[max(0, position - 20) : position + 20]
    return NotUnderstood(f"its JSON is damaged near {near!r}: {reason}")


def _skip(text: str, at: int, also: str) -> int:
    while at < len(text) and (text[at] in " \t\r\n" or text[at] in also):
        at += 1
    return at
