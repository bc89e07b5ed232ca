"""The whole tree of a conversation: its way from the first turn to its head, and all that its
going back has left beside it."""

from __future__ import annotations

import sqlite3

from chatkv_store import tree
from chatkv_store.records import TURN_COLUMNS, Session, Turn, fetch_turn, turn_from_row


def turns_of(conn: sqlite3.Connection, session: Session) -> list[Turn]:
    """Every turn on the session's way, then those that it owns beside it, the oldest first. What
    lies beside turns that it shares is their owner's."""
    path = tree.chain(conn, session.head)
    on_path = {turn.id for turn in path}
    rows = conn.execute(
        f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id = ? ORDER BY seq", (session.id,)
    )
    owned = map(turn_from_row, rows.fetchall())
    return path + [turn for turn in owned if turn.id not in on_path]


def whole_tree(conn: sqlite3.Connection, session: Session) -> list[Turn]:
    """The same with every turn that one of them follows, each behind its parent."""
    turns = turns_of(conn, session)
    known = {turn.id: turn for turn in turns}
    for turn in turns:
        parent = turn.parent_id
        while parent is not None and parent not in known:
            found = fetch_turn(conn, parent)
            if found is None:
                break
            known[parent], parent = found, found.parent_id
    return sorted(known.values(), key=lambda turn: turn.index)
