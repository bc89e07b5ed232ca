#!/usr/bin/env python3
"""Several conversations on one model: static batching, continuous batching, and prefill in chunks.

One trace (Poisson arrivals; prompts and answers log-normal, as ShareGPT's are, and scaled down) is
replayed three ways on one engine. *Static*: a batch is whoever has arrived, up to a size, without
waiting for it to be full; its rows are computed until its longest answer is done, and then comes
the next one (prompts are not padded, and tokens are shown as they come: a mild form of it). *Whole
prompts*: every step takes who is there, and all of a prompt at once. *Chunks*: every step takes as
much prefill as running answers can bear, which is what chatkv does. Requests come faster than they
are answered, so each way shows the most that it can do.

TPOT is an answer's time per token, (last - first) / (tokens - 1); its p99 is over all answers. At
the same p99 TPOT, that of the fastest static batch, chunks are to answer twice as many tokens. Gaps
are those between two tokens; an average over an answer hides a stall, so when a long prompt
arrives beside running answers, their p99 is looked at.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402
from traces import PROMPT_SIGMA, REPLY_SIGMA, log_normal  # noqa: E402

SLOTS = 16  # answers at once at most, also the largest static batch
STEPS_AT_ONCE = 24  # so many answers would have to run at once, were each as fast as one alone


@dataclass(frozen=True)
class Sizes:
    """What is replayed. Tokens in means."""

    num_requests: int
    prompt: int
    answer: int
    arriving_prompt: int  # beside RUNNING answers
    repeats: int
    static: tuple[int, ...]  # sizes of batches
    at_once: tuple[int, ...]  # limits of running answers
    places: int  # of running answers that are looked at without the prompt, the first before it


QUICK = Sizes(40, 6, 12, 512, 1, (8, SLOTS), (6, SLOTS), 2)
FULL = Sizes(128, 12, 24, 4096, 1, (4, 8, 12, SLOTS), (6, 8, 10, 12, 14, SLOTS), 4)
RUNNING = 4
SEED = 20


@dataclass
class Request:
    """One turn of a trace, and when its tokens came (seconds since the trace began)."""

    arrives_s: float
    ids: list[int]
    num_tokens: int
    times: list[float] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.arrives_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token behind the first one; None where there is none."""
        if len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Served:
    """How one replay went."""

    tokens_per_s: float
    ttft_s: list[float]
    tpot_s: list[float]  # of each answer
    gaps_s: list[float]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Served:
        tokens = sum(len(request.times) for request in requests)
        ended = max(request.times[-1] for request in requests)
        return cls(
            tokens / (ended - requests[0].arrives_s),
            [request.ttft_s for request in requests],
            [request.tpot_s for request in requests if request.tpot_s is not None],
            [gap for request in requests for gap in request.gaps_s],
        )

    @property
    def p99_tpot_s(self) -> float:
        return percentile(self.tpot_s, 99)


def measure(options: Options) -> Iterator[Figure]:
    sizes = QUICK if options.quick else FULL
    os.environ["CHATKV_CALIBRATE"] = "0"
    with tempfile.TemporaryDirectory() as home:
        os.environ["CHATKV_HOME"] = home
        from chatkv.client import ChatRequest, open_chat
        from chatkv.paths import folders

        with open_chat(folders(), ChatRequest()) as chat:
            engine = chat.runtime.engine
            step_s = time_of_a_step(engine)
            yield from replay(engine, sizes, step_s)
            yield from long_prompt_arrives(engine, sizes)


# --- a trace, three times -------------------------------------------------------------------------


