"""Keeping a store inside its budget: reserve first, then write, and evict where that needs it.

LMDB's file never shrinks by itself, and never outgrows its map. So the map is cut to what the
budget allows before a write, and what must be made is room inside: pages that are in use and go.
Three things take more than the payload itself:

- A transaction writes changed pages anew before the old ones are free, so some always stay spare;
  a store that is full to the last page could not even delete.
- What one transaction frees can be used by the second one after it, not by the next.
- A value needs neighbouring pages. Where those that are free lie scattered, more has to go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from chatkv_store.budget import Budget, disk_free_bytes
from chatkv_store.environment import DATA_FILE, PAGE_BYTES, NoRoom
from chatkv_store.errors import BudgetFull, StoreFull

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations
    from chatkv_store.eviction import Candidate, Ranker
    from chatkv_store.saving import Encoded

T = TypeVar("T")

LOCK_BYTES = 64 << 10  # LMDB's reader table, counted with the data
MAX_SPARE_BYTES = 2 << 20
ATTEMPTS = 6  # each doubles what goes, where free pages lie scattered
EVICTED_AT_ONCE = 8  # blocks per transaction: what it frees is listed in spare pages
MARGIN = 1.25  # what goes is worth less than what comes by this factor: else blocks of about the
# same worth would push each other out at every save of a history that does not fit
SLOW_RANKING_S = 0.1  # a refusal that took longer is remembered for a while
_PAGES_PER_BLOCK, _PAGES_PER_COMMIT = 8, 24  # leaves of the tables that are written anew


class Room:
    """Writes into `store` within `budget`. Without `conversations` nothing may be evicted, since
    it is not known what is pinned."""

    def __init__(
        self,
        store: BlockStore,
        budget: Budget,
        conversations: Conversations | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self.budget = budget
        self._conversations = conversations
        self._clock = clock
        self._resting_until = 0.0
        self._ranker: Ranker | None = None
        self._ranking = threading.Lock()  # one at a time, since it remembers

    def is_a_commit(self, batch: Sequence[Encoded]) -> bool:
        """Whether `batch` is as much as one transaction should take of a small store."""
        return _bytes_needed(batch) >= self.limit() // 16

    def write(self, batch: Sequence[Encoded], work: Callable[[object], T]) -> T:
        """Commit `work`, which stores `batch`; StoreFull where no room can be made for it."""
        env = self._store.env
        need = _bytes_needed(batch)
        extra = 0
        for _ in range(ATTEMPTS):
            hard = self.limit()
            limit = hard - self._spare(hard)
            env.fit_map(limit)
            missing = env.info()["used_bytes"] + need + extra - limit
            if extra:  # there was room, in pieces too small: only blocks that go make larger ones
                missing = max(missing, extra)
            if missing > 0:
                self._evict(missing, batch, hard)
            try:
                return env.write(work, limit)
            except NoRoom:
                extra = max(2 * extra, need)
        raise StoreFull(f"the KV cache in {self._store.path} has no room for these blocks")

    def limit(self) -> int:
        """Bytes that the data file may have: the cap, and what the disk's floor leaves."""
        data = self._store.path / DATA_FILE
        limit = self._cap()
        if self.budget.min_free_bytes:
            above_floor = disk_free_bytes(data) - self.budget.min_free_bytes
            limit = min(limit, data.stat().st_size + max(0, above_floor))
        return max(0, limit // PAGE_BYTES * PAGE_BYTES)

    def _cap(self) -> int:
        cap = 1 << 62 if self.budget.max_bytes is None else self.budget.max_bytes - LOCK_BYTES
        return max(0, cap // PAGE_BYTES * PAGE_BYTES)

    def _spare(self, hard: int) -> int:
        return min(MAX_SPARE_BYTES, hard // 8)

    def _evict(self, num_bytes: int, batch: Sequence[Encoded], hard: int) -> None:
        """Free `num_bytes`, of blocks that are worth less than those of `batch`; StoreFull where
        that cannot be, with nothing gone."""
        chosen = self._choose(num_bytes, batch, hard)
        for first in range(0, len(chosen), EVICTED_AT_ONCE):
            some = [one.key for one in chosen[first : first + EVICTED_AT_ONCE]]
            self._store.remove(some, hard)
        # Also the commit after which the freed pages can be used.
        num_freed = sum(one.num_bytes for one in chosen)
        self._store.count(hard, evicted_blocks=len(chosen), evicted_bytes=num_freed)

    def _choose(self, num_bytes: int, batch: Sequence[Encoded], hard: int) -> list[Candidate]:
        # What is as its user wants it is no news; a disk that fills up is.
        is_the_cap = hard == self._cap()
        full = (BudgetFull if is_the_cap else StoreFull)(
            f"the KV cache in {self._store.path} is full, and nothing in it is worth less than "
            "what is new; raise the cap, unpin or prune"
        )
        if self._conversations is None or self._clock() < self._resting_until:
            raise full
        from chatkv_store.eviction import Ranker

        began = self._clock()
        chosen: list[Candidate] = []
        freed = 0
        # A little more than is missing: a ranking looks at every block. One for each 64th of the
        # store costs as much per block that is written, however many there are.
        wanted = max(num_bytes, hard // 64)
        new = {one.key: one.header.num_payload_bytes for one in batch}
        with self._ranking:
            if self._ranker is None:
                self._ranker = Ranker(self._store, self._conversations)
            ranking = self._ranker.rank(also=new)
            new_worth = min(
                ranking.seconds.get(key, float("inf")) / max(1, size) for key, size in new.items()
            )
            for one in ranking.candidates():
                if one.worth >= new_worth / MARGIN or freed >= wanted:
                    break
                if one.key not in new:
                    chosen.append(one)
                    freed += one.disk_bytes
        if freed < num_bytes:
            took_s = self._clock() - began
            if took_s > SLOW_RANKING_S:  # the next block will most likely fare no better
                self._resting_until = self._clock() + 20 * took_s
            raise full
        return chosen


def pages_of(num_bytes: int) -> int:
    """Whole pages that a value of `num_bytes` fills, with its page header and, where the store is
    encrypted, what sealing adds."""
    return -(-(num_bytes + 16 + 48) // PAGE_BYTES)


def _bytes_needed(batch: Sequence[Encoded]) -> int:
    """Pages that `batch` takes, those included that its transaction writes anew."""
    pages = _PAGES_PER_COMMIT + _PAGES_PER_BLOCK * len(batch)
    pages += sum(pages_of(len(payload)) for one in batch for payload in one.payloads)
    return pages * PAGE_BYTES
