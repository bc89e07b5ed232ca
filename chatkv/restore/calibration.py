"""Measuring what a cost model needs, on this machine, with this model: a few seconds, once.

Prefill is timed at a few lengths and the formula of `cost` fitted to them; loading is timed on
blocks of the KV that this computed, written to a store of its own that is deleted afterwards.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from chatkv.engine.engine import Engine
from chatkv.engine.piece import Piece
from chatkv.engine.pool import BlockPool, Pool, Run
from chatkv.engine.sequence import TokenSequence
from chatkv.restore.cost import CostModel
from chatkv.restore.saver import DiskTier, Saver
from chatkv.restore.staging import reach
from chatkv_store.blocks import BlockStore, StoredBlock
from chatkv_store.environment import DATA_FILE
from chatkv_store.layout import KVLayout
from chatkv_store.loader import default_threads, load_blocks
from chatkv_store.page_cache import forget, let_go
from chatkv_store.writer import BlockWriter

LENGTHS = (32, 256, 1024, 2048, 4096)
ANSWERS = (1, 4)  # that steps are timed with
OTHERS_TOKENS = 512  # of codecs that nothing is stored with yet
_NAMESPACE = b"calibration".ljust(32, b"\0")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sample:
    """One measurement: prefill of num_tokens from nothing, or loading them."""

    num_tokens: int
    seconds: float
    cpu_s: float = 0.0  # of every core
    num_bytes: int = 0  # read for it


@dataclass(frozen=True)
class Loads:
    """What loading KV of one codec took."""

    codec: str
    warm: tuple[Sample, ...]
    cold: Sample | None  # None where it was not asked for, or the page cache cannot be dropped


@dataclass(frozen=True)
class Calibration:
    """The fitted model and what it was fitted to. loads: first of the codec that it is for."""

    cost: CostModel
    prefill: tuple[Sample, ...]
    loads: tuple[Loads, ...]
    steps: tuple[Sample, ...] = ()  # of so many answers, a token each

    def cost_of(self, loads: Loads) -> CostModel:
        """The model of another codec."""
        return replace(fit_cold(fit_loads(self.cost, loads.warm), loads.cold), num_observations=1)


def calibrate(
    engine: Engine,
    layout: KVLayout,
    frequencies: np.ndarray[tuple[int], np.dtype[np.float32]],
    scratch: Path,
    on_progress: Progress | None = None,
    budget_s: float = 4.0,
    codecs: Sequence[str] = ("lossless",),
) -> Calibration:
    """Measure for about budget_s seconds; `scratch` is a folder to write to and delete. The first
    of `codecs` is what KV is stored with; of the others shorter loads are measured too, which is
    about as long again for each as for the first."""

    def progress(done: int) -> None:
        if on_progress is not None:
            on_progress("measuring this machine", done, 10)

    progress(0)
    sequence = TokenSequence()
    try:
        prefill = _time_prefill(engine, sequence, budget_s, progress)
        progress(6)
        steps = _time_steps(engine)
        progress(7)
        loads: list[Loads] = []
        for codec in codecs:
            if loads:
                shorter = sequence.ids[:OTHERS_TOKENS]
                sequence.become(shorter, len(shorter))
            loads.append(_time_loads(engine, layout, frequencies, sequence, scratch, codec))
    finally:
        engine.pool.release(sequence.run)
        shutil.rmtree(scratch, ignore_errors=True)
    progress(10)
    cost = fit_steps(fit_loads(fit_prefill(CostModel(), prefill), loads[0].warm), steps)
    cost = fit_cold(cost, loads[0].cold)
    cost = replace(cost, num_observations=1)
    return Calibration(cost, tuple(prefill), tuple(loads), tuple(steps))


def fit_prefill(cost: CostModel, samples: Sequence[Sample]) -> CostModel:
    """c, alpha and beta by least squares of the relative errors, none below zero.

    Where noise makes one negative, c or beta is left out. Each token costs at least a quarter of
    what one of the longest sample did, unless its pairs do: nothing but noise makes tokens free.
    """
    lengths = np.array([sample.num_tokens for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2 / 2], axis=1) / seconds[:, None]
    used = [1, 0, 2][: max(1, len(samples))]
    while True:
        found = np.linalg.lstsq(terms[:, used], np.ones(len(samples)), rcond=None)[0]
        if found.min() >= 0 or len(used) == 1:
            break
        used.remove(min((term for term in used if term != 1), key=lambda t: found[used.index(t)]))
    fixed, linear, pairs = (
        float(max(0.0, found[used.index(term)])) if term in used else 0.0 for term in range(3)
    )
    least = seconds[-1] / lengths[-1] / 4 - pairs * lengths[-1] / 2
    return replace(
        cost,
        prefill_fixed_s=fixed,
        prefill_s_per_token=max(linear, float(least), 1e-9),
        prefill_s_per_token_pair=pairs,
    )


def fit_loads(cost: CostModel, samples: Sequence[Sample]) -> CostModel:
    """a and the seconds per token through the shortest and the longest load."""
    if not samples:
        return cost
    short, long = samples[0], samples[-1]
    if long.num_tokens == short.num_tokens:
        per_token, fixed = long.seconds / long.num_tokens, 0.0
    else:
        per_token = (long.seconds - short.seconds) / (long.num_tokens - short.num_tokens)
        per_token = max(per_token, long.seconds / long.num_tokens / 4)  # a stray short one
        fixed = max(0.0, short.seconds - short.num_tokens * per_token)
    return replace(
        cost,
        load_fixed_s=fixed,
        load_s_per_token=per_token,
        load_cpu_s_per_token=max(long.cpu_s / long.num_tokens, 1e-9),
    )


def fit_cold(cost: CostModel, sample: Sample | None) -> CostModel:
    """What pages from the disk take more, by one load of nothing else."""
    if sample is None:
        return replace(cost, cold_s_per_token=None)
    more_s = max(0.0, sample.seconds - cost.load_s(sample.num_tokens))
    return replace(cost, cold_s_per_token=more_s / sample.num_tokens)


def fit_steps(cost: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Through steps of few answers and of more; an answer more takes no less than nothing."""
    if len(samples) < 2:
        return cost
    few, more = samples[0], samples[-1]
    each_s = max(0.0, (more.seconds - few.seconds) / (more.num_tokens - few.num_tokens))
    each_s = min(each_s, more.seconds / more.num_tokens)  # the rest of a step takes no less, too
    fixed_s = max(0.0, few.seconds - each_s * few.num_tokens)
    return replace(cost, step_fixed_s=fixed_s, step_s_per_answer=each_s)


