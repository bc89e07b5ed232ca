"""How much of an answer is drafted: only what is expected to pay, from what was measured.

The expected tokens of a step grow with the draft, ever less; so does what the step takes. The
length that yields most tokens per second is drafted, and nothing where none does. How often drafts
are right is counted for this answer alone: so an answer after a restart drafts as it would without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.engine.draft_costs import DraftCosts
from chatkv.engine.drafts import Draft, Drafter
from chatkv.engine.options import SpeculationCounts

# What a draft must be expected to win, since expectations err.
_WORTH = 1.04
# So many steps in a row draft, then one does not: what that takes has to be known, too.
PROBE_STEPS = 24
# What is expected of drafts counts as much as so many drafted tokens; of what was counted, as much
# as so many tokens remains.
_PRIOR_TOKENS = 4.0
_KEPT_TOKENS = 60.0


@dataclass
class _Rate:
    """How often tokens of one kind of draft are right, where all before them were."""

    right: float
    judged: float

    def learn(self, is_right: bool) -> None:
        self.right, self.judged = self.right + is_right, self.judged + 1
        if self.judged > _KEPT_TOKENS:
            fade = _KEPT_TOKENS / self.judged
            self.right, self.judged = self.right * fade, self.judged * fade

    @property
    def value(self) -> float:
        return self.right / self.judged


@dataclass
class Speculation:
    """Drafts of one answer."""

    drafter: Drafter
    costs: DraftCosts
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    _rates: dict[int, _Rate] = field(default_factory=dict)
    _kind: int = 0  # of the draft that is being judged
    _guess: list[int] = field(default_factory=list)  # what of it is not judged yet
    _num_drafting: int = 0  # steps in a row
    _draft_s: float = 0.0  # that a drafted token takes

    def __post_init__(self) -> None:
        self.counts.source = self.drafter.source

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """What the next step is to compute beside the last of ids: at most so many tokens."""
        self.counts.steps += 1
        self._guess = []
        most = min(most, self.drafter.most)
        kind = self.drafter.outlook(ids) if most > 0 else None
        if kind is None:
            return self._none()
        self._kind = kind
        length = self._length(kind, most)
        if not length:
            if not self.drafter.share:  # judged like any other: it may begin to pay
                self._guess = list(self.drafter.propose(ids, 1).tokens)
            return self._none()
        draft = self.drafter.propose(ids, length)
        self._learn_cost(draft)
        self._guess = list(draft.tokens)
        self._num_drafting += 1
        self.counts.drafted += len(draft)
        return draft

    def heard(self, token: int, is_drafted: bool) -> None:
        """The answer goes on with `token`; is_drafted: which was drafted, and is accepted."""
        self.counts.accepted += is_drafted
        if not self._guess:
            return
        is_right = self._guess.pop(0) == token
        self._rate(self._kind).learn(is_right)
        if not is_right:
            self._guess = []

    def _none(self) -> Draft:
        self._num_drafting = 0
        return Draft()

    def _length(self, kind: int, most: int) -> int:
        """How many tokens to draft."""
        costs = self.costs
        if not costs.is_fixed and (self._num_drafting >= PROBE_STEPS or costs.plain_s() is None):
            return 0
        rate, others = self._rate(kind).value, costs.num_answers - 1
        best, best_yield = 0, (others + 1) * _WORTH
        expected, accepted = 1.0, 1.0
        for length in range(1, most + 1):
            accepted *= rate
            expected += accepted
            gained = (others + expected) / (costs.step(length) + length * self._draft_share())
            if gained > best_yield:
                best, best_yield = length, gained
        return best

    def _rate(self, kind: int) -> _Rate:
        if kind not in self._rates:
            expected = self.drafter.expected(kind)
            self._rates[kind] = _Rate(expected * _PRIOR_TOKENS, _PRIOR_TOKENS)
        return self._rates[kind]

    def _learn_cost(self, draft: Draft) -> None:
        if draft.seconds:
            each = draft.seconds / len(draft)
            self._draft_s = 0.8 * self._draft_s + 0.2 * each if self._draft_s else each

    def _draft_share(self) -> float:
        """What a drafted token takes to draft, as a multiple of a plain step."""
        plain_s = self.costs.plain_s()
        if self.costs.is_fixed or plain_s is None:
            return self.drafter.share
        return self._draft_s / plain_s if self._draft_s else self.drafter.share
