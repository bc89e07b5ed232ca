"""Conversations on disk: a tree of turns, sessions that name a path through it, leases, search.

The life of a turn is three transactions: `begin_turn` saves what the user said before anything is
computed, `checkpoint_turn` (at least every second) saves what has been answered so far, and
`finish_turn` closes it. A process that dies in between loses its lease with its life; `recover`
then marks its turn as interrupted, with everything that was last checkpointed.

Knows nothing of KV: deleting every KV block loses no word kept here.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from . import resolve, tree
from .database import Database
from .errors import StoreBusy, StoreError
from .leases import Leases
from .records import (
    SELECT_SESSION,
    TURN_COLUMNS,
    UNFINISHED,
    SearchHit,
    Session,
    Turn,
    fetch_turn,
    ids_to_blob,
    session_from_row,
    storable,
    title_from,
    turn_from_row,
)
from .search import find_sessions
from .ulid import ulid_after

__all__ = ["Conversations", "SearchHit", "Session", "Turn"]


class Conversations:
    """All conversations of one file; safe for several threads and several processes.

    Every method raises the store's own errors (`errors.py`) and nothing of SQLite's. A file that
    can only be read still opens: reading works, writing raises StoreReadOnly or StoreFull.
    `clock` gives epoch seconds; order never depends on it.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        busy_timeout_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._database = Database(path, busy_timeout_s=busy_timeout_s)
        self._leases = Leases(path.with_name(path.name + ".leases"))

    @property
    def path(self) -> Path:
        return self._database.path

    @property
    def refusal(self) -> StoreError | None:
        """What every write raises where this file can only be read, else None."""
        return self._database.refusal

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Conversations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- sessions -------------------------------------------------------------------------------

    def create_session(
        self,
        *,
        title: str = "",
        model: str = "",
        namespace: str | None = None,
        settings: dict[str, Any] | None = None,
        pinned: bool = False,
    ) -> Session:
        """A new, empty session. Without a title it takes one from its first turn's text."""
        with self._database.write() as conn:
            return self._insert_session(
                conn, storable(title), model, namespace, settings or {}, pinned, head=None
            )

    def get_session(self, ref: str) -> Session:
        """The session named by a full id, an exact title or a unique id prefix (>= 4 characters).

        Raises SessionNotFound or SessionAmbiguous, whose lines name the candidates.
        """
        with self._database.read() as conn:
            return resolve.session(conn, ref)

    def last_session(self) -> Session | None:
        """The session that was used last, None where there is none."""
        found = self.list_sessions(limit=1)
        return found[0] if found else None

    def list_sessions(self, limit: int | None = None, search: str | None = None) -> list[Session]:
        """Sessions by last use, newest first; only those where `search` finds something."""
        if search is not None:
            return [hit.session for hit in self.search(search, limit=limit)]
        with self._database.read() as conn:
            rows = conn.execute(
                f"{SELECT_SESSION} ORDER BY s.touched DESC LIMIT ?",
                (-1 if limit is None else limit,),
            )
            return [session_from_row(row) for row in rows]

    def search(self, text: str, limit: int | None = 20) -> list[SearchHit]:
        """Sessions with every word of `text`, taken literally, in the title or in one turn."""
        with self._database.read() as conn:
            return find_sessions(conn, text, limit)

    def rename(self, session_id: str, title: str) -> Session:
        """Give the session another title (any text; line breaks become spaces)."""
        return self.update_session(session_id, title=" ".join(title.split()))

    def update_session(
        self,
        session_id: str,
        *,
        title: str | None = None,
        model: str | None = None,
        namespace: str | None = None,
        settings: dict[str, Any] | None = None,
        pinned: bool | None = None,
    ) -> Session:
        """Change what is given and leave the rest; `settings` are replaced as a whole."""
        changes: dict[str, Any] = {
            "title": None if title is None else storable(title),
            "model": model,
            "namespace": namespace,
            "settings": None if settings is None else json.dumps(settings),
            "pinned": None if pinned is None else int(pinned),
        }
        changes = {column: value for column, value in changes.items() if value is not None}
        with self._database.write() as conn:
            resolve.by_id(conn, session_id)
            if changes:
                assignments = ", ".join(f"{column} = ?" for column in changes)
                conn.execute(
                    f"UPDATE sessions SET {assignments} WHERE id = ?",
                    (*changes.values(), session_id),
                )
            return resolve.by_id(conn, session_id)

    def fork(
        self, session_id: str, at_turn: int | None = None, *, title: str | None = None
    ) -> Session:
        """A new session that shares the first `at_turn` turns of this one; nothing is copied.

        `at_turn` counts from 1; 0 keeps no turn, None every turn that is no longer being written.
        StoreError where there is no such turn, StoreBusy where it is still being written.
        """
        with self._database.write() as conn:
            origin = resolve.by_id(conn, session_id)
            head = tree.turn_to_fork_at(conn, origin, at_turn)
            name = storable(title) if title is not None else f"{origin.title} (fork)".strip()
            return self._insert_session(
                conn, name, origin.model, origin.namespace, origin.settings, False, head
            )

    def delete_session(self, session_id: str) -> int:
        """Delete the session and the turns that no other session reaches; returns their number.

        Turns that others still reach go over to one of them. StoreBusy while it is in use.
        """
        with self.lease(session_id):
            with self._database.write() as conn:
                resolve.by_id(conn, session_id)
                dropped = tree.drop_session(conn, session_id)
            self._database.truncate_log()  # the log would keep the deleted text until its reuse
            return dropped

    def move_head(self, session_id: str, turn_id: str | None) -> Session:
        """Let the session end at another turn of the tree (None: before its first one).

        For undo, edit and regenerate: the next `begin_turn` goes on from there, and the turns
        left behind stay until the session is deleted. The session's lease must be held.
        """
        self._require_lease(session_id)
        with self._database.write() as conn:
            resolve.by_id(conn, session_id)
            if turn_id is not None and fetch_turn(conn, turn_id) is None:
                raise StoreError(f"session {session_id} has no turn {turn_id}")
            self._touch(conn, session_id, head=turn_id)
            return resolve.by_id(conn, session_id)

    # --- turns ----------------------------------------------------------------------------------

    def chain(self, session_id: str) -> list[Turn]:
        """The session's turns from the first to its head."""
        with self._database.read() as conn:
            return tree.chain(conn, resolve.by_id(conn, session_id).head)

    def get_turn(self, turn_id: str) -> Turn:
        with self._database.read() as conn:
            found = fetch_turn(conn, turn_id)
        if found is None:
            raise StoreError(f"there is no turn {turn_id}")
        return found

    def begin_turn(
        self,
        session_id: str,
        *,
        user_text: str,
        prompt_ids: Iterable[int],
        system_text: str | None = None,
        seed: int = 0,
        rng_draws_before: int = 0,
        stats: dict[str, Any] | None = None,
    ) -> Turn:
        """Save the user's words and the tokens that they add, behind the session's head.

        The new turn is `pending` and the session's new head. The session's lease must be held
        (else `recover`, in another process, would take this one for dead). StoreError where the
        head is itself unfinished: call `recover` or `finish_turn` first.
        """
        self._require_lease(session_id)
        with self._database.write() as conn:
            session = resolve.by_id(conn, session_id)
            head = fetch_turn(conn, session.head) if session.head else None
            if head is not None and head.state in UNFINISHED:
                raise StoreError(f"turn {head.index} of session {session_id} is not finished")
            turn_id = ulid_after(_newest_id(conn, "turns"), self._clock())
            conn.execute(
                f"INSERT INTO turns ({TURN_COLUMNS}) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, '', ?, x'', 'pending', NULL, ?, ?, ?, ?, ?)",
                (
                    turn_id,
                    session_id,
                    session.head,
                    session.num_turns + 1,
                    session.num_tokens,
                    None if system_text is None else storable(system_text),
                    storable(user_text),
                    ids_to_blob(prompt_ids),
                    str(seed),
                    rng_draws_before,
                    rng_draws_before,
                    json.dumps(stats or {}),
                    self._clock(),
                ),
            )
            self._touch(conn, session_id, head=turn_id)
            if not session.title:
                title = title_from(storable(user_text))
                conn.execute("UPDATE sessions SET title = ? WHERE id = ?", (title, session_id))
            turn = fetch_turn(conn, turn_id)
            assert turn is not None
            return turn

    def checkpoint_turn(
        self, turn_id: str, *, reply_text: str, reply_ids: Iterable[int], rng_draws_after: int
    ) -> None:
        """Save the answer so far; the turn is `streaming` from now on."""
        with self._database.write() as conn:
            self._write_reply(conn, turn_id, "streaming", reply_text, reply_ids, rng_draws_after)

    def finish_turn(
        self,
        turn_id: str,
        *,
        reply_text: str,
        reply_ids: Iterable[int],
        rng_draws_after: int,
        state: Literal["done", "interrupted"] = "done",
        finish_reason: str = "stop",
        stats: dict[str, Any] | None = None,
    ) -> Turn:
        """Close the turn with its whole answer; None as `stats` keeps those of `begin_turn`."""
        with self._database.write() as conn:
            self._write_reply(conn, turn_id, state, reply_text, reply_ids, rng_draws_after)
            conn.execute(
                "UPDATE turns SET finish_reason = ?, stats = coalesce(?, stats) WHERE id = ?",
                (finish_reason, None if stats is None else json.dumps(stats), turn_id),
            )
            turn = fetch_turn(conn, turn_id)
            assert turn is not None
            self._touch(conn, turn.session_id, head=None, keep_head=True)
            return turn

    # --- living and dead processes --------------------------------------------------------------

    @contextmanager
    def lease(self, session_id: str) -> Iterator[None]:
        """Be the session's only writer; StoreBusy names the process that is."""
        with self._leases.hold(session_id):
            yield

    def recover(self) -> list[Turn]:
        """Mark the turns that a dead process left unfinished as interrupted; returns them."""
        with self._database.read() as conn:
            query = "SELECT DISTINCT session_id FROM turns WHERE state IN ('pending', 'streaming')"
            suspects = [row[0] for row in conn.execute(query)]
        recovered: list[Turn] = []
        for session_id in suspects:
            try:
                with self._leases.hold(session_id, patience_s=0.0):
                    recovered += self._interrupt(session_id)
            except StoreBusy:
                continue  # its process lives and is answering
        return recovered

    def export_text(self, session_id: str) -> dict[str, Any]:
        """The whole conversation as plain JSON values, token ids included (KV is not)."""
        with self._database.read() as conn:
            session = resolve.by_id(conn, session_id)
            turns = tree.chain(conn, session.head)
        return tree.as_plain_values(session, turns)

    # --- inside of a transaction ----------------------------------------------------------------

    def _insert_session(
        self,
        conn: sqlite3.Connection,
        title: str,
        model: str,
        namespace: str | None,
        settings: dict[str, Any],
        pinned: bool,
        head: str | None,
    ) -> Session:
        now = self._clock()
        session_id = ulid_after(_newest_id(conn, "sessions"), now)
        conn.execute(
            "INSERT INTO sessions (id, title, created_at, updated_at, touched, head, model, "
            "namespace, settings, pinned) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, ?)",
            (session_id, title, now, now, head, model, namespace, json.dumps(settings), pinned),
        )
        self._touch(conn, session_id, head=head)
        return resolve.by_id(conn, session_id)

    def _touch(
        self,
        conn: sqlite3.Connection,
        session_id: str,
        *,
        head: str | None,
        keep_head: bool = False,
    ) -> None:
        """Make the session the one used last, ending at `head`."""
        conn.execute(
            "UPDATE sessions SET touched = (SELECT max(touched) + 1 FROM sessions), "
            "updated_at = ?, head = CASE WHEN ? THEN head ELSE ? END WHERE id = ?",
            (self._clock(), keep_head, head, session_id),
        )

    def _write_reply(
        self,
        conn: sqlite3.Connection,
        turn_id: str,
        state: str,
        reply_text: str,
        reply_ids: Iterable[int],
        rng_draws_after: int,
    ) -> None:
        changed = conn.execute(
            "UPDATE turns SET state = ?, reply_text = ?, reply_ids = ?, rng_draws_after = ? "
            "WHERE id = ? AND state IN ('pending', 'streaming')",
            (state, storable(reply_text), ids_to_blob(reply_ids), rng_draws_after, turn_id),
        ).rowcount
        if not changed:
            raise StoreError(f"turn {turn_id} is not being written: it is finished or was deleted")

    def _interrupt(self, session_id: str) -> list[Turn]:
        with self._database.write() as conn:
            query = f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id = ? AND state IN (?, ?)"
            left = [turn_from_row(row) for row in conn.execute(query, (session_id, *UNFINISHED))]
            for turn in left:
                conn.execute(
                    "UPDATE turns SET state = 'interrupted', finish_reason = 'interrupted' "
                    "WHERE id = ?",
                    (turn.id,),
                )
            return [turn for turn in (fetch_turn(conn, turn.id) for turn in left) if turn]

    def _require_lease(self, session_id: str) -> None:
        if not self._leases.holds(session_id):
            raise StoreError(f"the lease of session {session_id} must be held to write its turns")


def _newest_id(conn: sqlite3.Connection, table: str) -> str | None:
    row = conn.execute(f"SELECT max(id) FROM {table}").fetchone()
    newest: str | None = row[0]
    return newest
