"""Bringing a conversation's KV back into the pool, and handing new KV to the disk tier.

Knows the pool, the store and the cost model; decides nothing about text. Every block may be
missing or damaged at any time: that costs time, is said, and never gives a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from chatkv.engine.engine import Engine, TokenSequence
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.errors import PersistenceError
from chatkv.model.rope import inverse_frequencies
from chatkv.restore.cost import CostFile
from chatkv.restore.plan import Plan, Situation, Wanted, choose
from chatkv_store import codec as codecs
from chatkv_store.blocks import BlockStore, Match, NewBlock, StoredBlock
from chatkv_store.errors import StoreError
from chatkv_store.keys import block_key
from chatkv_store.layout import KVLayout
from chatkv_store.loader import LoadResult, default_threads, load_blocks
from chatkv_store.writer import BlockWriter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class DiskTier:
    """One model's KV on disk: its store, the writer behind it, what the KV is called, and the
    codec for new blocks."""

    store: BlockStore
    writer: BlockWriter
    namespace: bytes
    codec: str = "lossless"

    @property
    def is_lossy(self) -> bool:
        return codecs.is_lossy(codecs.by_name(self.codec))


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    ids: list[int]
    situation: Situation
    match: Match | None  # None: the disk was not asked, since the pool holds all of the history


@dataclass(frozen=True)
class Restored:
    """Where the KV of a turn's tokens came from, before prefill computes the rest."""

    plan: Plan
    reused: int
    loaded: int
    loaded_bytes: int = 0
    load_s: float = 0.0
    notices: tuple[str, ...] = ()


@dataclass
class _Chain:
    """Keys of a sequence's full blocks from the first on, and how many are on disk already.

    No token at or behind `quantised_end` has KV that came from a lossy block. A new block that
    begins before it (the front of a lossy block, where a session forks) is stored as it is: KV is
    quantised once, from its original, and never again.
    """

    keys: list[bytes] = field(default_factory=list)
    num_saved: int = 0
    quantised_end: int = 0

    def cut(self, num_tokens: int) -> None:
        """Forget everything behind the first num_tokens tokens."""
        full = num_tokens // BLOCK_TOKENS
        del self.keys[full:]
        self.num_saved = min(self.num_saved, full)
        self.quantised_end = min(self.quantised_end, num_tokens)


