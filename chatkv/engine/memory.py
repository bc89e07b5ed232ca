"""Whose KV is in the pool: sequences in use, which nobody may disturb, and idle ones.

The KV of a conversation stays after its turn, and after it was closed, until somebody needs the
room or idle KV exceeds its share: coming back to it then touches no disk. What two sequences begin
with alike one has from the other (`Pool.adopt`): as a copy, at memory speed, where the blocks of a
sequence are consecutive, which attention on a CPU is fast because of; in place on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from chatkv.engine.pool import BLOCK_TOKENS, Pool
from chatkv.engine.room import Room
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ContextFull


class Memory:
    """The sequences of one pool. max_idle_tokens: the KV that may stay without being in use."""

    def __init__(self, pool: Pool, max_idle_tokens: int) -> None:
        self.on_leave: Callable[[TokenSequence], None] = _ignore
        self.pool, self.max_idle_tokens = pool, max_idle_tokens
        # The pool's own: it asks for room while it holds that, and we ask it while we hold ours.
        self._lock = pool.lock
        # From the least to the most recently used; a name is there while its KV is worth finding.
        self._named: dict[str, TokenSequence] = {}
        self.room = Room(self._lock)  # of those in use
        self._asking: TokenSequence | None = None  # for whom room is being made
        self._spares_idle = False  # room is asked for that can be done without
        pool.reclaim = self._reclaim_for_asking

    def close(self) -> None:
        """Nobody asks for room any more, and nobody is heard of."""
        self.pool.reclaim = _nothing
        self.on_leave = _ignore

    def sequence(self, name: str, is_shareable: bool = True, realm: str = "") -> TokenSequence:
        """The sequence called `name` (a session), with what KV of it is still here."""
        with self._lock:
            known = self._named.get(name)
            return known or TokenSequence(name=name, is_shareable=is_shareable, realm=realm)

    @contextmanager
    def use(
        self,
        sequence: TokenSequence,
        is_background: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """A turn uses the sequence until the block of code ends: its blocks are given to others
        only where the turn itself gives way (`Room`). on_wait() is called when it has to wait."""
        try:
            with self.room.holding(sequence, is_background, on_wait):
                with self._lock:
                    name = sequence.name
                    if name is not None and self._named.get(name) is not sequence:
                        self.forget(name)
                        self._named[name] = sequence
                yield
        finally:
            with self._lock:
                self._leave(sequence)
                while self.num_idle_tokens > self.max_idle_tokens and self.reclaim():
                    pass
                self._notify()
            self.on_leave(sequence)

    @property
    def num_in_use(self) -> int:
        return len(self.room)

    @property
    def num_idle_tokens(self) -> int:
        """Tokens in the blocks of sequences that are not in use."""
        blocks = {block for sequence in self._idle() for block in sequence.run.blocks}
        return len(blocks) * BLOCK_TOKENS

    def forget(self, name: str) -> None:
        """Drop the KV of a session that is not in use: it was deleted, or is a scratch one."""
        with self._lock:
            sequence = self._named.get(name)
            if sequence is not None and sequence not in self.room:
                self.drop(sequence)

    def drop(self, sequence: TokenSequence) -> None:
        """Give the sequence's blocks back."""
        with self._lock:
            sequence.become(sequence.ids, 0)
            self.pool.release(sequence.run)
            self._notify()
            if sequence.name is not None and sequence not in self.room:
                self._named.pop(sequence.name, None)

    def share(self, sequence: TokenSequence, ids: Sequence[int]) -> int:
        """Take over the KV of what another sequence begins with like `ids` where that is at least
        a block more than `sequence` has; of how many tokens. The sequence is in use."""
        with self._lock:  # no run moves or is given away meanwhile
            if not sequence.is_shareable or sequence.exact_until is not None:
                return 0
            mine = sequence.common_prefix(ids)
            found = [
                (other.version, other.common_prefix(ids), other)
                for other in self._named.values()
                if other is not sequence
                and other.realm == sequence.realm
                and other.is_shareable
                and other.exact_until is None
            ]
            version, theirs, longest = max(found, key=lambda one: one[1], default=(0, 0, sequence))
            # The last token is computed in any case, since its logits are wanted.
            theirs = min(theirs, len(ids) - 1)
            if theirs - mine < BLOCK_TOKENS:
                return 0
            try:  # making room must not take what is taken over
                with self.room.holding(longest), self._making_room_for(sequence):
                    sequence.become(ids, mine)
                    self.pool.adopt(sequence.run, len(ids), longest.run, mine, theirs)
            except ContextFull:
                return 0
            if longest.version != version:  # its turn has begun to write over what was taken
                return 0
            sequence.num_cached = theirs
            return theirs - mine

    def reclaim(self) -> bool:
        """Give back the blocks of the idle sequence that was used longest ago; False: none is."""
        with self._lock:
            victim = next(iter(self._idle()), None)
            if victim is not None:
                self.drop(victim)
            return victim is not None

    # --- room for those in use --------------------------------------------------------------------

    def make_room(self, sequence: TokenSequence) -> bool:
        """Reserve what the sequence's ids need; False where others have to give it back first.
        Raises ContextFull where there are none."""
        with self._lock, self._making_room_for(sequence):
            while True:
                try:
                    self.pool.reserve(sequence.run, len(sequence.ids), sequence.num_cached)
                    return True
                except ContextFull:
                    if (other := self.room.yielded(sequence)) is not None:
                        other.on_displaced()
                        self.drop(other.sequence)
                    elif self.room.others_hold_blocks(sequence):
                        return False
                    else:
                        raise

    def take_free(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Reserve num_tokens in all for a sequence that can do without, where so much is free and
        nobody waits for it: no idle conversation has to leave. Whether that is reserved then."""
        with self._lock:
            if self.room.num_waiting or not self.pool.free_blocks:
                return False
            self._spares_idle = True
            try:
                self.pool.reserve(sequence.run, num_tokens, sequence.num_cached)
            except ContextFull:
                return False
            finally:
                self._spares_idle = False
            return True

    # --- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _making_room_for(self, sequence: TokenSequence) -> Iterator[None]:
        """The lock is held."""
        before, self._asking = self._asking, sequence
        try:
            yield
        finally:
            self._asking = before

    def _reclaim_for_asking(self) -> bool:
        """Background work takes no idle conversation's KV while it can wait for others' room."""
        if self._spares_idle:
            return False
        room, asking = self.room, self._asking
        may_wait = asking is not None and room.is_background(asking)
        if asking is not None and may_wait and room.others_hold_blocks(asking):
            return False
        return self.reclaim()

    def _notify(self) -> None:
        """Blocks were given back, or may be now."""
        self.room.freed()
        self.pool.notify()

    def _idle(self) -> list[TokenSequence]:
        return [
            sequence
            for sequence in self._named.values()
            if sequence.run.num_blocks and sequence not in self.room
        ]

    def _leave(self, sequence: TokenSequence) -> None:
        """Make it the most recently used one; what has no name or no KV leaves nothing behind."""
        if sequence in self.room:
            return
        if sequence.name is None or not sequence.run.num_blocks:
            self.drop(sequence)
        else:
            self._named[sequence.name] = self._named.pop(sequence.name)


def _nothing() -> bool:
    return False


def _ignore(sequence: TokenSequence) -> None: ...
