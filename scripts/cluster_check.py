"""The simulation beside what two processes really did (bench_disaggregation.py --json).

Two answers run without end, and a prompt arrives: together on two cores, or apart with one core for
each worker. What goes in are rates that were measured by themselves: steps without prompts, prefill
alone, bytes a second of the link. What comes out is what happens when they meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster import serve
from cluster_parts import Cluster, Link, Ran, Rates, Request

from chatkv.restore.cost import CostModel

RUNNING = 2
ENDLESS = 1 << 40


class NotMeasured(Exception):
    """The report lacks a figure; the text says which."""


@dataclass(frozen=True)
class Compared:
    """One figure, in ms."""

    name: str
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def compare(report: Mapping[str, Any], together: CostModel) -> list[Compared]:
    """Every figure of `report` that the simulation has too. together: prefill on both cores, which
    the report does not tell. Raises NotMeasured."""
    figures = {one["name"]: one for one in report["figures"]}

    def value(name: str, key: str = "value") -> float:
        found = figures.get(name, {}).get(key)
        if not found:
            raise NotMeasured(f"there is no {key} of {name!r}")
        return float(found)

    quiet = "TPOT p50 without prompts, one core"
    kv_bytes = value("KV per token")
    prompt = 1 + round(value("KV moved per prompt") * 1e6 / kv_bytes)
    rate = value("KV out of one pool into another, verified") * 1e9
    one_core = CostModel(
        prefill_fixed_s=0,
        prefill_s_per_token=1 / value("prefill on one core"),
        prefill_s_per_token_pair=0,
    )
    alone = Rates(one_core, {RUNNING: value(quiet) / 1e3})
    apart = Cluster(1, 1, alone, Link(rate), kv_bytes)
    rates = Rates(together, {RUNNING: value(quiet, "baseline") / 1e3})
    both = replace(apart, num_prefill=0, rates=rates)
    wired, reading = "apart over the wire", "while prompts are read"
    found = []
    for name, cluster, key in ((wired, apart, "value"), ("together", both, "baseline")):
        arrived = Request(RUNNING, 60.0, 0, prompt, 1)
        tpot_s = _beside(cluster, arrived)
        measured = value(f"TPOT p50 {reading}, {wired}", key)
        found.append(Compared(f"TPOT p50 {reading}, {name}", tpot_s * 1e3, measured))
        measured = value(f"TTFT of a prompt, {wired}", key)
        found.append(Compared(f"TTFT of a prompt, {name}", arrived.ttft_s * 1e3, measured))
    return found


def _beside(cluster: Cluster, arrived: Request) -> float:
    """The median of the running answers' times between tokens while `arrived` is being read."""
    running = [Request(number, 0.0, 0, 1, ENDLESS) for number in range(RUNNING)]
    ran: Ran = serve(cluster, [*running, arrived], until=lambda: arrived.last_s < math.inf)
    gaps = []
    for at_s, gap_s, count in ran.gaps:  # steps that are alike, of which some came before it
        since = math.ceil((at_s - arrived.arrived_s) / gap_s)
        if since > 0:
            gaps.append((gap_s, min(count, RUNNING * since)))
    gaps.sort()
    half = sum(count for _, count in gaps) / 2
    for gap_s, count in gaps:
        half -= count
        if half <= 0:
            return gap_s
    raise NotMeasured("no token came beside the prompt")
