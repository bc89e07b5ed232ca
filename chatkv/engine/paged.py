"""The pool of a GPU: a sequence's blocks lie anywhere, and full ones belong to several sequences.

What two sequences begin with alike is there once. A block knows how many runs hold it; who is to
write into one that others hold gets a copy of its own first (`reserve`), and since every write is
behind the tokens that a turn keeps, that is one block, where the turn departs from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chatkv.engine.pool import BLOCK_TOKENS, Pool, Run


@dataclass(eq=False)
class PagedPool(Pool):
    """kv: [num_blocks, num_layers, 2 (keys, values), num_kv_heads, BLOCK_TOKENS, head_dim]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        shape = config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim
        self.kv = torch.empty((self.num_blocks, *shape), dtype=self.dtype, device=self.device)
        self._free = list(range(self.num_blocks))[::-1]
        self._holders = [0] * self.num_blocks  # how many runs hold each block

    @property
    def blocks(self) -> Tensor:
        return self.kv

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def slot_index(self, run: Run, start: int, stop: int) -> Tensor:
        first = start // BLOCK_TOKENS
        blocks = torch.tensor(run.blocks[first : -(-stop // BLOCK_TOKENS)], dtype=torch.int64)
        slots = blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        base = first * BLOCK_TOKENS
        return slots.flatten()[start - base : stop - base].to(self.device)

    def is_reserved(self, run: Run, num_tokens: int, num_kept: int = 0) -> bool:
        with self.lock:
            return num_tokens <= run.capacity and not self._shared(run, num_tokens, num_kept)

    def reserve(self, run: Run, num_tokens: int, num_kept: int = 0) -> None:
        needed = -(-num_tokens // BLOCK_TOKENS)
        with self.lock:
            while True:
                shared = self._shared(run, num_tokens, num_kept)
                if len(shared) + needed - run.num_blocks <= len(self._free):
                    break
                if not self.reclaim():
                    raise self._no_room(num_tokens)
            blocks = list(run.blocks)
            for index in shared:
                copy = self._take()
                self.kv[copy] = self.kv[blocks[index]]
                self._let_go(blocks[index])
                blocks[index] = copy
            blocks += [self._take() for _ in range(needed - len(blocks))]
            run.blocks = blocks

    def adopt(self, run: Run, num_tokens: int, source: Run, start: int, stop: int) -> None:
        first = -(-start // BLOCK_TOKENS)  # of the whole blocks
        last = max(first, stop // BLOCK_TOKENS)
        with self.lock:
            shared = list(source.blocks[first:last])
            for block in shared:
                self._holders[block] += 1
            for block in run.blocks[first:]:
                self._let_go(block)
            run.blocks = [*run.blocks[:first], *shared]
            self.reserve(run, start, num_kept=start)
            self.reserve(run, num_tokens, num_kept=stop)
            # What is left in front of and behind the whole blocks is copied.
            front = start, min(first * BLOCK_TOKENS, stop)
            for begin, end in (front, (last * BLOCK_TOKENS, stop)):
                if begin < end:
                    index = begin // BLOCK_TOKENS
                    part = slice(begin - index * BLOCK_TOKENS, end - index * BLOCK_TOKENS)
                    copied = self.kv[source.blocks[index], ..., part, :]
                    self.kv[run.blocks[index], ..., part, :] = copied

    def release(self, run: Run) -> None:
        with self._changed:
            for block in run.blocks:
                self._let_go(block)
            run.blocks = range(0)
            self._changed.notify_all()

    def _shared(self, run: Run, num_tokens: int, num_kept: int) -> list[int]:
        """Which of the run's blocks hold tokens [num_kept, num_tokens) and belong to others too."""
        written = range(num_kept // BLOCK_TOKENS, -(-num_tokens // BLOCK_TOKENS))
        return [
            index
            for index in written[: max(0, run.num_blocks - written.start)]
            if self._holders[run.blocks[index]] > 1
        ]

    def _take(self) -> int:
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)
