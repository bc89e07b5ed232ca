"""Which turn gets room where memory has not enough for all, and which one gives it up.

Turns are ranked. Background work comes behind what somebody waits for, and of two alike the one
that began later comes behind; last of all comes a turn whose reader has not taken its last token
for a while. Who finds no room waits, in this order. The last one behind it that holds blocks gives
way: between two of its steps, or at once where it is with its reader, so that a reader which never
comes back keeps nothing. So whoever is first always gets on, and none gives way for one behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from chatkv.engine.sequence import TokenSequence

# A reader that takes longer than this for a token comes last.
STALLED_S = 2.0


@dataclass(eq=False)
class Holder:
    """A turn that uses a sequence."""

    sequence: TokenSequence
    number: int  # in the order in which turns began
    is_background: bool = False
    on_wait: Callable[[], None] = lambda: None
    num_uses: int = 0
    lacks_room: bool = False  # it waits, and found none since blocks were given back last
    away_since: float | None = None  # when its reader was given what it reads
    on_displaced: Callable[[], None] = lambda: None


@dataclass
class Room:
    """The turns of one pool; `lock` is the pool's."""

    lock: threading.RLock
    clock: Callable[[], float] = time.monotonic
    _holders: dict[TokenSequence, Holder] = field(default_factory=dict)
    _queue: list[Holder] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    # --- turns ----------------------------------------------------------------------------------

    @contextmanager
    def holding(
        self,
        sequence: TokenSequence,
        is_background: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[Holder]:
        """A turn has the sequence in use. on_wait() is called each time that it has to wait."""
        with self.lock:
            holder = self._holders.get(sequence)
            if holder is None:
                holder = Holder(sequence, next(self._numbers), is_background, on_wait)
                self._holders[sequence] = holder
            holder.num_uses += 1
        try:
            yield holder
        finally:
            with self.lock:
                holder.num_uses -= 1
                if not holder.num_uses:
                    del self._holders[sequence]

    @contextmanager
    def away(self, sequence: TokenSequence, on_displaced: Callable[[], None]) -> Iterator[None]:
        """The turn is with its reader, and touches no block: others may have them meanwhile.
        on_displaced() is called before they are taken, while the lock is held."""
        with self.lock:
            holder = self._holders.get(sequence)
            if holder is not None:
                holder.away_since, holder.on_displaced = self.clock(), on_displaced
        try:
            yield
        finally:
            with self.lock:
                if holder is not None:
                    holder.away_since = None

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence in self._holders

    # --- waiting --------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, sequence: TokenSequence) -> Iterator[None]:
        """Stand in the queue."""
        with self.holding(sequence) as holder:
            holder.on_wait()
            with self.lock:
                self._queue.append(holder)
            try:
                yield
            finally:
                with self.lock:
                    holder.lacks_room = False
                    self._queue.remove(holder)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def is_next(self, sequence: TokenSequence) -> bool:
        """Whether nobody who waits comes in front of the sequence's turn."""
        with self.lock:
            holder = self._holders.get(sequence)
            if not self._queue or holder is None:
                return not self._queue
            return self._rank(self._first()) >= self._rank(holder)

    def freed(self) -> None:
        """Blocks were given back: who lacked some looks again before anybody gives way."""
        for holder in self._queue:
            holder.lacks_room = False

    def others_hold_blocks(self, sequence: TokenSequence) -> bool:
        """Whether others could give any back one day."""
        with self.lock:
            return any(other.run.num_blocks for other in self._holders if other is not sequence)

    # --- giving way -----------------------------------------------------------------------------

    def must_give_way(self, sequence: TokenSequence) -> bool:
        """Whether the sequence's turn is the one that has to give its blocks to the first of those
        that wait."""
        if not self._queue:  # asked for every token, and mostly so
            return False
        with self.lock:
            if not self._queue or not (first := self._first()).lacks_room:
                return False
            last = self._last_behind(first)
            return last is not None and last.sequence is sequence

    def yielded(self, sequence: TokenSequence) -> Holder | None:
        """The sequence lacks room. Whose blocks it may have at once, None: nobody's."""
        with self.lock:
            holder = self._holders.get(sequence)
            if holder is None:
                return None
            last = self._last_behind(holder)
            if last is not None and last.away_since is not None:
                return last
            holder.lacks_room = holder in self._queue
            return None

    def is_background(self, sequence: TokenSequence) -> bool:
        """Whether the sequence's turn is one that nobody waits for."""
        holder = self._holders.get(sequence)
        return holder is not None and holder.is_background

    # --- inside ---------------------------------------------------------------------------------

    def _rank(self, holder: Holder) -> tuple[bool, bool, int]:
        """Smaller ones come first."""
        since = holder.away_since
        is_stalled = since is not None and self.clock() - since > STALLED_S
        return is_stalled, holder.is_background, holder.number

    def _first(self) -> Holder:
        return min(self._queue, key=self._rank)

    def _last_behind(self, holder: Holder) -> Holder | None:
        """The last of those that come behind it and hold blocks."""
        with_blocks = [one for one in self._holders.values() if one.sequence.run.num_blocks]
        last = max(with_blocks, key=self._rank, default=None)
        return last if last is not None and self._rank(last) > self._rank(holder) else None
