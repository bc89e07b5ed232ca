"""What a user's `prune` takes: blocks chosen by age, model and use, the rest by worth."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv_store.eviction import Candidate, rank
from chatkv_store.sharing import known_layouts, stored_blocks

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations


@dataclass(frozen=True)
class Wanted:
    """Which blocks are to go; those of a pinned session never do."""

    older_than_s: float | None = None  # blocks whose every session was last used before that long
    orphans: bool = False  # blocks that no session finds
    max_bytes: int | None = None  # then as many of the least worthy, until this many are used
    namespaces: Set[bytes] | None = None  # of these models only; None: of all


def choose(
    store: BlockStore, conversations: Conversations, wanted: Wanted, now_s: float
) -> list[Candidate]:
    """The blocks that `wanted` takes, each once."""
    last_use = _last_use(store, conversations)
    in_scope = {
        header.key
        for header in store.headers()
        if wanted.namespaces is None or header.namespace in wanted.namespaces
    }
    chosen: list[Candidate] = []
    rest: list[Candidate] = []
    by_model_alone = wanted.older_than_s is None and not wanted.orphans and wanted.max_bytes is None
    for one in rank(store, conversations, now_s).candidates:
        if one.key not in in_scope:
            continue
        used_at = last_use.get(one.key)
        is_old = (
            used_at is not None
            and wanted.older_than_s is not None
            and now_s - used_at > wanted.older_than_s
        )
        goes = by_model_alone or is_old or (wanted.orphans and used_at is None)
        (chosen if goes else rest).append(one)
    if wanted.max_bytes is not None:
        left = store.env.info()["used_bytes"] - sum(one.disk_bytes for one in chosen)
        for one in rest:
            if left <= wanted.max_bytes:
                break
            chosen.append(one)
            left -= one.disk_bytes
    return chosen


def unshared_keys(
    store: BlockStore, conversations: Conversations, session_ids: Set[str]
) -> dict[bytes, int]:
    """Blocks that these sessions find and no other one does, with their payload bytes."""
    layouts = known_layouts(store)
    mine: dict[bytes, int] = {}
    others: set[bytes] = set()
    for session in conversations.list_sessions():
        for block in stored_blocks(store, conversations, session, layouts):
            if session.id in session_ids:
                mine[block.key] = block.header.num_payload_bytes
            else:
                others.add(block.key)
    return {key: num_bytes for key, num_bytes in mine.items() if key not in others}


def _last_use(store: BlockStore, conversations: Conversations) -> dict[bytes, float]:
    """When a session that finds it was last used, by key; newest of all its sessions."""
    layouts = known_layouts(store)
    last: dict[bytes, float] = {}
    for session in conversations.list_sessions():
        for block in stored_blocks(store, conversations, session, layouts):
            last[block.key] = max(last.get(block.key, 0.0), session.updated_at)
    return last
