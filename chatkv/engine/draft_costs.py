"""What a step that computes drafts takes, as a multiple of one that does not.

A decode step reads all weights for one token, and reads them once for several too: so a few tokens
more cost little, how little depends on the machine. Learnt as it goes, for each number of answers:
a first drafted token may cost more than those behind it, so a line is fitted to the steps that
have some, and the ones without are what it is compared with.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# What is believed before anything was measured: (drafted tokens, multiple of a plain step).
_EXPECTED = ((1, 1.15), (8, 1.5))
# How much of what was known remains with each step that is measured; and how much of what was
# expected comes back with each plain step, so that what once seemed slow is tried again one day.
_KEPT = 0.97
_RETURNS = 0.005
# What takes so many times as long as expected had to wait for somebody else.
HICCUP = 2.0


@dataclass
class _Line:
    """The least squares line through weighted points, as sums over them."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def fade(self, kept: float) -> None:
        self.weight, self.x, self.y = self.weight * kept, self.x * kept, self.y * kept
        self.xx, self.xy = self.xx * kept, self.xy * kept

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y

    def at(self, x: float) -> float:
        spread = self.weight * self.xx - self.x * self.x
        slope = (self.weight * self.xy - self.x * self.y) / spread if spread > 1e-9 else 0.0
        slope = max(slope, 0.0)  # more tokens never take less time: that is noise
        return (self.y - slope * self.x) / self.weight + slope * x


def _expected() -> _Line:
    line = _Line()
    for num_drafted, multiple in _EXPECTED:
        line.add(num_drafted, multiple)
    return line


@dataclass
class DraftCosts:
    """is_fixed: keep to what is expected, so that nothing depends on the clock."""

    is_fixed: bool = False
    num_answers: int = 1  # of the last step
    _plain_s: dict[int, deque[float]] = field(default_factory=dict)  # by number of answers
    _lines: dict[int, _Line] = field(default_factory=dict)

    def observe(self, num_answers: int, num_drafted: int, seconds: float) -> None:
        """Learn from a step of so many answers, with so many drafted tokens in all."""
        if self.is_fixed or not num_answers:
            return
        self.num_answers = num_answers
        line = self._lines.setdefault(num_answers, _expected())
        if not num_drafted:
            # Few, since a conversation of another length may follow.
            self._plain_s.setdefault(num_answers, deque(maxlen=3)).append(seconds)
            for drafted, multiple in _EXPECTED:
                line.add(drafted, multiple, _RETURNS)
        elif num_answers in self._plain_s:
            multiple = seconds / median(self._plain_s[num_answers])
            most = HICCUP * max(1.0, line.at(num_drafted))
            line.fade(_KEPT)
            line.add(num_drafted, min(multiple, most))

    def step(self, num_drafted: int) -> float:
        """A step with so many drafted tokens more than none, as a multiple of a plain one."""
        if not num_drafted:
            return 1.0
        line = self._lines.get(self.num_answers)
        return max(1.0, (line or _expected()).at(num_drafted))

    def plain_s(self) -> float | None:
        """Seconds of a plain step, None: not known yet."""
        known = self._plain_s.get(self.num_answers)
        return median(known) if known else None
