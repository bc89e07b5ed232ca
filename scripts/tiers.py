"""What may become of KV that has left the pool; here: nothing, or a snapshot per session.

No model runs: what a turn takes is what the cost model says its plan takes, and the plan is the
product's own planner's. The third policy, this design, is in block_tier.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Protocol

from traces import TraceConversation

from chatkv.restore.cost import CostModel
from chatkv.restore.plan import Plan, Situation, Wanted, choose
from chatkv_store.layout import BLOCK_TOKENS


@dataclass(frozen=True)
class Machine:
    """What the conversations are served by; the defaults are SmolLM2-135M on a small CPU."""

    cost: CostModel = field(default_factory=CostModel)
    decode_s_per_token: float = 0.02
    pool_tokens: int = 16384  # KV that stays in memory; whole sessions leave it, the oldest first
    restart_every_s: float = 24 * 3600.0  # ... and all of them with the process
    kv_bytes_per_token: float = 15_700  # on disk: bf16 (23,040) by what the lossless codec saves
    cap_bytes: float = 2 << 30  # of the disk tier; inf: none


@dataclass(frozen=True)
class Served:
    """How a turn's prompt came to have its KV."""

    plan: Plan
    seconds: float  # restore and prefill
    reused: int
    found: int
    loaded: int


@dataclass(frozen=True)
class Counts:
    """What a tier did to the disk; blocks, or sessions where these come and go as a whole."""

    bytes_written: float = 0.0
    evicted: int = 0
    refused: int = 0  # found no room

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.bytes_written + other.bytes_written,
            self.evicted + other.evicted,
            self.refused + other.refused,
        )


class Tier(Protocol):
    """What happens to KV outside the pool."""

    name: str

    def serve(self, conversation: TraceConversation, turn: int, in_pool: int) -> Served:
        """Bring the prompt's KV into the pool, of which in_pool tokens are there."""

    def save(self, conversation: TraceConversation, turn: int, in_pool: int) -> None:
        """The turn has ended: keep its KV, of which in_pool tokens were in the pool before it."""

    def counts(self) -> Counts:
        """What was written, evicted and refused until now."""


def spend(situation: Situation, cost: CostModel, wanted: Wanted = "auto") -> Served:
    """Choose a plan, and carry it out in the time that the cost model gives it."""
    plan = choose(situation, cost, wanted)
    loaded = 0
    if plan.chosen == "reload":
        loaded = situation.loadable
    elif plan.chosen == "both":
        first, last = situation.both_range
        loaded = last - _meeting(cost, situation.in_pool, first, last)
    return Served(plan, plan.predicted_ms / 1e3, situation.in_pool, found=0, loaded=loaded)


def _meeting(cost: CostModel, start: int, first: int, last: int) -> int:
    """The block border where both ends meet: prefill from `start`, the loader from `last` back."""

    def at(meeting: int) -> float:
        loaded = last - meeting
        computing = cost.prefill_s(start, meeting) + loaded * cost.load_cpu_s_per_token
        return max(cost.load_s(loaded), computing)

    border = -(-first // BLOCK_TOKENS) * BLOCK_TOKENS
    meetings: list[int] = [first, *range(border, last, BLOCK_TOKENS), last]
    return min(meetings, key=at)


class NoPersistence:
    """What has left the pool is computed again."""

    name = "no persistence"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def serve(self, conversation: TraceConversation, turn: int, in_pool: int) -> Served:
        total = conversation.prompt_end(turn)
        history = conversation.history(turn)
        return spend(Situation(total, in_pool, in_pool, history), self.machine.cost)

    def save(self, conversation: TraceConversation, turn: int, in_pool: int) -> None:
        pass

    def counts(self) -> Counts:
        return Counts()


class Snapshots(NoPersistence):
    """One file per session, as llama.cpp's slots: written anew after each turn and loaded as a
    whole; under the cap the session that was used longest ago goes first. Shares nothing.

    A token takes as many bytes as in our store: it is the policies that are compared.
    """

    name = "whole-session snapshots"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._saved: OrderedDict[int, int] = OrderedDict()  # session -> tokens, oldest use first
        self._written = self._evicted = self._refused = 0

    def serve(self, conversation: TraceConversation, turn: int, in_pool: int) -> Served:
        total = conversation.prompt_end(turn)
        saved = 0 if in_pool else self._saved.get(conversation.number, 0)
        if saved:
            self._saved.move_to_end(conversation.number)
        situation = Situation(total, in_pool, max(in_pool, saved), conversation.history(turn))
        return replace(spend(situation, self.machine.cost, "reload"), found=situation.loadable)

    def save(self, conversation: TraceConversation, turn: int, in_pool: int) -> None:
        number, num_tokens = conversation.number, conversation.history(turn + 1)
        room_tokens = self.machine.cap_bytes / self.machine.kv_bytes_per_token
        self._saved.pop(number, None)
        if num_tokens > room_tokens:
            self._refused += 1
            return
        while sum(self._saved.values()) + num_tokens > room_tokens:
            self._saved.popitem(last=False)
            self._evicted += 1
        self._saved[number] = num_tokens
        self._written += num_tokens

    def counts(self) -> Counts:
        num_bytes = self._written * self.machine.kv_bytes_per_token
        return Counts(num_bytes, self._evicted, self._refused)
