#!/usr/bin/env python3
"""Reload, re-prefill or both ends, over history lengths and disks of every speed.

Each cell of the grid is one history length on one source; each plan is forced and timed to the
first logits of a short new prompt, and the planner's own choice is held against the fastest. The
disks that no test machine has are this one's, slowed down by a token bucket inside the reader:
their rates are fractions and multiples of the rate at which prefill makes the same bytes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402

PROMPT_TOKENS = 16
THROTTLES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of prefill's own rate
WAYS = ("reload", "re-prefill", "both")


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


CELLS: list[Cell] = []


def measure(options: Options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"CHATKV_HOME": home, "CHATKV_CALIBRATE": "0"}
        from chatkv.paths import folders
        from chatkv.runtime import Runtime
        from chatkv_store.conversations import Conversations

        where = folders().make()
        with (
            Conversations(where.conversations) as conversations,
            Runtime(where, conversations) as runtime,
        ):
            say("calibrating ...")
            runtime.calibrate()
            lengths = (512, 1024) if options.quick else (512, 1024, 2048, 4096, 8000)
            bench = Bench(runtime, Path(home), max(lengths), repeat=1 if options.quick else 3)
            throttles = THROTTLES[1:4] if options.quick else THROTTLES
            for num_tokens in lengths:
                CELLS.extend(bench.cells(num_tokens, throttles))
            bench.close()
    return [*_cell_figures(), *_summary()]


class Bench:
    """A stored history, read through sources of different speeds."""

    def __init__(self, runtime: Any, home: Path, num_tokens: int, repeat: int) -> None:
        import torch

        from chatkv.engine.sequence import TokenSequence
        from chatkv.restore.saver import DiskTier
        from chatkv_store.writer import BlockWriter

        self.runtime, self.repeat = runtime, repeat
        self.engine = runtime.engine
        vocab_size = self.engine.decoder.config.vocab_size
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(
            100, vocab_size, (num_tokens + PROMPT_TOKENS,), generator=generator
        ).tolist()
        self.path = home / "throttled"
        self.store = _throttled_store(self.path)
        self.writer = BlockWriter(self.store)
        self.disk = DiskTier(self.store, self.writer, runtime.namespace)
        say(f"storing {num_tokens} tokens ...")
        sequence = TokenSequence(self.ids[:num_tokens])
        self.engine.prefill(sequence)
        self.restorer = self._restorer()
        self.restorer.save(sequence, tail=True)
        self.writer.flush()
        self.engine.pool.release(sequence.run)
        self.bytes_per_token = (self.path / "data.mdb").stat().st_size / num_tokens

    def close(self) -> None:
        self.writer.close()
        self.store.close()

    def cells(self, num_tokens: int, throttles: Sequence[float]) -> list[Cell]:
        """The row of the grid of one history length."""
        say(f"{num_tokens} tokens: re-prefill ...")
        re_prefill = self._median(num_tokens, "re-prefill", None, cold=False)
        rate = num_tokens / re_prefill * self.bytes_per_token
        sources: list[tuple[str, float | None, bool]] = [
            ("disk, warm", None, False),
            ("disk, cold", None, True),
        ]
        sources += [(f"disk at {share:g}x prefill", rate * share, False) for share in throttles]
        return [self._cell(num_tokens, *source, re_prefill) for source in sources]

    def _cell(
        self, num_tokens: int, name: str, rate: float | None, cold: bool, re_prefill: float
    ) -> Cell:
        say(f"{num_tokens} tokens: {name} ...")
        self._learn(num_tokens, rate, cold)
        planned = self._plan(num_tokens, "auto")
        seconds = {
            way: re_prefill if way == "re-prefill" else self._median(num_tokens, way, rate, cold)
            for way in WAYS
        }
        predicted = {way: ms / 1e3 for way, ms in planned.plan.alternatives_ms.items()}
        return Cell(num_tokens, name, seconds, predicted, planned.plan.chosen)

    def _learn(self, num_tokens: int, rate: float | None, cold: bool) -> None:
        """Give the cost model this source's rate, by loading from it as calibration does."""
        from chatkv.restore.calibration import Sample, fit_loads

        samples = []
        for count in (max(64, num_tokens // 4), num_tokens):
            self._set(rate, cold)
            began, cpu_began = time.perf_counter(), time.process_time()
            self._once(count, "reload", prefill=False)
            cpu_s = (time.process_time() - cpu_began) / len(os.sched_getaffinity(0))
            samples.append(Sample(count, time.perf_counter() - began, cpu_s))
        self.restorer.cost = fit_loads(self.restorer.cost, samples)

    def _median(self, num_tokens: int, way: str, rate: float | None, cold: bool) -> float:
        times = []
        for _ in range(self.repeat):
            self._set(rate, cold)
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

    def _plan(self, num_tokens: int, way: str, sequence: Any = None) -> Any:
        from chatkv.engine.sequence import TokenSequence

        ids = self.ids[:num_tokens] + self.ids[-PROMPT_TOKENS:]
        return self.restorer.plan(sequence or TokenSequence(), ids, num_tokens - 1, way)

    def _set(self, rate: float | None, cold: bool) -> None:
        self.store.bucket = Bucket(rate) if rate else None
        if cold:
            _forget(self.path / "data.mdb")

    def _restorer(self) -> Any:
        from chatkv.restore.cost import CostFile
        from chatkv.restore.restorer import Restorer

        restorer = Restorer(
            self.engine, self.runtime.layout, self.disk, CostFile(self.path / "costs.json"), "bench"
        )
        restorer.cost = replace(self.runtime.restorer.cost)
        return restorer


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


# --- figures ----------------------------------------------------------------------------------


def _cell_figures() -> list[Figure]:
    figures = []
    for cell in CELLS:
        best = min(WAYS, key=lambda way: cell.seconds[way])
        ways = ", ".join(
            f"{way} {cell.seconds[way] * 1e3:.0f} ms (said {cell.predicted.get(way, 0) * 1e3:.0f})"
            for way in WAYS
        )
        figures.append(
            Figure(
                f"{cell.num_tokens} tokens, {cell.source}: {cell.chosen}",
                cell.seconds[cell.chosen] * 1e3,
                "ms",
                cell.seconds[best] * 1e3,
                f"best: {best}",
                goal=0.95,
                note=ways,
                less_is_better=True,
            )
        )
    return figures


def _summary() -> list[Figure]:
    regrets = [cell.regret for cell in CELLS]
    near = [cell for cell in CELLS if cell.within_4x]
    within = sum(regret <= 0.10 for regret in regrets) / len(regrets)
    figures = [
        Figure(
            "mean regret of the choice",
            100 * statistics.mean(regrets),
            "%",
            goal=5,
            goal_of="value",
            goal_is="<=",
        ),
        Figure("cells within 10% of the best", 100 * within, "%", goal=95, goal_of="value"),
    ]
    figures += [
        Figure(
            f"both ends, {cell.num_tokens} tokens, {cell.source}",
            cell.num_tokens / cell.seconds["both"],
            "tokens/s",
            cell.num_tokens / cell.seconds["reload"] + cell.num_tokens / cell.seconds["re-prefill"],
            "load rate + prefill rate",
            goal=0.85,
        )
        for cell in near
    ]
    return figures


def draw(path: Path) -> None:
    """The grid as a picture: which plan was chosen where, and what it took."""
    from matplotlib.figure import Figure as Picture

    lengths = sorted({cell.num_tokens for cell in CELLS})
    sources = list(dict.fromkeys(cell.source for cell in CELLS))
    colours = {"reload": "#4c9f70", "re-prefill": "#d9a441", "both": "#4a7fb5"}
    picture = Picture(
        figsize=(2 + 1.7 * len(lengths), 1.2 + 0.75 * len(sources)), layout="constrained"
    )
    axes = picture.subplots()
    for cell in CELLS:
        x, y = lengths.index(cell.num_tokens), sources.index(cell.source)
        axes.barh(y, 0.94, left=x - 0.47, height=0.9, color=colours[cell.chosen], alpha=0.85)
        axes.text(
            x,
            y,
            f"{cell.chosen}\n{cell.seconds[cell.chosen] * 1e3:,.0f} ms, +{100 * cell.regret:.0f}%",
            ha="center",
            va="center",
            fontsize=8,
        )
    axes.set_xticks(range(len(lengths)), [f"{length:,} tokens" for length in lengths])
    axes.set_yticks(range(len(sources)), sources)
    axes.set_title("The chosen plan, its time to the first logits, and its distance from the best")
    axes.invert_yaxis()
    picture.savefig(path, dpi=120)


if __name__ == "__main__":
    run(__doc__.splitlines()[0], measure, draw)