def replay(engine: Any, sizes: Sizes, step_s: float) -> list[Figure]:
    from chatkv.engine.budget import StepBudget

    def fresh() -> list[Request]:
        return make_trace(sizes, step_s, engine.decoder.config.vocab_size)

    static, chunks = {}, {}
    for size in sizes.static:
        say(f"static batches of {size} ...")
        static[size] = serve_static(engine, fresh(), size)
    for size in sizes.at_once:
        say(f"continuous batching, prompts in chunks, {size} at once ...")
        chunks[size] = serve(engine, fresh(), StepBudget(), size)
    say("continuous batching, whole prompts ...")
    whole = serve(engine, fresh(), WholePrompts(), SLOTS)
    figures = [
        Figure(f"throughput, {name}", one.tokens_per_s, "tokens/s", note=spread(one))
        for name, one in (
            *((f"static, batches of {size}", one) for size, one in static.items()),
            *((f"chunks, {size} at once", one) for size, one in chunks.items()),
            (f"whole prompts, {SLOTS} at once", whole),
        )
    ]
    figures.append(at_equal_tpot(static, chunks))
    for name, served, baseline, baseline_name in (
        ("whole prompts", whole, static[SLOTS], f"static, batches of {SLOTS}"),
        ("chunks", chunks[SLOTS], whole, "whole prompts"),
    ):
        for what, mine, theirs in (
            ("TTFT", served.ttft_s, baseline.ttft_s),
            ("TPOT", served.tpot_s, baseline.tpot_s),
            ("gaps", served.gaps_s, baseline.gaps_s),
        ):
            for share in (50, 99):
                figures.append(
                    Figure(
                        f"{what} p{share}, {name}",
                        percentile(mine, share) * 1e3,
                        "ms",
                        percentile(theirs, share) * 1e3,
                        baseline_name,
                        less_is_better=True,
                    )
                )
    return figures


def at_equal_tpot(static: dict[int, Served], chunks: dict[int, Served]) -> Figure:
    """How many tokens a second chunks say at the p99 TPOT of the fastest static batch."""
    size, fastest = max(static.items(), key=lambda one: one[1].tokens_per_s)
    limit_s = fastest.p99_tpot_s
    best, how = best_within(limit_s, chunks)
    return Figure(
        "throughput at equal p99 TPOT, chunks",
        best,
        "tokens/s",
        fastest.tokens_per_s,
        f"static, batches of {size}",
        goal=2,
        note=f"p99 TPOT {limit_s * 1e3:.3g} ms, {how}",
    )


def best_within(limit_s: float, chunks: dict[int, Served]) -> tuple[float | None, str]:
    """(tokens/s, with how many answers at once): the most answers up to which p99 TPOT keeps to the
    limit; and where a few more exceed it, a straight line between these two says what is between
    them, or the figure would leap by a tenth for a fraction of a millisecond."""
    kept: tuple[int, Served] | None = None
    for at_once, one in sorted(chunks.items()):
        if one.p99_tpot_s <= limit_s:
            kept = at_once, one
            continue
        if kept is None:
            return None, f"which {at_once} answers at once exceed"
        fewer, below = kept
        share = (limit_s - below.p99_tpot_s) / (one.p99_tpot_s - below.p99_tpot_s)
        more = max(0.0, one.tokens_per_s - below.tokens_per_s)
        return below.tokens_per_s + share * more, (
            f"which {fewer} answers at once keep to and {at_once} exceed"
        )
    assert kept is not None
    return kept[1].tokens_per_s, f"which {kept[0]} answers at once keep to"


def make_trace(sizes: Sizes, step_s: float, vocab_size: int) -> list[Request]:
    """The same requests each time, as fast as keeps a machine of this speed busy: a trace that
    leaves it idle measures nothing."""
    random, arrives_s, requests = Random(SEED), 0.0, []
    for _ in range(sizes.num_requests):
        length = log_normal(random, sizes.prompt, PROMPT_SIGMA)
        ids = [random.randrange(vocab_size) for _ in range(length)]
        num_tokens = log_normal(random, sizes.answer, REPLY_SIGMA)
        requests.append(Request(arrives_s, ids, num_tokens))
        arrives_s += random.expovariate(STEPS_AT_ONCE / (sizes.answer * step_s))
    return requests


class WholePrompts:
    """A step takes all of every prompt."""

    def prefill_tokens(self, num_decoding: int) -> float:
        return sys.maxsize

    def observe(self, num_decoding: int, num_prefilled: float, seconds: float) -> None:
        pass


def serve(engine: Any, requests: list[Request], budget: Any, at_once: int) -> Served:
    """Each request is a turn in a thread of its own; so many are answered at once."""
    engine.scheduler.budget = budget
    slots, began = threading.Semaphore(at_once), time.perf_counter()

    def turn(request: Request) -> None:
        time.sleep(max(0.0, began + request.arrives_s - time.perf_counter()))
        with slots:
            answer(engine, request, lambda: time.perf_counter() - began)

    run_all([lambda one=request: turn(one) for request in requests])  # type: ignore[misc]
    return Served.of(requests)


