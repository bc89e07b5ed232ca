"""What is to be restored for a turn, as planned, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chatkv.restore.both_ends import BothEnds
from chatkv.restore.layers import Arrived, LayerLoad
from chatkv.restore.measured import Range
from chatkv.restore.misses import Departure
from chatkv.restore.plan import Plan, Situation, Wanted
from chatkv.restore.prefill_worker import Offer
from chatkv.restore.remote import Fetched
from chatkv_store.blocks import Match, StoredBlock


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    ids: list[int]
    situation: Situation
    match: Match | None  # None: the disk was not asked, since the pool holds all of the history
    stored: list[StoredBlock | None]  # block by block, also behind gaps
    wanted: Wanted = "auto"
    exact: bool = False
    departure: Departure | None = None  # from what is kept, in memory or else on disk
    # What a prefill worker offers; or why it does not.
    offer: Offer | None = None
    no_offer: str | None = None
    # Of what is to be loaded, how much the system does not have in memory; None: nobody can tell.
    cold: float | None = None


@dataclass(frozen=True)
class Restored:
    """Where the KV of a turn's tokens came from, before prefill computes the rest."""

    plan: Plan
    reused: int
    departure: Departure | None = None  # where it differs from what is kept
    arrived: Arrived | None = None  # loaded before prefill begins
    arriving: BothEnds | LayerLoad | None = None  # on its way still; close it after the prefill
    fetched: Fetched | None = None  # from a prefill worker
    notices: tuple[str, ...] = ()
    history: int = 0  # leading tokens that an earlier turn has computed
    cold: float | None = None  # see `Planned`

    @property
    def all_notices(self) -> tuple[str, ...]:
        """`notices`, and what has become known since."""
        late = (self.arrived or self.arriving, self.fetched)
        return (*self.notices, *(line for one in late if one for line in one.notices))

    @property
    def num_bytes(self) -> int:
        """Payload bytes that were read from the disk until now."""
        source = self.arrived or self.arriving
        return source.num_bytes if source else 0

    @property
    def num_loaded(self) -> int:
        """Tokens that came from the disk until now."""
        if self.arrived is not None:
            return self.arrived.num_cached - self.reused
        return self.arriving.num_loaded if self.arriving else 0

    def recomputed(self, num_cached: int) -> list[Range]:
        """Which tokens of the history were computed again, of the first num_cached ones."""
        computed = [(self.num_ready, num_cached)]
        if isinstance(self.arriving, BothEnds):
            computed = self.arriving.measured.computed
        stop = min(self.history, num_cached)
        return [(first, min(last, stop)) for first, last in computed if first < stop]

    @property
    def recomputed_layers(self) -> dict[str, Any] | None:
        """Of which tokens only the first layers were computed, and how many of them; None: all."""
        if not isinstance(self.arriving, BothEnds) or self.arriving.measured.left is None:
            return None
        index, computed, of_all = self.arriving.measured.left
        tokens = self.arriving.measured.steps[index][0]
        return {"tokens": tokens, "layers": computed, "of": of_all}

    @property
    def num_fetched(self) -> int:
        """Tokens that a prefill worker has computed."""
        return self.fetched.num_tokens if self.fetched is not None else 0

    @property
    def num_ready(self) -> int:
        """Tokens that prefill need not compute, from the first on, as far as that is known."""
        return self.reused + self.num_loaded + self.num_fetched

    @property
    def waited_s(self) -> float:
        """Seconds that prefill has waited for KV on its way."""
        return self.arriving.waited_s if isinstance(self.arriving, LayerLoad) else 0.0
