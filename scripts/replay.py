#!/usr/bin/env python
"""Replays a trace of conversations against the tiers that keep KV, on a simulated clock.

Turns queue for one server, in the order of their arrival: restore, prefill and the reply's decoding
take what the cost model says, and the next message comes when its writer has read and thought.

    scripts/replay.py --conversations 200 --cap 4GiB
    scripts/replay.py --costs ~/.cache/chatkv/costs.json     with this machine's measured rates
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from block_tier import Blocks, open_blocks
from tiers import Counts, Machine, NoPersistence, Snapshots, Tier
from traces import TraceConversation, TraceSpec, generate

from chatkv.restore.cost import CostFile, CostModel
from chatkv_store.budget import parse_size
from chatkv_store.errors import StoreError

POLICIES = (NoPersistence.name, Snapshots.name, Blocks.name)
SHARES = (0.5, 0.9, 0.99)


@dataclass
class Report:
    """What one policy did in one replay; tokens are those of prompts, history included."""

    policy: str
    num_turns: int = 0
    prompt_tokens: int = 0
    reusable: int = 0  # ... whose KV had been computed before, by this or another session
    reused: int = 0  # ... that were in the pool
    found: int = 0  # ... that were not, but on disk
    loaded: int = 0  # ... that were loaded: the plan may compute what it could load
    computed: int = 0
    disk: Counts = field(default_factory=Counts)
    plans: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)  # from the message's arrival: queue included
    resumed_ttft_s: list[float] = field(default_factory=list)  # ... of turns whose history was gone

    @property
    def pool_hit_rate(self) -> float:
        """Of the tokens that had been computed before."""
        return self.reused / self.reusable if self.reusable else 0.0

    @property
    def disk_hit_rate(self) -> float:
        """Of the tokens that had been computed before and are not in the pool."""
        missing = self.reusable - self.reused
        return self.found / missing if missing else 0.0

    def __add__(self, other: Report) -> Report:
        """What the policy did in both replays."""
        assert self.policy == other.policy
        sums = {
            one.name: getattr(self, one.name) + getattr(other, one.name)
            for one in fields(self)
            if one.name != "policy"
        }
        return Report(self.policy, **sums)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def replay(trace: Sequence[TraceConversation], policy: str, machine: Machine) -> Report:
    """Serve every turn of `trace` under one of POLICIES; deterministic."""
    clock = Clock()
    report = Report(policy)
    pool = Pool(machine.pool_tokens)
    systems_seen: set[int] = set()
    num_restarts = 0
    waiting = [(one.arrival_s, one.number, 0, one) for one in trace]
    heapq.heapify(waiting)
    with open_tier(policy, machine, clock) as tier:
        while waiting:
            arrival_s, number, turn, conversation = heapq.heappop(waiting)
            start_s = max(clock.now_s, arrival_s)
            if start_s // machine.restart_every_s > num_restarts:
                num_restarts = int(start_s // machine.restart_every_s)
                pool.clear()
            clock.now_s = start_s
            total, history = conversation.prompt_end(turn), conversation.history(turn)
            in_pool = min(pool.tokens_of(number), total - 1)
            served = tier.serve(conversation, turn, in_pool)
            clock.now_s += served.seconds
            report.ttft_s.append(clock.now_s - arrival_s)
            if in_pool < history:
                report.resumed_ttft_s.append(clock.now_s - arrival_s)
            clock.now_s += conversation.turns[turn].reply_tokens * machine.decode_s_per_token
            tier.save(conversation, turn, in_pool)
            pool.hold(number, conversation.history(turn + 1))

            report.num_turns += 1
            report.prompt_tokens += total
            if turn or conversation.system in systems_seen:
                report.reusable += history if turn else min(conversation.system_tokens, total - 1)
            systems_seen.add(conversation.system)
            report.reused += served.reused
            report.found += served.found
            report.loaded += served.loaded
            report.computed += total - served.reused - served.loaded
            report.plans[served.plan.chosen] += 1
            if turn + 1 < len(conversation.turns):
                again_s = clock.now_s + conversation.turns[turn + 1].think_s
                heapq.heappush(waiting, (again_s, number, turn + 1, conversation))
        report.disk = tier.counts()
    return report


class Clock:
    """The simulated time, which the store's conversations are told too."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def open_tier(policy: str, machine: Machine, clock: Clock) -> Iterator[Tier]:
    """The tier of that name. Where a cap is too small to open a store under it, chats go on
    without one, as the program's do."""
    with ExitStack() as stack:
        tier: Tier = NoPersistence(machine)
        if policy == Snapshots.name:
            tier = Snapshots(machine)
        elif policy == Blocks.name:
            with suppress(StoreError):
                tier = stack.enter_context(open_blocks(machine, clock))
        yield tier


