"""One history, restored from sources of every speed: what bench_restore.py measures.

The disks that no test machine has are this one's, slowed down by a token bucket inside the reader:
their rates are fractions and multiples of the rate at which prefill makes the same bytes.

Whatever else a machine does comes in stretches of seconds, and only ever adds. So all plans on all
sources are timed once before any is timed again, and the shortest times are compared. A disk that
is slowed down is steady by itself: from there a reload is timed once, and one that would take
longer than some seconds on so many of the history's first tokens as take about that long, then told
in proportion.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_common import say

PROMPT_TOKENS = 16
WAYS = ("reload", "re-prefill", "both")
LEARNT_FROM = (64, 320)  # tokens that calibration, as it were, loads from each source


@dataclass(frozen=True)
class Source:
    """A disk; `share` of prefill's own rate is what it is slowed down to."""

    name: str
    share: float | None = None
    is_cold: bool = False


@dataclass
class Cell:
    """One history length on one source: the seconds that each plan took, and what the planner
    said."""

    num_tokens: int
    source: Source
    samples: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    predicted: dict[str, float] = field(default_factory=dict)
    chosen: str = ""
    reload_tokens: int = 0  # on which a reload was timed

    @property
    def seconds(self) -> dict[str, float]:
        return {way: min(times) for way, times in self.samples.items()}

    @property
    def regret(self) -> float:
        """How much longer the chosen plan took than the fastest, as a share."""
        return self.seconds[self.chosen] / min(self.seconds.values()) - 1

    @property
    def error(self) -> float:
        """How far the prediction of the chosen plan was off, as a share of what it took."""
        return self.predicted[self.chosen] / self.seconds[self.chosen] - 1

    @property
    def within_4x(self) -> bool:
        ratio = self.seconds["reload"] / self.seconds["re-prefill"]
        return 0.25 <= ratio <= 4


