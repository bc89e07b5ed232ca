"""Everybody who uses KV: conversations, and the uses of other engines (uses.py), as one list.

What looks at KV by who finds it (eviction, listings, pruning) asks here and sees no difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from chatkv_store.errors import SessionAmbiguous, SessionNotFound
from chatkv_store.resolve import MIN_PREFIX_CHARS
from chatkv_store.uses import Use, Uses

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations, Session


class Logs:
    """The token logs that may find blocks of `store`; without one, conversations alone."""

    def __init__(self, store: BlockStore | None, conversations: Conversations) -> None:
        self._uses = None if store is None else Uses(store)
        self._conversations = conversations

    def now_s(self) -> float:
        return self._conversations.now_s()

    def list_sessions(self) -> list[Session]:
        """All of them by last use, newest first."""
        sessions, uses = self._conversations.list_sessions(), self._every_use()
        if not uses:
            return sessions
        every = [*sessions, *(use.as_session() for use in uses)]
        return sorted(every, key=lambda one: -one.updated_at)

    def token_log(self, session: Session) -> array[int]:
        """Every token id (u32) of one of them."""
        if self._uses is not None and is_use(session):
            return self._uses.token_log(_key(session))
        return self._conversations.token_log(session.id)

    def get_session(self, ref: str) -> Session:
        """The one that a full id, a title or the beginning of an id names, conversations first.

        Raises SessionNotFound or SessionAmbiguous.
        """
        try:
            return self._conversations.get_session(ref)
        except SessionNotFound:
            found = self._uses_named(ref)
            if len(found) == 1:
                return found[0].as_session()
            if found:
                raise SessionAmbiguous(
                    f'"{ref}" names {len(found)} requests: give more of the id'
                ) from None
            raise

    def short_ids(self) -> dict[str, str]:
        """Every id -> a prefix of it that names it alone (>= 8 characters)."""
        short = self._conversations.short_ids()
        ids = [use.id for use in self._every_use()]
        for one in ids:
            others = [*short, *(id for id in ids if id != one)]
            length = 8
            while length < len(one) and any(id.startswith(one[:length]) for id in others):
                length += 1
            short[one] = one[:length]
        return short

    def pin(self, session: Session, pinned: bool) -> None:
        """Keep its KV for good, or let it be evicted again."""
        if self._uses is not None and is_use(session):
            self._uses.pin(_key(session), pinned)
        else:
            self._conversations.update_session(session.id, pinned=pinned)

    def remove_uses(self, sessions: Iterable[Session]) -> None:
        """Forget those among them that are uses: who deletes their KV means all of it."""
        if self._uses is not None:
            self._uses.remove(_key(one) for one in sessions if is_use(one))

    def _every_use(self) -> list[Use]:
        return [] if self._uses is None else self._uses.every()

    def _uses_named(self, ref: str) -> list[Use]:
        every = self._every_use()
        named = [use for use in every if ref in (use.id, use.title)]
        if not named and len(ref) >= MIN_PREFIX_CHARS:
            named = [use for use in every if use.id.startswith(ref.lower())]
        return named


def is_use(session: Session) -> bool:
    """Whether it stands for a use: its head is the key of a block, longer than any turn's id."""
    return len(session.head or "") > len(session.id)


def _key(use: Session) -> bytes:
    return bytes.fromhex(use.head or "")
