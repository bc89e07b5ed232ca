#!/usr/bin/env python
"""Tiers under load: what users wait for, and what the disk bears, when conversations come and go.

Replays one trace (traces.py) under three policies: KV in memory only, a snapshot file per session,
and this design. No model runs (tiers.py): the clock is simulated, so these figures are the same on
every machine. Caps are shares of the KV of the whole trace, so that they are as tight at any size.

"Resumed" turns are those whose history had left the memory: only they differ by policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench_common import Figure, Options, run, say
from replay import POLICIES, Report, percentile, replay
from tiers import Machine
from traces import TraceConversation, TraceSpec, generate

CAPS = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}
MAIN_CAP = "1/4"


def measure(options: Options) -> list[Figure]:
    trace = generate(TraceSpec(num_conversations=40 if options.quick else 160))
    kv_bytes = Machine.kv_bytes_per_token * sum(one.num_tokens for one in trace)
    by_cap = {
        name: _replay(trace, replace(Machine(), cap_bytes=share * kv_bytes), f"{name} of all KV")
        for name, share in CAPS.items()
    }
    memory, snapshots, ours = by_cap[MAIN_CAP]
    turns = f"{ours.num_turns} turns, {len(ours.resumed_ttft_s)} of them resumed"
    figures = []
    for other in (memory, snapshots):
        for percent in (50, 90, 99):
            figures.append(_ttft("TTFT", percent, ours, other, turns))
        for percent in (50, 90, 99):
            figures.append(_ttft("resumed TTFT", percent, ours, other))
    figures += [
        Figure("hit rate of the memory", ours.pool_hit_rate, "of reusable tokens"),
        *(
            Figure(
                f"hit rate of the disk, cap {name}",
                us.disk_hit_rate,
                "of tokens not in memory",
                them.disk_hit_rate,
                them.policy,
                goal=1,
            )
            for name, (_, them, us) in by_cap.items()
        ),
        _counts("tokens computed", ours.computed, memory.computed, memory.policy),
        _counts("tokens computed", ours.computed, snapshots.computed, snapshots.policy),
        Figure("tokens loaded", ours.loaded, "tokens", snapshots.loaded, snapshots.policy),
        Figure(
            "bytes written",
            ours.disk.bytes_written / 1e9,
            "GB",
            snapshots.disk.bytes_written / 1e9,
            snapshots.policy,
            goal=1,
            less_is_better=True,
        ),
        Figure("blocks evicted", ours.disk.evicted, "blocks"),
        Figure("blocks refused", ours.disk.refused, "blocks"),
    ]
    return figures


def _replay(trace: Sequence[TraceConversation], machine: Machine, cap: str) -> list[Report]:
    say(f"replaying {len(trace)} conversations, cap {cap} ({machine.cap_bytes / 1e9:.2f} GB)")
    return [replay(trace, policy, machine) for policy in POLICIES]


def _ttft(name: str, percent: int, ours: Report, other: Report, note: str | None = None) -> Figure:
    values = (one.ttft_s if name == "TTFT" else one.resumed_ttft_s for one in (ours, other))
    value, baseline = (percentile(one, percent / 100) for one in values)
    return Figure(
        f"{name} p{percent}",
        value,
        "s",
        baseline,
        other.policy,
        goal=1,
        less_is_better=True,
        note=note if percent == 50 else None,
    )


def _counts(name: str, value: int, baseline: int, policy: str) -> Figure:
    return Figure(name, value, "tokens", baseline, policy, goal=1, less_is_better=True)


if __name__ == "__main__":
    run("tiers under load", measure)
