"""The last step of a restore from both ends: what it computes, and what it counts on.

It computes the front of what is missing, and what follows the history; the layers of the blocks in
between arrive meanwhile, first layers first. Once these are there, the loader goes on with the very
blocks that the step computes, from their last layers to the first: where the step finds the next
layers of its front on their way, it goes on without the front. So both ends meet in front of some
layer, which is nearer to where they should than the next border of blocks is.

Knows neither time nor threads; whoever holds the lock asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.restore.claims import Claims
from chatkv.restore.pace import RunPace


class LastStep:
    """Takes `count` blocks from `first` on. groups: which layers arrive together; none where the
    step has to compute all layers of what it takes."""

    def __init__(self, claims: Claims, first: int, count: int, groups: Sequence[range]) -> None:
        self._claims, self._groups = claims, groups
        self.taken, self.awaited = range(first, first + count), range(first + count, len(claims))
        claims.take(first, count)
        # Of the groups, prefill has begun those in front of `low`; the loader those from `high` on,
        # of which those from `there` on have come.
        self._low, self._high, self._there = 0, len(groups), len(groups)
        self._left: int | None = None  # in front of which group the step has left its front
        self.is_shared = bool(groups)  # the loader may bring layers of what the step takes

    # --- prefill's end --------------------------------------------------------------------------

    def goes_on(self, layer: int) -> int:
        """See `Gap`."""
        group = next(n for n, layers in enumerate(self._groups) if layers.start == layer)
        if group >= self._high:
            self._left = group
            return layer
        self._low = group + 1
        return self._groups[group].stop

    def has_come(self, layer: int, loading: RunPace) -> bool:
        """Whether all is there that this layer attends to."""
        to_come = self._claims.to_come(self.awaited)
        if to_come:
            return loading.has(layer, to_come)
        if self._left is None or self._there <= self._left:
            return True
        is_there = self._there < len(self._groups) and layer >= self._groups[self._there].start
        return is_there or loading.has(layer, self.taken)

    @property
    def num_groups_begun(self) -> int:
        return self._low

    @property
    def has_left(self) -> bool:
        """Whether the step has left its front; then it has computed so many layers of it."""
        return self._left is not None

    @property
    def num_layers(self) -> int:
        return self._groups[self._left].start if self._left is not None else 0

    @property
    def share(self) -> float:
        """`num_layers` of all of them."""
        return self.num_layers / self._groups[-1].stop

    # --- the loader's end -----------------------------------------------------------------------

    def claim(self, load_s: float, compute_s: float, most: int) -> range:
        """The next groups to be loaded, at most `most`; none where prefill will sooner have been
        through them. load_s, compute_s: of one group."""
        between = self._high - self._low
        is_sooner = load_s < (between + 0.5) * compute_s  # half of one is what prefill is busy with
        if not self.is_shared or between < 1 or not is_sooner:
            return range(0)
        self._high -= max(1, min(most, between // 4))
        return range(self._high, self._there)

    def brought(self) -> None:
        """All that was claimed has come."""
        self._there = self._high

    def failed(self) -> bool:
        """What was claimed will not come, nor anything else; whether the step can do without."""
        self._high, self.is_shared = self._there, False
        return self._left is None or self._left >= self._there
