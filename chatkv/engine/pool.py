"""The KV of live sequences on one device: a pool of blocks, and each sequence's run of them.

On a CPU a sequence's blocks are consecutive (`BlockPool`), so its keys of one layer and head are
one contiguous stretch of memory and attention reads views, never copies. A run that cannot grow
where it is moves to where it can. On a GPU they lie anywhere (`paged`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chatkv.errors import ContextFull
from chatkv.model.batch import Memory
from chatkv.model.config import ModelConfig

BLOCK_TOKENS = 64


@dataclass(eq=False)
class Run:
    """The blocks of one sequence, in their order."""

    blocks: Sequence[int] = range(0)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.blocks) * BLOCK_TOKENS

    # Of consecutive blocks:

    @property
    def first_block(self) -> int:
        return self.blocks[0] if self.blocks else 0

    @property
    def end(self) -> int:
        return self.first_block + len(self.blocks)

    @property
    def first_slot(self) -> int:
        """Index of the run's first token among the pool's token slots."""
        return self.first_block * BLOCK_TOKENS


@dataclass(eq=False)
class Pool(ABC):
    """`num_blocks` blocks of `BLOCK_TOKENS` tokens for every layer.

    Several threads may reserve and release, each only the runs of its own turn; `reclaim` is asked
    for room where there is none, until it says that it has no more to give. Runs change under
    `lock` alone.
    """

    config: ModelConfig
    num_blocks: int
    dtype: torch.dtype
    device: torch.device
    reclaim: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    @property
    @abstractmethod
    def blocks(self) -> Tensor:
        """All KV as the kernels see it: [blocks, num_layers, 2 (keys, values), num_kv_heads,
        tokens, head_dim]."""

    @abstractmethod
    def slot_index(self, run: Run, start: int, stop: int) -> Tensor:
        """Where in `blocks` a run's tokens [start, stop) are: slots, int64 on the pool's device."""

    @property
    @abstractmethod
    def free_blocks(self) -> int: ...

    @abstractmethod
    def reserve(self, run: Run, num_tokens: int, num_kept: int = 0) -> None:
        """Make room in `run` for num_tokens tokens in all; its KV keeps its values, and what
        follows its first num_kept tokens may be written.

        The run's blocks may change. Raises ContextFull, with nothing changed, when they do not fit.
        """

    @abstractmethod
    def is_reserved(self, run: Run, num_tokens: int, num_kept: int = 0) -> bool:
        """Whether `reserve` would have nothing to do."""

    @abstractmethod
    def adopt(self, run: Run, num_tokens: int, source: Run, start: int, stop: int) -> None:
        """Reserve, and let tokens [start, stop) of `run` have the KV that they have in `source`.

        Raises ContextFull, with the KV of the first `start` tokens as it was.
        """

    @abstractmethod
    def release(self, run: Run) -> None:
        """Give the run's blocks back; the run is empty then."""

    def notify(self) -> None:
        """Somebody may have become able to give room."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait until blocks are given back, or may be, but not for longer than that."""
        with self._changed:
            self._changed.wait(timeout_s)

    def _no_room(self, num_tokens: int) -> ContextFull:
        return ContextFull(
            f"{num_tokens} tokens do not fit into memory: "
            f"{self.free_blocks * BLOCK_TOKENS} tokens of KV are free"
        )