class Pool:
    """Which sessions' KV is in memory, under a cap of tokens; the one used longest ago leaves."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: OrderedDict[int, int] = OrderedDict()

    def tokens_of(self, number: int) -> int:
        return self._held.get(number, 0)

    def hold(self, number: int, num_tokens: int) -> None:
        self._held[number] = num_tokens
        self._held.move_to_end(number)
        while sum(self._held.values()) > self._max_tokens:
            self._held.popitem(last=False)

    def clear(self) -> None:
        self._held.clear()


def table(reports: Sequence[Report]) -> str:
    """One line per policy."""
    rows: list[tuple[str, ...]] = [
        (
            *("policy", "pool hits", "disk hits", "reused", "loaded", "computed"),
            *("written", "evicted", "refused", "TTFT p50", "p90", "p99"),
            *("resumed p50", "p90", "p99", "plans"),
        )
    ]
    for one in reports:
        rows.append(
            (
                one.policy,
                f"{one.pool_hit_rate:.1%}",
                f"{one.disk_hit_rate:.1%}",
                *(f"{number:,}" for number in (one.reused, one.loaded, one.computed)),
                f"{one.disk.bytes_written / 1e9:.2f} GB",
                *(f"{number:,}" for number in (one.disk.evicted, one.disk.refused)),
                *(f"{percentile(one.ttft_s, share):.2f} s" for share in SHARES),
                *(f"{percentile(one.resumed_ttft_s, share):.2f} s" for share in SHARES),
                " ".join(f"{plan} {number}" for plan, number in sorted(one.plans.items())),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay conversations against the KV tiers.")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-hour", type=float, default=30.0, help="conversations that begin")
    parser.add_argument("--cap", type=_cap, default="1GiB", help='of the disk tier, or "none"')
    parser.add_argument("--pool-tokens", type=int, default=Machine.pool_tokens)
    parser.add_argument("--kv-bytes-per-token", type=float, default=Machine.kv_bytes_per_token)
    parser.add_argument("--decode-s-per-token", type=float, default=Machine.decode_s_per_token)
    parser.add_argument("--restart-every-h", type=float, default=24.0)
    cost_arguments(parser)
    given = parser.parse_args()

    machine = Machine(
        cost=cost_of(parser, given),
        decode_s_per_token=given.decode_s_per_token,
        pool_tokens=given.pool_tokens,
        restart_every_s=given.restart_every_h * 3600,
        kv_bytes_per_token=given.kv_bytes_per_token,
        cap_bytes=given.cap,
    )
    trace = generate(
        TraceSpec(given.conversations, given.seed, conversations_per_hour=given.per_hour)
    )
    print(table([replay(trace, policy, machine) for policy in POLICIES]))


_RATES = [one.name for one in fields(CostModel) if "_s" in one.name]


def cost_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags from which `cost_of` reads what loading and prefill cost."""
    parser.add_argument("--costs", type=Path, help="costs.json of a chatkv cache folder")
    parser.add_argument("--model", default="", help="which of its entries: a part of its label")
    for name in _RATES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="SECONDS")


def cost_of(
    parser: argparse.ArgumentParser, given: argparse.Namespace, default: CostModel | None = None
) -> CostModel:
    """What was measured on a machine, but for what a flag says otherwise."""
    cost = default or CostModel()
    if given.costs:
        cost = _measured(parser, given.costs, given.model)
    changed = {name: getattr(given, name) for name in _RATES if getattr(given, name) is not None}
    return replace(cost, **changed)


def _cap(text: str) -> float:
    try:
        return math.inf if text == "none" else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _measured(parser: argparse.ArgumentParser, path: Path, model: str) -> CostModel:
    entries = CostFile(path).entries()
    found = [(label, cost) for label, cost in entries.values() if model in label]
    if len(found) != 1:
        labels = ", ".join(label for label, _ in entries.values()) or "none"
        parser.error(f'{path} has {len(found)} entries for --model "{model}"; it has: {labels}')
    return found[0][1]


if __name__ == "__main__":
    main()
