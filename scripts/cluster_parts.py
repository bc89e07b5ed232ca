"""What a simulated cluster is made of, what it is asked, and what it did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from chatkv.restore.cost import CostModel

# Where prompts are computed: always apart, or there where the first token is expected sooner.
Send = Literal["always", "when it pays"]


@dataclass(frozen=True)
class Rates:
    """What one worker takes. `step_s`: of a step that decodes so many answers, in seconds."""

    cost: CostModel
    step_s: Mapping[int, float]

    def decode_s(self, num_answers: int) -> float:
        """A step of num_answers: between two that were measured on the line through them, beyond
        all as if each further answer took what the last ones did, below all as the fewest."""
        known = sorted(self.step_s)
        if num_answers <= known[0]:
            return self.step_s[known[0]]
        if len(known) == 1:
            return self.step_s[known[0]] * num_answers / known[0]
        after = next((at for at, one in enumerate(known) if one >= num_answers), len(known) - 1)
        low, high = known[after - 1], known[after]
        slope = (self.step_s[high] - self.step_s[low]) / (high - low)
        return self.step_s[high] + slope * (num_answers - high)

    def chunk_s(self, start: int, stop: int) -> float:
        """More of a prompt, beside other work: what begins a prompt is not in it."""
        return self.cost.prefill_s(start, stop) - (self.cost.prefill_fixed_s if stop > start else 0)


@dataclass(frozen=True)
class Link:
    """From a prefill worker to the others: one transfer after the other."""

    bytes_per_s: float
    delay_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """How many workers of each kind; without prefill workers each does both."""

    num_prefill: int
    num_decode: int
    rates: Rates
    link: Link
    kv_bytes_per_token: float
    send: Send = "always"
    is_store_shared: bool = False
    pieces: int = 30  # in which a chunk's KV leaves: one for each layer

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        if not self.num_prefill:
            return f"{self.num_decode} together"
        return f"{self.num_prefill}:{self.num_decode} apart"


@dataclass(eq=False)
class Request:
    """One turn, and when its tokens came. The reply's first is computed with the prompt's last."""

    conversation: int
    arrived_s: float
    history: int  # tokens of the log in front of it: their KV is where the answer is made
    prompt_end: int
    reply_tokens: int
    began_s: float = math.inf  # when somebody began to compute its prompt
    kv_s: float = math.inf  # when all KV of its prompt was where the answer is made
    first_s: float = math.inf
    last_s: float = math.inf
    was_sent: bool = False
    computed: int = 0  # tokens of its prompt, so far

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Per token behind the first; 0 where there is none."""
        return (self.last_s - self.first_s) / max(1, self.reply_tokens - 1)


@dataclass
class Ran:
    """What a simulation did. `gaps`: (when, seconds between two tokens of an answer, how often)."""

    requests: list[Request] = field(default_factory=list)
    gaps: list[tuple[float, float, int]] = field(default_factory=list)
    sent_bytes: float = 0.0
    ended_s: float = 0.0
    prefill_busy_s: float = 0.0  # of all prefill workers together
    decode_busy_s: float = 0.0