@dataclass(eq=False)
class BlockPool(Pool):
    """A pool whose runs are consecutive.

    kv: [num_layers, 2 (keys, values), num_kv_heads, num_blocks * BLOCK_TOKENS, head_dim].
    Memory is committed by the system as it is first written, so a large pool costs little.
    """

    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        slots = self.num_blocks * BLOCK_TOKENS
        self.kv = torch.empty(
            (config.num_layers, 2, config.num_kv_heads, slots, config.head_dim),
            dtype=self.dtype,
            device=self.device,
        )
        # Views made once: slicing a five-dimensional tensor 60 times a token shows in a profile.
        self.keys = [self.kv[layer, 0] for layer in range(config.num_layers)]
        self.values = [self.kv[layer, 1] for layer in range(config.num_layers)]
        self.memory = Memory(self.keys, self.values)

    @property
    def blocks(self) -> Tensor:
        return self.kv[None]  # to the kernels: one large block

    def slot_index(self, run: Run, start: int, stop: int) -> Tensor:
        return torch.arange(run.first_slot + start, run.first_slot + stop, device=self.device)

    @property
    def free_blocks(self) -> int:
        with self._changed:
            return self.num_blocks - sum(run.num_blocks for run in self.runs)

    def is_reserved(self, run: Run, num_tokens: int, num_kept: int = 0) -> bool:
        return num_tokens <= run.capacity

    def reserve(self, run: Run, num_tokens: int, num_kept: int = 0) -> None:
        needed = -(-num_tokens // BLOCK_TOKENS)
        if needed <= run.num_blocks:
            return
        with self._changed:
            while (first := self._place(run, needed)) is None:
                if not self.reclaim():
                    raise self._no_room(num_tokens)
            if not run.num_blocks:
                self.runs.append(run)
            elif first != run.first_block:
                old = slice(run.first_slot, run.first_slot + run.capacity)
                slot = first * BLOCK_TOKENS
                self.kv[:, :, :, slot : slot + run.capacity] = self.kv[:, :, :, old].clone()
            run.blocks = range(first, first + needed)

    def adopt(self, run: Run, num_tokens: int, source: Run, start: int, stop: int) -> None:
        with self.lock:
            self.reserve(run, num_tokens)
            self.slots(run, start, stop).copy_(self.slots(source, start, stop))

    def release(self, run: Run) -> None:
        with self._changed:
            self.runs = [other for other in self.runs if other is not run]
            run.blocks = range(0)
            self._changed.notify_all()

    def move(self, run: Run, source: int, target: int) -> None:
        """Let the run's token at `target` have the KV of that at `source`."""
        self.slots(run, target, target + 1).copy_(self.slots(run, source, source + 1))

    def slots(self, run: Run, start: int, stop: int) -> Tensor:
        """View of the KV of a run's tokens [start, stop) in every layer, shaped as `kv`."""
        base = run.first_slot
        return self.kv[:, :, :, base + start : base + stop]

    def _place(self, run: Run, needed: int) -> int | None:
        """The first block of a stretch where the run can have `needed` blocks, None where none is
        free: where it is, in the largest gap, or over both gaps around it."""
        if run.num_blocks and needed <= self._room_after(run):
            return run.first_block
        start, size = max(self._gaps(), key=lambda gap: gap[1], default=(0, 0))
        if size >= needed:
            # Not right behind a neighbour where there is room to spare: both may have to grow.
            return start + (size - needed) // 2 if start else start
        if run.num_blocks:
            before = max((o.end for o in self.runs if o.end <= run.first_block), default=0)
            if run.first_block - before + self._room_after(run) >= needed:
                return before
        return None

    def _room_after(self, run: Run) -> int:
        """Blocks this run could have without moving."""
        following = [other.first_block for other in self.runs if other.first_block >= run.end]
        return min(following, default=self.num_blocks) - run.first_block

    def _gaps(self) -> list[tuple[int, int]]:
        """Free stretches as (first block, number of blocks)."""
        gaps, cursor = [], 0
        for run in sorted(self.runs, key=lambda run: run.first_block):
            gaps.append((cursor, run.first_block - cursor))
            cursor = run.end
        gaps.append((cursor, self.num_blocks - cursor))
        return [gap for gap in gaps if gap[1] > 0]


@dataclass
class RunSpan:
    """`length` new tokens of a run, behind the `start` it already holds (a `decoder.Span`)."""

    pool: BlockPool
    run: Run
    start: int
    length: int
    wait_layer: Callable[[int], None] | None = None  # for KV of this run that is still arriving
    draft: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._base = self.run.first_slot
        self._new = self._base + self.start
        self._end = self._new + self.length

    @property
    def place(self) -> tuple[Memory, int] | None:
        return (self.pool.memory, self._base) if self.wait_layer is None else None

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.wait_layer is not None:
            self.wait_layer(layer)
        pool_keys, pool_values = self.pool.keys[layer], self.pool.values[layer]
        pool_keys[:, self._new : self._end].copy_(keys.transpose(0, 1))
        pool_values[:, self._new : self._end].copy_(values.transpose(0, 1))
        return pool_keys[:, self._base : self._end], pool_values[:, self._base : self._end]
