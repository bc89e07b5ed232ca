"""How many prefill tokens one step may take beside the answers that are running.

A step computes one token of every running answer and a piece of what is prefilled. The longer the
piece, the longer all answers wait for their next token. What a step takes is learnt as it goes: for
each number of answers, seconds without prefill and seconds more for each token of it. (On a CPU a
token of prefill costs hardly more beside answers than in a chunk of its own, so short pieces lose
little: the weights have to be read for the answers in any case.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Tokens per prefill chunk where nobody waits: the unit of progress and of cancelling. 256 lost 10%
# of the rate on two cores, 1024 won 2% and doubled the wait for Ctrl-C.
CHUNK_TOKENS = 512
# Beside running answers, at least so much that a prefill gets on, where a pass cannot be cut; and
# in the first such step.
LEAST_TOKENS = 16
# How much longer than without prefill a step of running answers may take. The goal is 1.5 for the
# p99 of the gaps between tokens, and steps vary: by half a layer of a slice to begin with.
MAX_STALL = 1.45
# Of so many steps with prefill in a row, one is left out, to learn what steps take without it.
PROBE_STEPS = 32


@dataclass(frozen=True)
class StepRates:
    """What steps were measured to take: fixed_s + answer_s * answers, and token_s more for each
    token of prefill."""

    fixed_s: float
    answer_s: float
    token_s: float

    def plain_s(self, num_decoding: int) -> float:
        """Seconds of a step without prefill."""
        return self.fixed_s + self.answer_s * num_decoding

    def prefill_tokens(self, num_decoding: int, max_stall: float = MAX_STALL) -> float:
        """Tokens of prefill that a step has time for."""
        return self.plain_s(num_decoding) * (max_stall - 1) / self.token_s


@dataclass
class StepBudget:
    """expected: what holds until steps have told better; None: they tell from the first one on."""

    max_stall: float = MAX_STALL
    expected: StepRates | None = None
    _plain_s: dict[int, deque[float]] = field(default_factory=dict)  # by number of answers
    _token_s: dict[int, deque[float]] = field(default_factory=dict)  # beside so many answers
    _num_mixed: int = 0  # steps since the last one without prefill

    def prefill_tokens(self, num_decoding: int) -> float:
        """Tokens of prefill for the next step; a token through half the layers is half of one."""
        if not num_decoding:
            return CHUNK_TOKENS
        plain_s = self._plain(num_decoding)
        if plain_s is None or self._num_mixed >= PROBE_STEPS:
            return 0
        if self._token_s:
            nearest = min(self._token_s, key=lambda known: abs(known - num_decoding))
            token_s = median(self._token_s[nearest])
        elif self.expected is not None:
            token_s = self.expected.token_s
        else:
            return LEAST_TOKENS
        return min(plain_s * (self.max_stall - 1) / token_s, CHUNK_TOKENS)

    def observe(self, num_decoding: int, num_prefilled: float, seconds: float) -> None:
        """Learn from a step that computed so many answers' tokens and so many of prefill."""
        if not num_decoding:
            return
        if not num_prefilled:
            self._num_mixed = 0
            _learn(self._plain_s, num_decoding, seconds)
            return
        self._num_mixed += 1
        if (plain_s := self._plain(num_decoding)) is not None:
            # What is not above zero is noise: the machine was busy when it was not expected to be.
            token_s = max((seconds - plain_s) / num_prefilled, plain_s / CHUNK_TOKENS / 8)
            _learn(self._token_s, num_decoding, token_s)

    def _plain(self, num_decoding: int) -> float | None:
        """Seconds of a step without prefill, where anything is known of it."""
        if num_decoding in self._plain_s:
            return median(self._plain_s[num_decoding])
        return self.expected.plain_s(num_decoding) if self.expected is not None else None


def _learn(seen: dict[int, deque[float]], key: int, seconds: float) -> None:
    """Remember the last few: their median does not mind a machine that was busy for a moment."""
    seen.setdefault(key, deque(maxlen=7)).append(seconds)
