#!/usr/bin/env python3
"""Prefill and decode apart: what running answers feel of long prompts that arrive.

A few conversations are answered without end while long prompts arrive, one after the other.
*Together* one process has both cores. *Apart* a prefill worker has one core and the decode worker
the other: over the wire, where each has a cache of its own; and where they share one, through that
or over the wire, as the cost model chooses. Times between tokens of the running answers are
compared while a prompt is being read, and prompts by their time to the first token. Then KV that a
worker has in memory is fetched as fast as it comes, beside a raw socket between the same two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402
from kv_transport import raw_socket, transport  # noqa: E402

RUNNING = 2  # answers that are being written all the time
PREFILL_CORE, DECODE_CORE = 0, 1  # of those that this process may use
WORDS = ("the", "tide", "comes", "in", "and", "goes", "out", "while", "boats", "wait", "for")


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: int
    num_prompts: int
    quiet_s: float
    repeats: int  # of measuring the transport


QUICK = Sizes(256, 2, 1.0, 5)
FULL = Sizes(2048, 8, 10.0, 15)


@dataclass
class Load:
    """How one way went, in a decode worker of its own."""

    quiet_gaps_s: list[float] = field(default_factory=list)  # between tokens, no prompt there
    gaps_s: list[float] = field(default_factory=list)  # while one is being read
    tokens_per_s: float = 0.0  # of all running answers, while one is being read
    ttft_ms: list[float] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)  # plan and remote, as in the JSON
    prompt_tokens: list[int] = field(default_factory=list)


def measure(options: Options) -> list[Figure]:
    sizes = QUICK if options.quick else FULL
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return [Figure("TPOT p99 apart", None, "ms", note="needs two cores")]
    first, second = cores[PREFILL_CORE], cores[DECODE_CORE]
    with tempfile.TemporaryDirectory() as place:
        own, other = Path(place) / "prefill", Path(place) / "decode"
        say("a prefill worker on one core, over a shared cache")
        with worker(own, first) as url:
            shared = decode_worker(own, [second], sizes, "shared", url)
            _share_model(own, other)
            say("the same, over a cache of its own")
            wire = decode_worker(other, [second], sizes, "wire", url)
            layout = _wait_for_model(url)
        say("together on both cores")
        both = decode_worker(other, [first, second], sizes, "both", None)
    moved = transport(layout, first, second, sizes.repeats)
    raw = raw_socket(first, second, 64 << 20, sizes.repeats)
    return [*compared(both, wire, shared), *moved_figures(wire, shared, moved, raw)]


def compared(both: Load, wire: Load, shared: Load) -> list[Figure]:
    name = "together, two cores"

    def beside(what: str, ours: float, theirs: float, unit: str = "ms", **more: Any) -> Figure:
        return Figure(what, ours, unit, theirs, name, **more)

    tpot = [1e3 * percentile(load.gaps_s, 99) for load in (wire, shared, both)]
    middle = [1e3 * percentile(load.gaps_s, 50) for load in (wire, shared, both)]
    quiet = [1e3 * percentile(load.quiet_gaps_s, 99) for load in (wire, both)]
    median = [1e3 * percentile(load.quiet_gaps_s, 50) for load in (wire, both)]
    ttft = [statistics.median(load.ttft_ms) for load in (wire, shared, both)]
    less: dict[str, Any] = {"less_is_better": True}
    goal: dict[str, Any] = {"goal": 1.0, **less}
    reading, wired, stored = "while prompts are read", "apart over the wire", "apart, shared cache"
    return [
        beside(f"TPOT p99 {reading}, {wired}", tpot[0], tpot[2], **goal),
        beside(f"TPOT p99 {reading}, {stored}", tpot[1], tpot[2], **goal),
        beside(f"TPOT p50 {reading}, {wired}", middle[0], middle[2], **less),
        beside(f"TPOT p50 {reading}, {stored}", middle[1], middle[2], **less),
        beside("TPOT p99 without prompts, one core", quiet[0], quiet[1], **less),
        beside("TPOT p50 without prompts, one core", median[0], median[1], **less),
        beside(f"running answers {reading}, {wired}", *_rates(wire, both), "tokens/s"),
        beside(f"running answers {reading}, {stored}", *_rates(shared, both), "tokens/s"),
        beside(f"TTFT of a prompt, {wired}", ttft[0], ttft[2], **less),
        beside(f"TTFT of a prompt, {stored}", ttft[1], ttft[2], **less),
    ]


def _rates(ours: Load, theirs: Load) -> tuple[float, float]:
    return ours.tokens_per_s, theirs.tokens_per_s


def moved_figures(
    wire: Load, shared: Load, moved: list[list[float]], raw: list[float]
) -> list[Figure]:
    """What went over the wire, and how well it was foretold."""
    fetched = [one["remote"] for one in wire.prompts if one["remote"]]
    stored = [one["remote"] for one in shared.prompts if one["remote"]]
    num_tokens = sum(one["tokens"] for one in fetched)
    prefill_s = sum((one["prefill_ms"] or 0) / 1e3 for one in fetched)
    errors = [abs(one["ms"] / one["predicted"]["ms"] - 1) for one in fetched + stored]
    placed, read = (statistics.median(rates) / 1e9 for rates in moved)
    raw_rate = statistics.median(raw) / 1e9, "a raw socket"
    count = sum(one["plan"]["chosen"] == "remote" for one in wire.prompts + shared.prompts)
    all_prompts = len(wire.prompts) + len(shared.prompts)
    through = 100 * _mean(one["stored_tokens"] > 0 for one in stored)
    return [
        Figure("KV moved per prompt", _mean(one["bytes"] for one in fetched) / 1e6, "MB"),
        Figure("KV moved per prompt, shared cache", _mean(o["bytes"] for o in stored) / 1e6, "MB"),
        Figure("KV per token", sum(one["bytes"] for one in fetched) / max(1, num_tokens), "bytes"),
        Figure("prefill on one core", num_tokens / prefill_s if prefill_s else None, "tokens/s"),
        Figure("prompts that the plan sent away", 100 * count / max(1, all_prompts), "%"),
        Figure("fetches that went through the cache, where it is shared", through, "%"),
        Figure("error of the foretold time of a fetch", 100 * _mean(errors), "%"),
        Figure("KV out of a pool over HTTP", read, "GB/s", *raw_rate, goal=0.9),
        Figure("KV out of one pool into another, verified", placed, "GB/s", *raw_rate),
    ]


# --- the workers ----------------------------------------------------------------------------------


@contextmanager
def worker(home: Path, core: int) -> Iterator[str]:
    """The address of a prefill worker, as the program starts it, on one core."""
    command = [sys.executable, "-m", "chatkv", "serve", "--role", "prefill", "--port", "0"]
    environment = _environment(home) | {"CHATKV_CALIBRATE": "1"}
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    try:
        from chatkv import runtime  # noqa: F401  while that starts: decode workers are forked

        url = process.stderr.readline().split("serving at ")[1].split(",")[0].split(" ")[0].strip()
        _wait_for_model(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait_for_model(url: str) -> str:
    """Until it has one: the layout of its KV."""
    from chatkv.apart.over_http import HttpTransport

    while not (models := HttpTransport(url).state(10).models):
        time.sleep(0.1)
    return models[0].model.layout


def decode_worker(
    home: Path, cores: Sequence[int], sizes: Sizes, name: str, url: str | None
) -> Load:
    """What running answers and arriving prompts take in a process of its own on these cores. It is
    forked from this one, which has computed nothing, and need not import everything again."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    about = (home, set(cores), sizes, name, url)
    process = context.Process(target=be_decode_worker, args=(theirs, *about))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        raise SystemExit("a decode worker has failed, see above") from None
    finally:
        process.join(30)
    assert isinstance(found, Load)
    return found


