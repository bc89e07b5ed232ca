"""How much of an answer is drafted: only what is expected to pay, from what was measured.

The expected tokens of a step grow with the draft, ever less; so does what the step takes. The
length that yields most tokens per second is drafted, and nothing where none does; drafts that adapt
grow token by token (`growth`). How often drafts are right is counted for this answer alone: so an
answer after a restart drafts as it would without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.engine.draft_costs import HICCUP, DraftCosts
from chatkv.engine.drafts import Draft, Drafter, Look
from chatkv.engine.growth import WORTH, Grown
from chatkv.engine.options import SpeculationCounts

# So many steps in a row draft, then one does not: what that takes has to be known, too.
PROBE_STEPS = 24
# What is expected of drafts counts as much as so many drafted tokens; of what was counted, as much
# as so many tokens remains.
_PRIOR_TOKENS = 4.0
_KEPT_TOKENS = 60.0
# How often the likeliest token of a look is expected to be right.
_BEHIND = 0.4
# Drafts that cost something even where none is made are judged by so many steps at least, and
# what has cost more than it won is left for so many.
_JUDGED_STEPS = 16.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512
# An answer begins as if so many steps had said so many tokens each, or a few unlucky ones would
# leave most of a short answer without drafts.
_BELIEVED_STEPS, _BELIEVED_GAIN = 8.0, 1.25


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

    spent: float = _BELIEVED_STEPS  # in plain steps, by those that drafted or looked whether to
    won: float = _BELIEVED_STEPS * _BELIEVED_GAIN  # tokens that these said
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
    _behind: _Rate = field(default_factory=lambda: _Rate(_BEHIND * _PRIOR_TOKENS, _PRIOR_TOKENS))
    _looks: list[Look] = field(default_factory=list)  # of the draft, not judged yet
    _num_drafting: int = 0  # steps in a row
    _draft_s: float = 0.0  # that a look takes
    _pause: _Pause = field(default_factory=_Pause)
    _spent: float = 0.0  # by the last step, where that is to be judged, in plain steps
    _accepted: int = 0  # before it

    def __post_init__(self) -> None:
        self.counts.source = self.drafter.source

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """What the next step is to compute beside the last of ids: at most so many tokens."""
        self.counts.steps += 1
        self._looks = []
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
        draft = self._grown(ids, most) if self.drafter.adapts else self._of_length(ids, most, kind)
        if not draft:
            return self._none()
        self._num_drafting += 1
        self.counts.drafted += len(draft)
        return draft

    def heard(self, token: int, is_drafted: bool) -> None:
        """The answer goes on with `token`; is_drafted: which was drafted, and is accepted."""
        self.counts.accepted += is_drafted
        if not self._looks:
            return
        look = self._looks.pop(0)
        for guess, kind in zip(look.tokens, look.kinds, strict=True):
            self._rate(kind).learn(guess == token)
        self._behind.learn(look.tokens[0] == token)
        if look.tokens[0] != token:
            self._looks = []

    def _grown(self, ids: Sequence[int], most: int) -> Draft:
        """A draft as large as it pays. What was looked at is judged, also where it is not drafted:
        it may begin to pay."""
        if self._must_be_plain():
            return Draft()
        growth = Grown(
            self.costs, lambda kind: self._rate(kind).value, self._behind.value, self._look_share()
        )
        draft = self.drafter.propose(ids, most, growth)
        self._learn_cost(draft.seconds, growth.num_looks)
        self._looks = list(draft.looks)
        self._spent = self.costs.step(len(draft)) + growth.num_looks * self._look_share()
        self._accepted = self.counts.accepted
        return draft

    def _of_length(self, ids: Sequence[int], most: int, kind: int) -> Draft:
        """A draft as long as it pays, all of one kind."""
        length = self._length(kind, most)
        if not length and self.drafter.share:
            return Draft()
        draft = self.drafter.propose(ids, length or 1)
        self._learn_cost(draft.seconds, len(draft))
        self._looks = [Look((token,), (kind,)) for token in draft.tokens]
        return draft if length else Draft()

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
        rate, share = self._rate(kind).value, self._look_share()
        others = self.costs.num_answers - 1
        best, best_yield = 0, (others + 1) * WORTH
        expected, accepted = 1.0, 1.0
        for length in range(1, most + 1):
            accepted *= rate
            expected += accepted
            gained = (others + expected) / (self.costs.step(length) + length * share)
            if gained > best_yield:
                best, best_yield = length, gained
        return best

    def _rate(self, kind: int) -> _Rate:
        if kind not in self._rates:
            expected = self.drafter.expected(kind)
            self._rates[kind] = _Rate(expected * _PRIOR_TOKENS, _PRIOR_TOKENS)
        return self._rates[kind]

    def _learn_cost(self, seconds: float, num_looks: int) -> None:
        if not seconds or not num_looks:
            return
        each_s = seconds / num_looks
        before_s = self._draft_s or self.drafter.share * (self.costs.plain_s() or 0.0)
        if before_s:  # the first look reads all of the prompt that counts, and any may have to wait
            each_s = 0.8 * before_s + 0.2 * min(each_s, HICCUP * before_s)
        self._draft_s = each_s

    def _look_share(self) -> float:
        """What it takes to think of a drafted token, as a multiple of a plain step."""
        plain_s = self.costs.plain_s()
        if self.costs.is_fixed or plain_s is None or not self.drafter.share:
            return self.drafter.share
        return self._draft_s / plain_s if self._draft_s else self.drafter.share
