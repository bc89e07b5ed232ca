"""KV that others bring while a prefill computes the rest: what the engine asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class LayerMissing(Exception):
    """KV that was to arrive did not: what attended to it is of no use."""


class Gap(NamedTuple):
    """Tokens to compute next, [start, stop). All before `start` have their KV, or will have where
    there is `wait_layer` and no `behind`.

    behind: [start, stop) of tokens to compute in the same step; what lies between is there, or
    will be, layer by layer.
    goes_on(layer): in front of which layer it is to be asked again whether [start, stop) are still
    computed, beginning with 0; `layer`: they are not, from there on their KV is there too, or will
    be. None, or a pass that cannot be cut: through all layers.
    wait_layer: waits until a layer's KV in front of the last of these tokens is there; raises
    LayerMissing where some never will be. None: it is there in all layers.
    """

    start: int
    stop: int
    behind: tuple[int, int] | None = None
    wait_layer: Callable[[int], None] | None = None
    goes_on: Callable[[int], int] | None = None


class Arriving(Protocol):
    """KV that others are putting into a sequence's run while it is prefilled."""

    def next_gap(self, position: int, total: int, limit: int) -> Gap:
        """The next tokens to compute: none before `position`, at most `limit`, and at least the
        last of `total`."""

    def computed(self, position: int) -> None:
        """A step is done: the tokens of the last gap that lie before `position` have their KV."""
