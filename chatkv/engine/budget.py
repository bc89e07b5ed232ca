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
# Beside running answers, at least so much that a prefill gets on.
LEAST_TOKENS = 16
# Steps have multiples of so many rows: libraries prepare a kernel for each number of rows.
ROWS = 8
# Of so many steps with prefill in a row, one is left out, to learn what steps take without it.
PROBE_STEPS = 32


@dataclass
class StepBudget:
    """max_stall: how much longer than without prefill a step of running answers may take."""

    max_stall: float = 1.5
    _plain_s: dict[int, deque[float]] = field(default_factory=dict)  # by number of answers
    _token_s: dict[int, deque[float]] = field(default_factory=dict)  # beside so many answers
    _num_mixed: int = 0  # steps since the last one without prefill

    def prefill_tokens(self, num_decoding: int) -> int:
        """Tokens of prefill for the next step."""
        if not num_decoding:
            return CHUNK_TOKENS
        if num_decoding not in self._plain_s or self._num_mixed >= PROBE_STEPS:
            return 0
        if not self._token_s:
            return LEAST_TOKENS
        nearest = min(self._token_s, key=lambda known: abs(known - num_decoding))
        spare_s = median(self._plain_s[num_decoding]) * (self.max_stall - 1)
        tokens = int(min(spare_s / median(self._token_s[nearest]), CHUNK_TOKENS))
        rows = (num_decoding + tokens) // ROWS * ROWS
        return max(LEAST_TOKENS, rows - num_decoding)

    def observe(self, num_decoding: int, num_prefilled: int, seconds: float) -> None:
        """Learn from a step that computed so many answers' tokens and so many of prefill."""
        if not num_decoding:
            return
        if not num_prefilled:
            self._num_mixed = 0
            _learn(self._plain_s, num_decoding, seconds)
            return
        self._num_mixed += 1
        if num_decoding in self._plain_s:
            plain_s = median(self._plain_s[num_decoding])
            # What is not above zero is noise: the machine was busy when it was not expected to be.
            token_s = max((seconds - plain_s) / num_prefilled, plain_s / CHUNK_TOKENS / 8)
            _learn(self._token_s, num_decoding, token_s)


def _learn(seen: dict[int, deque[float]], key: int, seconds: float) -> None:
    """Remember the last few: their median does not mind a machine that was busy for a moment."""
    seen.setdefault(key, deque(maxlen=7)).append(seconds)
