"""Who uses which KV blocks: the bytes of each session, those of its own and those it shares.

Blocks know nothing of sessions; they are found by tokens. So a session's blocks are looked up the
way a resume would find them, from its token log, and a block that several sessions find is shared.
No count of references is kept anywhere: what is derived from the logs each time is right after any
crash, and a fork or a deleted session changes it without a write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chatkv_store.blocks import BlockStore
from chatkv_store.chain import StoredBlock
from chatkv_store.conversations import Conversations, Session
from chatkv_store.layout import KVLayout
from chatkv_store.logs import Logs

NEWEST = "the newest token: it comes with the next turn"  # which begins by computing it


@dataclass(frozen=True)
class SessionUsage:
    """What the disk tier holds for one session; bytes are those of the encoded values."""

    session: Session
    num_stored_tokens: int  # behind gaps too: both-ends restore computes the front, loads the rest
    num_blocks: int
    unique_bytes: int  # found by this session alone
    shared_bytes: int  # found by others too
    raw_bytes: int  # what both are in memory
    miss: str | None  # why the rest of its tokens is not stored; None where all of it is

    @property
    def num_bytes(self) -> int:
        return self.unique_bytes + self.shared_bytes

    def to_json(self) -> dict[str, Any]:
        """What programs get of it."""
        return {
            "session": self.session.id,
            "title": self.session.title,
            "model": self.session.model,
            "tokens": self.session.num_tokens,
            "stored_tokens": self.num_stored_tokens,
            "blocks": self.num_blocks,
            "bytes": self.num_bytes,
            "unique_bytes": self.unique_bytes,
            "shared_bytes": self.shared_bytes,
            "pinned": self.session.pinned,
            "updated_at": self.session.updated_at,
        }


@dataclass(frozen=True)
class Usage:
    """Every session's share, and who finds which block."""

    sessions: list[SessionUsage]
    blocks: dict[str, list[StoredBlock]]  # by session id, of all sessions, in the log's order
    finders: dict[bytes, list[str]]  # by block, the ids of the sessions that find it

    @cached_property
    def used_keys(self) -> set[bytes]:
        """Blocks that any session finds."""
        return set(self.finders)

    @cached_property
    def shared_keys(self) -> set[bytes]:
        """Blocks that several sessions find."""
        return {key for key, ids in self.finders.items() if len(ids) > 1}


def usage(
    blocks: BlockStore, conversations: Conversations, sessions: Iterable[Session] | None = None
) -> Usage:
    """The share of each session (None: of all), newest first; reads headers, never values.

    What is shared is judged among all sessions, whichever are asked for.
    """
    everyone = Logs(blocks, conversations).list_sessions()
    layouts = known_layouts(blocks)
    known = {space.hex() for space in layouts}
    found = {
        session.id: stored_blocks(blocks, conversations, session, layouts) for session in everyone
    }
    finders: dict[bytes, list[str]] = {}
    for session_id, its_blocks in found.items():
        for block in its_blocks:
            finders.setdefault(block.key, []).append(session_id)
    wanted = everyone if sessions is None else list(sessions)
    return Usage(
        [
            _share(session, found[session.id], finders, (session.namespace or "") in known)
            for session in wanted
        ],
        found,
        finders,
    )


def stored_blocks(
    blocks: BlockStore,
    conversations: Conversations,
    session: Session,
    layouts: dict[bytes, KVLayout] | None = None,
) -> list[StoredBlock]:
    """The blocks that hold KV of the session, gaps left out.

    `layouts` are those of all namespaces, where the caller has them already.
    """
    if layouts is None:
        layouts = known_layouts(blocks)
    layout = layouts.get(bytes.fromhex(session.namespace or ""))
    if layout is None:
        return []
    token_ids = Logs(blocks, conversations).token_log(session)
    located = blocks.locate(bytes.fromhex(session.namespace or ""), token_ids, layout)
    return [block for block in located if block is not None]


def known_layouts(blocks: BlockStore) -> dict[bytes, KVLayout]:
    """The layout of each namespace that a model has registered."""
    return {
        space: KVLayout.from_json(info["layout"]) for space, info in blocks.namespaces().items()
    }


def _share(
    session: Session, found: list[StoredBlock], finders: dict[bytes, list[str]], is_known: bool
) -> SessionUsage:
    unique = shared = raw = tokens = 0
    miss: str | None = None
    for block in found:
        raw += block.header.num_raw_bytes
        if len(finders[block.key]) == 1:
            unique += block.header.num_payload_bytes
        else:
            shared += block.header.num_payload_bytes
        if miss is None and block.start != tokens:
            miss = f"from token {tokens} of {session.num_tokens}: not stored until {block.start}"
        tokens += block.num_tokens
    if miss is None and tokens == session.num_tokens - 1:
        miss = NEWEST
    if miss is None and tokens < session.num_tokens:
        miss = f"from token {tokens} of {session.num_tokens}: not stored"
    if not is_known:
        miss = "no model has stored KV for it"
    return SessionUsage(session, tokens, len(found), unique, shared, raw, miss)
