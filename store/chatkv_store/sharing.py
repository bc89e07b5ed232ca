"""Who uses which KV blocks: the bytes of each session, those of its own and those it shares.

Blocks know nothing of sessions; they are found by tokens. So a session's blocks are looked up the
way a resume would find them, from its token log, and a block that several sessions find is shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chatkv_store.blocks import BlockStore, Match
from chatkv_store.conversations import Conversations, Session
from chatkv_store.layout import KVLayout


@dataclass(frozen=True)
class SessionUsage:
    """What the disk tier holds for one session; bytes are those of the encoded values."""

    session: Session
    num_stored_tokens: int  # the next turn need not compute these
    num_blocks: int
    unique_bytes: int  # found by this session alone
    shared_bytes: int  # found by others too
    raw_bytes: int  # what both are in memory
    miss: str | None  # why the rest of its tokens is not stored; None where all of it is

    @property
    def num_bytes(self) -> int:
        return self.unique_bytes + self.shared_bytes


@dataclass(frozen=True)
class Usage:
    """Every session's share, and the blocks that any session finds."""

    sessions: list[SessionUsage]
    used_keys: frozenset[bytes]


def usage(
    blocks: BlockStore, conversations: Conversations, sessions: Iterable[Session] | None = None
) -> Usage:
    """The share of each session (None: of all), newest first; reads headers, never values.

    What is shared is judged among all sessions, whichever are asked for.
    """
    everyone = conversations.list_sessions()
    layouts = {space: _layout(info) for space, info in blocks.namespaces().items()}
    matches = {
        session.id: _match(blocks, layouts, session, conversations.token_log(session.id))
        for session in everyone
    }
    finders = Counter(block.key for match in matches.values() for block in match.blocks)
    wanted = everyone if sessions is None else list(sessions)
    return Usage(
        [_share(session, matches[session.id], finders) for session in wanted],
        frozenset(finders),
    )


def _match(
    blocks: BlockStore, layouts: dict[bytes, KVLayout], session: Session, token_ids: Iterable[int]
) -> Match:
    space = bytes.fromhex(session.namespace or "")
    if space not in layouts:
        return Match([], 0, "no model has stored KV for it")
    return blocks.match(space, list(token_ids), layouts[space])


def _share(session: Session, match: Match, finders: Counter[bytes]) -> SessionUsage:
    unique = shared = raw = 0
    for block in match.blocks:
        raw += block.header.num_raw_bytes
        if finders[block.key] == 1:
            unique += block.header.num_payload_bytes
        else:
            shared += block.header.num_payload_bytes
    return SessionUsage(
        session, match.num_tokens, len(match.blocks), unique, shared, raw, match.miss
    )


def _layout(info: dict[str, Any]) -> KVLayout:
    return KVLayout.from_json(info["layout"])
