"""The tree of turns: walking a path, forking off it, and dropping what nobody reaches.

The rule that keeps deletion cheap: every turn is owned by one living session. So only the owner's
own turns are candidates, and one of them stays exactly when something of another session hangs on
it: that session's head, or a turn that it owns further down.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Sequence

from chatkv_store.errors import StoreBusy, StoreError
from chatkv_store.records import (
    TURN_COLUMNS,
    UNFINISHED,
    Session,
    Turn,
    Window,
    blob_to_ids,
    turn_from_row,
)

# The turns from the root down to the head that is bound to the first `?`.
_PATH = """
    WITH RECURSIVE path(id) AS (
        SELECT ?
        UNION ALL
        SELECT turns.parent_id FROM turns JOIN path ON turns.id = path.id
    )
    SELECT {columns} FROM path JOIN turns ON turns.id = path.id ORDER BY turns.position
"""


def chain(conn: sqlite3.Connection, head: str | None) -> list[Turn]:
    """The turns from the root down to `head`."""
    columns = ", ".join(f"turns.{name.strip()}" for name in TURN_COLUMNS.split(","))
    return [turn_from_row(row) for row in conn.execute(_PATH.format(columns=columns), (head,))]


def token_log(conn: sqlite3.Connection, head: str | None) -> array[int]:
    """The token ids that the model has before it after `head`: every one from the root down, but
    for the turns that had to leave its context."""
    return _logs(conn, head)[0]


def token_logs(conn: sqlite3.Connection, session: Session) -> list[array[int]]:
    """The log up to the head, and up to every turn that the session owns and nothing follows; with
    and without what has left the model's context."""
    rows = conn.execute(
        "SELECT id FROM turns mine WHERE session_id = ? AND id IS NOT ? "
        "AND NOT EXISTS (SELECT 1 FROM turns WHERE parent_id = mine.id)",
        (session.id, session.head),
    )
    ends = [session.head, *(row[0] for row in rows.fetchall())]
    return [log for end in ends for log in _logs(conn, end)]


def _logs(conn: sqlite3.Connection, head: str | None) -> list[array[int]]:
    """What the model has in its context after `head`, and everything where that is more."""
    columns = "turns.prompt_ids, turns.reply_ids, turns.stats"
    rows = conn.execute(_PATH.format(columns=columns), (head,)).fetchall()
    pieces = [blob_to_ids(prompt + reply) for prompt, reply, _ in rows]
    logs = [_joined(pieces)]
    window = Window.of(json.loads(rows[-1][2])) if rows else None
    if window is not None:
        kept = logs[0][: window.num_kept]
        logs.insert(0, kept + _joined(pieces[window.first_turn - 1 :]))
    return logs


def _joined(pieces: Sequence[array[int]]) -> array[int]:
    whole = array("I")
    for piece in pieces:
        whole.extend(piece)
    return whole


def turn_to_fork_at(conn: sqlite3.Connection, session: Session, at_turn: int | None) -> str | None:
    """The id of the turn that a fork of `session` ends with, None for a fork without turns."""
    if at_turn == 0:
        return None
    turns = chain(conn, session.head)
    if at_turn is None:
        settled = [turn for turn in turns if turn.state not in UNFINISHED]
        return settled[-1].id if settled else None
    if not 0 < at_turn <= len(turns):
        raise StoreError(
            f"session {session.id} has {len(turns)} turns; there is no turn {at_turn} to fork at"
        )
    turn = turns[at_turn - 1]
    if turn.state in UNFINISHED:
        raise StoreBusy(f"turn {at_turn} of session {session.id} is still being written")
    return turn.id


def drop_session(conn: sqlite3.Connection, session_id: str) -> int:
    """Delete the session and its turns that no other session reaches; returns their number."""
    heirs = conn.execute(
        """SELECT mine.id, other.id FROM turns mine JOIN sessions other ON other.head = mine.id
               WHERE mine.session_id = :gone AND other.id != :gone
           UNION
           SELECT mine.id, child.session_id FROM turns mine JOIN turns child
               ON child.parent_id = mine.id
               WHERE mine.session_id = :gone AND child.session_id != :gone
           ORDER BY 1, 2""",
        {"gone": session_id},
    ).fetchall()
    for turn_id, heir in heirs:
        # Up to the root, or to the first turn that has found another owner already.
        conn.execute(
            """WITH RECURSIVE kept(id) AS (
                   SELECT id FROM turns WHERE id = :turn AND session_id = :gone
                   UNION ALL
                   SELECT parent.id FROM kept JOIN turns ON turns.id = kept.id
                       JOIN turns parent ON parent.id = turns.parent_id
                       WHERE parent.session_id = :gone
               )
               UPDATE turns SET session_id = :heir WHERE id IN (SELECT id FROM kept)""",
            {"turn": turn_id, "gone": session_id, "heir": heir},
        )
    conn.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
    return conn.execute("DELETE FROM turns WHERE session_id = ?", (session_id,)).rowcount


def drop_last(conn: sqlite3.Connection, turn_id: str) -> bool:
    """Delete a turn that nothing follows; False where something does. Sessions that end with it end
    with the turn before it, and go where they own nothing more."""
    row = conn.execute(
        "SELECT parent_id, session_id FROM turns WHERE id = ? "
        "AND NOT EXISTS (SELECT 1 FROM turns WHERE parent_id = ?)",
        (turn_id, turn_id),
    ).fetchone()
    if row is None:
        return False
    parent, owner = row
    touched = {owner, *sessions_at(conn, turn_id)}
    conn.execute("UPDATE sessions SET head = ? WHERE head = ?", (parent, turn_id))
    conn.execute("DELETE FROM turns WHERE id = ?", (turn_id,))
    conn.executemany(
        "DELETE FROM sessions WHERE id = :id AND head IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM turns WHERE session_id = :id)",
        [{"id": session_id} for session_id in touched],
    )
    return True


def sessions_at(conn: sqlite3.Connection, turn_id: str) -> list[str]:
    """The sessions that end with a turn."""
    rows = conn.execute("SELECT id FROM sessions WHERE head = ?", (turn_id,))
    return [row[0] for row in rows.fetchall()]
