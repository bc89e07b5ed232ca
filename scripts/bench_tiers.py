#!/usr/bin/env python
"""Tiers under load: what users wait for, and what the disk bears, when conversations come and go.

Replays one trace (traces.py) under three policies: KV in memory only, a snapshot file per session,
and this design. No model runs (tiers.py): the clock is simulated, so these figures are the same on
every machine. scripts/replay.py replays other traces, machines and caps.

Caps are shares of the KV of the whole trace, so that they are as tight at any size; where none is
named it is 1/4. "Resumed" turns are those whose history had left the memory. A p99 has no goal: it
is a few turns that happened to queue behind a long one, and falls either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench_common import Figure, Options, run, say
from replay import POLICIES, Report, percentile, replay
from tiers import Machine, NoPersistence, Snapshots
from traces import TraceConversation, TraceSpec, generate

CAPS = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}
MAIN_CAP = "1/4"
_BESIDE = {NoPersistence.name: "beside memory", Snapshots.name: "beside snapshots"}


def measure(options: Options) -> list[Figure]:
    trace = generate(TraceSpec(num_conversations=30 if options.quick else 150))
    kv_bytes = Machine.kv_bytes_per_token * sum(one.num_tokens for one in trace)
    by_cap = {
        name: _replay(trace, replace(Machine(), cap_bytes=share * kv_bytes), f"{name} of all KV")
        for name, share in CAPS.items()
    }
    memory, snapshots, ours = by_cap[MAIN_CAP]
    figures = [
        _ttft(name, percent, ours, other)
        for other in (memory, snapshots)
        for name in ("TTFT", "resumed TTFT")
        for percent in (50, 90, 99)
    ]
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
        _computed(ours, memory),
        _computed(ours, snapshots),
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


def _ttft(name: str, percent: int, ours: Report, other: Report) -> Figure:
    values = [one.ttft_s if name == "TTFT" else one.resumed_ttft_s for one in (ours, other)]
    value, baseline = (percentile(one, percent / 100) for one in values)
    return Figure(
        f"{name} p{percent}, {_BESIDE[other.policy]}",
        value,
        "s",
        baseline,
        other.policy,
        goal=1 if percent < 99 else None,
        less_is_better=True,
        note=f"{len(values[0])} turns" if percent == 50 else None,
    )


def _computed(ours: Report, other: Report) -> Figure:
    return Figure(
        f"tokens computed, {_BESIDE[other.policy]}",
        ours.computed,
        "tokens",
        other.computed,
        other.policy,
        goal=1,
        less_is_better=True,
    )


if __name__ == "__main__":
    run("tiers under load", measure)
