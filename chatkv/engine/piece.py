"""What a turn wants of the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.model.decoder import Pass


@dataclass(eq=False)
class Piece:
    """The KV that a turn wants next: of ids[start:stop) of its sequence.

    A step may compute only the front of a piece of prefill, or take it through some of the layers
    only; the turn asks again for the rest, and hears nothing of the layers.
    draft: tokens that may follow, computed with it; their KV lies behind that of the sequence, to
    be counted in by whoever accepts them. instead: of the last ones, of which index each could come
    instead (`drafts.Draft`).
    wait_layer(layer) is called before a layer attends to KV that is still arriving: a step of its
    own, since all of it may have to wait or to fail. front: a piece of the same sequence that is
    computed in that step too, in front of what arrives, as far as goes_on says (see `Gap`).
    """

    sequence: TokenSequence
    start: int
    stop: int
    since: float = 0.0  # when its turn began to prefill
    is_decode: bool = False
    is_background: bool = False
    is_short: bool = False  # see `shares.is_short`
    wait_layer: Callable[[int], None] | None = None
    front: Piece | None = None
    goes_on: Callable[[int], int] | None = None
    draft: Sequence[int] = ()
    instead: Sequence[int] = ()
    # How the token that follows is drawn, where the runner may draw it, and put it into `token`;
    # and whether there is room for its KV, so that the step behind this one may begin.
    sampler: Sampler | None = None
    may_go_ahead: bool = False
    token: int | None = None
    # After the last token computed, [vocab_size] float32. With a draft: after the one in front of
    # it and after each of its tokens, [1 + num_drafted, vocab_size].
    logits: Tensor | None = None
    # Out of the last norm, for each token computed, [length, hidden_size]; None: nobody keeps it.
    hidden: Tensor | None = None
    error: BaseException | None = None
    # Of prefill that goes through its layers in several steps: where it is, and how far the next
    # step takes it; None: in front of the first, and through all.
    passing: Pass | None = None
    until: int | None = None
    is_started: bool = False  # a step is computing it
    is_withdrawn: bool = False  # its turn wants no more of it
    num_passed_over: int = 0  # steps that had no room for it
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def ids(self) -> Sequence[int]:
        """All tokens to compute."""
        ids = self.sequence.ids[self.start : self.stop]
        return [*ids, *self.draft] if self.draft else ids

    @property
    def end(self) -> int:
        """Of the sequence and its draft."""
        return self.stop + len(self.draft)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def layer(self) -> int:
        """Layers that it has been through."""
        return self.passing.layer if self.passing is not None else 0

    def work(self, num_layers: int) -> float:
        """What the next step does for it, in tokens that go through all layers."""
        return self.length * ((self.until or num_layers) - self.layer) / num_layers

    def left(self, num_layers: int) -> float:
        """What there is to do, the same."""
        return self.length * (num_layers - self.layer) / num_layers


def with_fronts(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces, each behind its front."""
    return [part for piece in pieces for part in (piece.front, piece) if part is not None]
