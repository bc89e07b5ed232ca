#!/usr/bin/env python
"""How many machines should prefill, how many decode, and over which links: simulated.

Replays made-up conversations (traces.py) on clusters of one size (cluster.py), from "all together"
to one decoder behind prefill workers, over links of several rates. Goodput is the highest load at
which a share of the turns keep to limits of both TTFT and TPOT (DistServe, arXiv 2401.09670), found
by bisection; the columns beside it are of that load. Nothing is computed but the clock: the rates
come from this machine (--measure), from the record of a calibration (--costs) or from flags.

    scripts/simulate_cluster.py --quick
    scripts/simulate_cluster.py --measure --workers 4 --link-mb-s 12.5 125 1250
    scripts/simulate_cluster.py --check apart.json   beside what bench_disaggregation.py measured
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import machine, say, versions  # noqa: E402
from cluster import simulate  # noqa: E402
from cluster_check import NotMeasured, compare  # noqa: E402
from cluster_parts import Cluster, Link, Ran, Rates, Send  # noqa: E402
from replay import cost_arguments, cost_of, percentile  # noqa: E402
from traces import (  # noqa: E402
    MEAN_PROMPT_TOKENS,
    TraceConversation,
    TraceSpec,
    generate,
)

from chatkv.restore.cost import CostModel  # noqa: E402

# SmolLM2-135M in bfloat16 on one core of a small server, where nothing was measured: rough.
STEP_S = {1: 0.025, 4: 0.04, 8: 0.06}
KV_BYTES_PER_TOKEN = 23_040
LINKS_MB_S = (12.5, 125.0, 1250.0)  # 100 Mbit/s, 1 Gbit/s, 10 Gbit/s
MOST_PER_HOUR = 1e6
MEASURED_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Limits:
    """What a turn must keep to, and which share of them must."""

    ttft_s: float
    tpot_s: float
    share: float

    def kept_by(self, ran: Ran) -> float:
        """The share of turns that kept to both."""
        kept = (one.ttft_s <= self.ttft_s and one.tpot_s <= self.tpot_s for one in ran.requests)
        return sum(kept) / len(ran.requests)


@dataclass(frozen=True)
class Row:
    """One cluster at the highest load that it bears."""

    layout: str
    link_mb_s: float | None
    turns_per_s: float  # 0: even one conversation after the other is too much
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    prefill_busy: float  # share of the time, of those that prefill alone
    decode_busy: float
    sent_share: float  # of the turns
    sent_mb_per_turn: float


def goodput(
    cluster: Cluster,
    traced: Callable[[float], Sequence[TraceConversation]],
    limits: Limits,
    precision: float = 1.03,
) -> Row:
    """The highest rate of conversations at which the cluster keeps to the limits; how it does."""

    def kept(per_hour: float) -> bool:
        return limits.kept_by(simulate(cluster, traced(per_hour))) >= limits.share

    low, high = 0.0, 30.0
    while high < MOST_PER_HOUR and kept(high):
        low, high = high, 2 * high
    while low and high > precision * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if kept(middle) else (low, middle)
    trace = traced(low or high)
    ran = simulate(cluster, trace)
    return row_of(cluster, ran, low / 3600 * sum(len(one.turns) for one in trace) / len(trace))


def row_of(cluster: Cluster, ran: Ran, turns_per_s: float) -> Row:
    ttft_s = [one.ttft_s for one in ran.requests]
    tpot_s = [one.tpot_s for one in ran.requests if one.reply_tokens > 1]
    sent = sum(one.was_sent for one in ran.requests)
    return Row(
        cluster.name,
        cluster.link.bytes_per_s / 1e6 if cluster.num_prefill else None,
        turns_per_s,
        percentile(ttft_s, 0.5),
        percentile(ttft_s, 0.99),
        percentile(tpot_s, 0.5),
        percentile(tpot_s, 0.99),
        ran.prefill_busy_s / ran.ended_s / max(1, cluster.num_prefill),
        ran.decode_busy_s / ran.ended_s / cluster.num_decode,
        sent / len(ran.requests),
        ran.sent_bytes / len(ran.requests) / 1e6,
    )


def layouts(num_workers: int, cluster: Cluster, links_mb_s: Sequence[float]) -> list[Cluster]:
    """All together, then every split of the workers over every link."""
    found = [replace(cluster, num_prefill=0, num_decode=num_workers)]
    for rate in links_mb_s:
        link = replace(cluster.link, bytes_per_s=rate * 1e6)
        found += [
            replace(cluster, num_prefill=one, num_decode=num_workers - one, link=link)
            for one in range(1, num_workers)
        ]
    return found


def measured() -> tuple[CostModel, dict[int, float], float]:
    """This machine with the default model: prefill, steps by number of answers, KV per token."""
    import os
    import tempfile

    from chatkv.client import ChatRequest, open_chat
    from chatkv.paths import folders

    os.environ["CHATKV_CALIBRATE"] = "0"
    with tempfile.TemporaryDirectory() as home:
        os.environ["CHATKV_HOME"] = home
        with open_chat(folders(), ChatRequest()) as chat:
            say("measuring prefill ...")
            cost = chat.runtime.calibrate().cost
            steps = {num: _step_s(chat.runtime.engine, num) for num in MEASURED_BATCHES}
            return cost, steps, chat.runtime.layout.bytes_per_token


def _step_s(engine: Any, num_answers: int) -> float:
    """Seconds of a step that computes a token of each of so many answers; the first warm up."""
    import time

    from chatkv.engine.piece import Piece
    from chatkv.engine.sequence import TokenSequence

    say(f"measuring a step of {num_answers} ...")
    sequences = [TokenSequence(ids=[5 + i] * 200) for i in range(num_answers)]
    times = []
    for one in sequences:
        engine.pool.reserve(one.run, len(one.ids) + 20)
    for _ in range(20):
        pieces = [Piece(one, one.num_cached, len(one.ids)) for one in sequences]
        began = time.perf_counter()
        logits = engine.runner.forward(pieces)
        times.append(time.perf_counter() - began)
        for one, after in zip(sequences, logits, strict=True):
            one.num_cached = len(one.ids)
            one.ids.append(int(after.argmax()))
    for one in sequences:
        engine.pool.release(one.run)
    return statistics.median(times[5:])


def table(rows: Sequence[Row], num_workers: int) -> str:
    cells = [
        (
            *("workers", "link", "turns/s", "of together", "TTFT p50", "p99", "TPOT p50", "p99"),
            *("prefill busy", "decode busy", "sent", "MB/turn"),
        )
    ]
    base = rows[0].turns_per_s
    for one in rows:
        cells.append(
            (
                one.layout,
                "" if one.link_mb_s is None else f"{one.link_mb_s:g} MB/s",
                f"{one.turns_per_s:.3f}",
                f"{one.turns_per_s / base:.2f}x" if base else "",
                *(f"{value:.2f} s" for value in (one.ttft_p50_s, one.ttft_p99_s)),
                *(f"{1e3 * value:.0f} ms" for value in (one.tpot_p50_s, one.tpot_p99_s)),
                "" if one.link_mb_s is None else f"{one.prefill_busy:.0%}",
                f"{one.decode_busy:.0%}",
                f"{one.sent_share:.0%}",
                f"{one.sent_mb_per_turn:.1f}",
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer conversations and layouts")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE, or to stdout for -")
    parser.add_argument("--measure", action="store_true", help="rates of this machine")
    cost_arguments(parser)
    parser.add_argument(
        "--step-ms", type=_steps, metavar="N=MS,...", help="a step by its number of answers"
    )
    parser.add_argument("--kv-bytes-per-token", type=float, help="what goes over the link")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link-mb-s", type=float, nargs="+", default=LINKS_MB_S)
    parser.add_argument("--link-delay-ms", type=float, default=0.5)
    parser.add_argument("--send", choices=["always", "when it pays"], default="always")
    parser.add_argument(
        "--shared-store", action="store_true", help="prefill workers can read what was said"
    )
    parser.add_argument(
        "--prompt-tokens", type=float, default=MEAN_PROMPT_TOKENS, help="of a turn, on average"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="in which they begin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft-s", type=float, default=2.0)
    parser.add_argument("--tpot-s", type=float, default=0.1)
    parser.add_argument("--share", type=float, default=0.9, help="of the turns that keep to both")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="beside a report of bench_disaggregation.py"
    )
    given = parser.parse_args(arguments)
    if given.workers < 2 or min(given.link_mb_s) <= 0:
        parser.error("give at least two workers, and links that carry something")

    default, steps, kv_bytes = (
        measured() if given.measure else (CostModel(), STEP_S, KV_BYTES_PER_TOKEN)
    )
    cost = cost_of(parser, given, default)
    if given.check:
        check(given.check, cost)
        return
    rates = Rates(cost, given.step_ms or steps)
    link = Link(0.0, given.link_delay_ms / 1e3)
    send: Send = given.send
    cluster = Cluster(
        0, 1, rates, link, given.kv_bytes_per_token or kv_bytes, send, given.shared_store
    )
    limits = Limits(given.ttft_s, given.tpot_s, given.share)
    hours = (10.0 if given.quick else given.minutes) / 60

    def traced(per_hour: float) -> list[TraceConversation]:
        # Without absences of hours: a load is to be held, not to be waited for.
        size = max(1, round(per_hour * hours))
        return generate(
            TraceSpec(
                size,
                given.seed,
                conversations_per_hour=per_hour,
                prompt_tokens=given.prompt_tokens,
                away_odds=0.0,
            )
        )

    links = given.link_mb_s[:1] if given.quick else given.link_mb_s
    rows = []
    for one in layouts(given.workers, cluster, links):
        say(f"{one.name}, {one.link.bytes_per_s / 1e6:g} MB/s ...")
        rows.append(goodput(one, traced, limits, 1.15 if given.quick else 1.03))
    report(given.json, rates, cluster, limits, rows)


def check(file: Path, cost: CostModel) -> None:
    """What is simulated of a report's workload, beside what was measured."""
    try:
        compared = compare(json.loads(file.read_text(encoding="utf-8")), cost)
    except (OSError, ValueError, KeyError, NotMeasured) as error:
        raise SystemExit(f"{file}: {error}") from None
    width = max(len(one.name) for one in compared)
    for one in compared:
        print(
            f"{one.name.ljust(width)}  simulated {one.simulated:7.0f} ms  "
            f"measured {one.measured:7.0f} ms  {one.error:+.0%}"
        )


def report(
    file: str | None, rates: Rates, cluster: Cluster, limits: Limits, rows: Sequence[Row]
) -> None:
    """As a table, or as JSON with everything that went in."""
    if file is None:
        print(table(rows, cluster.num_workers))
        return
    values = {
        "machine": machine(),
        "versions": versions(),
        "rates": {"cost": asdict(rates.cost), "step_s": rates.step_s},
        "kv_bytes_per_token": cluster.kv_bytes_per_token,
        "limits": asdict(limits),
        "rows": [asdict(row) for row in rows],
    }
    text = json.dumps(values, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


def _steps(text: str) -> Mapping[int, float]:
    try:
        found = {
            int(num): float(ms) / 1e3
            for num, _, ms in (one.partition("=") for one in text.split(","))
        }
        if not found or min(found) < 1 or min(found.values()) <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1=25,8=60") from None
    return found


if __name__ == "__main__":
    main()
