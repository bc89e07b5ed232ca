"""Drafts from what was said before where that is long enough to be trusted, else from the model's
own modules or heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.engine.drafts import Draft, Drafter, Growth
from chatkv.engine.mtp import MtpDrafter
from chatkv.engine.ngram import NUM_KINDS, NgramDrafter

# Of the stretches that were said before, the shortest kind to be trusted more than a module.
_TRUSTED = 3


@dataclass
class BothDrafter:
    """A `Drafter`; kinds are those of `ngram`, then those of `mtp`."""

    ngram: NgramDrafter
    mtp: MtpDrafter
    source: str = field(default="ngram+mtp", init=False)
    _is_said_before: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.mtp.first_kind = NUM_KINDS

    @property
    def most(self) -> int:
        return max(self.ngram.most, self.mtp.most)

    @property
    def share(self) -> float:
        return self._current.share

    @property
    def adapts(self) -> bool:
        return self._current.adapts

    @property
    def _current(self) -> Drafter:
        return self.ngram if self._is_said_before else self.mtp

    def expected(self, kind: int) -> float:
        if kind < NUM_KINDS:
            return self.ngram.expected(kind)
        return self.mtp.expected(kind)

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        kind = self.ngram.outlook(ids)
        self._is_said_before = kind is not None and kind >= _TRUSTED
        if self._is_said_before:
            return kind
        return self.mtp.outlook(ids, freely)

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        if self._is_said_before:
            return self.ngram.propose(ids, count)
        return self.mtp.propose(ids, min(count, self.mtp.most), growth)
