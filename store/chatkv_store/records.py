"""What a conversation is made of: sessions, turns, and how each lies in its SQLite row.

A turn holds the exact token ids that were fed (`prompt_ids`: what this turn added in front of the
reply, never the history) and sampled (`reply_ids`). Turns form a tree; a session is a name for
one path through it, and its token log is prompt_ids + reply_ids of every turn on that path.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from chatkv_store.errors import StoreDamaged

TurnState = Literal["pending", "streaming", "done", "interrupted"]
UNFINISHED = ("pending", "streaming")


@dataclass(frozen=True)
class Session:
    """One conversation as it is listed; times are epoch seconds, `namespace` is hex."""

    id: str  # 26 characters, a ULID
    title: str
    created_at: float
    updated_at: float
    head: str | None  # id of the newest turn, None before the first
    model: str  # the model's display name
    namespace: str | None  # of its KV blocks, None until a model has been loaded for it
    settings: dict[str, Any]
    pinned: bool
    num_turns: int
    num_tokens: int  # length of the token log up to and including the head

    def to_json(self) -> dict[str, Any]:
        """What programs get of it, wherever sessions are listed."""
        return {
            "session": self.id,
            "title": self.title,
            "turns": self.num_turns,
            "tokens": self.num_tokens,
            "model": self.model,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "pinned": self.pinned,
        }


@dataclass(frozen=True)
class Turn:
    """What the user said, what was answered, and the exact tokens of both."""

    id: str
    session_id: str  # the session that owns it (others may share it)
    parent_id: str | None
    index: int  # the first turn is 1
    tokens_before: int  # length of the token log in front of this turn
    system_text: str | None  # first turn only
    user_text: str
    reply_text: str
    prompt_ids: array[int]  # u32
    reply_ids: array[int]  # u32
    state: TurnState
    finish_reason: str | None
    seed: int
    rng_draws_before: int
    rng_draws_after: int
    stats: dict[str, Any]
    created_at: float

    @property
    def num_tokens(self) -> int:
        """Tokens of this turn alone."""
        return len(self.prompt_ids) + len(self.reply_ids)

    def to_json(self) -> dict[str, Any]:
        """What a face shows of it."""
        return {
            "turn": self.index,
            "system": self.system_text,
            "user": self.user_text,
            "reply": self.reply_text,
            "state": self.state,
            "finish_reason": self.finish_reason,
            "stats": self.stats,
        }


@dataclass(frozen=True)
class Window:
    """What a turn was computed on where the whole log did not fit the model's context: the first
    num_kept tokens (the system prompt), and the turns from first_turn on (1 is the session's)."""

    num_kept: int
    first_turn: int

    def to_json(self) -> dict[str, int]:
        return {"num_kept": self.num_kept, "first_turn": self.first_turn}

    @classmethod
    def of(cls, stats: dict[str, Any]) -> Window | None:
        """As a turn's `stats` have it; None: the turn was computed on everything before it."""
        found = stats.get("window")
        return cls(found["num_kept"], found["first_turn"]) if found else None


@dataclass(frozen=True)
class SearchHit:
    """A session that matched; `turn_index` is the newest matching turn, None for its title."""

    session: Session
    turn_index: int | None
    snippet: str
    num_hits: int  # matching turns, the title counted as one


def ids_to_blob(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32; OverflowError for an id outside of u32."""
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def blob_to_ids(blob: bytes) -> array[int]:
    """The inverse of `ids_to_blob`."""
    words = array("I")
    words.frombytes(blob)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def storable(text: str) -> str:
    """`text` as SQLite can hold it: lone surrogates (undecodable input bytes) become `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def one_line(title: str) -> str:
    """A title as it is stored: whatever was typed, without line breaks."""
    return " ".join(storable(title).split())


def title_from(text: str, max_chars: int = 60) -> str:
    """A title out of the user's first words: one line, cut at a word where that is possible."""
    line = one_line(text)
    if len(line) <= max_chars:
        return line
    cut = line[: max_chars - 1]
    return cut[: cut.rfind(" ")] + "…" if " " in cut[max_chars // 2 :] else cut + "…"


# Length of a session's log: everything before its head, and the head's own ids at 4 bytes each.
SELECT_SESSION = """
    SELECT s.id, s.title, s.created_at, s.updated_at, s.head, s.model, s.namespace, s.settings,
           s.pinned, coalesce(t.position, 0),
           coalesce(t.tokens_before + (length(t.prompt_ids) + length(t.reply_ids)) / 4, 0)
    FROM sessions s LEFT JOIN turns t ON t.id = s.head
"""
TURN_COLUMNS = """
    id, session_id, parent_id, position, tokens_before, system_text, user_text, reply_text,
    prompt_ids, reply_ids, state, finish_reason, seed, rng_draws_before, rng_draws_after, stats,
    created_at
"""


def session_from_row(row: tuple[Any, ...]) -> Session:
    """A row of `SELECT_SESSION`; StoreDamaged where its content cannot be read."""
    *front, settings, pinned, num_turns, num_tokens = row
    with _damage_named("session", row[0]):
        fields = [*front, json.loads(settings), bool(pinned), num_turns, num_tokens]
    return Session(*fields)


def turn_from_row(row: tuple[Any, ...]) -> Turn:
    """A row of `TURN_COLUMNS`; StoreDamaged where its content cannot be read."""
    *texts, prompt, reply, state, reason, seed, before, after, stats, created_at = row
    with _damage_named("turn", row[0]):
        fields = [
            *texts,
            blob_to_ids(prompt),
            blob_to_ids(reply),
            state,
            reason,
            int(seed),  # kept as text: seeds of 64 bits and more do not fit SQLite's integers
            before,
            after,
            json.loads(stats),
            created_at,
        ]
    return Turn(*fields)


@contextmanager
def _damage_named(kind: str, row_id: str) -> Iterator[None]:
    """Bytes that SQLite handed out and that we never wrote."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise StoreDamaged(f"the record of {kind} {row_id} is damaged ({error})") from error


def fetch_turn(conn: sqlite3.Connection, turn_id: str) -> Turn | None:
    row = conn.execute(f"SELECT {TURN_COLUMNS} FROM turns WHERE id = ?", (turn_id,)).fetchone()
    return turn_from_row(row) if row else None
