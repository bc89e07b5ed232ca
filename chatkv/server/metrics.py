"""What the APIs have done, counted, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Metrics:
    """Counters since the process began; any thread may count."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # path, status
    hits: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    num_disconnected: int = 0
    num_open: int = 0
    _ttft_counts: list[int] = field(default_factory=lambda: [0] * len(TTFT_BUCKETS_S))
    _ttft_sum_s: float = 0.0
    _num_ttft: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, result: dict[str, Any]) -> None:
        """Count the data of a `result` event."""
        with self._lock:
            timings = result["timings"]
            self.hits[timings["hit"]] += 1
            self.tokens["reused"] += timings["reused_n"]
            self.tokens["loaded"] += timings["loaded_n"]
            self.tokens["computed"] += timings["prompt_n"]
            self.tokens["generated"] += result["generated_tokens"]
            ttft_s = timings["ttft_ms"] / 1e3
            self._num_ttft += 1
            self._ttft_sum_s += ttft_s
            for index, bound in enumerate(TTFT_BUCKETS_S):
                self._ttft_counts[index] += ttft_s <= bound

    def text(self, hub: dict[str, Any]) -> str:
        """Everything, the hub's status included."""
        with self._lock:
            lines = [
                *_counter(
                    "chatkv_requests_total",
                    "Requests by path and status.",
                    (
                        (f'path="{path}",status="{status}"', n)
                        for (path, status), n in self.requests.items()
                    ),
                ),
                *_counter(
                    "chatkv_matches_total",
                    "Answers by how their conversation was found.",
                    ((f'hit="{hit}"', n) for hit, n in self.hits.items()),
                ),
                *_counter(
                    "chatkv_tokens_total",
                    "Tokens: KV reused from memory, loaded from disk, computed; and generated.",
                    ((f'source="{source}"', n) for source, n in self.tokens.items()),
                ),
                *_counter(
                    "chatkv_disconnects_total",
                    "Requests whose client left before the end.",
                    (("", self.num_disconnected),),
                ),
                *_gauge("chatkv_requests_open", "Requests being answered.", (("", self.num_open),)),
                *self._ttft(),
            ]
        kv = [
            (f'model="{_quoted(model["model"])}",state="{state}"', model["kv_tokens"][state])
            for model in hub["models"]
            for state in ("total", "free", "idle")
        ]
        lines += _gauge("chatkv_kv_tokens", "Tokens of KV that memory has room for.", kv)
        open_sessions = len(hub["open_sessions"])
        lines += _gauge("chatkv_sessions_open", "Open conversations.", (("", open_sessions),))
        return "\n".join(lines) + "\n"

    def _ttft(self) -> list[str]:
        name = "chatkv_ttft_seconds"
        lines = [f"# HELP {name} Time to first token.", f"# TYPE {name} histogram"]
        for bound, count in zip(TTFT_BUCKETS_S, self._ttft_counts, strict=True):
            lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
        lines.append(f'{name}_bucket{{le="+Inf"}} {self._num_ttft}')
        return [*lines, f"{name}_sum {self._ttft_sum_s:.6f}", f"{name}_count {self._num_ttft}"]


Samples = Iterable[tuple[str, int]]


def _counter(name: str, says: str, samples: Samples) -> list[str]:
    return _family(name, says, "counter", samples)


def _gauge(name: str, says: str, samples: Samples) -> list[str]:
    return _family(name, says, "gauge", samples)


def _family(name: str, says: str, kind: str, samples: Samples) -> list[str]:
    lines = [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
    return lines + [f"{name}{{{labels}}} {n}" if labels else f"{name} {n}" for labels, n in samples]


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
