"""A conversation from plain values (export.py) back into rows: checked first, then in one piece."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from chatkv_store import sessions
from chatkv_store.errors import StoreDamaged, StoreVersionError
from chatkv_store.export import EXPORT_FORMAT, EXPORT_VERSION
from chatkv_store.records import TURN_COLUMNS, ids_to_blob, one_line, storable, title_from
from chatkv_store.ulid import decode, ulid_after

# Ids are sorted by the time they begin with, and new ones always come after the greatest.
_MAX_AHEAD_S = 86_400.0


def check(values: dict[str, Any], origin: str) -> None:
    """Raise StoreDamaged, or StoreVersionError, unless `values` are what an export writes."""

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise StoreDamaged(f"{origin} does not verify: {what}")

    expect(values.get("format") == EXPORT_FORMAT, "it is no conversation")
    version = values.get("version")
    expect(isinstance(version, int), "its format has no number")
    if values["version"] > EXPORT_VERSION:
        raise StoreVersionError(
            f"{origin}: a conversation of format {version}, this program knows {EXPORT_VERSION}; "
            "update chatkv"
        )
    for name, kind in _SESSION_FIELDS.items():
        expect(isinstance(values.get(name), kind), f"its {name} is {values.get(name)!r:.40}")
    for number, turn in enumerate(values["turns"], start=1):
        expect(isinstance(turn, dict), f"turn {number} is no turn")
        for name, kind in _TURN_FIELDS.items():
            found = turn.get(name)
            expect(isinstance(found, kind), f"{name} of turn {number} is {found!r:.40}")
        for name in ("prompt_ids", "reply_ids"):
            good = all(type(token) is int and 0 <= token < 1 << 32 for token in turn[name])
            expect(good, f"{name} of turn {number} are no token ids")
        for name in ("rng_draws_before", "rng_draws_after"):
            expect(0 <= turn[name] < 1 << 63, f"{name} of turn {number} is out of range")
    _check_tree(values, expect)


def _check_tree(values: dict[str, Any], expect: Callable[[bool, str], None]) -> None:
    """Turns that say what they follow come behind it; the others follow each other."""
    seen: set[str | None] = {None}
    for number, turn in enumerate(values["turns"], start=1):
        expect(isinstance(turn.get("parent"), _TEXT_OR_NONE), f"parent of turn {number} is no id")
        expect(turn.get("parent") in seen or "parent" not in turn, f"turn {number} follows nothing")
        expect(turn["id"] not in seen, f"turn {number} has the id of another")
        seen.add(turn["id"])
    expect(isinstance(values.get("head"), _TEXT_OR_NONE), "its head is no id")
    expect(values.get("head") in seen, "it ends with a turn that it does not hold")


def insert(conn: sqlite3.Connection, values: dict[str, Any], now_s: float) -> str:
    """Insert a checked conversation as the session used last; returns its id.

    Ids are kept, unless one of them is taken or no id of ours: then all are new. A turn follows its
    "parent", by default the turn before it; the session ends with "head", by default the last one.
    """
    ids = [values["session"], *(turn["id"] for turn in values["turns"])]
    if not _are_free(conn, ids, now_s):
        ids = _new_ids(conn, len(ids), now_s)
    session_id: str = ids[0]
    places = dict(zip((turn["id"] for turn in values["turns"]), ids[1:], strict=True))
    head = places.get(values["head"]) if "head" in values else (ids[-1] if places else None)
    first_text = values["turns"][0]["user"] if places else ""
    conn.execute(
        "INSERT INTO sessions (id, title, created_at, updated_at, touched, head, model, "
        "namespace, settings, pinned) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, 0)",
        (
            session_id,
            one_line(values["title"]) or title_from(first_text),
            values["created_at"],
            now_s,
            head,
            storable(values["model"]),
            values["namespace"],
            json.dumps(values["settings"]),
        ),
    )
    before: dict[str | None, tuple[int, int]] = {None: (0, 0)}  # turns and tokens up to each one
    last: str | None = None
    for turn in values["turns"]:
        turn_id = places[turn["id"]]
        parent = places.get(turn["parent"]) if "parent" in turn else last
        index, num_tokens = before[parent]
        _insert_turn(conn, turn_id, turn, session_id, parent, index + 1, num_tokens)
        own = len(turn["prompt_ids"]) + len(turn["reply_ids"])
        before[turn_id], last = (index + 1, num_tokens + own), turn_id
    sessions.touch(conn, session_id, now_s)
    return session_id


def sources(conn: sqlite3.Connection) -> dict[str, str]:
    """Where sessions were imported from -> the session; those held here, by their own id."""
    rows = conn.execute("SELECT id, settings FROM sessions ORDER BY seq").fetchall()
    found = {f"chatkv:{session_id}": session_id for session_id, _ in rows}
    for session_id, settings in rows:
        if '"source"' in settings:
            source = json.loads(settings).get("source")
            if isinstance(source, str):
                found[source] = session_id
    return found


def order_by_use(conn: sqlite3.Connection, used_at: dict[str, float]) -> None:
    """Let imported sessions stand where their last use, in epoch seconds, puts them among the
    others, whose order stays."""
    rows = conn.execute("SELECT id, updated_at FROM sessions ORDER BY touched").fetchall()
    new = sorted(used_at, key=lambda session_id: used_at[session_id])
    ordered: list[str] = []
    for session_id, updated_at in rows:
        if session_id not in used_at:
            while new and used_at[new[0]] < updated_at:
                ordered.append(new.pop(0))
            ordered.append(session_id)
    conn.executemany(
        "UPDATE sessions SET touched = ? WHERE id = ?",
        [(place, session_id) for place, session_id in enumerate([*ordered, *new], start=1)],
    )
    conn.executemany(
        "UPDATE sessions SET updated_at = ? WHERE id = ?",
        [(time, session_id) for session_id, time in used_at.items()],
    )


def _insert_turn(
    conn: sqlite3.Connection,
    turn_id: str,
    turn: dict[str, Any],
    session_id: str,
    parent: str | None,
    index: int,
    tokens_before: int,
) -> None:
    is_done = turn["state"] == "done"
    conn.execute(
        f"INSERT INTO turns ({TURN_COLUMNS}) VALUES ({', '.join('?' * 17)})",
        (
            turn_id,
            session_id,
            parent,
            index,
            tokens_before,
            None if turn["system"] is None else storable(turn["system"]),
            storable(turn["user"]),
            storable(turn["reply"]),
            ids_to_blob(turn["prompt_ids"]),
            ids_to_blob(turn["reply_ids"]),
            "done" if is_done else "interrupted",  # nobody is writing it here
            turn["finish_reason"] if is_done else "interrupted",
            str(turn["seed"]),
            turn["rng_draws_before"],
            turn["rng_draws_after"],
            json.dumps(turn["stats"]),
            turn["created_at"],
        ),
    )


def _are_free(conn: sqlite3.Connection, ids: list[str], now_s: float) -> bool:
    latest = decode(ulid_after(None, now_s + _MAX_AHEAD_S))
    try:
        if len(set(ids)) < len(ids) or any(decode(one) > latest for one in ids):
            return False
    except ValueError:
        return False
    (session,) = conn.execute("SELECT count(*) FROM sessions WHERE id = ?", ids[:1]).fetchone()
    turns = sum(
        conn.execute("SELECT count(*) FROM turns WHERE id = ?", (one,)).fetchone()[0]
        for one in ids[1:]
    )
    return not session and not turns


def _new_ids(conn: sqlite3.Connection, count: int, now_s: float) -> list[str]:
    # Each by its index: the greatest of both at once would look at every row.
    pairs = [conn.execute(f"SELECT max(id) FROM {table}").fetchone() for table in _WITH_IDS]
    newest = max((one for (one,) in pairs if one is not None), default=None)
    ids: list[str] = []
    for _ in range(count):
        newest = ulid_after(newest, now_s)
        ids.append(newest)
    return ids


_WITH_IDS = ("sessions", "turns")
_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))
_SESSION_FIELDS: dict[str, Any] = {
    "session": str,
    "title": str,
    "model": str,
    "namespace": _TEXT_OR_NONE,
    "created_at": _NUMBER,
    "settings": dict,
    "turns": list,
}
_TURN_FIELDS: dict[str, Any] = {
    "id": str,
    "created_at": _NUMBER,
    "state": str,
    "finish_reason": _TEXT_OR_NONE,
    "system": _TEXT_OR_NONE,
    "user": str,
    "reply": str,
    "prompt_ids": list,
    "reply_ids": list,
    "seed": int,
    "rng_draws_before": int,
    "rng_draws_after": int,
    "stats": dict,
}
