"""Bringing a conversation's KV back into the pool: planning it, loading it, saying what it took.

Knows the pool, the store and the cost model; decides nothing about text. Every block may be
missing or damaged at any time: that costs time, is said, and never gives a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from chatkv.engine.engine import Engine, TokenSequence
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.errors import PersistenceError
from chatkv.model.rope import inverse_frequencies
from chatkv.restore.both_ends import BothEnds
from chatkv.restore.calibration import Calibration, Progress, calibrate
from chatkv.restore.cost import CostFile
from chatkv.restore.plan import Plan, Situation, Wanted, choose, survey
from chatkv.restore.saver import DiskTier, Saver, pool_bits
from chatkv_store.blocks import Match, StoredBlock
from chatkv_store.errors import StoreError
from chatkv_store.layout import KVLayout
from chatkv_store.loader import default_threads, load_blocks

# Restoring from both ends, the loader reads runs of blocks that take about this long: prefill may
# have to wait for one of them.
RUN_S, MAX_RUN_BLOCKS = 0.02, 8


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    ids: list[int]
    situation: Situation
    match: Match | None  # None: the disk was not asked, since the pool holds all of the history
    stored: list[StoredBlock | None]  # block by block, also behind gaps


@dataclass(frozen=True)
class Restored:
    """Where the KV of a turn's tokens came from, before prefill computes the rest."""

    plan: Plan
    reused: int
    loaded: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    load_cpu_s: float = 0.0  # of all threads together
    notices: tuple[str, ...] = ()
    arriving: BothEnds | None = None  # what is on its way still; close it after the prefill

    @property
    def all_notices(self) -> tuple[str, ...]:
        """`notices`, and what has become known since."""
        if self.arriving is None or self.arriving.error is None:
            return self.notices
        return (*self.notices, f"loading stopped, the rest was computed: {self.arriving.error}")

    @property
    def num_bytes(self) -> int:
        """Payload bytes that were read from the disk until now."""
        return self.loaded_bytes + (self.arriving.num_bytes if self.arriving else 0)

    @property
    def num_loaded(self) -> int:
        """Tokens that came from the disk until now."""
        return self.loaded + (self.arriving.num_loaded if self.arriving else 0)


