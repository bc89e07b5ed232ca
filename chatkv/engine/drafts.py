"""Drafts: tokens that may follow, from whoever guesses them, and how they are verified.

A model says in one pass what follows each token of a draft. With p its distribution and q the one
that a drafted token was drawn from, the token is accepted with probability min(1, p/q), and else
one is drawn from the normalised max(0, p - q): what comes out is distributed as p (Leviathan et
al., ICML '23; Chen et al., arXiv 2302.01318). A token that was looked up, not drawn, has all of q,
and then the rule is simpler: draw from p as ever, and see whether the draft guessed it. So guesses
that are looked up change nothing about an answer, not even for a given seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Distribution = tuple[Tensor, Tensor]  # token ids, and their probabilities (float64)


@dataclass(frozen=True)
class Drawn:
    """A drafted token, and the distribution that it was drawn from (not empty, sums up to 1)."""

    token: int
    distribution: Distribution


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow; `drawn` is empty where they were looked up, else one for each.
    kinds: of each token but the first, where they are not all of one kind. seconds: what drafting
    took, 0 where that is next to nothing."""

    tokens: Sequence[int] = ()
    drawn: Sequence[Drawn] = ()
    kinds: Sequence[int] = ()
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn_at(self, index: int) -> Drawn | None:
        return self.drawn[index] if index < len(self.drawn) else None


GoesOn = Callable[[int], bool]
"""Whether a draft is worth another token, of such a kind. Asked before each but the first."""


def always(kind: int) -> bool:
    """`GoesOn` whatever comes."""
    return True


class Drafter(Protocol):
    """Where drafts come from. One answer's, and one thread's at a time."""

    @property
    def source(self) -> str:
        """Its name, as people are told it."""

    @property
    def most(self) -> int:
        """The longest draft worth asking for."""

    @property
    def share(self) -> float:
        """What a drafted token takes to draft, as a multiple of a plain step of the model, until
        that is measured. 0: nothing to speak of."""

    def expected(self, kind: int) -> float:
        """How often a token of such a draft is right, until that is measured."""

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        """What kind of draft follows `ids`: kinds differ in how often they are right. None: there
        is none; freely: or to look would take some time. The next `propose` is about the same
        ids."""

    @property
    def adapts(self) -> bool:
        """Whether the next draft asks `goes_on`, so that it may be as long as it pays."""

    def propose(self, ids: Sequence[int], count: int, goes_on: GoesOn = always) -> Draft:
        """At most `count` tokens behind ids."""


@dataclass
class NoDrafts:
    """A `Drafter` that never guesses."""

    source: str = field(default="off", init=False)
    most: int = field(default=0, init=False)
    share: float = field(default=0.0, init=False)
    adapts: bool = field(default=False, init=False)

    def expected(self, kind: int) -> float:
        return 0.0

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        return None

    def propose(self, ids: Sequence[int], count: int, goes_on: GoesOn = always) -> Draft:
        return Draft()


def verified(p: Distribution, drawn: Drawn, accept: float, redraw: float) -> int:
    """One token that is distributed as p, most likely the drafted one.

    p: probabilities that need not be normalised; accept, redraw: two independent numbers from
    [0, 1), which are independent of the one that the token was drafted with, too.
    """
    ids, mass = p[0], p[1] / p[1].sum()
    q = spread(drawn.distribution, ids)
    at = (ids == drawn.token).nonzero()
    if len(at):
        index = int(at[0, 0])
        if accept * float(q[index]) < float(mass[index]):
            return drawn.token
    left = (mass - q).clamp_(min=0)
    if not float(left.sum()) > 0:  # p and q agree but for rounding
        left = mass
    return draw(ids, left, redraw)


def spread(distribution: Distribution, ids: Tensor) -> Tensor:
    """Its probabilities at `ids`, [len(ids)]; 0 for those that it does not have."""
    its_ids, its_mass = distribution
    order = its_ids.argsort()
    sorted_ids = its_ids[order]
    at = torch.searchsorted(sorted_ids, ids).clamp_(max=len(sorted_ids) - 1)
    return torch.where(sorted_ids[at] == ids, its_mass[order][at], 0.0)


def draw(ids: Tensor, mass: Tensor, number: float) -> int:
    """The token at `number`, from [0, 1), of the cumulated mass, which need not be normalised."""
    cumulative = mass.cumsum(0)
    index = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    if index >= len(ids):  # rounding: the last one that can be
        index = int((mass > 0).nonzero()[-1])
    return int(ids[index])
