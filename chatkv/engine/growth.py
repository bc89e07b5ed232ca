"""How far a draft grows: as long as another token is worth the time that it takes.

Each token is right as often as those of its kind were, where all in front of it are. So what a
draft is expected to say is the sum, over its tokens, of how likely each is reached and right; what
it takes is a step with so many rows more, and what was looked at to guess them. The draft grows as
long as that says more tokens a second. (EAGLE-2, arXiv 2406.16858, grows trees by the drafter's own
probabilities to a fixed size; here they are measured, and the size is what pays.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chatkv.engine.draft_costs import DraftCosts

# What a draft must be expected to win, since expectations err.
WORTH = 1.04


@dataclass
class Grown:
    """A `Growth` of one draft.

    rate(kind): how often such a token is right; behind: how often the likeliest one is, wherever;
    share: what a look takes, as a multiple of a plain step. The first is taken already.
    """

    costs: DraftCosts
    rate: Callable[[int], float]
    behind: float
    share: float
    num_tokens: int = 0
    num_looks: int = 1
    _said: float = 1.0  # tokens that the step is expected to say
    _reached: float = 1.0  # how often all of the long branch is right
    _others: int = field(init=False)

    def __post_init__(self) -> None:
        self._others = self.costs.num_answers - 1

    def take(self, kinds: Sequence[int]) -> int:
        best, most = 0, self._speed() * (1.0 if self.num_tokens else WORTH)
        said, best_said = self._said, self._said
        for count, kind in enumerate(kinds, 1):
            said += self._reached * self.rate(kind)
            if (speed := self._speed(count, said)) > most:
                best, best_said, most = count, said, speed
        self.num_tokens, self._said = self.num_tokens + best, best_said
        self._reached *= self.rate(kinds[0]) if kinds else 0.0
        return best

    def goes_on(self) -> bool:
        said = self._said + self._reached * self.behind
        if self._speed(1, said, self.num_looks + 1) <= self._speed():
            return False
        self.num_looks += 1
        return True

    def _speed(
        self, more: int = 0, said: float | None = None, num_looks: int | None = None
    ) -> float:
        """Tokens in the time of a plain step, of all answers in it."""
        said = self._said if said is None else said
        looks = self.num_looks if num_looks is None else num_looks
        return (self._others + said) / (
            self.costs.step(self.num_tokens + more) + looks * self.share
        )
