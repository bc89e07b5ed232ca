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
from math import ceil
from typing import NamedTuple

from chatkv.restore.claims import Claims
from chatkv.restore.pace import RunPace


class Layers(NamedTuple):
    """Groups of layers to be loaded together; of the first group only those from `first` on, the
    others being prefill's."""

    groups: range
    first: int


class LastStep:
    """Takes `count` blocks from `first` on. groups: which layers arrive together; none where the
    step has to compute all layers of what it takes."""

    def __init__(self, claims: Claims, first: int, count: int, groups: Sequence[range]) -> None:
        self._claims, self._groups = claims, groups
        self.taken, self.awaited = range(first, first + count), range(first + count, len(claims))
        claims.take(first, count)
        self.is_shared = bool(groups)  # the loader may bring layers of what the step takes
        # Of the layers, prefill has begun those in front of `low`; the loader those from `high` on,
        # of which those from `there` on have come.
        self._num_layers = groups[-1].stop if groups else 0
        self.low, self._high, self._there = 0, self._num_layers, self._num_layers
        self._left: int | None = None  # in front of which layer the step has left its front

    # --- prefill's end --------------------------------------------------------------------------

    def goes_on(self, layer: int) -> int:
        """See `Gap`."""
        if layer >= self._high:
            self._left = layer
            return layer
        self.low = layer + 1
        return self.low

    def has_come(self, layer: int, loading: RunPace) -> bool:
        """Whether all is there that this layer attends to."""
        to_come = self._claims.to_come(self.awaited)
        if to_come:
            return loading.has(layer, to_come)
        is_there = self._left is None or layer >= self._there
        return is_there or loading.has(layer, self.taken)

    @property
    def has_left(self) -> bool:
        """Whether the step has left its front; then it has computed `low` layers of it."""
        return self._left is not None

    @property
    def share(self) -> float:
        """Of the front's layers, how much the step computes."""
        return self.low / self._num_layers if self._left is not None else 1.0

    # --- the loader's end -----------------------------------------------------------------------

    def claim(self, load_s: float, compute_s: float, most: int) -> Layers | None:
        """What to load next, at most so many groups, marked as on its way; None where prefill will
        sooner have been through it. load_s: of a group; compute_s: of a layer."""
        group_of = {layer: n for n, layers in enumerate(self._groups) for layer in layers}
        between = self._high - self.low
        if not self.is_shared or between <= 0:
            return None
        stop = group_of[self._high - 1] + 1
        # Where there is much to do, a quarter of it at most: estimates may be off.
        count = min(most, between * len(self._groups) // (4 * self._num_layers))
        for groups in (range(start, stop) for start in range(stop - max(1, count), stop)):
            # Where prefill will be when they have come: half of a layer is what it is busy with.
            meeting = self.low - 0.5 + len(groups) * load_s / max(compute_s, 1e-12)
            first = max(self._groups[groups.start].start, ceil(min(meeting, self._high)))
            if first < self._high:
                self._high = first
                return Layers(range(group_of[first], stop), first)
        return None

    def brought(self) -> None:
        """All that was claimed has come."""
        self._there = self._high

    def failed(self) -> bool:
        """What was claimed will not come, nor anything else; whether the step can do without."""
        self._high, self.is_shared = self._there, False
        return self._left is None or self._left >= self._there
