"""A conversation from plain values (export.py) back into rows: checked first, then in one piece."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from chatkv_store import sessions
from chatkv_store.errors import StoreDamaged, StoreVersionError
from chatkv_store.export import EXPORT_FORMAT, EXPORT_VERSION
from chatkv_store.records import TURN_COLUMNS, ids_to_blob, one_line, storable
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


def insert(conn: sqlite3.Connection, values: dict[str, Any], now_s: float) -> str:
    """Insert a checked conversation as the session used last; returns its id.

    Ids are kept, unless one of them is taken or no id of ours: then all are new.
    """
    ids = [values["session"], *(turn["id"] for turn in values["turns"])]
    if not _are_free(conn, ids, now_s):
        ids = _new_ids(conn, len(ids), now_s)
    session_id: str = ids[0]
    turn_ids = ids[1:]
    conn.execute(
        "INSERT INTO sessions (id, title, created_at, updated_at, touched, head, model, "
        "namespace, settings, pinned) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, 0)",
        (
            session_id,
            one_line(values["title"]),
            values["created_at"],
            now_s,
            turn_ids[-1] if turn_ids else None,
            storable(values["model"]),
            values["namespace"],
            json.dumps(values["settings"]),
        ),
    )
    parent, tokens_before = None, 0
    for index, (turn_id, turn) in enumerate(zip(turn_ids, values["turns"], strict=True), start=1):
        _insert_turn(conn, turn_id, turn, session_id, parent, index, tokens_before)
        parent = turn_id
        tokens_before += len(turn["prompt_ids"]) + len(turn["reply_ids"])
    sessions.touch(conn, session_id, now_s)
    return session_id


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
    (newest,) = conn.execute(
        "SELECT max(id) FROM (SELECT id FROM sessions UNION ALL SELECT id FROM turns)"
    ).fetchone()
    ids: list[str] = []
    for _ in range(count):
        newest = ulid_after(newest, now_s)
        ids.append(newest)
    return ids


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
