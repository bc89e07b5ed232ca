"""Whose KV is in the pool: sequences in use, which nobody may disturb, and idle ones.

The KV of a conversation stays after its turn, and after it was closed, until somebody needs the
room or idle KV exceeds its share: coming back to it then touches no disk. What two sequences begin
with alike is copied from one to the other, at memory speed: on a CPU the blocks of a sequence are
consecutive, which attention is fast because of, so they cannot be shared in place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ContextFull


class Memory:
    """The sequences of one pool. max_idle_tokens: the KV that may stay without being in use."""

    def __init__(self, pool: BlockPool, max_idle_tokens: int) -> None:
        self.pool, self.max_idle_tokens = pool, max_idle_tokens
        self._lock = threading.RLock()
        # From the least to the most recently used; a name is there while its KV is worth finding.
        self._named: dict[str, TokenSequence] = {}
        self._in_use: list[TokenSequence] = []
        pool.reclaim = self.reclaim

    def sequence(self, name: str, is_shareable: bool = True) -> TokenSequence:
        """The sequence called `name` (a session), with what KV of it is still here."""
        with self._lock:
            return self._named.setdefault(name, TokenSequence(is_shareable=is_shareable))

    @contextmanager
    def use(self, sequence: TokenSequence) -> Iterator[None]:
        """Keep the sequence's blocks from being taken until the block of code ends."""
        with self._lock:
            self._in_use.append(sequence)
        try:
            yield
        finally:
            with self._lock:
                self._in_use.remove(sequence)
                self._touch(sequence)
                while self.num_idle_tokens > self.max_idle_tokens and self.reclaim():
                    pass
                self.pool.notify()

    @property
    def num_in_use(self) -> int:
        return len(self._in_use)

    @property
    def num_idle_tokens(self) -> int:
        """Tokens in the blocks of sequences that are not in use."""
        return sum(sequence.run.capacity for sequence in self._idle())

    def forget(self, name: str) -> None:
        """Drop the KV of a session that is not in use: it was deleted, or is a scratch one."""
        with self._lock:
            sequence = self._named.get(name)
            if sequence is not None and sequence not in self._in_use:
                del self._named[name]
                self._release(sequence)

    def share(self, sequence: TokenSequence, ids: Sequence[int]) -> int:
        """Copy the KV of what another sequence begins with like `ids` where that is at least a
        block more than `sequence` has; how many tokens were copied. The sequence is in use."""
        with self._lock:
            mine = sequence.common_prefix(ids)
            if not sequence.is_shareable:
                return 0
            others = [
                other
                for other in self._named.values()
                if other is not sequence and other.is_shareable
            ]
            longest = max(others, key=lambda other: other.common_prefix(ids), default=None)
            # The last token is computed in any case, since its logits are wanted.
            theirs = min(longest.common_prefix(ids), len(ids) - 1) if longest else 0
            if longest is None or theirs - mine < BLOCK_TOKENS:
                return 0
            self._in_use.append(longest)  # making room must not take what is to be copied
            try:
                sequence.num_cached = mine
                self.pool.reserve(sequence.run, len(ids))
            except ContextFull:
                return 0
            finally:
                self._in_use.remove(longest)
            source = self.pool.slots(longest.run, mine, theirs)
            self.pool.slots(sequence.run, mine, theirs).copy_(source)
            sequence.become(ids, theirs)
            return theirs - mine

    def reclaim(self) -> bool:
        """Give back the blocks of the idle sequence that was used longest ago; False: none is."""
        with self._lock:
            victim = next(iter(self._idle()), None)
            if victim is None:
                return False
            self._release(victim)
            return True

    def _idle(self) -> list[TokenSequence]:
        return [
            sequence
            for sequence in self._named.values()
            if sequence.run.num_blocks and not any(sequence is used for used in self._in_use)
        ]

    def _touch(self, sequence: TokenSequence) -> None:
        """Make it the most recently used one; sequences without a name leave no KV behind."""
        name = next((name for name, held in self._named.items() if held is sequence), None)
        if name is not None:
            self._named[name] = self._named.pop(name)
        else:
            self._release(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        self.pool.release(sequence.run)
        sequence.num_cached = 0