def _environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "store"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHATKV_")}
    return kept | {"CHATKV_HOME": str(home), "PYTHONPATH": path}


def _share_model(home: Path, other: Path) -> None:
    """Let another home have the prepared model and what was measured of the machine."""
    (other / "cache").mkdir(parents=True)
    for name in ("models", "costs.json"):
        source = home / "cache" / name
        if source.is_dir():
            (other / "cache" / name).symlink_to(source)
        elif source.exists():
            shutil.copy(source, other / "cache" / name)


# --- inside a decode worker -----------------------------------------------------------------------


def be_decode_worker(
    told: Connection, home: Path, cores: set[int], sizes: Sizes, name: str, url: str | None
) -> None:
    os.sched_setaffinity(0, cores)
    environment = _environment(home) | {"CHATKV_CALIBRATE": "0"}
    os.environ.clear()
    os.environ.update(environment)
    from chatkv.apart.over_http import HttpTransport
    from chatkv.paths import folders
    from chatkv.restore.prefill_worker import PrefillWorker
    from chatkv.runtime import Runtime
    from chatkv_store.conversations import Conversations

    where = folders()
    where.make()
    remote = PrefillWorker(HttpTransport(url)) if url else None
    with (
        Conversations(where.conversations) as conversations,
        Runtime(where, conversations, prefill=remote) as runtime,
    ):
        told.send(Running(runtime, name).load(sizes))


