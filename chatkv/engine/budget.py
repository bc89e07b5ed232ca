"""How many prefill tokens one step may take beside the answers that are running.

A step computes one token of every running answer and a piece of what is prefilled. The longer the
piece, the longer all answers wait for their next token. The time of a step is learnt as it goes:
fixed + rows * per_row for steps with a piece of prefill, and a mean for those without.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Tokens per prefill chunk where nobody waits: the unit of progress and of cancelling. 256 lost 10%
# of the rate on two cores, 1024 won 2% and doubled the wait for Ctrl-C.
CHUNK_TOKENS = 512
# Beside running answers: at least so much that a prefill gets on, in steps that are multiples of
# this, since libraries prepare a kernel for each number of rows.
LEAST_TOKENS = 16

_WEIGHT = 0.2  # of a new observation


@dataclass
class StepBudget:
    """max_stall: how much longer than without prefill a step of running answers may take."""

    max_stall: float = 1.5
    _plain_s: dict[int, float] = field(default_factory=dict)  # by number of answers
    _mixed: dict[int, float] = field(default_factory=dict)  # seconds, by rows

    def prefill_tokens(self, num_decoding: int) -> int:
        """Tokens of prefill for the next step."""
        if not num_decoding:
            return CHUNK_TOKENS
        plain_s = self._plain_s.get(num_decoding)
        if plain_s is None or not self._mixed:
            return LEAST_TOKENS
        fixed_s, per_row_s = self._line()
        rows = (plain_s * self.max_stall - fixed_s) / per_row_s - num_decoding
        return int(min(max(rows // LEAST_TOKENS * LEAST_TOKENS, LEAST_TOKENS), CHUNK_TOKENS))

    def observe(self, num_decoding: int, num_prefilled: int, seconds: float) -> None:
        """Learn from a step that computed so many answers' tokens and so many of prefill."""
        if num_decoding and not num_prefilled:
            _learn(self._plain_s, num_decoding, seconds)
        elif num_prefilled:
            # The nearest power of two: chunks end anywhere.
            _learn(self._mixed, 1 << (num_decoding + num_prefilled - 1).bit_length(), seconds)

    def _line(self) -> tuple[float, float]:
        """fixed and per_row through what is known of mixed steps, each row count once."""
        points = sorted(self._mixed.items())
        (rows, seconds), (more, longer) = points[0], points[-1]
        if more == rows or longer <= seconds:
            return 0.0, seconds / rows
        per_row = (longer - seconds) / (more - rows)
        return max(0.0, seconds - rows * per_row), per_row


def _learn(means: dict[int, float], key: int, seconds: float) -> None:
    before = means.get(key)
    means[key] = seconds if before is None else before + _WEIGHT * (seconds - before)
