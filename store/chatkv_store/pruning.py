"""What a user's `prune` takes: blocks chosen by age, model and use, the rest by worth."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv_store.eviction import Candidate, rank
from chatkv_store.logs import Logs
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
    chosen: list[Candidate] = []
    rest: list[Candidate] = []
    by_model_alone = wanted.older_than_s is None and not wanted.orphans and wanted.max_bytes is None
    for one in rank(store, conversations, now_s).candidates():
        if wanted.namespaces is not None and one.namespace not in wanted.namespaces:
            continue
        is_old = (
            one.last_use is not None
            and wanted.older_than_s is not None
            and now_s - one.last_use > wanted.older_than_s
        )
        goes = by_model_alone or is_old or (wanted.orphans and one.last_use is None)
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
) -> tuple[dict[bytes, int], int]:
    """Blocks that these sessions find and no other one does, with their payload bytes; and how
    many they find that others find too."""
    layouts = known_layouts(store)
    mine: dict[bytes, int] = {}
    others: set[bytes] = set()
    for session in Logs(store, conversations).list_sessions():
        for block in stored_blocks(store, conversations, session, layouts):
            if session.id in session_ids:
                mine[block.key] = block.header.num_payload_bytes
            else:
                others.add(block.key)
    unshared = {key: num_bytes for key, num_bytes in mine.items() if key not in others}
    return unshared, len(mine) - len(unshared)