class Running:
    """Answers that are written all the time, each in a thread."""

    def __init__(self, runtime: Any, name: str) -> None:
        self.runtime, self._random = runtime, random.Random(name)
        self._is_over = threading.Event()
        self._tokens: list[list[tuple[float, bool]]] = [[] for _ in range(RUNNING)]

    def load(self, sizes: Sizes) -> Load:
        threads = [threading.Thread(target=self._answer, args=(i,)) for i in range(RUNNING)]
        for thread in threads:
            thread.start()
        while any(len(one) < 8 for one in self._tokens):
            time.sleep(0.05)
        found = Load()
        self._prompt(64, found)  # so that whatever is done once is done
        found = Load(quiet_gaps_s=self._quiet(sizes.quiet_s))
        for _ in range(sizes.num_prompts):
            began = time.perf_counter()
            self._prompt(sizes.prompt_tokens, found)
            ended = began + found.ttft_ms[-1] / 1e3
            gaps = self._gaps(began, ended)
            found.gaps_s += gaps
            found.tokens_per_s += len(gaps) / (ended - began) / sizes.num_prompts
            time.sleep(0.1)
        self._is_over.set()
        for thread in threads:
            thread.join()
        return found

    def _quiet(self, seconds: float) -> list[float]:
        began = time.perf_counter()
        time.sleep(seconds)
        return self._gaps(began, time.perf_counter())

    def _gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between neighbouring tokens of an answer, of which the later one came then."""
        return [
            after - before
            for tokens in self._tokens
            for (before, _), (after, is_first) in pairwise(list(tokens))
            if began <= after <= ended and not is_first
        ]

    def _answer(self, index: int) -> None:
        """One answer after the other, none of which is long enough to slow its tokens down."""
        from chatkv.session.turn import Listener

        tokens = self._tokens[index]
        while not self._is_over.is_set():
            is_first = True

            def heard(token: int, logits: Any) -> None:
                nonlocal is_first
                tokens.append((time.perf_counter(), is_first))
                is_first = False

            listener = Listener(on_token=heard, cancelled=self._is_over.is_set)
            self._say("Tell me a long story about the sea.", 256, listener, speculate="off")

    def _prompt(self, num_tokens: int, found: Load) -> None:
        """A prompt that nobody has said before arrives, and is answered with one token."""
        words = [self._random.choice(WORDS) for _ in range(num_tokens)]
        done = self._say(" ".join(words), 1)
        found.ttft_ms.append(done.timing.ttft_ms)
        found.prompts.append({"plan": done.to_json()["plan"], "remote": done.remote})
        found.prompt_tokens.append(done.tokens.prompt)

    def _say(self, text: str, max_tokens: int, listener: Any = None, **more: Any) -> Any:
        from chatkv.engine.options import SamplingOptions
        from chatkv.session.turn import TurnOptions

        options = TurnOptions(SamplingOptions(temperature=1.0), max_tokens=max_tokens, **more)
        with self.runtime.open(self.runtime.new_session()) as conversation:
            return conversation.send(text, options, listener)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def _mean(values: Any) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


if __name__ == "__main__":
    run("running answers while long prompts arrive, together and apart", measure)
