"""What is left for both ends of a restore to do, by what was expected and their pace until now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore.measured import Range
from chatkv.restore.meeting import Pull
from chatkv.restore.pace import Pace, RunPace

# A step that waits for layers is given up for what takes so many times less.
WORTH_MORE = 1.25


class Estimates:
    """load_block_s: what loading a block is expected to take; step_s(ranges): what a step is that
    computes these tokens. num_groups: in so many parts the layers of a load arrive."""

    def __init__(
        self, load_block_s: float, step_s: Callable[[Sequence[Range]], float], num_groups: int
    ) -> None:
        self.step_s, self._num_groups = step_s, num_groups
        self.loading, self.computing = RunPace(load_block_s, num_groups), Pace()

    def pull(
        self, index: int, gap: int, rest: Range, is_alone: bool, is_shared: bool = False
    ) -> Pull:
        """What is left from block `index` on, where `gap` blocks are neither there nor on their
        way, and the tokens of `rest` follow the history."""
        start, pace = index * BLOCK_TOKENS, self.computing.factor
        one_s, two_s = (
            self.step_s([(start, start + count * BLOCK_TOKENS)]) * pace for count in (1, 2)
        )
        fixed_s = max(0.0, 2 * one_s - two_s)
        rest_s = self.step_s([rest]) * pace - fixed_s if rest[1] > rest[0] else 0.0
        load_s, left_s = self.loading.block_s, self.loading.left_s
        num_groups = self._num_groups if is_alone else 1
        each_s = two_s - one_s
        return Pull(gap, load_s, each_s, fixed_s, rest_s, left_s, num_groups, is_shared)

    def is_too_slow(self, num_wanted: int, missing: Range, total: int) -> bool:
        """Whether both ends together would have the KV of the tokens `missing`, and what follows
        up to `total`, sooner than so many blocks come that a step waits for, beside those that are
        on their way."""
        block_s = self.loading.block_s
        waits_s = self.loading.left_s + num_wanted * block_s
        load_s = (missing[1] - missing[0]) / BLOCK_TOKENS * block_s
        compute_s = self.step_s([(missing[0], total)]) * self.computing.settled
        return waits_s > WORTH_MORE * load_s * compute_s / max(load_s + compute_s, 1e-12)