class Restorer:
    """Restores and saves the sequences of one engine. `disk` None: nothing outlives the process."""

    def __init__(
        self,
        engine: Engine,
        layout: KVLayout,
        disk: DiskTier | None,
        costs: CostFile,
        key: str,
        label: str = "",
    ) -> None:
        assert layout.block_tokens == BLOCK_TOKENS
        self.engine, self.layout, self.disk = engine, layout, disk
        self._costs, self._cost_key, self._label = costs, key, label
        self.cost = costs.load(key)
        self._frequencies = inverse_frequencies(engine.decoder.config)[0].numpy()
        self._saver = (
            Saver(engine.pool, layout, disk, self._frequencies) if disk is not None else None
        )

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
        stored = self._stored(ids, match, history)
        matched = match.num_tokens if match else 0
        situation = survey(len(ids), history, in_pool, matched, stored)
        plan = choose(situation, self.cost, wanted, exact)
        return Planned(plan, list(ids), situation, match, stored)

    def restore(
        self,
        sequence: TokenSequence,
        planned: Planned,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Restored:
        """Make `sequence` hold the planned ids, with as much of their KV in the pool as the plan
        says. The rest is prefill's, which must be told of `arriving` where that is set."""
        situation = planned.situation
        sequence.become(planned.ids, num_cached=situation.in_pool)
        if self._saver is not None:
            self._saver.begin(sequence, [block for block in planned.stored if block is not None])
        result = Restored(planned.plan, reused=situation.in_pool)
        if planned.plan.chosen == "reload" and planned.match is not None:
            result = self._load(sequence, planned.match, result, on_progress)
        elif planned.plan.chosen == "both":
            result = replace(result, arriving=self._load_from_the_end(sequence, planned))
        return replace(result, notices=result.notices + self._alarm(sequence, planned))

    def save(self, sequence: TokenSequence, tail: bool = False) -> None:
        """Hand what was computed since the last call to the disk tier (see `Saver.save`)."""
        if self._saver is not None:
            self._saver.save(sequence, tail)

    @property
    def is_calibrated(self) -> bool:
        """Whether the cost model was ever measured on this machine."""
        return self.cost.num_observations > 0

    def calibrate(self, scratch: Path, on_progress: Progress | None = None) -> Calibration:
        """Measure the cost model anew, in a few seconds, and remember it."""
        found = calibrate(self.engine, self.layout, self._frequencies, scratch, on_progress)
        self.cost = found.cost
        self._costs.save(self._cost_key, self._label, self.cost)
        return found

    def learn(self, restored: Restored, num_computed: int, prefill_s: float) -> None:
        """Correct the cost model by what a turn took. A restore from both ends says nothing about
        either rate alone."""
        if restored.arriving is not None:
            return
        if restored.loaded:
            self.cost = self.cost.after_load(
                restored.loaded, restored.load_s, restored.load_cpu_s / default_threads()
            )
        if num_computed:
            start = restored.reused + restored.loaded
            self.cost = self.cost.after_prefill(start, start + num_computed, prefill_s)
        self._costs.save(self._cost_key, self._label, self.cost)

    # --- inside ---------------------------------------------------------------------------------

    def _match(self, ids: Sequence[int]) -> Match | None:
        if self.disk is None:
            return None
        try:
            return self.disk.store.match(self.disk.namespace, ids[:-1], self.layout)
        except StoreError as error:
            return Match([], 0, str(error))

    def _stored(
        self, ids: Sequence[int], match: Match | None, history: int
    ) -> list[StoredBlock | None]:
        """What is stored, block by block; what lies behind a gap is looked for where history is."""
        if match is None or self.disk is None:
            return []
        if match.num_tokens >= history:
            return list(match.blocks)
        try:
            store, namespace = self.disk.store, self.disk.namespace
            found = store.locate(namespace, ids[: min(history, len(ids) - 1)], self.layout)
        except StoreError:
            return list(match.blocks)
        while found and found[-1] is None:
            found.pop()
        return found

    def _load(
        self,
        sequence: TokenSequence,
        match: Match,
        result: Restored,
        on_progress: Callable[[int, int], None] | None,
    ) -> Restored:
        """Read the matched blocks that are not in the pool yet. Those that turn out to be damaged
        end the useful part, and are dropped from the store so that they can be written again."""
        assert self.disk is not None and self._saver is not None
        began, cpu_began = time.perf_counter(), time.process_time()
        self.engine.pool.reserve(sequence.run, len(sequence.ids))
        first = result.reused // BLOCK_TOKENS
        blocks = match.blocks[first:]
        groups = self.layout.num_values
        loaded = load_blocks(
            self.disk.store,
            blocks,
            self.layout,
            pool_bits(self.engine.pool, sequence),
            default_threads(),
            on_group_done=lambda group, _: on_progress and on_progress(group + 1, groups),
        )
        usable = max(result.reused, first * BLOCK_TOKENS + loaded.num_tokens_ok)
        sequence.num_cached = usable
        self._saver.loaded(sequence, [block for block in blocks if block.start < usable])
        notices: tuple[str, ...] = ()
        if loaded.misses:
            damaged = next(b for b in blocks if b.start + b.num_tokens > usable)
            self._drop(sequence, damaged)
            notices = (f"stored KV is unusable and computed again: {loaded.misses[0]}",)
        return replace(
            result,
            loaded=usable - result.reused,
            loaded_bytes=loaded.bytes_read,
            load_s=time.perf_counter() - began,
            load_cpu_s=time.process_time() - cpu_began,
            notices=notices,
        )

    def _load_from_the_end(self, sequence: TokenSequence, planned: Planned) -> BothEnds:
        """Begin to load the stored blocks, the last ones first, beside the prefill that follows."""
        self.engine.pool.reserve(sequence.run, len(sequence.ids))
        bits = pool_bits(self.engine.pool, sequence)

        def load(blocks: Sequence[StoredBlock]) -> tuple[int, int]:
            assert self.disk is not None and self._saver is not None
            done = load_blocks(self.disk.store, blocks, self.layout, bits, threads=1)
            sound = done.num_tokens_ok // blocks[0].num_tokens
            self._saver.loaded(sequence, blocks[:sound])
            if sound < len(blocks):
                self._drop(sequence, blocks[sound])
            return sound, done.bytes_read

        def share(position: int) -> float:
            block_s = self.cost.prefill_s(position, position + BLOCK_TOKENS)
            load_s = self.cost.load_s_per_token * BLOCK_TOKENS
            return load_s / (load_s + block_s - self.cost.prefill_fixed_s)

        # A block that is partly in the pool already is prefill's.
        first = -(-planned.situation.in_pool // BLOCK_TOKENS)
        run_blocks = int(RUN_S / (self.cost.load_s_per_token * BLOCK_TOKENS))
        return BothEnds(planned.stored, first, load, share, max(1, min(run_blocks, MAX_RUN_BLOCKS)))

    def _drop(self, sequence: TokenSequence, damaged: StoredBlock) -> None:
        assert self._saver is not None
        with suppress(StoreError):  # else it stays damaged, and stays a miss
            self._saver.replace(sequence, damaged)

    def _alarm(self, sequence: TokenSequence, planned: Planned) -> tuple[str, ...]:
        """History that has to be computed again although nobody asked for it is always said."""
        situation, match = planned.situation, planned.match
        missing = situation.history - max(situation.available, sequence.num_cached)
        if missing <= 0 or match is None or match.miss is None:
            return ()
        return (
            f"{missing} tokens of history have no stored KV and are computed again: {match.miss}",
        )
