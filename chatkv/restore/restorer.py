"""Bringing a conversation's KV back into the pool: planning it, loading it, saying what it took.

Knows the pool, the store and the cost model; decides nothing about text. Every block may be
missing or damaged at any time: that costs time, is said, and never gives a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from chatkv.engine.engine import Engine
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.scheduler import Cancelled
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import PersistenceError
from chatkv.model.rope import inverse_frequencies
from chatkv.restore.both_ends import BothEnds
from chatkv.restore.calibration import Calibration, Progress, calibrate
from chatkv.restore.cost import OVERLAP_S, CostFile
from chatkv.restore.fetching import Fetching
from chatkv.restore.layers import Arrived, LayerLoad
from chatkv.restore.misses import (
    cause,
    departure_in_memory,
    departure_on_disk,
    num_missing,
)
from chatkv.restore.plan import Wanted, choose, survey
from chatkv.restore.pool_loads import PoolLoads
from chatkv.restore.prefill_worker import Offer
from chatkv.restore.remote import RemotePrefill, told
from chatkv.restore.restored import Planned, Restored
from chatkv.restore.saver import DiskTier, Saver
from chatkv.restore.staging import reach
from chatkv_store.blocks import Match, StoredBlock
from chatkv_store.errors import StoreError
from chatkv_store.layout import KVLayout
from chatkv_store.loader import default_threads, load_blocks

# How long others wait at most for the KV that they displace to be on disk.
SWAP_S = 5.0


class Restorer:
    """Restores and saves the sequences of one engine. `disk` None: nothing outlives the process.
    Sequences of two realms share no KV in memory. `remote`: a worker that may compute prompts."""

    def __init__(
        self,
        engine: Engine,
        layout: KVLayout,
        disk: DiskTier | None,
        costs: CostFile,
        key: str,
        label: str = "",
        realm: str = "",
        remote: RemotePrefill | None = None,
    ) -> None:
        assert layout.block_tokens == BLOCK_TOKENS
        self.engine, self.layout, self.disk, self.realm = engine, layout, disk, realm
        self._fetching: Fetching | None = None
        self._costs, self._cost_key, self._label = costs, key, label
        self.cost = costs.load(key)
        engine.scheduler.budget.expected = self.cost.steps or engine.scheduler.budget.expected
        self._frequencies = inverse_frequencies(engine.decoder.config)[0].numpy()
        self.reach = reach(engine.pool, layout)
        self._saver = (
            Saver(engine.pool, layout, disk, self._frequencies) if disk is not None else None
        )
        if remote is not None:
            self._fetching = Fetching(remote, engine, layout, self.reach, disk, self._saver)

    def plan(
        self,
        sequence: TokenSequence,
        ids: Sequence[int],
        history: int,
        wanted: Wanted = "auto",
        exact: bool = False,
    ) -> Planned:
        """Decide how `sequence` is to come to hold the KV of `ids`. What another sequence in memory
        begins with alike is copied already; nothing else is changed or read.

        history: leading ids whose KV an earlier turn has computed, so that it should be found.
        Raises PersistenceError where `exact` forbids what would have to be done.
        """
        departure = departure_in_memory(sequence, ids)
        self.engine.memory.share(sequence, ids)
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
        offer = no_offer = there = None
        if self._fetching is not None and not exact and wanted in ("auto", "remote"):
            offer, no_offer = self._fetching.offer(situation, self.cost.load_s_per_token)
            there = self._fetching.there(offer) if offer is not None else None
        cold = self._cold_share(stored, in_pool)
        plan = choose(situation, self.cost.with_cold(cold), wanted, exact, there)
        departure = departure or departure_on_disk(match, ids)
        kept = (match, stored, wanted, exact, departure)
        return Planned(plan, list(ids), situation, *kept, offer, no_offer, cold)

    def restore(
        self,
        sequence: TokenSequence,
        planned: Planned,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Restored:
        """Make `sequence` hold the planned ids, with as much of their KV in the pool as the plan
        says. The rest is prefill's, which must be told of `arriving` where that is set.

        Waits for room, and raises what `Engine.reserve` does; Cancelled also while it loads.
        """
        situation = planned.situation
        sequence.become(planned.ids, num_cached=situation.in_pool)
        self.engine.reserve(sequence, cancelled)
        if sequence.num_cached < situation.in_pool:  # others had its blocks meanwhile
            history, wanted, exact = situation.history, planned.wanted, planned.exact
            again = self.plan(sequence, planned.ids, history, wanted, exact)
            return self.restore(sequence, again, on_progress, cancelled)
        if self._saver is not None:
            self._saver.begin(sequence, [block for block in planned.stored if block is not None])
        result = Restored(
            planned.plan,
            situation.in_pool,
            planned.departure,
            history=situation.history,
            cold=planned.cold,
        )
        if planned.plan.chosen == "reload" and planned.match is not None:
            result = self._reload(sequence, planned.match, result, on_progress, cancelled)
        elif planned.plan.chosen == "both":
            result = replace(result, arriving=self._load_from_the_end(sequence, planned, cancelled))
        elif planned.plan.chosen == "remote" and planned.offer is not None:
            result = self._fetch(sequence, planned, planned.offer, result, on_progress, cancelled)
        return replace(result, notices=self._alarm(planned))

    def bring_back(self, sequence: TokenSequence, ids: Sequence[int]) -> None:
        """Load what is stored of the KV of `ids`, and compute nothing."""
        planned = self.plan(sequence, ids, history=0)
        sequence.become(ids, planned.situation.in_pool)
        if planned.match is not None and planned.situation.loadable and self._saver is not None:
            self._saver.begin(sequence, planned.match.blocks)
            self._saver.loaded(sequence, planned.match.blocks)
            self.engine.pool.reserve(sequence.run, len(ids))
            arrived = self._load(sequence, planned.match, sequence.num_cached, lambda *_: None)
            sequence.num_cached = arrived.num_cached

    def sequence(self, session_id: str) -> TokenSequence:
        """The sequence of a session, with what an earlier opening left of its KV in memory. KV of
        two codecs never meets."""
        is_shareable = self.disk is None or not self.disk.is_lossy
        return self.engine.memory.sequence(self._name(session_id), is_shareable, self.realm)

    def scratch_sequence(self) -> TokenSequence:
        """One that leaves nothing behind, and begins with what others have in memory alike."""
        return TokenSequence(realm=self.realm)

    def forget(self, session_id: str) -> None:
        """Drop the session's KV from memory."""
        self.engine.memory.forget(self._name(session_id))

    def save(self, sequence: TokenSequence, tail: bool = False) -> None:
        """Hand what was computed since the last call to the disk tier (see `Saver.save`)."""
        if self._saver is not None:
            self._saver.save(sequence, tail)

    @property
    def is_calibrated(self) -> bool:
        """Whether the cost model was ever measured on this machine."""
        return self.cost.num_observations > 0

    def calibrate(
        self,
        scratch: Path,
        on_progress: Progress | None = None,
        other_codecs: Sequence[str] = (),
    ) -> Calibration:
        """Measure the cost model anew, in a few seconds, and remember it; and what loading takes
        with other codecs."""
        codec = self.disk.codec if self.disk is not None else "lossless"
        codecs = (codec, *other_codecs)
        found = calibrate(
            self.engine, self.layout, self._frequencies, scratch, on_progress, codecs=codecs
        )
        self.cost = found.cost
        self.engine.scheduler.budget.expected = self.cost.steps
        self._costs.save(self._cost_key, self._label, self.cost)
        return found

    def learn(self, restored: Restored, num_computed: int, prefill_s: float) -> None:
        """Correct the cost model by what a turn took."""
        arriving = restored.arriving
        if isinstance(arriving, BothEnds):
            self.cost = self.cost.after_both(arriving.measured, restored.cold)
        else:
            arrived = arriving.arrived if arriving is not None else restored.arrived
            if arrived is not None and restored.num_loaded:
                cpu_s = 0.0 if arriving is not None else arrived.cpu_s / default_threads()
                self.cost = self.cost.after_load(
                    restored.num_loaded, arrived.seconds, cpu_s, restored.cold
                )
            if num_computed:
                start = restored.num_ready
                self.cost = self.cost.after_prefill(start, start + num_computed, prefill_s)
        if restored.plan.leaves_loading_untried:
            self.cost = self.cost.after_no_load()
        if restored.plan.leaves_remote_untried and self._fetching is not None:
            self._fetching.remote.worker.after_none()
        self._costs.save(self._cost_key, self._label, self.cost)

    def swap_out(self, sequence: TokenSequence) -> None:
        """Give the sequence's memory to others; its KV goes to the disk as far as that keeps up."""
        self.save(sequence, tail=True)
        if self.disk is not None:
            self.disk.writer.flush(SWAP_S)
        self.engine.memory.drop(sequence)

    # --- inside ---------------------------------------------------------------------------------

    def _name(self, session_id: str) -> str:
        return session_id if self.disk is None else f"{session_id}/{self.disk.namespace.hex()}"

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

    def _cold_share(self, stored: Sequence[StoredBlock | None], in_pool: int) -> float | None:
        """Of what may be loaded, how much has to come from the disk. Not asked before it is known
        what that takes."""
        blocks = [b for b in stored if b is not None and b.start + b.num_tokens > in_pool]
        if self.disk is None or not blocks or self.cost.cold_s_per_token is None:
            return None
        return self.disk.store.cold_share(blocks)

    def _reload(
        self,
        sequence: TokenSequence,
        match: Match,
        result: Restored,
        on_progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> Restored:
        """Load the history, or begin to, where prefill may as well start on its first layers."""
        assert self._saver is not None
        self._saver.loaded(sequence, match.blocks)
        groups = self.layout.num_values

        def load(on_group: Callable[[int, int], None] | None = None) -> Arrived:
            def done(group: int, num_cached: int) -> None:
                if on_group is not None:
                    on_group(group, num_cached)
                if on_progress is not None:
                    on_progress(group + 1, groups)

            return self._load(sequence, match, result.reused, done, cancelled)

        expected = max(result.reused, min(match.num_tokens, len(sequence.ids) - 1))
        if self._may_overlap(expected - result.reused, result.cold):
            layers = LayerLoad(result.reused, expected, self.layout, load, self._is_alone)
            return replace(result, arriving=layers)
        arrived = load()
        sequence.num_cached = arrived.num_cached
        return replace(result, arrived=arrived)

    def _fetch(
        self,
        sequence: TokenSequence,
        planned: Planned,
        offer: Offer,
        result: Restored,
        on_progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> Restored:
        """Have a prefill worker compute what is not here, while what is on disk is loaded. What
        does not come from there is prefill's."""
        assert self._fetching is not None
        arrived: list[Arrived] = []

        def load_before() -> int:
            match = planned.match
            if match is not None and planned.situation.loadable and self._saver is not None:
                self._saver.loaded(sequence, match.blocks)
                found = self._load(sequence, match, result.reused, lambda *_: None, cancelled)
                sequence.num_cached = found.num_cached
                arrived.append(found)
            return sequence.num_cached

        fetched = self._fetching.fetch(sequence, offer, load_before, on_progress, cancelled)
        return replace(result, arrived=next(iter(arrived), None), fetched=fetched)

    def _may_overlap(self, num_tokens: int, cold: float | None) -> bool:
        """Whether the new prompt should start while history loads: not where loading is the work
        of the cores that would compute, nor where the model is busy with others meanwhile."""
        is_worth_it = self.cost.with_cold(cold).idle_s(num_tokens) > OVERLAP_S
        return self._is_alone() and self.layout.num_values > 1 and is_worth_it

    def _is_alone(self) -> bool:
        return self.engine.memory.num_in_use <= 1

    def _load(
        self,
        sequence: TokenSequence,
        match: Match,
        reused: int,
        on_group: Callable[[int, int], None],
        cancelled: Callable[[], bool] | None = None,
    ) -> Arrived:
        """Read the matched blocks that are not in the pool yet. Those that turn out to be damaged
        end the useful part, and are dropped from the store so that they can be written again.
        Raises Cancelled between values."""
        assert self.disk is not None
        began, cpu_began = time.perf_counter(), time.process_time()
        first = reused // BLOCK_TOKENS
        blocks = match.blocks[first:]
        loaded = load_blocks(
            self.disk.store,
            blocks,
            self.layout,
            self.reach.destination(sequence.run),
            default_threads(),
            on_group_done=lambda group, num_ok: on_group(group, first * BLOCK_TOKENS + num_ok),
            stop=cancelled,
        )
        if loaded.stopped:
            raise Cancelled
        usable = max(reused, first * BLOCK_TOKENS + loaded.num_tokens_ok)
        if loaded.misses:
            self._drop(sequence, next(b for b in blocks if b.start + b.num_tokens > usable))
        return Arrived(
            usable,
            loaded.bytes_read,
            time.perf_counter() - began,
            time.process_time() - cpu_began,
            loaded.misses[0] if loaded.misses else None,
        )

    def _load_from_the_end(
        self, sequence: TokenSequence, planned: Planned, cancelled: Callable[[], bool] | None
    ) -> BothEnds:
        """Begin to load the stored blocks, the last ones first, beside the prefill that follows."""
        assert self.disk is not None and self._saver is not None
        load = PoolLoads(
            self.disk.store,
            self.layout,
            self.reach.destination(sequence.run),
            partial(self._saver.loaded, sequence),
            partial(self._drop, sequence),
            cancelled,
        )
        # A block that is partly in the pool already is prefill's.
        first = -(-planned.situation.in_pool // BLOCK_TOKENS)
        return BothEnds(
            planned.stored,
            first,
            load,
            self.cost.with_cold(planned.cold).load_s_per_token * BLOCK_TOKENS,
            self.cost.step_s,
            self._is_alone,
            [self.layout.value_layers(group) for group in range(self.layout.num_values)],
            can_leave=self.engine.runner.num_layers > 1,
        )

    def _drop(self, sequence: TokenSequence, damaged: StoredBlock) -> None:
        assert self._saver is not None
        with suppress(StoreError):  # else it stays damaged, and stays a miss
            self._saver.replace(sequence, damaged)

    def _alarm(self, planned: Planned) -> tuple[str, ...]:
        """History that has to be computed again although nobody asked for it is always said, and a
        prefill worker that could not be had."""
        lines = []
        if planned.no_offer is not None and self._fetching is not None:
            lines.append(told(self._fetching.remote.worker.name, planned.no_offer))
        situation, match = planned.situation, planned.match
        missing = num_missing(planned.stored, situation.in_pool, situation.history)
        if missing:
            why = "nothing is kept on disk"
            if self.disk is not None and match is not None:
                ids = planned.ids[: situation.history]
                why = cause(self.disk.store, self.disk.namespace, ids, match.num_tokens)
                why = f"{match.miss}; {why}" if match.miss else why
            lines.append(
                f"{missing} tokens of history have no stored KV and are computed again: {why}"
            )
        return tuple(lines)
