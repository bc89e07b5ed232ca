"""Whose each block of a history is while both ends bring it: the loader's, prefill's, or nobody's.

Knows blocks by their number, and neither time nor threads; whoever holds the lock asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv_store.chain import StoredBlock


class State(Enum):
    WANTED = auto()  # stored, and nobody's yet
    LOADING = auto()
    LOADED = auto()
    COMPUTED = auto()  # prefill has taken it, or must: it is damaged or not stored


class Claims:
    """blocks[i]: what is stored for tokens from i * BLOCK_TOKENS on, None where nothing is. Those
    in front of block `first` are prefill's."""

    def __init__(self, blocks: Sequence[StoredBlock | None], first: int) -> None:
        self.blocks = list(blocks)
        self._states = [
            State.WANTED if block is not None and index >= first else State.COMPUTED
            for index, block in enumerate(blocks)
        ]
        self.frontier = first  # the block behind what prefill took last

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> State:
        return self._states[index]

    @property
    def end(self) -> int:
        """The token behind the last block."""
        last = self.blocks[-1] if self.blocks else None
        return last.start + last.num_tokens if last is not None else 0

    def mark(self, indices: Iterable[int], state: State) -> None:
        for index in indices:
            self._states[index] = state

    def take(self, first: int, count: int) -> None:
        """Prefill takes these blocks."""
        self.mark(range(first, first + count), State.COMPUTED)
        self.frontier = first + count

    def gap_at(self, first: int) -> int:
        """How many blocks from `first` on are neither there nor on their way."""
        gap = first
        while gap < len(self) and self._states[gap] in (State.WANTED, State.COMPUTED):
            gap += 1
        return gap - first

    def has_wanted(self, first: int, count: int) -> bool:
        return State.WANTED in self._states[first : first + count]

    def wanted(self, among: Iterable[int] | None = None) -> list[int]:
        indices = range(len(self)) if among is None else among
        return [index for index in indices if self._states[index] is State.WANTED]

    def to_come(self, among: Iterable[int]) -> list[int]:
        """Those that are not there."""
        return [index for index in among if self._states[index] is not State.LOADED]

    def least_computed(self, first: int, loads_more: bool) -> int:
        """So many blocks from `first` on hold all that prefill must compute."""
        never = (State.COMPUTED,) if loads_more else (State.COMPUTED, State.WANTED)
        behind = [index for index in range(first, len(self)) if self._states[index] in never]
        return behind[-1] + 1 - first if behind else 0

    def is_whole(self, first: int) -> bool:
        """Whether the blocks from `first` on reach to the last one without a gap."""
        blocks = self.blocks[first:]
        return all(block is not None for block in blocks) and all(
            block.num_tokens == BLOCK_TOKENS for block in blocks[:-1] if block is not None
        )

    def num_open(self, stop: int) -> int:
        """Of the blocks between prefill and block `stop`, how many are not there."""
        between = self._states[self.frontier : stop]
        return sum(state in (State.WANTED, State.COMPUTED) for state in between)

    def run_before(self, stop: int, most: int) -> range:
        """The wanted blocks in front of block `stop` that can be read together: equally long
        neighbours, at most `most` and at least the last one."""
        start = stop - 1
        while start > 0 and stop - start < most and self._fits(start - 1, start):
            start -= 1
        return range(start, stop)

    def _fits(self, index: int, following: int) -> bool:
        block, other = self.blocks[index], self.blocks[following]
        return (
            self._states[index] is State.WANTED
            and block is not None
            and other is not None
            and block.num_tokens == other.num_tokens
        )