def answer(
    engine: Any,
    request: Request,
    now: Callable[[], float],
    cancelled: Callable[[], bool] = lambda: False,
    begin: Callable[[], object] = lambda: None,
) -> None:
    """begin() is waited for between the prompt and the answer."""
    from chatkv.engine.options import SamplingOptions
    from chatkv.engine.sampling import Sampler
    from chatkv.engine.sequence import TokenSequence

    sequence = TokenSequence(ids=list(request.ids))
    sampler = Sampler(SamplingOptions(temperature=0), seed=0)
    with engine.memory.use(sequence):
        logits = engine.prefill(sequence)
        begin()
        for token, _ in engine.decode(
            sequence, logits, sampler, frozenset(), request.num_tokens, cancelled
        ):
            request.times.append(now())
            request.said.append(token)


def serve_static(engine: Any, requests: list[Request], size: int) -> Served:
    """One batch after the other, on the thread and the cores that compute for turns too."""
    engine.scheduler.compute(lambda: _serve_static(engine, requests, size))
    return Served.of(requests)


def _serve_static(engine: Any, requests: list[Request], size: int) -> None:
    from chatkv.engine.piece import Piece
    from chatkv.engine.sequence import TokenSequence

    began, waiting = time.perf_counter(), list(requests)
    while waiting:
        time.sleep(max(0.0, began + waiting[0].arrives_s - time.perf_counter()))
        arrived_s = time.perf_counter() - began
        batch = [request for request in waiting[:size] if request.arrives_s <= arrived_s]
        del waiting[: len(batch)]
        sequences = [TokenSequence(ids=list(request.ids)) for request in batch]
        num_steps = max(request.num_tokens for request in batch)
        for sequence in sequences:
            engine.pool.reserve(sequence.run, len(sequence.ids) + num_steps)
        for step in range(num_steps):
            pieces = [Piece(one, one.num_cached, len(one.ids)) for one in sequences]
            logits = engine.runner.forward(pieces)
            moment = time.perf_counter() - began
            for request, sequence, after in zip(batch, sequences, logits, strict=True):
                sequence.num_cached = len(sequence.ids)
                sequence.ids.append(int(after.argmax()))
                if step < request.num_tokens:
                    request.times.append(moment)
        for sequence in sequences:
            engine.pool.release(sequence.run)


def time_of_a_step(engine: Any) -> float:
    """Seconds for one token of one answer, when nothing else happens; the first ones warm up."""
    request = Request(0.0, [1] * 32, 24)
    answer(engine, request, time.perf_counter)
    return statistics.median(request.gaps_s[8:])


# --- a long prompt beside running answers ---------------------------------------------------------


