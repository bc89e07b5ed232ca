"""What a restore from both ends took, for whoever corrects the cost model by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Range = tuple[int, int]  # tokens [start, stop)


def left_step_s(
    step_s: Callable[[Sequence[Range]], float], ranges: Sequence[Range], share: float
) -> float:
    """Seconds of a step that computes its first range in a share of the layers only."""
    return share * step_s(ranges) + (1 - share) * step_s(ranges[1:])


@dataclass
class Measured:
    """What a restore from both ends took, each end for itself: seconds of loading, and of prefill
    beside it."""

    loaded: float = 0.0  # tokens; of one with some of its layers, that share
    load_s: float = 0.0
    steps: list[Sequence[Range]] = field(default_factory=list)  # what each one computed
    prefill_s: float = 0.0
    # Of which step's first range only some layers were computed, how many, and of how many.
    left: tuple[int, int, int] | None = None

    @property
    def computed(self) -> list[Range]:
        """The tokens of all steps, in their order, neighbours as one."""
        found: list[Range] = []
        for start, stop in sorted(part for step in self.steps for part in step):
            if found and found[-1][1] >= start:
                found[-1] = found[-1][0], max(found[-1][1], stop)
            else:
                found.append((start, stop))
        return found
