"""Any file of conversations: what kind it is, and the conversations in it, one after the other."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, TextIO

from chatkv.formats import chatgpt, json_stream, llm_logs, markdown, messages, own_json
from chatkv.formats.told import NotUnderstood, Told

Kind = Literal["auto", "markdown", "json", "messages", "chatgpt", "llm"]
MAX_MARKDOWN_BYTES = 1 << 28
# An export that is large comes in pieces: conversations-000.json, conversations-001.json, ...
_CHATGPT_FILE = re.compile(r"(.*/)?conversations(-\d+)?\.json")


@dataclass(frozen=True)
class Found:
    """One conversation of a file: as our JSON's values, once it is known when; or why not."""

    values: Callable[[float], dict[str, Any]]
    left_out: dict[str, int]
    refusal: str = ""
    title: str = ""
    is_empty: bool = False  # nothing was said in it


def conversations(path: Path, kind: Kind = "auto") -> Iterator[Found]:
    """Every conversation in a file. A file that is not understood raises NotUnderstood, or OSError
    where it cannot be read; a conversation in it that is not, is told in its place."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 12)
        if start.startswith(b"SQLite format 3\0"):
            if kind not in ("auto", "llm"):
                raise NotUnderstood("this is a database, as llm keeps its logs in")
            yield from map(_of_told, llm_logs.of_database(path))
        elif start.startswith(b"PK\x03\x04"):
            yield from _in_zip(path, kind)
        elif kind == "markdown" or (kind == "auto" and not _begins_json(start)):
            yield _of_told(_markdown(path))
        else:
            with path.open(encoding="utf-8", newline="") as text:
                yield from _in_json(text, kind)
    except UnicodeDecodeError as error:
        raise NotUnderstood(f"it is no text in UTF-8 (byte {error.start})") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise NotUnderstood(f"its zip file is damaged: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise NotUnderstood(
            f"its data are not what they should be ({type(error).__name__})"
        ) from None


def _markdown(path: Path) -> Told:
    if path.stat().st_size > MAX_MARKDOWN_BYTES:
        raise NotUnderstood("it is too large for one conversation in Markdown")
    with path.open(encoding="utf-8", newline="") as file:
        return markdown.read(file.read())


def _in_zip(path: Path, kind: Kind) -> Iterator[Found]:
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if _CHATGPT_FILE.fullmatch(name))
        if "manifest.json" in archive.namelist() and "conversation.json" in archive.namelist():
            raise NotUnderstood("this is a conversation with its KV: chatkv cache import takes it")
        if not names or kind not in ("auto", "chatgpt"):
            raise NotUnderstood("this zip file holds no conversations.json")
        for name in names:
            with archive.open(name) as member, _text(member) as text:
                yield from _in_json(text, "chatgpt")


@contextmanager
def _text(member: IO[bytes]) -> Iterator[io.TextIOWrapper]:
    with io.TextIOWrapper(member, encoding="utf-8", newline="") as text:
        yield text


def _begins_json(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def _in_json(file: TextIO, kind: Kind) -> Iterator[Found]:
    values = json_stream.values(file)
    first = next(values, None)
    if first is None:
        if kind == "auto":
            raise NotUnderstood("there is no conversation in it")
        return
    found = _kind_of(first)
    if found is None or kind not in ("auto", found):
        raise NotUnderstood(
            "it is none of the files that are understood here: Markdown, JSON of chatkv, lists of "
            "messages, ChatGPT's export, logs of llm"
        )
    every = chain([first], values)
    if found == "llm":
        yield from map(_of_told, llm_logs.of_rows(every))
    elif messages.is_message(first):
        yield _of_told(messages.read(list(every)))
    else:
        for value in every:
            yield _one(value, found)


def _kind_of(value: Any) -> Kind | None:
    if own_json.is_one(value):
        return "json"
    if chatgpt.is_one(value):
        return "chatgpt"
    if llm_logs.is_row(value):
        return "llm"
    if messages.is_message(value) or messages.is_one(value):
        return "messages"
    return None


def _one(value: Any, kind: Kind) -> Found:
    """A conversation that a file of `kind` holds, whatever it turns out to be."""
    title = str(value.get("title") or "") if isinstance(value, dict) else ""
    try:
        if _kind_of(value) != kind:
            raise NotUnderstood("it is no conversation like the one before it")
        if kind == "json":
            is_empty = not own_json.whole(value, 0.0)["turns"]
            return Found(lambda now_s: own_json.whole(value, now_s), {}, "", title, is_empty)
        if kind == "chatgpt":
            return _of_told(chatgpt.read(value))
        return _of_told(messages.read(value["messages"], title))
    except NotUnderstood as error:
        return Found(lambda now_s: {}, {}, str(error), title)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        reason = f"its data are not what they should be ({type(error).__name__})"
        return Found(lambda now_s: {}, {}, reason, title)


def _of_told(told: Told) -> Found:
    if not told.turns:
        return Found(lambda now_s: {}, {}, title=told.title, is_empty=True)
    return Found(told.as_values, told.left_out, title=told.title)
