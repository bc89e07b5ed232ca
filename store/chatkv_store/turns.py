"""How a turn is written: begun, checkpointed, finished or found interrupted.

Each function runs inside the caller's write transaction; `now_s` is the caller's clock in epoch
seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from chatkv_store.errors import StoreError
from chatkv_store.records import (
    TURN_COLUMNS,
    UNFINISHED,
    Session,
    Turn,
    TurnState,
    fetch_turn,
    ids_to_blob,
    storable,
    turn_from_row,
)
from chatkv_store.ulid import ulid_after


def begin(
    conn: sqlite3.Connection,
    session: Session,
    *,
    user_text: str,
    prompt_ids: Iterable[int],
    system_text: str | None,
    seed: int,
    rng_draws_before: int,
    stats: dict[str, Any],
    now_s: float,
) -> str:
    """Insert a pending turn behind the session's head; returns its id."""
    head = fetch_turn(conn, session.head) if session.head else None
    if head is not None and head.state in UNFINISHED:
        raise StoreError(f"turn {head.index} of session {session.id} is not finished")
    (newest,) = conn.execute("SELECT max(id) FROM turns").fetchone()
    turn_id = ulid_after(newest, now_s)
    conn.execute(
        f"INSERT INTO turns ({TURN_COLUMNS}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, '', ?, x'', 'pending', NULL, ?, ?, ?, ?, ?)",
        (
            turn_id,
            session.id,
            session.head,
            session.num_turns + 1,
            session.num_tokens,
            None if system_text is None else storable(system_text),
            storable(user_text),
            ids_to_blob(prompt_ids),
            str(seed),
            rng_draws_before,
            rng_draws_before,
            json.dumps(stats),
            now_s,
        ),
    )
    return turn_id


def insert(conn: sqlite3.Connection, turn: Turn) -> None:
    """A turn as it is, with its own id."""
    conn.execute(
        f"INSERT INTO turns ({TURN_COLUMNS}) VALUES ({', '.join('?' * 17)})",
        (
            turn.id,
            turn.session_id,
            turn.parent_id,
            turn.index,
            turn.tokens_before,
            None if turn.system_text is None else storable(turn.system_text),
            storable(turn.user_text),
            storable(turn.reply_text),
            ids_to_blob(turn.prompt_ids),
            ids_to_blob(turn.reply_ids),
            turn.state,
            turn.finish_reason,
            str(turn.seed),
            turn.rng_draws_before,
            turn.rng_draws_after,
            json.dumps(turn.stats),
            turn.created_at,
        ),
    )


def complete(conn: sqlite3.Connection, turn: Turn) -> bool:
    """Give a turn that the file holds its answer; False where the file does not hold it."""
    changed = conn.execute(
        "UPDATE turns SET state = ?, finish_reason = ?, reply_text = ?, reply_ids = ?, "
        "rng_draws_after = ?, stats = ? WHERE id = ?",
        (
            turn.state,
            turn.finish_reason,
            storable(turn.reply_text),
            ids_to_blob(turn.reply_ids),
            turn.rng_draws_after,
            json.dumps(turn.stats),
            turn.id,
        ),
    ).rowcount
    return bool(changed)


def write_reply(
    conn: sqlite3.Connection,
    turn_id: str,
    state: TurnState,
    *,
    reply_text: str,
    reply_ids: Iterable[int],
    rng_draws_after: int,
) -> None:
    """Replace the answer of an unfinished turn; StoreError where it is finished or gone."""
    changed = conn.execute(
        "UPDATE turns SET state = ?, reply_text = ?, reply_ids = ?, rng_draws_after = ? "
        "WHERE id = ? AND state IN ('pending', 'streaming')",
        (state, storable(reply_text), ids_to_blob(reply_ids), rng_draws_after, turn_id),
    ).rowcount
    if not changed:
        raise StoreError(f"turn {turn_id} is not being written: it is finished or was deleted")


def close(
    conn: sqlite3.Connection, turn_id: str, finish_reason: str, stats: dict[str, Any] | None
) -> None:
    """Say why the answer ended; None as `stats` keeps those that the turn has."""
    conn.execute(
        "UPDATE turns SET finish_reason = ?, stats = coalesce(?, stats) WHERE id = ?",
        (finish_reason, None if stats is None else json.dumps(stats), turn_id),
    )


def give_ids(conn: sqlite3.Connection, turn: Turn) -> bool:
    """Give a turn that has no ids those of `turn`; False where it has some, or is gone."""
    changed = conn.execute(
        "UPDATE turns SET prompt_ids = ?, reply_ids = ?, tokens_before = ?, stats = ? "
        "WHERE id = ? AND prompt_ids = x''",
        (
            ids_to_blob(turn.prompt_ids),
            ids_to_blob(turn.reply_ids),
            turn.tokens_before,
            json.dumps(turn.stats),
            turn.id,
        ),
    ).rowcount
    return bool(changed)


def sessions_with_unfinished(conn: sqlite3.Connection) -> list[str]:
    rows = conn.execute(
        "SELECT DISTINCT session_id FROM turns WHERE state IN ('pending', 'streaming')"
    )
    return [row[0] for row in rows]


def interrupt_unfinished(conn: sqlite3.Connection, session_id: str) -> list[Turn]:
    """Mark the session's unfinished turns as interrupted; returns them as they are now."""
    query = "SELECT id FROM turns WHERE session_id = ? AND state IN ('pending', 'streaming')"
    ids = [row[0] for row in conn.execute(query, (session_id,))]
    marks = ", ".join("?" * len(ids))
    conn.execute(
        "UPDATE turns SET state = 'interrupted', finish_reason = 'interrupted' "
        f"WHERE id IN ({marks})",
        ids,
    )
    rows = conn.execute(f"SELECT {TURN_COLUMNS} FROM turns WHERE id IN ({marks})", ids)
    return [turn_from_row(row) for row in rows]
