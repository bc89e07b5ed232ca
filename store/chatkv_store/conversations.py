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
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from chatkv_store import branching, importing, resolve, sessions, tree, turns
from chatkv_store.database import Database
from chatkv_store.errors import StoreBusy, StoreError, StoreFull
from chatkv_store.export import as_plain_values
from chatkv_store.leases import Leases
from chatkv_store.records import (
    SELECT_SESSION,
    UNFINISHED,
    SearchHit,
    Session,
    Turn,
    fetch_turn,
    session_from_row,
    title_from,
)
from chatkv_store.search import find_sessions
from chatkv_store.ulid import ulid_after

__all__ = ["Conversations", "SearchHit", "Session", "Turn"]


class Conversations:
    """All conversations of one file; safe for several threads and several processes.

    Every method raises the store's own errors (`errors.py`) and nothing of SQLite's. A file that
    can only be read still opens: reading works, writing raises StoreReadOnly or StoreFull until it
    can be written. With `must_open` False so does one that cannot be opened at all; it reads as
    empty. `clock` gives epoch seconds; order never depends on it.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        busy_timeout_s: float = 5.0,
        must_open: bool = True,
    ) -> None:
        self._clock = clock
        self._database = Database(path, busy_timeout_s=busy_timeout_s, must_open=must_open)
        self._leases = Leases(path.with_name(path.name + ".leases"))

    @property
    def path(self) -> Path:
        return self._database.path

    @property
    def refusal(self) -> StoreError | None:
        """What every write raises where this file can only be read, else None."""
        return self._database.refusal

    def now_s(self) -> float:
        """Epoch seconds by the clock that this file's times come from."""
        return self._clock()

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
            session_id = sessions.insert(
                conn,
                title=title,
                model=model,
                namespace=namespace,
                settings=settings or {},
                pinned=pinned,
                head=None,
                now_s=self._clock(),
            )
            return resolve.by_id(conn, session_id)

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

    def short_ids(self) -> dict[str, str]:
        """Every session's id -> its shortest prefix that names it alone (>= 8 characters)."""
        with self._database.read() as conn:
            return resolve.short_ids(conn)

    def search(self, text: str, limit: int | None = 20) -> list[SearchHit]:
        """Sessions with every word of `text`, taken literally, in the title or in one turn."""
        with self._database.read() as conn:
            return find_sessions(conn, text, limit)

    def rename(self, session_id: str, title: str) -> Session:
        """Give the session another title (any text; line breaks become spaces)."""
        return self.update_session(session_id, title=title)

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
        with self._database.write() as conn:
            resolve.by_id(conn, session_id)
            changes = {
                "title": title,
                "model": model,
                "namespace": namespace,
                "settings": settings,
                "pinned": pinned,
            }
            sessions.update(conn, session_id, changes)
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
            fork_id = sessions.insert(
                conn,
                title=f"{origin.title} (fork)" if title is None else title,
                model=origin.model,
                namespace=origin.namespace,
                settings=origin.settings,
                pinned=False,
                head=head,
                now_s=self._clock(),
            )
            return resolve.by_id(conn, fork_id)

    def fork_from(self, turn_id: str) -> Session:
        """A new session that ends with any turn, also one that was left behind as a branch; it has
        the title of the turn's owner. StoreBusy where the turn is still being written."""
        with self._database.write() as conn:
            turn = _existing_turn(conn, turn_id)
            if turn.state in UNFINISHED:
                raise StoreBusy(f"turn {turn.index} is still being written")
            origin = resolve.by_id(conn, turn.session_id)
            fork_id = sessions.insert(
                conn,
                title=origin.title,
                model=origin.model,
                namespace=origin.namespace,
                settings=origin.settings,
                pinned=False,
                head=turn_id,
                now_s=self._clock(),
            )
            return resolve.by_id(conn, fork_id)

    def delete_session(self, session_id: str) -> int:
        """Delete the session and the turns that no other session reaches; returns their number.

        Turns that others still reach go over to one of them. StoreBusy while it is in use.
        """
        with self.lease(session_id):
            with self._database.write() as conn:
                resolve.by_id(conn, session_id)
                dropped = tree.drop_session(conn, session_id)
            self._erase_traces()
            return dropped

    def move_head(self, session_id: str, turn_id: str | None) -> Session:
        """Let the session end at another turn of the tree (None: before its first one).

        For undo, edit and regenerate: the next `begin_turn` goes on from there, and the turns
        left behind stay until the session is deleted. The session's lease must be held.
        """
        self._require_lease(session_id)
        with self._database.write() as conn:
            resolve.by_id(conn, session_id)
            if turn_id is not None:
                _existing_turn(conn, turn_id)
            sessions.set_head(conn, session_id, turn_id)
            sessions.touch(conn, session_id, self._clock())
            return resolve.by_id(conn, session_id)

    # --- turns ----------------------------------------------------------------------------------

    def chain(self, session_id: str) -> list[Turn]:
        """The session's turns from the first to its head."""
        with self._database.read() as conn:
            return tree.chain(conn, resolve.by_id(conn, session_id).head)

    def tree(self, session_id: str) -> list[Turn]:
        """The session's turns, and behind them those that it left behind by moving its head."""
        with self._database.read() as conn:
            return branching.turns_of(conn, resolve.by_id(conn, session_id))

    def token_log(self, session_id: str) -> array[int]:
        """Every token id (u32) of the session, from its first turn to its head."""
        with self._database.read() as conn:
            return tree.token_log(conn, resolve.by_id(conn, session_id).head)

    def token_logs(self, session_id: str) -> list[array[int]]:
        """The session's log, and those of what it left behind by moving its head."""
        with self._database.read() as conn:
            return tree.token_logs(conn, resolve.by_id(conn, session_id))

    def get_turn(self, turn_id: str) -> Turn:
        """One turn by its id; StoreError where there is none."""
        with self._database.read() as conn:
            return _existing_turn(conn, turn_id)

    def note_messages(self, noted: Iterable[tuple[bytes, str]]) -> None:
        """Let `turn_of_messages` find turns by digests of all messages up to their answers:
        (digest, turn's id)."""
        with self._database.write() as conn:
            conn.executemany("INSERT INTO turns_messages VALUES (?, ?)", noted)

    def turn_of_messages(self, digest: bytes) -> Turn | None:
        """The newest turn that was noted under `digest`."""
        with self._database.read() as conn:
            row = conn.execute(
                "SELECT turn_id FROM turns_messages WHERE digest = ? ORDER BY rowid DESC LIMIT 1",
                (digest,),
            ).fetchone()
            return _existing_turn(conn, row[0]) if row else None

    def forget_messages(self, digest: bytes) -> None:
        """Let `turn_of_messages` find nothing under `digest`."""
        with self._database.write() as conn:
            conn.execute("DELETE FROM turns_messages WHERE digest = ?", (digest,))

    def sessions_at(self, turn_id: str) -> list[str]:
        """Ids of the sessions that end with a turn."""
        with self._database.read() as conn:
            return tree.sessions_at(conn, turn_id)

    def delete_turn(self, turn_id: str) -> bool:
        """Delete a turn that nothing follows; False where something does, which needs it.

        Sessions that end with it end with the turn before it; one that it was all of goes too.
        StoreBusy where one of them is in use.
        """
        with ExitStack() as leases:
            for session_id in self.sessions_at(turn_id):
                leases.enter_context(self.lease(session_id))
            with self._database.write() as conn:
                is_gone = tree.drop_last(conn, turn_id)
            if is_gone:
                self._erase_traces()
            return is_gone

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
            now_s = self._clock()
            turn_id = turns.begin(
                conn,
                session,
                user_text=user_text,
                prompt_ids=prompt_ids,
                system_text=system_text,
                seed=seed,
                rng_draws_before=rng_draws_before,
                stats=stats or {},
                now_s=now_s,
            )
            sessions.set_head(conn, session_id, turn_id)
            sessions.touch(conn, session_id, now_s)
            if not session.title:
                sessions.update(conn, session_id, {"title": title_from(user_text)})
            return _existing_turn(conn, turn_id)

    def checkpoint_turn(
        self, turn_id: str, *, reply_text: str, reply_ids: Iterable[int], rng_draws_after: int
    ) -> None:
        """Save the answer so far; the turn is `streaming` from now on."""
        with self._database.write() as conn:
            turns.write_reply(
                conn,
                turn_id,
                "streaming",
                reply_text=reply_text,
                reply_ids=reply_ids,
                rng_draws_after=rng_draws_after,
            )

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
            turns.write_reply(
                conn,
                turn_id,
                state,
                reply_text=reply_text,
                reply_ids=reply_ids,
                rng_draws_after=rng_draws_after,
            )
            turns.close(conn, turn_id, finish_reason, stats)
            turn = _existing_turn(conn, turn_id)
            sessions.touch(conn, turn.session_id, self._clock())
            return turn

    # --- what was held in memory while the file could not be written ----------------------------

    def unsaved_session(
        self, *, model: str, namespace: str | None, settings: dict[str, Any], title: str = ""
    ) -> Session:
        """A session that is in no file yet; `keep` writes it."""
        now_s = self._clock()
        return Session(
            id=ulid_after(None, now_s),
            title=title,
            created_at=now_s,
            updated_at=now_s,
            head=None,
            model=model,
            namespace=namespace,
            settings=settings,
            pinned=False,
            num_turns=0,
            num_tokens=0,
        )

    def keep(self, session: Session, unsaved: Sequence[Turn]) -> None:
        """Write turns that were held in memory, and the session where the file lacks it.

        In one transaction. Turns that the file holds already, as far as they were saved, get their
        answer; the others go behind the session's head. The session's lease must be held.
        StoreBusy where another process has gone on with the session meanwhile.
        """
        self._require_lease(session.id)
        with self._database.write() as conn:
            now_s = self._clock()
            if (
                conn.execute("SELECT 1 FROM sessions WHERE id = ?", (session.id,)).fetchone()
                is None
            ):
                sessions.insert(
                    conn,
                    session_id=session.id,
                    title=session.title or title_from(unsaved[0].user_text if unsaved else ""),
                    model=session.model,
                    namespace=session.namespace,
                    settings=session.settings,
                    pinned=session.pinned,
                    head=None,
                    now_s=session.created_at,
                )
            for turn in unsaved:
                if not turns.complete(conn, turn):
                    head = resolve.by_id(conn, session.id).head
                    if head != turn.parent_id:
                        raise StoreBusy(
                            f"session {session.id} was continued elsewhere: what was said here "
                            "cannot be added to it"
                        )
                    turns.insert(conn, turn)
                    sessions.set_head(conn, session.id, turn.id)
            sessions.touch(conn, session.id, now_s)

    # --- living and dead processes --------------------------------------------------------------

    @contextmanager
    def lease(self, session_id: str) -> Iterator[None]:
        """Be the session's only writer; StoreBusy names the process that is.

        Whoever holds the lease knows that an unfinished turn was left by a dead process: such
        turns are marked as interrupted first.
        """
        with self._database.read() as conn:
            resolve.by_id(conn, session_id)
        with self.lease_of_new(session_id):
            self._interrupt_left_turns(session_id)
            yield

    def lease_of_new(self, session_id: str) -> AbstractContextManager[None]:
        """The lease of a session that no file may hold yet, see `unsaved_session`."""
        return self._leases.hold(session_id)

    def recover(self) -> list[Turn]:
        """Mark the turns that a dead process left unfinished as interrupted; returns them."""
        with self._database.read() as conn:
            suspects = turns.sessions_with_unfinished(conn)
        recovered: list[Turn] = []
        for session_id in suspects:
            try:
                with self._leases.hold(session_id, patience_s=0.0):
                    recovered += self._interrupt_left_turns(session_id)
            except StoreBusy:
                continue  # its process lives and is answering
        return recovered

    def export_text(self, session_id: str, *, branches: bool = False) -> dict[str, Any]:
        """The whole conversation as plain JSON values, token ids included (KV is not); with what it
        has left behind as `branches`."""
        with self._database.read() as conn:
            session = resolve.by_id(conn, session_id)
            found = branching.whole_tree(conn, session) if branches else None
            path = tree.chain(conn, session.head) if found is None else found
        return as_plain_values(session, path)

    def import_text(self, values: dict[str, Any], origin: str = "the file") -> Session:
        """Store what `export_text` gave; ids are kept unless one is taken, then all are new.

        Raises StoreDamaged or StoreVersionError, naming `origin`, where `values` do not verify.
        """
        importing.check(values, origin)
        with self._database.write() as conn:
            return resolve.by_id(conn, importing.insert(conn, values, self._clock()))

    def import_all(self, every: Sequence[dict[str, Any]], origin: str) -> list[Session]:
        """Store conversations in the form of `export_text` in one transaction, among the others by
        the time of their last use ("updated_at", by default "created_at")."""
        for values in every:
            importing.check(values, origin)
        with self._database.write() as conn:
            now_s = self._clock()
            ids = [importing.insert(conn, values, now_s) for values in every]
            times = [values.get("updated_at") or values["created_at"] for values in every]
            importing.order_by_use(conn, dict(zip(ids, times, strict=True)))
            return [resolve.by_id(conn, session_id) for session_id in ids]

    def sources(self) -> dict[str, str]:
        """Where sessions came from (`settings.source`, or "chatkv:" and the id) -> the session."""
        with self._database.read() as conn:
            return importing.sources(conn)

    def give_ids(self, session_id: str, told: Sequence[Turn], tokenizer: str) -> Session:
        """Write the ids of turns that were imported as words alone, and whose ids these are.

        The session's lease must be held. StoreBusy where another session that shares the turns has
        given them ids meanwhile.
        """
        self._require_lease(session_id)
        with self._database.write() as conn:
            session = resolve.by_id(conn, session_id)
            if not all(turns.give_ids(conn, turn) for turn in told):
                raise StoreBusy(f"turns of session {session_id} were read elsewhere: open it again")
            settings = session.settings | {"tokenizer": tokenizer}
            sessions.update(conn, session_id, {"settings": settings})
            return resolve.by_id(conn, session_id)

    def turn_stats(self) -> Iterator[tuple[str, float, dict[str, Any]]]:
        """(session that owns it, epoch seconds, what was measured) of every finished turn."""
        with self._database.read() as conn:
            rows = conn.execute(
                "SELECT session_id, created_at, stats FROM turns WHERE stats != '{}' ORDER BY seq"
            ).fetchall()
        for session_id, created_at, stats in rows:
            with suppress(ValueError):
                yield session_id, created_at, json.loads(stats)

    def _interrupt_left_turns(self, session_id: str) -> list[Turn]:
        """Called with the lease held, before any turn of this holder has begun."""
        with self._database.read() as conn:
            if session_id not in turns.sessions_with_unfinished(conn):
                return []
        with self._database.write() as conn:
            return turns.interrupt_unfinished(conn, session_id)

    def _erase_traces(self) -> None:
        """Overwrite what SQLite still holds of deleted words: in its search index and its log.

        Best effort: the deletion itself is committed, and the next one erases these traces too.
        Merging the index takes about 0.1 s per 10 MB of text.
        """
        with suppress(StoreFull, StoreBusy), self._database.write() as conn:
            conn.execute("INSERT INTO turns_words(turns_words) VALUES ('optimize')")
        self._database.truncate_log()

    def _require_lease(self, session_id: str) -> None:
        if not self._leases.holds(session_id):
            raise StoreError(f"the lease of session {session_id} must be held to write its turns")


def _existing_turn(conn: sqlite3.Connection, turn_id: str) -> Turn:
    found = fetch_turn(conn, turn_id)
    if found is None:
        raise StoreError(f"there is no turn {turn_id}")
    return found
