"""Which session a client means by the names that it gives: its id, or whatever the client calls it.

A name of a client's own is noted with each turn that it came with, under a digest that holds the
model and the owner: to others it names nothing.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass

from chatkv.server.asked import Asked
from chatkv_store.conversations import Conversations, Session
from chatkv_store.errors import SessionNotFound

MAX_RECENT = 1000


@dataclass(frozen=True)
class Names:
    """The names in one request. `recent` is all requests': which sessions were named lately, since
    a client that stops an answer may go on before its end is noted."""

    conversations: Conversations
    asked: Asked
    seed: str
    recent: dict[bytes, str]

    def session(self) -> Session | None:
        """The session that the request names and may have. Raises SessionNotFound for an id."""
        wanted = self.asked.carriers.session
        if wanted is not None:
            with suppress(SessionNotFound):
                session = self.conversations.get_session(wanted)
                if session.id == wanted and self._is_mine(session):
                    return session
            raise SessionNotFound(f"there is no session {wanted[:100]!r}")
        for digest in self._keys():
            turn = self.conversations.turn_of_messages(digest)
            session_id = self.recent.get(digest) or (turn.session_id if turn is not None else None)
            with suppress(SessionNotFound):
                found = self.conversations.get_session(session_id) if session_id else None
                return found if found is not None and self._is_mine(found) else None
        return None

    def remember(self, session_id: str) -> None:
        """The request has gone to this session."""
        for digest in self._keys():
            self.recent.pop(digest, None)
            self.recent[digest] = session_id
        while len(self.recent) > MAX_RECENT:
            self.recent.pop(next(iter(self.recent)), None)

    def digests(self) -> list[bytes]:
        """Under which the request's turn is to be noted."""
        return [*self._keys(), *(name_digest(*name) for name in self.asked.names)]

    def _keys(self) -> list[bytes]:
        """The client's most telling name, where there is one."""
        return [name_digest(self.seed, *key) for key in self.asked.carriers.keys[:1]]

    def _is_mine(self, session: Session) -> bool:
        return bool(session.settings.get("owner", "") == self.asked.owner)


def name_digest(*name: str) -> bytes:
    """Under which a turn is noted that was given a name."""
    return hashlib.sha256(json.dumps(name).encode()).digest()
