#!/usr/bin/env python
"""Tiers under load: what users wait for, and what the disk bears, when conversations come and go.

Replays traces (traces.py) under three policies: KV in memory only, a snapshot file per session,
and this design. No model runs (tiers.py): the clock is simulated, so these figures are the same on
every machine. scripts/replay.py replays other traces, machines and caps.

Caps are shares of the KV of a whole trace, so that they are as tight at any size; where none is
named it is 1/4. "Resumed" turns are those whose history had left the memory. A snapshot is there as
a whole or not at all, so of the few that one short trace has, the median falls anywhere: --quick
replays many traces and takes them together. A p99 has no goal: it is a few turns that happened
to queue behind a long one, and falls either way.
"""

from __future__ import annotations

import statistics
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
    size, seeds = (20, range(8)) if options.quick else (150, range(1))
    traces = [generate(TraceSpec(num_conversations=size, seed=seed)) for seed in seeds]
    by_cap = {
        name: _replay(traces if name == MAIN_CAP else traces[:2], name, share)
        for name, share in CAPS.items()
    }
    memory, snapshots, ours = by_cap[MAIN_CAP]
    figures = [
        _ttft(name, percent, ours, other)
        for other in (memory, snapshots)
        for name in ("TTFT", "resumed TTFT")
        for percent in (50, 90, 99)
    ]
    figures += [_mean_ttft(ours, other) for other in (memory, snapshots)]
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


def _replay(traces: Sequence[Sequence[TraceConversation]], cap: str, share: float) -> list[Report]:
    """What each policy did in all traces, under a cap of that share of each one's KV."""
    say(f"replaying {len(traces)} x {len(traces[0])} conversations, cap {cap} of all KV")
    reports: dict[str, Report] = {policy: Report(policy) for policy in POLICIES}
    for trace in traces:
        kv_bytes = Machine.kv_bytes_per_token * sum(one.num_tokens for one in trace)
        machine = replace(Machine(), cap_bytes=share * kv_bytes)
        for policy in POLICIES:
            reports[policy] += replay(trace, policy, machine)
    return list(reports.values())


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


def _mean_ttft(ours: Report, other: Report) -> Figure:
    value, baseline = (statistics.mean(one.resumed_ttft_s) for one in (ours, other))
    return Figure(
        f"resumed TTFT on average, {_BESIDE[other.policy]}",
        value,
        "s",
        baseline,
        other.policy,
        goal=1,
        less_is_better=True,
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