class Restorer:
    """Restores and saves the sequences of one engine. `disk` None: nothing outlives the process."""

    def __init__(
        self, engine: Engine, layout: KVLayout, disk: DiskTier | None, costs: CostFile, key: str
    ) -> None:
        assert layout.block_tokens == BLOCK_TOKENS
        self.engine, self.layout, self.disk = engine, layout, disk
        self._costs, self._cost_key = costs, key
        self.cost = costs.load(key)
        self._inverse_frequencies = inverse_frequencies(engine.decoder.config)[0].numpy()
        self._chains: WeakKeyDictionary[TokenSequence, _Chain] = WeakKeyDictionary()

    def plan(
        self,
        sequence: TokenSequence,
        ids: Sequence[int],
        history: int,
        wanted: Wanted = "auto",
        exact: bool = False,
    ) -> Planned:
        """Decide how `sequence` is to come to hold the KV of `ids`; changes and reads no KV.

        history: leading ids whose KV an earlier turn has computed, so that it should be found.
        Raises PersistenceError where `exact` forbids what would have to be done.
        """
        in_pool = min(sequence.common_prefix(ids), len(ids) - 1)
        if exact and self.disk is not None and self.disk.is_lossy and in_pool < history:
            raise PersistenceError(
                f"--exact: this session keeps its KV as {self.disk.codec}, which changes it; leave "
                "--exact out, or start a session without --kv-codec"
            )
        match = self._match(ids) if in_pool < history or not history else None
        situation = Situation(
            total=len(ids),
            in_pool=in_pool,
            available=max(in_pool, match.num_tokens if match else 0),
            history=history,
        )
        return Planned(choose(situation, self.cost, wanted, exact), list(ids), situation, match)

    def restore(
        self,
        sequence: TokenSequence,
        planned: Planned,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Restored:
        """Make `sequence` hold the planned ids, with as much of their KV in the pool as the plan
        says. The rest is prefill's."""
        situation, match = planned.situation, planned.match
        sequence.become(planned.ids, num_cached=situation.in_pool)
        chain = self._chains.setdefault(sequence, _Chain())
        chain.cut(situation.in_pool)
        result = Restored(planned.plan, reused=situation.in_pool, loaded=0)
        if planned.plan.chosen == "reload" and match is not None:
            result = self._load(sequence, match, result, on_progress)
        return replace(result, notices=result.notices + self._alarm(sequence, situation, match))

    def save(self, sequence: TokenSequence, tail: bool = False) -> None:
        """Hand blocks computed since the last call to the background writer; with `tail`, the
        tokens of the unfinished last block too. Copies the KV, never waits for the disk."""
        if self.disk is None:
            return
        chain = self._chains.setdefault(sequence, _Chain())
        full = sequence.num_cached // BLOCK_TOKENS
        chain.cut(sequence.num_cached)
        while len(chain.keys) < full:
            start = len(chain.keys) * BLOCK_TOKENS
            parent = chain.keys[-1] if chain.keys else self.disk.namespace
            chain.keys.append(block_key(parent, sequence.ids[start : start + BLOCK_TOKENS]))
        while chain.num_saved < full:
            start = chain.num_saved * BLOCK_TOKENS
            if not self._put(sequence, chain, start, start + BLOCK_TOKENS):
                return  # the queue is full: tried again with the next block, or recomputed one day
            chain.num_saved += 1
        if tail and sequence.num_cached % BLOCK_TOKENS:
            self._put(sequence, chain, full * BLOCK_TOKENS, sequence.num_cached)

    def learn(self, restored: Restored, num_computed: int, prefill_s: float) -> None:
        """Correct the cost model by what a turn took."""
        if restored.loaded:
            self.cost = self.cost.after_load(restored.loaded, restored.load_s)
        if num_computed:
            start = restored.reused + restored.loaded
            self.cost = self.cost.after_prefill(start, start + num_computed, prefill_s)
        self._costs.save(self._cost_key, self.cost)

    # --- inside ---------------------------------------------------------------------------------

    def _match(self, ids: Sequence[int]) -> Match | None:
        if self.disk is None:
            return None
        try:
            return self.disk.store.match(self.disk.namespace, ids[:-1], self.layout)
        except StoreError as error:
            return Match([], 0, str(error))

    def _load(
        self,
        sequence: TokenSequence,
        match: Match,
        result: Restored,
        on_progress: Callable[[int, int], None] | None,
    ) -> Restored:
        """Read the matched blocks that are not in the pool yet. Those that turn out to be damaged
        end the useful part, and are dropped from the store so that they can be written again."""
        assert self.disk is not None
        began = time.perf_counter()
        self.engine.pool.reserve(sequence.run, len(sequence.ids))
        first = result.reused // BLOCK_TOKENS
        blocks = match.blocks[first:]
        groups = self.layout.num_values
        loaded = load_blocks(
            self.disk.store,
            blocks,
            self.layout,
            self._bits(sequence),
            default_threads(),
            on_group_done=lambda group, _: on_progress and on_progress(group + 1, groups),
        )
        usable = max(result.reused, first * BLOCK_TOKENS + loaded.num_tokens_ok)
        sequence.num_cached = usable
        self._remember(sequence, match, usable)
        return replace(
            result,
            loaded=usable - result.reused,
            loaded_bytes=loaded.bytes_read,
            load_s=time.perf_counter() - began,
            notices=self._drop_damaged(blocks, loaded),
        )

    def _remember(self, sequence: TokenSequence, match: Match, usable: int) -> None:
        """The full blocks that came from the store need not be saved to it."""
        full = usable // BLOCK_TOKENS
        chain = self._chains[sequence]
        chain.keys = [block.key for block in match.blocks[:full]]
        if full and match.blocks[full - 1].header.num_tokens != match.blocks[full - 1].num_tokens:
            chain.keys.pop()
        chain.num_saved = len(chain.keys)
        for block in match.blocks:
            if codecs.is_quantised(block.header.codec):
                chain.quantised_end = min(block.start + block.num_tokens, usable)

    def _drop_damaged(self, blocks: Sequence[StoredBlock], loaded: LoadResult) -> tuple[str, ...]:
        if not loaded.misses:
            return ()
        assert self.disk is not None
        good = 0
        for block in blocks:
            good += block.num_tokens
            if good > loaded.num_tokens_ok:
                with suppress(StoreError):  # else it stays damaged, and stays a miss
                    self.disk.store.remove([block.key])
                break
        return (f"stored KV is unusable and computed again: {loaded.misses[0]}",)

    def _alarm(
        self, sequence: TokenSequence, situation: Situation, match: Match | None
    ) -> tuple[str, ...]:
        """History that has to be computed again although nobody asked for it is always said."""
        missing = situation.history - max(situation.available, sequence.num_cached)
        if missing <= 0 or match is None or match.miss is None:
            return ()
        return (
            f"{missing} tokens of history have no stored KV and are computed again: {match.miss}",
        )

    def _put(self, sequence: TokenSequence, chain: _Chain, start: int, stop: int) -> bool:
        """Queue tokens [start, stop) of one block; False where the queue has no room."""
        assert self.disk is not None
        index = start // BLOCK_TOKENS
        parent = chain.keys[index - 1] if index else self.disk.namespace
        # A copy, since the pool's memory may be given to somebody else before it is written.
        bits = self._bits(sequence)[:, :, :, start:stop].copy()

        def value(group: int) -> npt.NDArray[Any]:
            layers = self.layout.value_layers(group)
            return bits[layers.start : layers.stop]

        block = NewBlock(parent, sequence.ids[start:stop], value, start, self._inverse_frequencies)
        codec = codecs.KEPT if start < chain.quantised_end else self.disk.codec
        return self.disk.writer.submit(self.disk.namespace, self.layout, [block], codec)

    def _bits(self, sequence: TokenSequence) -> npt.NDArray[np.unsignedinteger[Any]]:
        """View of the sequence's KV as bits: [layers, 2, kv_heads, capacity, head_dim]."""
        slots = self.engine.pool.slots(sequence.run, 0, sequence.run.capacity)
        kind = torch.uint32 if slots.dtype == torch.float32 else torch.uint16
        return slots.view(kind).numpy()
