"""Drafts that were said before: what followed the last time that the text ended like this.

Quoting, editing and code repeat long stretches, of this answer or of any earlier turn (prompt
lookup). All positions are kept by the two tokens that end there, each with the one before it that
ends alike; so a token costs one entry, and a lookup looks at the last few places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.engine.drafts import Draft, Growth

MAX_DRAFT = 16
# Places that a lookup compares, the latest first, and how far back each.
_MAX_PLACES = 24
_MAX_MATCH = 24
# The shortest match of each kind, and how often its next token is right, before that is measured.
_KINDS = ((2, 0.3), (3, 0.4), (4, 0.5), (6, 0.65), (9, 0.8), (16, 0.9))
NUM_KINDS = len(_KINDS)


@dataclass
class NgramDrafter:
    """A `Drafter`; kind: how long the stretch before it is that was said before."""

    source: str = field(default="ngram", init=False)
    most: int = field(default=MAX_DRAFT, init=False)
    share: float = field(default=0.0, init=False)
    adapts: bool = field(default=False, init=False)
    _latest: dict[tuple[int, int], int] = field(default_factory=dict)  # where such a pair ended
    _before: list[int] = field(default_factory=list)  # by position: where it ended before, or -1
    _place: int = -1  # the last token of the stretch that was found

    def expected(self, kind: int) -> float:
        return _KINDS[kind][1]

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        self._extend(ids)
        self._place, length = self._longest(ids)
        if self._place < 0:
            return None
        return max(kind for kind, (shortest, _) in enumerate(_KINDS) if shortest <= length)

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        # A stretch that reaches up to the end goes on with what it drafts: it repeats itself.
        start, size = self._place + 1, len(ids)
        tokens: list[int] = []
        for at in range(start, start + count):
            tokens.append(ids[at] if at < size else tokens[at - size])
        return Draft(tokens)

    def _extend(self, ids: Sequence[int]) -> None:
        """Take in what was added to `ids`, which else are those of the last call."""
        if not self._before:
            self._before.append(-1)
        for at in range(len(self._before), len(ids)):
            pair = ids[at - 1], ids[at]
            self._before.append(self._latest.get(pair, -1))
            self._latest[pair] = at

    def _longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where the longest stretch that ends like `ids` ended before, the latest of equal ones,
        and its length; (-1, 0) for none."""
        end = len(ids) - 1
        place = self._before[end] if end > 0 else -1
        best, longest = -1, 0
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            length = self._match(ids, place, end)
            if length > longest:
                best, longest = place, length
                if length >= _MAX_MATCH:
                    break
            place = self._before[place]
        return best, longest

    @staticmethod
    def _match(ids: Sequence[int], place: int, end: int) -> int:
        """How many tokens up to `place` are those up to `end`: at least the two of the pair."""
        length = 2
        while length < _MAX_MATCH and place >= length and ids[place - length] == ids[end - length]:
            length += 1
        return length
