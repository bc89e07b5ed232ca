"""From what a person types (id, prefix or title) to one session, or a line that helps them on."""

from __future__ import annotations

import sqlite3
from itertools import pairwise

from chatkv_store.errors import SessionAmbiguous, SessionNotFound
from chatkv_store.records import SELECT_SESSION, Session, one_line, session_from_row, title_from
from chatkv_store.ulid import ALPHABET

MIN_PREFIX_CHARS = 4
_NAMED = 3  # candidates that an error line names
_TITLE_CHARS = 32  # of each of their titles


def by_id(conn: sqlite3.Connection, session_id: str) -> Session:
    """The session with exactly this id; SessionNotFound where it is gone."""
    row = conn.execute(f"{SELECT_SESSION} WHERE s.id = ?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(f"there is no session {session_id}")
    return session_from_row(row)


def session(conn: sqlite3.Connection, ref: str) -> Session:
    """The one session that `ref` names: full id, else exact title, else unique id prefix."""
    ref = one_line(ref)
    prefix = ref.lower()
    found = _select(conn, "s.id = ?", prefix) or _select(conn, "s.title = ?", ref)
    if not found and len(prefix) >= MIN_PREFIX_CHARS and set(prefix) <= set(ALPHABET):
        # "{" follows "z": every id that begins with the prefix lies in this range of the index.
        found = _select(conn, "s.id >= ? AND s.id < ?", prefix, prefix + "{")
    if len(found) == 1:
        return found[0]
    if found:
        raise SessionAmbiguous(
            f'"{ref}" names {len(found)} sessions: {_named(conn, found)}; give more of the id'
        )
    raise SessionNotFound(_nothing_found(conn, ref))


def short_ids(conn: sqlite3.Connection, min_chars: int = 8) -> dict[str, str]:
    """Every id -> its shortest prefix that no other id has.

    An id begins with its time, 8 characters of it being about a second: shorter prefixes would
    often be unique today and ambiguous tomorrow.
    """
    ids = [row[0] for row in conn.execute("SELECT id FROM sessions ORDER BY id")]
    shared = [_common_chars(*pair) for pair in pairwise(ids)]  # sorted: neighbours are closest
    return {
        one: one[: max(min_chars, before + 1, after + 1)]
        for one, before, after in zip(ids, [0, *shared], [*shared, 0], strict=False)
    }


def _common_chars(one: str, other: str) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), 0)


def _select(conn: sqlite3.Connection, condition: str, *values: str) -> list[Session]:
    rows = conn.execute(f"{SELECT_SESSION} WHERE {condition} ORDER BY s.touched DESC", values)
    return [session_from_row(row) for row in rows]


def _nothing_found(conn: sqlite3.Connection, ref: str) -> str:
    newest = _select(conn, "s.touched > 0")
    if not newest:
        return f'there is no session "{ref}": no conversation has been saved yet'
    hint = ""
    if 0 < len(ref) < MIN_PREFIX_CHARS:
        hint = f" (a prefix of an id needs at least {MIN_PREFIX_CHARS} characters)"
    return f'there is no session "{ref}"{hint}; the last ones are {_named(conn, newest)}'


def _named(conn: sqlite3.Connection, sessions: list[Session]) -> str:
    """Some of the sessions, each by the id that one has to type and the front of its title."""
    short = short_ids(conn)
    listed = ", ".join(
        f'{short[one.id]} "{title_from(one.title, _TITLE_CHARS)}"' for one in sessions[:_NAMED]
    )
    rest = len(sessions) - _NAMED
    return listed if rest <= 0 else f"{listed} and {rest} more"