class Grid:
    """A stored history of num_tokens tokens, of which cells take the front. A reload from a disk
    that is slowed down is timed for about reload_s seconds."""

    def __init__(self, runtime: Any, home: Path, num_tokens: int, reload_s: float) -> None:
        import torch

        from chatkv.engine.sequence import TokenSequence
        from chatkv.restore.cost import CostFile
        from chatkv.restore.restorer import Restorer
        from chatkv.restore.saver import DiskTier
        from chatkv_store.writer import BlockWriter

        self.engine, self._reload_s = runtime.engine, reload_s
        vocab_size = self.engine.decoder.config.vocab_size
        generator = torch.Generator().manual_seed(1)
        count = num_tokens + PROMPT_TOKENS
        self.ids = torch.randint(100, vocab_size, (count,), generator=generator).tolist()
        self.path = home / "throttled"
        self.store = _throttled_store(self.path)
        self.writer = BlockWriter(self.store)
        disk = DiskTier(self.store, self.writer, runtime.namespace)
        costs = CostFile(self.path / "costs.json")
        self.restorer = Restorer(self.engine, runtime.layout, disk, costs, "bench")
        self.restorer.cost = replace(runtime.restorer.cost)
        self.costs: dict[Source, Any] = {}  # of each source, as it was learnt
        say(f"storing {num_tokens} tokens ...")
        sequence = TokenSequence(self.ids[:num_tokens])
        began = time.perf_counter()
        self.engine.prefill(sequence)
        self.stored_s = time.perf_counter() - began
        self.restorer.save(sequence, tail=True)
        self.writer.flush()
        self.engine.pool.release(sequence.run)
        file_bytes = (self.path / "data.mdb").stat().st_size
        self._prefill_bytes_per_s = file_bytes / self.stored_s

    def close(self) -> None:
        self.writer.close()
        self.store.close()

    def in_memory(self, num_tokens: int, repeat: int) -> float:
        """Seconds to the first logits where the history has never left the pool."""
        from chatkv.engine.sequence import TokenSequence

        sequence = TokenSequence(self.ids[:num_tokens])
        self._once(num_tokens, "reload", sequence)
        times = []
        for _ in range(repeat):
            sequence.become(self.ids[:num_tokens], num_tokens)
            began = time.perf_counter()
            planned = self._plan(num_tokens, "auto", sequence)
            assert planned.plan.chosen == "none", planned.plan
            self.restorer.restore(sequence, planned)
            self.engine.prefill(sequence)
            times.append(time.perf_counter() - began)
        self.engine.pool.release(sequence.run)
        return min(times)

    def learn(self, source: Source) -> None:
        """Give the cost model this source's rate, by loading from it as calibration does."""
        from chatkv.restore.calibration import Sample, fit_loads

        if source.share is None:  # calibrated; which pages are cold, the planner sees by itself
            self.costs[source] = self.restorer.cost
            return
        say(f"{source.name}: rates ...")
        samples = []
        for count in LEARNT_FROM:
            self._set(source)
            began, cpu_began = time.perf_counter(), time.process_time()
            self._load(count)
            cpu_s = (time.process_time() - cpu_began) / len(os.sched_getaffinity(0))
            samples.append(Sample(count, time.perf_counter() - began, cpu_s))
        self.costs[source] = fit_loads(self.restorer.cost, samples)

    def plan(self, cell: Cell) -> None:
        """What the planner says of a cell."""
        self.restorer.cost = self.costs[cell.source]
        self._set(cell.source)
        plan = self._plan(cell.num_tokens, "auto").plan
        cell.chosen = plan.chosen
        cell.predicted = {way: ms / 1e3 for way, ms in plan.alternatives_ms.items()}
        predicted_s = cell.predicted["reload"]
        share = min(1.0, self._reload_s / predicted_s) if cell.source.share else 1.0
        cell.reload_tokens = max(int(share * cell.num_tokens), min(256, cell.num_tokens))

    def time(self, cell: Cell, way: str) -> None:
        """Another sample of a cell."""
        say(f"{cell.num_tokens} tokens, {cell.source.name}: {way} ...")
        self.restorer.cost = self.costs[cell.source]
        num_tokens = cell.reload_tokens if way == "reload" else cell.num_tokens
        self._set(cell.source)
        began = time.perf_counter()
        self._once(num_tokens, way)
        seconds = time.perf_counter() - began
        cell.samples[way].append(seconds * cell.num_tokens / num_tokens)

    def re_prefill(self, num_tokens: int) -> float:
        """Seconds to the first logits where everything is computed again."""
        say(f"{num_tokens} tokens: re-prefill ...")
        began = time.perf_counter()
        self._once(num_tokens, "re-prefill")
        return time.perf_counter() - began

    def _once(self, num_tokens: int, way: str, sequence: Any = None) -> None:
        """Restore the history that way, to the first logits of the prompt behind it."""
        from chatkv.engine.sequence import TokenSequence

        into = sequence or TokenSequence()
        planned = self._plan(num_tokens, way, into)
        assert planned.plan.chosen == way, planned.plan
        restored = self.restorer.restore(into, planned)
        try:
            self.engine.prefill(into, arriving=restored.arriving)
        finally:
            if restored.arriving is not None:
                restored.arriving.close()
            if sequence is None:
                self.engine.pool.release(into.run)

    def _load(self, num_tokens: int) -> None:
        """Load the history's first tokens, and compute nothing."""
        from chatkv.engine.sequence import TokenSequence

        sequence = TokenSequence()
        self.restorer.bring_back(sequence, self.ids[: num_tokens + 1])
        assert sequence.num_cached == num_tokens
        self.engine.pool.release(sequence.run)

    def _plan(self, num_tokens: int, way: Any, sequence: Any = None) -> Any:
        from chatkv.engine.sequence import TokenSequence

        ids = self.ids[:num_tokens] + self.ids[-PROMPT_TOKENS:]
        return self.restorer.plan(sequence or TokenSequence(), ids, num_tokens - 1, way)

    def _set(self, source: Source) -> None:
        from chatkv_store.page_cache import forget

        rate = source.share and source.share * self._prefill_bytes_per_s
        self.store.bucket = Bucket(rate) if rate else None
        if source.is_cold:
            forget(self.path / "data.mdb")


class Bucket:
    """Lets bytes through at a rate, for all threads together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._lock = bytes_per_s, threading.Lock()
        self._free_at = time.perf_counter()

    def take(self, num_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self._rate
            wait = self._free_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


def _throttled_store(path: Path) -> Any:
    from chatkv_store.blocks import BlockStore

    class Throttled(BlockStore):
        bucket: Bucket | None = None

        def read_run(self, *args: Any, **kwargs: Any) -> Any:
            done = super().read_run(*args, **kwargs)
            if self.bucket is not None:
                self.bucket.take(done.num_bytes)
            return done

    return Throttled(path)


def sources(throttles: Sequence[float]) -> list[Source]:
    """This machine's disk, warm and cold, and slower ones: shares of prefill's rate."""
    slowed = [Source(f"disk at {share:g}x prefill", share) for share in throttles]
    return [Source("disk, warm"), Source("disk, cold", is_cold=True), *slowed]
