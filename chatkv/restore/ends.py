"""What the two ends of a restore know of each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chatkv.restore.claims import Claims
from chatkv.restore.estimates import Estimates
from chatkv.restore.last_step import LastStep
from chatkv.restore.measured import Measured
from chatkv.restore.meeting import Pull


@dataclass
class Ends:
    """Looked at and changed with `changed` held, whose waiters are told.

    groups: the layers that arrive together, the first ones first. is_alone(): whether nobody else
    computes, who would have to wait for layers too.
    """

    claims: Claims
    estimates: Estimates
    groups: Sequence[range]
    is_alone: Callable[[], bool]
    changed: threading.Condition = field(default_factory=threading.Condition)
    # Of prefill.
    total: int = 0  # tokens, known when it has begun
    last: LastStep | None = None  # the step on its way, where that is the last and can succeed
    num_begun: int = 0  # tokens that this step counts on
    waited_s: float = 0.0  # in this step
    num_loaded: int = 0  # tokens that prefill skipped
    # Of the loader.
    is_closed: bool = False  # it is to take no more blocks
    is_over: bool = False  # it takes no more
    declines: bool = False  # it has nothing to do beside the step on its way
    stops_run: bool = False  # what it is just loading is not wanted any more
    damage: str | None = None  # of the first block that was not sound
    error: Exception | None = None
    num_bytes: int = 0  # read
    measured: Measured = field(default_factory=Measured)

    def pull(self, index: int) -> Pull:
        """What is left to do from block `index` on."""
        gap, rest = self.claims.gap_at(index), (self.claims.end, self.total)
        return self.estimates.pull(index, gap, rest, self.is_alone())

    def lose_step(self) -> None:
        """What the step on its way began without will not come."""
        self.last = None
        self.num_loaded -= self.num_begun
        self.num_begun = 0
