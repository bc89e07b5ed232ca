"""The token ids of one conversation, and how many of them have their KV in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.engine.pool import Run
from chatkv.engine.trail import Trail


@dataclass(eq=False)
class TokenSequence:
    """The token ids of one conversation, and how many of them have their KV in the pool.

    Invariant: KV of ids[:num_cached] is in `run`; num_cached <= len(ids). KV that a lossy codec
    may have changed is not shareable, and what is goes to sequences of the same realm: how fast an
    answer comes must tell nobody what somebody else has said. A sequence without a name keeps no KV
    when it is not in use.
    """

    ids: list[int] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    num_cached: int = 0
    is_shareable: bool = True
    exact_until: int | None = None
    name: str | None = None
    realm: str = ""
    trail: Trail = field(default_factory=Trail)  # where this engine drafts by it
    version: int = 0  # while it is the same, ids and num_cached have only grown

    def common_prefix(self, ids: Sequence[int]) -> int:
        """How many leading tokens of `ids` have their KV here."""
        cached = self.ids[: self.num_cached]
        if cached == ids[: self.num_cached]:
            return self.num_cached
        pairs = enumerate(zip(cached, ids, strict=False))
        return next(
            (at for at, (mine, theirs) in pairs if mine != theirs), min(len(ids), len(cached))
        )

    def become(self, ids: Sequence[int], num_cached: int) -> None:
        """Hold `ids`, the first num_cached of which (at most `common_prefix`) keep their KV."""
        # Before and after: who copies from here meanwhile must notice.
        self.version += 1
        self.ids, self.num_cached = list(ids), num_cached
        self.trail.cut(num_cached)
        if self.exact_until is not None and num_cached <= self.exact_until:
            self.exact_until = None
        self.version += 1
