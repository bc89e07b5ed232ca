"""The conversations on disk, read and forked beside the engine: SQLite lets many look at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chatkv.client import TurnText
from chatkv.words import ago, plural, printable

if TYPE_CHECKING:
    from chatkv_store.conversations import Conversations, Session, Turn

# What a list shows, and what a preview shows of a conversation's end.
MAX_SHOWN, PREVIEW_TURNS, PREVIEW_CHARS = 200, 3, 600


@dataclass(frozen=True)
class Listed:
    """One conversation in a list. `found` is where a search word stands, "" without a search."""

    session: str
    title: str
    about: str
    found: str = ""


class Library:
    """Opens the file when it is first asked for something."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Conversations | None = None

    @property
    def _store(self) -> Conversations:
        if self._opened is None:
            from chatkv_store.conversations import Conversations

            self._opened = Conversations(self._path, must_open=False)
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def listed(self, search: str = "", now_s: Callable[[], float] | None = None) -> list[Listed]:
        """Conversations by last use, newest first; with every word of `search` in one turn."""
        if not search.strip():
            return [_listed(session, now_s) for session in self._store.list_sessions(MAX_SHOWN)]
        hits = self._store.search(search, MAX_SHOWN)
        return [_listed(hit.session, now_s, hit.snippet) for hit in hits]

    def names(self) -> list[str]:
        """Ids, for completion."""
        short = self._store.short_ids()
        return [short[session.id] for session in self._store.list_sessions(MAX_SHOWN)]

    def find(self, reference: str) -> Session:
        """By id, prefix or title. Raises StoreError."""
        return self._store.get_session(reference)

    def turns(self, session: str) -> list[TurnText]:
        """What was said."""
        return [TurnText.of(turn) for turn in self._store.chain(session)]

    def preview(self, session: str) -> str:
        """The end of a conversation, as text."""
        parts = []
        for turn in self._store.chain(session)[-PREVIEW_TURNS:]:
            parts += [f"> {_cut(turn.user_text)}", _cut(turn.reply_text) or "(no answer yet)", ""]
        return printable("\n".join(parts).strip()) or "Nothing was said in it yet."

    def tree(self, session: str) -> tuple[list[Turn], str | None]:
        """Every turn, those that were left behind too, and the id of the newest current one."""
        found = self._store.get_session(session)
        return self._store.tree(found.id), found.head

    def fork(self, session: str, at_turn: int) -> str:
        """The id of a new conversation with the first `at_turn` turns of another."""
        return self._store.fork(session, at_turn).id


def _listed(session: Session, now_s: Callable[[], float] | None, found: str = "") -> Listed:
    used = ago(session.updated_at, now_s() if now_s is not None else None)
    about = f"{used} · {plural(session.num_turns, 'turn')} · {session.model}"
    title = printable(" ".join(session.title.split())) or "untitled"
    return Listed(session.id, title, printable(about), printable(found))


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= PREVIEW_CHARS else text[:PREVIEW_CHARS] + "…"