def long_prompt_arrives(engine: Any, sizes: Sizes) -> list[Figure]:
    from chatkv.engine.budget import StepBudget

    say(f"a prompt of {sizes.arriving_prompt} tokens alone ...")
    engine.scheduler.budget = StepBudget()
    alone = Request(0.0, long_prompt(sizes.arriving_prompt), 1)
    began = time.perf_counter()
    answer(engine, alone, time.perf_counter)
    alone_s = alone.times[0] - began
    ways: dict[str, list[Arrival]] = {"chunks": [], "whole prompts": []}
    for _ in range(sizes.repeats):
        for name, arrivals in ways.items():
            say(f"a prompt of {sizes.arriving_prompt} tokens arrives, {name} ...")
            budget = StepBudget() if name == "chunks" else WholePrompts()
            arrivals.append(arrival(engine, sizes.arriving_prompt, budget, sizes.places))
    figures = []
    for name, arrivals in ways.items():
        middle = sorted(arrivals, key=lambda one: one.ratio)[len(arrivals) // 2]
        figures.append(
            Figure(
                f"gaps p99 of {RUNNING} running answers while {sizes.arriving_prompt} tokens are "
                f"read, {name}",
                percentile(middle.beside_s, 99) * 1e3,
                "ms",
                percentile(middle.without_s, 99) * 1e3,
                "answers as long, without it",
                goal=1.5 if name == "chunks" else None,
                goal_is="<=",
                note=f"p50 {middle.ratio_p50:.2f}x; the prompt's TTFT: {middle.ttft_s:.2f} s, read "
                f"alone {alone_s:.2f} s",
            )
        )
    return figures


@dataclass(frozen=True)
class Arrival:
    """Of the gaps in running answers."""

    without_s: Sequence[float]  # that answers of the same lengths have without the prompt
    beside_s: Sequence[float]  # while it is read
    ttft_s: float  # of the prompt

    @property
    def ratio(self) -> float:
        return percentile(self.beside_s, 99) / percentile(self.without_s, 99)

    @property
    def ratio_p50(self) -> float:
        return percentile(self.beside_s, 50) / percentile(self.without_s, 50)


def arrival(engine: Any, num_tokens: int, budget: Any, places: int) -> Arrival:
    engine.scheduler.budget = budget
    is_over = threading.Event()
    running = [Request(0.0, [7 + i] * 64, sys.maxsize) for i in range(RUNNING)]
    prompt = Request(0.0, long_prompt(num_tokens), 1)
    arrived_s: list[float] = []

    def arrive() -> None:
        while min(len(request.times) for request in running) < BEFORE:
            time.sleep(0.005)
        arrived_s.append(time.perf_counter())
        answer(engine, prompt, time.perf_counter)
        is_over.set()

    turns = [
        lambda one=request: answer(engine, one, time.perf_counter, is_over.is_set)
        for request in running
    ]
    run_all([*turns, arrive])
    beside = [
        gap
        for request in running
        for moment, gap in zip(request.times[1:], request.gaps_s, strict=True)
        if moment >= arrived_s[0] and moment - gap < prompt.times[0]
    ]
    # From both sides of the read: a machine's speed drifts, too.
    without = [gap for request in running for gap in request.gaps_s[BEFORE - AT_EACH : BEFORE - 1]]
    without += without_prompt(engine, running, places)
    return Arrival(without, beside, prompt.times[0] - arrived_s[0])


def without_prompt(engine: Any, running: Sequence[Request], places: int) -> list[float]:
    """Gaps of the same answers with nothing beside them, in places between where they were when
    the prompt arrived and where they were when it had been read: each token attends to all before
    it, so answers slow down by themselves."""
    gaps: list[float] = []
    longest = min(len(request.said) for request in running)
    span = max(0, longest - BEFORE - AT_EACH)
    for num_said in sorted({BEFORE + span * place // (places - 1) for place in range(1, places)}):
        again = [
            Request(0.0, request.ids + request.said[:num_said], WARM_UP + AT_EACH)
            for request in running
        ]
        together = threading.Barrier(RUNNING).wait
        run_all(
            [
                lambda one=one, begin=together: answer(engine, one, time.perf_counter, begin=begin)
                for one in again
            ]
        )
        gaps += [gap for one in again for gap in one.gaps_s[WARM_UP:]]
    return gaps


def long_prompt(num_tokens: int) -> list[int]:
    return [index % 1000 for index in range(num_tokens)]


WARM_UP = 12  # tokens of each answer that are not counted
BEFORE = 48  # that each has said when the prompt arrives
AT_EACH = 32  # tokens of each answer at each of the places where it is looked at without the prompt


# --- small things ---------------------------------------------------------------------------------


def run_all(turns: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own; the first error ends the benchmark."""
    errors: list[BaseException] = []

    def guarded(turn: Callable[[], None]) -> None:
        try:
            turn()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(turn,), daemon=True) for turn in turns]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        if errors:
            raise errors[0]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


def spread(served: Served) -> str:
    ttft_s = percentile(served.ttft_s, 50)
    p50_ms, p99_ms = percentile(served.tpot_s, 50) * 1e3, served.p99_tpot_s * 1e3
    gap_ms = percentile(served.gaps_s, 99) * 1e3
    return (
        f"TTFT p50 {ttft_s:.3g} s, TPOT p50 {p50_ms:.3g} ms, p99 {p99_ms:.3g} ms, "
        f"gaps p99 {gap_ms:.3g} ms"
    )


if __name__ == "__main__":
    run(__doc__.splitlines()[0], measure)
