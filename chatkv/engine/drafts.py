"""Drafts: tokens that may follow, from whoever guesses them, and how they are verified.

A model says in one pass what follows each token of a draft. With p its distribution and q the one
that a drafted token was drawn from, the token is accepted with probability min(1, p/q), and else
one is drawn from the normalised max(0, p - q): what comes out is distributed as p (Leviathan et
al., ICML '23; Chen et al., arXiv 2302.01318). A token that was not drawn, but looked up or likely,
has all of q, and then the rule is simpler: draw from p as ever, and see whether the draft guessed
it. So such guesses change nothing about an answer, not even for a given seed; and there may be
several for one place, of which one is right at most.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class Look:
    """What may come at one place of a draft: tokens, likeliest first, and the kind of each."""

    tokens: Sequence[int]
    kinds: Sequence[int]


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow, one behind the other; the last ones, as many as `instead` has, each
    could come instead of the token of that index, and nothing is guessed behind them. So a draft is
    a tree, of one long branch.

    drawn: where its tokens were drawn, what each was drawn from. looks: what was thought of at each
    place, where that is more than its tokens. seconds: what drafting took, 0 where that is next to
    nothing.
    """

    tokens: Sequence[int] = ()
    instead: Sequence[int] = ()
    drawn: Sequence[Drawn] = ()
    looks: Sequence[Look] = ()
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn_at(self, index: int) -> Drawn | None:
        return self.drawn[index] if index < len(self.drawn) else None

    def index_of(self, token: int, place: int) -> int | None:
        """Which of the tokens it is that comes at a place of the long branch; None: no one."""
        chain = len(self.tokens) - len(self.instead)
        if place >= chain:
            return None
        if self.tokens[place] == token:
            return place
        beside = zip(self.instead, self.tokens[chain:], strict=True)
        return next((chain + at for at, one in enumerate(beside) if one == (place, token)), None)


class Growth(Protocol):
    """Says how far a draft is to grow: what is worth the time that it takes."""

    def take(self, kinds: Sequence[int]) -> int:
        """How many of the tokens of such kinds, likeliest first, that may come next. 0: the draft
        ends here."""

    def goes_on(self) -> bool:
        """Whether to look what comes behind the likeliest of those that were just taken."""


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
        """Whether the next draft grows as it is told, so that it may be as large as it pays."""

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        """At most `count` tokens behind ids. growth: for drafts that adapt, which need it."""


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

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
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
