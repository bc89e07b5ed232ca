"""How much of an answer is drafted: only what is expected to pay, from what was measured.

The expected tokens of a step grow with the draft, ever less; so does what the step takes. The
length that yields most tokens per second is drafted, and nothing where none does. How often drafts
are right is counted for this answer alone: so an answer after a restart drafts as it would without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.engine.draft_costs import DraftCosts
from chatkv.engine.drafts import Draft, Drafter, GoesOn
from chatkv.engine.options import SpeculationCounts

# What a draft must be expected to win, since expectations err.
_WORTH = 1.04
# So many steps in a row draft, then one does not: what that takes has to be known, too.
PROBE_STEPS = 24
# What is expected of drafts counts as much as so many drafted tokens; of what was counted, as much
# as so many tokens remains.
_PRIOR_TOKENS = 4.0
_KEPT_TOKENS = 60.0


# Drafts that cost something even where none is made are judged by so many steps at least, and
# what has cost more than it won is left for so many.
_JUDGED_STEPS = 24.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512


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
class _Pause:
    """From drafts that have cost more than they won, for some steps, ever more of them."""

    spent: float = 0.0  # in plain steps, by those that drafted or looked whether to
    won: float = 0.0  # tokens that these said
    length: int = _FIRST_PAUSE
    left: int = 0

    def learn(self, spent: float, won: float) -> None:
        self.spent, self.won = self.spent + spent, self.won + won
        if self.spent < _JUDGED_STEPS:
            return
        if self.won < self.spent:
            self.left, self.length = self.length, min(2 * self.length, _LONGEST_PAUSE)
        self.spent, self.won = self.spent / 2, self.won / 2

    def step(self) -> bool:
        """Whether the step that begins is one of it."""
        self.left = max(self.left - 1, 0)
        return self.left > 0


@dataclass
class Speculation:
    """Drafts of one answer."""

    drafter: Drafter
    costs: DraftCosts
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    _rates: dict[int, _Rate] = field(default_factory=dict)
    _guess: list[tuple[int, int]] = field(default_factory=list)  # not judged yet: token, kind
    _num_drafting: int = 0  # steps in a row
    _draft_s: float = 0.0  # that a drafted token takes
    _pause: _Pause = field(default_factory=_Pause)
    _spent: float = 0.0  # by the last step, where that is to be judged, in plain steps
    _accepted: int = 0  # before it

    def __post_init__(self) -> None:
        self.counts.source = self.drafter.source

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """What the next step is to compute beside the last of ids: at most so many tokens."""
        self.counts.steps += 1
        self._guess = []
        most = min(most, self.drafter.most)
        if self._spent:
            self._pause.learn(self._spent, 1 + self.counts.accepted - self._accepted)
            self._spent = 0.0
        is_paused = self._pause.step()
        kind = None
        if most > 0:
            kind = self.drafter.outlook(ids, freely=is_paused or self._must_be_plain())
        if kind is None:
            return self._none()
        length = self._length(kind, most)
        draft = Draft()
        if length and self.drafter.adapts:
            draft = self.drafter.propose(ids, most, self._goes_on(kind))
        elif length:
            draft = self.drafter.propose(ids, length)
        elif not self.drafter.share:  # judged like any other: it may begin to pay
            self._expect(self.drafter.propose(ids, 1), kind)
        if self.drafter.adapts:
            looked = max(len(draft), 1) * self._draft_share()
            self._spent, self._accepted = self.costs.step(len(draft)) + looked, self.counts.accepted
        if not length:
            return self._none()
        self._learn_cost(draft)
        self._expect(draft, kind)
        self._num_drafting += 1
        self.counts.drafted += len(draft)
        return draft

    def heard(self, token: int, is_drafted: bool) -> None:
        """The answer goes on with `token`; is_drafted: which was drafted, and is accepted."""
        self.counts.accepted += is_drafted
        if not self._guess:
            return
        guess, kind = self._guess.pop(0)
        self._rate(kind).learn(guess == token)
        if guess != token:
            self._guess = []

    def _expect(self, draft: Draft, kind: int) -> None:
        kinds = [kind, *(draft.kinds or [kind] * (len(draft) - 1))]
        self._guess = list(zip(draft.tokens, kinds, strict=True)) if draft else []

    def _none(self) -> Draft:
        self._num_drafting = 0
        return Draft()

    def _must_be_plain(self) -> bool:
        is_due = self._num_drafting >= PROBE_STEPS or self.costs.plain_s() is None
        return is_due and not self.costs.is_fixed

    def _length(self, kind: int, most: int) -> int:
        """How many tokens to draft."""
        if self._must_be_plain():
            return 0
        rate, others, share = (
            self._rate(kind).value,
            self.costs.num_answers - 1,
            self._draft_share(),
        )
        # Where looking ahead takes something, that is spent already.
        none = 1 + share if self.drafter.adapts else 1.0
        best, best_yield = 0, (others + 1) / none * _WORTH
        expected, accepted = 1.0, 1.0
        for length in range(1, most + 1):
            accepted *= rate
            expected += accepted
            gained = (others + expected) / (self.costs.step(length) + length * share)
            if gained > best_yield:
                best, best_yield = length, gained
        return best

    def _goes_on(self, first: int) -> GoesOn:
        """Whether another token is worth what it takes, from how likely all up to it are right."""
        accepted = self._rate(first).value
        expected, length = 1 + accepted, 1
        share, others = self._draft_share(), self.costs.num_answers - 1

        def goes_on(kind: int) -> bool:
            nonlocal accepted, expected, length
            accepted *= self._rate(kind).value
            now = (others + expected) / (self.costs.step(length) + length * share)
            more = self.costs.step(length + 1) - self.costs.step(length) + share
            expected, length = expected + accepted, length + 1
            return accepted > now * more

        return goes_on

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
        if self.costs.is_fixed or plain_s is None or not self.drafter.share:
            return self.drafter.share
        return self._draft_s / plain_s if self._draft_s else self.drafter.share
