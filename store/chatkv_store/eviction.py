"""What goes first when there is no room: the least seconds saved per byte, by the odds of a resume.

    worth(block) = prefill seconds of its tokens, summed over its sessions by the odds of a resume
    seconds      = alpha * n + beta * (e^2 - s^2) / 2     tokens s..e of a sequence, as restore's
    odds         = 1 / (1 + hours since the session's last use)

Seconds grow with the position, since a later token attends to more: so of one session the front
goes first, which is also what a restore from both ends computes fastest. Blocks of a pinned session
never go. A block that no session finds (of a deleted one, of an undone turn) is worth little.

Last use is the session's own record, so no read of KV ever has to write.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatkv_store.environment import PAGE_BYTES
from chatkv_store.keys import chain_keys
from chatkv_store.room import pages_of
from chatkv_store.sharing import known_layouts

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations, Session
    from chatkv_store.layout import KVLayout

# Only the ratio of the two matters within one model: attention doubles a token's work at 10k.
PREFILL_S_PER_TOKEN = 500e-6
PREFILL_S_PER_TOKEN_PAIR = 50e-9
UNUSED_ODDS = 0.01  # of a block that no session finds, beside one of a session of its age


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored block that may go."""

    key: bytes
    namespace: bytes
    num_bytes: int  # payload bytes
    disk_bytes: int  # of the whole pages that its values fill
    worth: float  # expected seconds saved per byte
    last_use: float | None  # of the sessions that find it, in epoch seconds; None: none does


@dataclass(frozen=True)
class Ranking:
    """Stored blocks that may go, the least worthy first, and what keys of any log are worth."""

    candidates: list[Candidate]
    seconds: dict[bytes, float] = field(repr=False)  # expected seconds saved, by key
    pinned: frozenset[bytes] = field(repr=False)


def rank(store: BlockStore, conversations: Conversations, now_s: float | None = None) -> Ranking:
    """Rank every stored block; reads logs and headers, never values."""
    now_s = conversations.now_s() if now_s is None else now_s
    layouts = known_layouts(store)
    seconds: defaultdict[bytes, float] = defaultdict(float)
    last_use: dict[bytes, float] = {}
    pinned: set[bytes] = set()
    for session in conversations.list_sessions():
        layout = layouts.get(bytes.fromhex(session.namespace or ""))
        if layout is not None:
            keys = _count(store, conversations, session, layout, seconds, now_s)
            for key in keys:
                last_use[key] = max(last_use.get(key, session.updated_at), session.updated_at)
            if session.pinned:
                pinned |= keys
    candidates = []
    for header in store.headers():
        key = header.key
        if key in pinned:
            continue
        worth = seconds.get(key)
        if worth is None:
            worth = UNUSED_ODDS * odds(now_s - header.created) * prefill_s(0, header.num_tokens)
        num_bytes = header.num_payload_bytes
        disk_bytes = sum(pages_of(value.num_bytes) * PAGE_BYTES for value in header.values)
        worth /= max(1, num_bytes)
        candidates.append(
            Candidate(key, header.namespace, num_bytes, disk_bytes, worth, last_use.get(key))
        )
    candidates.sort(key=lambda one: (one.worth, one.key))
    return Ranking(candidates, dict(seconds), frozenset(pinned))


def odds(age_s: float) -> float:
    """Of a resume soon; a session that a clock going backwards left in the future is new."""
    return 1 / (1 + max(0.0, age_s) / 3600)


def prefill_s(start: int, num_tokens: int) -> float:
    """Seconds to compute `num_tokens` tokens from position `start`."""
    pairs = num_tokens * (start + num_tokens / 2)
    return PREFILL_S_PER_TOKEN * num_tokens + PREFILL_S_PER_TOKEN_PAIR * pairs


def _count(
    store: BlockStore,
    conversations: Conversations,
    session: Session,
    layout: KVLayout,
    seconds: defaultdict[bytes, float],
    now_s: float,
) -> set[bytes]:
    """Add what the session's blocks are worth to it, stored or not; returns their keys."""
    namespace = bytes.fromhex(session.namespace or "")
    token_ids = conversations.token_log(session.id)
    chance = odds(now_s - session.updated_at)
    keys: set[bytes] = set()
    places = zip(
        chain_keys(namespace, token_ids, layout.block_tokens),
        store.locate(namespace, token_ids, layout),
        strict=True,
    )
    for index, (key, block) in enumerate(places):
        start = index * layout.block_tokens
        own = min(layout.block_tokens, len(token_ids) - start)
        for found, num_tokens in {
            key: own,
            **({block.key: block.num_tokens} if block else {}),
        }.items():
            seconds[found] += chance * prefill_s(start, num_tokens)
            keys.add(found)
    return keys
