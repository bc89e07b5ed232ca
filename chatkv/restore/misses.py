"""Why a turn does not find all the KV it could: other words, another model or codec, or it is gone.

Reads headers, never values. Causes are looked for only where history is missing, which is rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatkv.engine.sequence import TokenSequence
from chatkv_store.blocks import BlockStore, Match, StoredBlock
from chatkv_store.errors import StoreError
from chatkv_store.keys import unpack_ids
from chatkv_store.layout import KVLayout


@dataclass(frozen=True)
class Departure:
    """The first token that differs from what stood there when KV was kept, in memory or on disk."""

    position: int
    token: int
    other: int  # what stood there
    where: Literal["memory", "disk"]


def departure_in_memory(sequence: TokenSequence, ids: Sequence[int]) -> Departure | None:
    """Where `ids` departs from the tokens whose KV `sequence` holds."""
    at = sequence.common_prefix(ids)
    if at >= min(sequence.num_cached, len(ids)):
        return None
    return Departure(at, ids[at], sequence.ids[at], "memory")


def departure_on_disk(match: Match | None, ids: Sequence[int]) -> Departure | None:
    """Where `ids` departs from the stored block that agrees with it longest."""
    last = match.blocks[-1] if match is not None and match.blocks else None
    if last is None or last.num_tokens == last.header.num_tokens:
        return None
    # The match may end before they differ: what is asked for leaves out the last token of all.
    there = unpack_ids(last.header.ids)
    for offset in range(last.num_tokens, min(len(there), len(ids) - last.start)):
        now = ids[last.start + offset]
        if now != there[offset]:
            return Departure(last.start + offset, now, there[offset], "disk")
    return None


def num_missing(stored: Sequence[StoredBlock | None], in_pool: int, history: int) -> int:
    """Tokens of the history whose KV is neither among the first in_pool ones nor `stored`."""
    spans = [(b.start, b.start + b.num_tokens) for b in stored if b is not None]
    found = sum(max(0, min(stop, history) - max(start, in_pool)) for start, stop in spans)
    return max(0, history - in_pool - found)


def cause(store: BlockStore, namespace: bytes, ids: Sequence[int], found: int) -> str:
    """Why only the first `found` of `ids` have KV in `namespace`, although all were computed."""
    try:
        if not store.stats()["blocks"]:
            return "the KV cache is empty"
        return _elsewhere(store, namespace, ids, found) or _gone(store)
    except StoreError as error:
        return str(error)


def _elsewhere(store: BlockStore, namespace: bytes, ids: Sequence[int], found: int) -> str | None:
    """Whose KV of these tokens is stored, where it is not ours."""
    spaces = store.namespaces()
    own = spaces.get(namespace)
    if own is None:
        return None
    best, reason = found, None
    for space, info in spaces.items():
        layout = KVLayout.from_json(info["layout"])
        num_tokens = store.match(space, ids, layout).num_tokens if space != namespace else 0
        if num_tokens > best:
            best, reason = num_tokens, _difference(info, own)
    return reason


def _difference(theirs: dict[str, Any], own: dict[str, Any]) -> str:
    dtype, own_dtype = (KVLayout.from_json(info["layout"]).dtype for info in (theirs, own))
    if theirs.get("model") != own.get("model"):
        return f"it is stored for {theirs.get('model')}, and this is {own.get('model')}"
    if dtype != own_dtype:
        return f"it is stored for {dtype}, and this turn computed in {own_dtype}"
    if theirs.get("codec") != own.get("codec"):
        return f"it is stored as {theirs.get('codec')}, and this turn uses {own.get('codec')}"
    return "it is stored for other weights or another configuration of this model"


def _gone(store: BlockStore) -> str:
    counters = store.counters()
    happened = [
        f"{counters[f'{what}_blocks']:,} {what}"
        for what in ("evicted", "refused", "dropped")
        if counters.get(f"{what}_blocks")
    ]
    if not happened:
        return "it was deleted"
    return f"it has gone, of this cache's blocks {' and '.join(happened)} for want of room or time"
