"""What may be asked of sampling and drafts, checked. Needs no torch, so that nonsense is refused at
once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatkv.errors import UsageError

# Where drafts of an answer come from: what was said before (ngram), modules or heads of the model's
# own (mtp), a smaller model, or nowhere (off). auto: the first, and the second where that is right
# often enough; nowhere where another rounding is forbidden.
Speculate = Literal["auto", "ngram", "mtp", "model", "off"]


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their filter off."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.05

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top-k", self.top_k, self.top_k >= 0, "0 or more"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
        )
        for name, value, sound, wanted in checks:
            if not sound:
                raise UsageError(f"{name} {value} makes no sense: give a number {wanted}")


@dataclass
class SpeculationCounts:
    """Of one answer. source: where drafts came from, or off; steps: passes of the model after the
    first token; drafted and accepted: tokens."""

    source: str = "off"
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
