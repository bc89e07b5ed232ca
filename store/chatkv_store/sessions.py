"""How a session's row is written; each function runs inside the caller's write transaction."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from chatkv_store.records import one_line, storable
from chatkv_store.ulid import ulid_after


def insert(
    conn: sqlite3.Connection,
    *,
    title: str,
    model: str,
    namespace: str | None,
    settings: dict[str, Any],
    pinned: bool,
    head: str | None,
    now_s: float,
    session_id: str | None = None,
) -> str:
    """A new session that ends at `head` and is the one used last; returns its id (None: a new
    one, greater than all others)."""
    if session_id is None:
        (newest,) = conn.execute("SELECT max(id) FROM sessions").fetchone()
        session_id = ulid_after(newest, now_s)
    conn.execute(
        "INSERT INTO sessions (id, title, created_at, updated_at, touched, head, model, "
        "namespace, settings, pinned) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, ?)",
        (
            session_id,
            one_line(title),
            now_s,
            now_s,
            head,
            storable(model),
            namespace,
            json.dumps(settings),
            pinned,
        ),
    )
    touch(conn, session_id, now_s)
    return session_id


def update(conn: sqlite3.Connection, session_id: str, changes: dict[str, Any]) -> None:
    """Write the columns that are not None."""
    values = {column: value for column, value in changes.items() if value is not None}
    if "settings" in values:
        values["settings"] = json.dumps(values["settings"])
    if "title" in values:
        values["title"] = one_line(values["title"])
    if values:
        assignments = ", ".join(f"{column} = ?" for column in values)
        conn.execute(
            f"UPDATE sessions SET {assignments} WHERE id = ?", (*values.values(), session_id)
        )


def touch(conn: sqlite3.Connection, session_id: str, now_s: float) -> None:
    """Make this the session used last. A counter says so, since clocks may go backwards."""
    conn.execute(
        "UPDATE sessions SET touched = (SELECT max(touched) + 1 FROM sessions), updated_at = ? "
        "WHERE id = ?",
        (now_s, session_id),
    )


def set_head(conn: sqlite3.Connection, session_id: str, turn_id: str | None) -> None:
    conn.execute("UPDATE sessions SET head = ? WHERE id = ?", (turn_id, session_id))
