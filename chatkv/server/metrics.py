"""What the APIs have done, counted, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from chatkv import __version__
from chatkv.process import resident_bytes

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)

Samples = Iterable[tuple[str, float]]


class Histogram:
    """How often which sizes came, by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, says: str) -> Iterator[str]:
        yield from _head(name, says, "histogram")
        names = [str(bound) for bound in self._bounds] + ["+Inf"]
        counts = list(accumulate(self._counts))
        for bound, count in zip(names, counts, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {counts[-1]}"


@dataclass
class Metrics:
    """Counters since the process began; any thread may count."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # path, status
    hits: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    drafted: Counter[tuple[str, str]] = field(default_factory=Counter)  # source, outcome
    plans: Counter[str] = field(default_factory=Counter)
    plan_ms: Counter[tuple[str, str]] = field(default_factory=Counter)  # plan, expected or taken
    remote: Counter[str] = field(default_factory=Counter)  # by how a fetch ended
    remote_bytes: int = 0
    num_disconnected: int = 0
    num_open: int = 0
    began_at: float = field(default_factory=time.time)
    _ttft: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    _per_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    _computed: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, result: dict[str, Any]) -> None:
        """Count the data of a `result` event."""
        with self._lock:
            timings = result["timings"]
            self.hits[timings["hit"]] += 1
            self.tokens["reused"] += timings["reused_n"]
            self.tokens["loaded"] += timings["loaded_n"]
            self.tokens["computed"] += timings["prompt_n"] - timings["remote_n"]
            self.tokens["remote"] += timings["remote_n"]
            plan = timings["plan"]
            self.plans[plan] += 1
            self.plan_ms[plan, "expected"] += round(timings["plan_expected_ms"])
            self.plan_ms[plan, "taken"] += round(timings["plan_ms"])
            if result["remote"] is not None:
                self.remote["failed" if result["remote"]["failure"] else "done"] += 1
                self.remote_bytes += result["remote"]["bytes"]
            self.tokens["generated"] += result["generated_tokens"]
            source, accepted = timings["draft_source"], timings["draft_n_accepted"]
            self.drafted[source, "accepted"] += accepted
            self.drafted[source, "rejected"] += timings["draft_n"] - accepted
            self._ttft.add(timings["ttft_ms"] / 1e3)
            self._computed.add(timings["prompt_n"])
            if timings["predicted_per_second"]:
                self._per_token.add(1 / timings["predicted_per_second"])

    def text(self, hub: dict[str, Any], disk: dict[str, int]) -> str:
        """Everything, with the hub's status and the disk tier's figures (`cache.disk_figures`)."""
        with self._lock:
            lines = [*self._counted()]
        return "\n".join([*lines, *self._process(), *_models(hub), *_disk(disk)]) + "\n"

    def _counted(self) -> Iterator[str]:
        requests = [
            (f'path="{path}",status="{status}"', n) for (path, status), n in self.requests.items()
        ]
        hits = [(f'hit="{hit}"', n) for hit, n in self.hits.items()]
        tokens = [(f'source="{source}"', n) for source, n in self.tokens.items()]
        yield from counter("requests_total", "Requests by path and status.", requests)
        yield from counter("matches_total", "Answers by how their conversation was found.", hits)
        says = "Tokens: KV reused, loaded from disk, from a prefill worker, computed; generated."
        yield from counter("tokens_total", says, tokens)
        plans = [(f'plan="{plan}"', n) for plan, n in self.plans.items()]
        yield from counter("plans_total", "How history and prompts came into memory.", plans)
        spent = sorted(self.plan_ms.items())
        taken = [(f'plan="{plan}",which="{which}"', n / 1e3) for (plan, which), n in spent]
        says = "Seconds to the first logits by plan, as it was expected and as it was."
        yield from counter("plan_seconds_total", says, taken)
        fetches = [(f'ended="{how}"', n) for how, n in self.remote.items()]
        yield from counter("remote_prefills_total", "Requests to the prefill worker.", fetches)
        says = "Bytes of KV that came from there."
        yield from counter("remote_bytes_total", says, [("", self.remote_bytes)])
        says = "Tokens guessed ahead of the model, by who guessed, and whether it said them then."
        drafted = [
            (f'source="{source}",outcome="{outcome}"', n)
            for (source, outcome), n in self.drafted.items()
        ]
        yield from counter("drafted_tokens_total", says, drafted)
        says = "Requests whose client left before the end."
        yield from counter("disconnects_total", says, [("", self.num_disconnected)])
        yield from gauge("requests_open", "Requests being answered.", [("", self.num_open)])
        yield from self._ttft.lines("chatkv_ttft_seconds", "Time to first token.")
        yield from self._per_token.lines("chatkv_token_seconds", "Time per further token.")
        says = "Tokens of each prompt that had to be computed."
        yield from self._computed.lines("chatkv_prompt_computed_tokens", says)

    def _process(self) -> Iterator[str]:
        yield from gauge("build_info", "This program.", [(f'version="{__version__}"', 1)])
        yield from gauge("start_time_seconds", "When it began to count.", [("", self.began_at)])
        yield from gauge("memory_bytes", "Memory that it takes.", [("", resident_bytes())])


def _models(hub: dict[str, Any]) -> Iterator[str]:
    tokens, num_bytes = [], []
    for model in hub["models"]:
        for state in ("total", "free", "idle"):
            labels = f'model="{_quoted(model["model"])}",state="{state}"'
            tokens.append((labels, model["kv_tokens"][state]))
            num_bytes.append((labels, model["kv_tokens"][state] * model["kv_bytes_per_token"]))
    yield from gauge("models_loaded", "Models in memory.", [("", len(hub["models"]))])
    yield from gauge("kv_tokens", "Tokens of KV that memory has room for.", tokens)
    yield from gauge("kv_bytes", "The same, in bytes.", num_bytes)
    yield from gauge("sessions_open", "Open conversations.", [("", len(hub["open_sessions"]))])
    yield from gauge("sessions_answering", "... that answer.", [("", len(hub["answering"]))])


def _disk(disk: dict[str, int]) -> Iterator[str]:
    """Names that end in _blocks or _bytes, as the store has them; empty where there is none."""
    for name in ("file_bytes", "used_bytes", "max_bytes", "blocks"):
        if name in disk:
            yield from gauge(f"disk_{name}", "KV on the disk.", [("", disk[name])])
    for name in sorted(disk.keys() & _DISK_COUNTERS.keys()):
        yield from counter(f"disk_{name}_total", _DISK_COUNTERS[name], [("", disk[name])])


_DISK_COUNTERS = {
    "written_blocks": "Blocks of KV that were written.",
    "written_bytes": "Their bytes.",
    "evicted_blocks": "Blocks that went to make room.",
    "evicted_bytes": "Their bytes.",
    "refused_blocks": "Blocks for which there was no room.",
    "dropped_blocks": "Blocks that the disk could not follow with.",
}


def counter(name: str, says: str, samples: Samples) -> list[str]:
    return _family(f"chatkv_{name}", says, "counter", samples)


def gauge(name: str, says: str, samples: Samples) -> list[str]:
    return _family(f"chatkv_{name}", says, "gauge", samples)


def _family(name: str, says: str, kind: str, samples: Samples) -> list[str]:
    lines = _head(name, says, kind)
    return lines + [f"{name}{{{labels}}} {n}" if labels else f"{name} {n}" for labels, n in samples]


def _head(name: str, says: str, kind: str) -> list[str]:
    return [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
