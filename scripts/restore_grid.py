"""One history, restored from sources of every speed: what bench_restore.py measures.

The disks that no test machine has are this one's, slowed down by a token bucket inside the reader:
their rates are fractions and multiples of the rate at which prefill makes the same bytes.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_common import say

PROMPT_TOKENS = 16
WAYS = ("reload", "re-prefill", "both")


@dataclass(frozen=True)
class Source:
    """A disk; `rate` is bytes a second that it is slowed down to."""

    name: str
    rate: float | None = None
    is_cold: bool = False


@dataclass
class Cell:
    """One history length on one source: seconds per plan, and what the planner said."""

    num_tokens: int
    source: str
    seconds: dict[str, float]
    predicted: dict[str, float]
    chosen: str

    @property
    def regret(self) -> float:
        """How much longer the chosen plan took than the fastest, as a share."""
        return self.seconds[self.chosen] / min(self.seconds.values()) - 1

    @property
    def within_4x(self) -> bool:
        ratio = self.seconds["reload"] / self.seconds["re-prefill"]
        return 0.25 <= ratio <= 4

    @property
    def reached(self) -> float:
        """Both ends' rate as a share of the two rates added up."""
        together = 1 / self.seconds["reload"] + 1 / self.seconds["re-prefill"]
        return 1 / self.seconds["both"] / together


class Grid:
    """A stored history of num_tokens tokens, of which cells take the front."""

    def __init__(self, runtime: Any, home: Path, num_tokens: int) -> None:
        import torch

        from chatkv.engine.sequence import TokenSequence
        from chatkv.restore.cost import CostFile
        from chatkv.restore.restorer import Restorer
        from chatkv.restore.saver import DiskTier
        from chatkv_store.writer import BlockWriter

        self.engine = runtime.engine
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
        say(f"storing {num_tokens} tokens ...")
        sequence = TokenSequence(self.ids[:num_tokens])
        self.engine.prefill(sequence)
        self.restorer.save(sequence, tail=True)
        self.writer.flush()
        self.engine.pool.release(sequence.run)
        self.bytes_per_token = (self.path / "data.mdb").stat().st_size / num_tokens

    def close(self) -> None:
        self.writer.close()
        self.store.close()

    def in_memory(self, num_tokens: int, repeat: int) -> float:
        """Seconds to the first logits where the history has never left the pool."""
        from chatkv.engine.sequence import TokenSequence

        sequence = TokenSequence(self.ids[:num_tokens])
        self.engine.prefill(sequence)
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            planned = self._plan(num_tokens, "auto", sequence)
            assert planned.plan.chosen == "none", planned.plan
            self.restorer.restore(sequence, planned)
            self.engine.prefill(sequence)
            times.append(time.perf_counter() - began)
            sequence.become(self.ids[:num_tokens], num_tokens)
        self.engine.pool.release(sequence.run)
        return statistics.median(times)

    def re_prefill(self, num_tokens: int, repeat: int) -> float:
        """Seconds to the first logits where everything is computed again."""
        return self._median(num_tokens, "re-prefill", Source("none"), repeat)

    def cell(self, num_tokens: int, source: Source, re_prefill_s: float, repeat: int) -> Cell:
        say(f"{num_tokens} tokens: {source.name} ...")
        self._learn(num_tokens, source)
        planned = self._plan(num_tokens, "auto")
        seconds = {
            "reload": self._median(num_tokens, "reload", source, repeat),
            "re-prefill": re_prefill_s,
            "both": self._median(num_tokens, "both", source, repeat),
        }
        predicted = {way: ms / 1e3 for way, ms in planned.plan.alternatives_ms.items()}
        return Cell(num_tokens, source.name, seconds, predicted, planned.plan.chosen)

    def _learn(self, num_tokens: int, source: Source) -> None:
        """Give the cost model this source's rate, by loading from it as calibration does."""
        from chatkv.restore.calibration import Sample, fit_loads

        samples = []
        for count in (256, min(num_tokens, 1024)):
            self._set(source)
            began, cpu_began = time.perf_counter(), time.process_time()
            self._once(count, "reload", prefill=False)
            cpu_s = (time.process_time() - cpu_began) / len(os.sched_getaffinity(0))
            samples.append(Sample(count, time.perf_counter() - began, cpu_s))
        self.restorer.cost = fit_loads(self.restorer.cost, samples)

    def _median(self, num_tokens: int, way: str, source: Source, repeat: int) -> float:
        # After seconds of waiting for a slow disk, a virtual machine computed at half its speed.
        self._once(min(num_tokens, 512), "re-prefill")
        times = []
        for _ in range(repeat):
            self._set(source)
            began = time.perf_counter()
            self._once(num_tokens, way)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _once(self, num_tokens: int, way: str, prefill: bool = True) -> None:
        from chatkv.engine.sequence import TokenSequence

        sequence = TokenSequence()
        planned = self._plan(num_tokens, way, sequence)
        assert planned.plan.chosen == way, planned.plan
        restored = self.restorer.restore(sequence, planned)
        try:
            if prefill:
                self.engine.prefill(sequence, arriving=restored.arriving)
        finally:
            if restored.arriving is not None:
                restored.arriving.close()
            self.engine.pool.release(sequence.run)

    def _plan(self, num_tokens: int, way: Any, sequence: Any = None) -> Any:
        from chatkv.engine.sequence import TokenSequence

        ids = self.ids[:num_tokens] + self.ids[-PROMPT_TOKENS:]
        return self.restorer.plan(sequence or TokenSequence(), ids, num_tokens - 1, way)

    def _set(self, source: Source) -> None:
        self.store.bucket = Bucket(source.rate) if source.rate else None
        if source.is_cold:
            _forget(self.path / "data.mdb")


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


def _forget(path: Path) -> None:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def sources(throttles: Sequence[float], prefill_bytes_per_s: float) -> list[Source]:
    """This machine's disk, warm and cold, and slower ones: shares of prefill's rate."""
    slowed = [
        Source(f"disk at {share:g}x prefill", share * prefill_bytes_per_s) for share in throttles
    ]
    return [Source("disk, warm"), Source("disk, cold", is_cold=True), *slowed]