def _time_steps(engine: Engine) -> list[Sample]:
    """Steps that only decode, behind a short prompt each."""
    sequences = [TokenSequence(ids=list(range(24))) for _ in range(max(ANSWERS))]
    samples = []
    try:
        for sequence in sequences:
            engine.prefill(sequence)
            engine.pool.reserve(sequence.run, len(sequence.ids) + 1, sequence.num_cached)
            sequence.ids.append(0)
        for count in ANSWERS:
            times = []
            for _ in range(4):  # the first one also warms the kernels up
                pieces = [
                    Piece(one, one.num_cached, one.num_cached + 1, is_decode=True)
                    for one in sequences[:count]
                ]
                began = time.perf_counter()
                engine.runner.forward(pieces)
                times.append(time.perf_counter() - began)
            samples.append(Sample(count, min(times)))
    finally:
        for sequence in sequences:
            engine.pool.release(sequence.run)
    return samples


def _time_prefill(
    engine: Engine, sequence: TokenSequence, budget_s: float, progress: Callable[[int], None]
) -> list[Sample]:
    """Prefill of ever longer sequences until the budget is used up; `sequence` is the longest."""
    vocab_size = engine.decoder.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (max(LENGTHS),), generator=generator).tolist()
    samples: list[Sample] = []
    spent = 0.0
    for done, length in enumerate(n for n in LENGTHS if n <= engine.max_tokens):
        times = []
        for _ in range(5 if length <= 256 else 2):  # the first ones also warm the kernels up
            sequence.become(ids[:length], num_cached=0)
            began = time.perf_counter()
            engine.prefill(sequence)
            times.append(time.perf_counter() - began)
        spent += sum(times)
        samples.append(Sample(length, median(times[1:])))
        progress(1 + done)
        if spent + 6 * min(times) > budget_s:  # the next length takes about that
            break
    return samples


def _time_loads(
    engine: Engine,
    layout: KVLayout,
    frequencies: np.ndarray[tuple[int], np.dtype[np.float32]],
    sequence: TokenSequence,
    scratch: Path,
    codec: str,
) -> Loads:
    """Loads of a quarter and of all of the sequence's blocks, warm; and of all, cold."""
    shutil.rmtree(scratch, ignore_errors=True)
    with BlockStore(scratch) as store:
        with BlockWriter(store) as writer:
            disk = DiskTier(store, writer, _NAMESPACE, codec)
            Saver(engine.pool, layout, disk, frequencies).save(sequence, tail=True)
        blocks = store.match(_NAMESPACE, sequence.ids, layout).blocks

        def load(blocks: Sequence[StoredBlock]) -> Sample:
            _untouch(engine.pool, sequence.run)
            began, cpu_began = time.perf_counter(), time.process_time()
            into = reach(engine.pool, layout).destination(sequence.run)
            done = load_blocks(store, blocks, layout, into, default_threads())
            seconds = time.perf_counter() - began
            cpu_s = (time.process_time() - cpu_began) / len(os.sched_getaffinity(0))
            return Sample(done.num_tokens_ok, seconds, cpu_s, done.bytes_read)

        if not blocks:  # the disk refused them: nothing will be loaded either
            return Loads(codec, (), None)
        warm = tuple(
            sorted((load(blocks[:count]) for _ in range(3)), key=lambda sample: sample.seconds)[1]
            for count in (max(1, len(blocks) // 4), len(blocks))
        )
        cold = load(blocks) if forget(scratch / DATA_FILE) else None
    return Loads(codec, warm, cold)


def _untouch(pool: Pool, run: Run) -> None:
    """Give the memory of a run back, where a process has just been given none of it: after a start
    KV is loaded into such, and half of the time goes to the system, which hands it out."""
    if not isinstance(pool, BlockPool) or pool.device.type != "cpu":
        return
    for plane in pool.slots(run, 0, run.capacity).flatten(0, 2):  # [tokens, head_dim]
        let_go(plane.data_ptr(), plane.data_ptr() + plane.nbytes)
