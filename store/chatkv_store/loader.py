"""Reading the KV of a matched prefix into its place, with several threads.

Order is layer group by layer group, and within a group from the first block to the last: the
first layers of the whole history arrive first, so a caller may start on them while the others
load. A block with one bad value is a miss, and nothing after it is usable: its successors attend
to it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from chatkv_store.chain import RunResult, StoredBlock
from chatkv_store.errors import BlockMiss
from chatkv_store.layout import KVLayout

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.codec import Bits

RUN_BLOCKS = 8  # values read in one go into an array


def default_threads() -> int:
    """How many threads to load with: one per core, at most 8, and two to overlap disk and CPU.

    Two cores: 2 threads were fastest warm and cold; 4 lost a tenth to the interpreter lock.
    """
    return max(2, min(8, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What arrived. Tokens before `num_tokens_ok` are in place; whatever follows is undefined."""

    num_tokens_ok: int
    bytes_read: int  # payload bytes
    misses: list[str] = field(default_factory=list)  # "block 12 (token 768): reason"
    stopped: bool = False


@runtime_checkable
class Destination(Protocol):
    """A place that KV does not reach as an array in memory."""

    @property
    def run_blocks(self) -> int:
        """The most values that `read` takes."""

    def read(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult:
        """Bring value `group` of neighbouring blocks to the tokens from `start` on, up to the first
        bad one. What it says is read has arrived. Called by several threads."""


def load_blocks(
    store: BlockStore,
    blocks: Sequence[StoredBlock],
    layout: KVLayout,
    destination: Bits | Destination,
    threads: int,
    on_group_done: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    positions: Sequence[int] | None = None,
    groups: range | None = None,
) -> LoadResult:
    """Decode `blocks` (a chain, as `BlockStore.match` returns it) into `destination`.

    `destination` is [num_layers, 2 (K, V), num_kv_heads, tokens, head_dim] bits of any strides, or
    stands for such; block `i` goes to the tokens from `positions[i]`, by default its own `start`.
    `on_group_done(group, num_tokens_ok)` is called for each layer group in order, on one of the
    threads, when all that will come of it has come. `stop()` is asked between values. `groups`:
    only these, and what is said to have arrived has in these.
    """
    into = destination if isinstance(destination, Destination) else _Array(layout, destination)
    groups = range(layout.num_values) if groups is None else groups
    load = _Load(store, blocks, layout, into, on_group_done, stop, positions, threads, groups)
    workers = [
        threading.Thread(target=load.work, name=f"kv-read-{i}", daemon=True)
        for i in range(max(1, min(threads, len(blocks) * len(groups))))
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:  # Ctrl-C: nobody may go on writing into the destination
        load.cancel()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    return load.result()


@dataclass(frozen=True, slots=True)
class _Array:
    """An array as a destination."""

    layout: KVLayout
    bits: Bits
    run_blocks: int = RUN_BLOCKS

    def read(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult:
        layers = self.layout.value_layers(group)
        tokens = slice(start, start + sum(block.num_tokens for block in blocks))
        out = self.bits[layers.start : layers.stop, :, :, tokens]
        if len(blocks) > 1:
            return store.read_run(blocks, group, out)
        try:
            return RunResult(1, store.read(blocks[0], group, out), None)
        except BlockMiss as miss:
            return RunResult(0, 0, miss.reason)


class _Load:
    """The state that the threads of one `load_blocks` share."""

    def __init__(
        self,
        store: BlockStore,
        blocks: Sequence[StoredBlock],
        layout: KVLayout,
        destination: Destination,
        on_group_done: Callable[[int, int], None] | None,
        stop: Callable[[], bool] | None,
        positions: Sequence[int] | None,
        threads: int,
        groups: range,
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._destination, self._groups = destination, groups
        self._on_group_done = on_group_done
        self._stop = stop
        self._positions = positions if positions is not None else [b.start for b in blocks]
        self._lock = threading.Lock()
        longest = max(1, min(destination.run_blocks, len(blocks) // threads))
        runs = _runs(blocks, self._positions, layout.block_tokens, longest)
        self._tasks: Iterator[tuple[int, range]] = (
            (group, run) for group in groups for run in runs
        )
        self._loaded = [0] * len(blocks)  # values in place, per block
        self._pending = dict.fromkeys(groups, len(blocks))  # blocks to come, per group
        self._next_report = groups.start
        self._reporting = threading.Lock()
        self._limit = len(blocks)  # the first bad block; later ones are of no use
        self._misses: dict[int, str] = {}
        self._bytes_read = 0
        self._cancelled = self._stopped = False
        self._error: BaseException | None = None

    def work(self) -> None:
        """Take values until none is left. Runs on every thread."""
        try:
            while not self._is_over():
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                self._load_run(*task)
        except BaseException as error:  # raised again by `result`, on the caller's thread
            with self._lock:
                self._error = self._error or error
                self._cancelled = True

    def cancel(self) -> None:
        self._cancelled = True

    def result(self) -> LoadResult:
        if self._error is not None:
            raise self._error
        misses = [
            f"block {index} (token {self._blocks[index].start}): {reason}"
            for index, reason in sorted(self._misses.items())
        ]
        return LoadResult(self._tokens_ok(), self._bytes_read, misses, self._stopped)

    def _is_over(self) -> bool:
        if self._stop is not None and self._stop():
            self._stopped = self._cancelled = True
        return self._cancelled

    def _load_run(self, group: int, run: range) -> None:
        usable = range(run.start, max(run.start, min(run.stop, self._limit)))
        done = self._read(group, usable) if usable else RunResult(0, 0, None)
        with self._lock:
            self._bytes_read += done.num_bytes
            for index in usable[: done.num_blocks]:
                self._loaded[index] += 1
            if done.miss is not None:
                bad = usable[done.num_blocks]
                self._misses.setdefault(bad, done.miss)
                self._limit = min(self._limit, bad)
            self._pending[group] -= len(run)
            group_is_done = self._pending[group] == 0
        if group_is_done and self._on_group_done is not None:
            self._report()

    def _read(self, group: int, run: range) -> RunResult:
        blocks = self._blocks[run.start : run.stop]
        return self._destination.read(self._store, blocks, group, self._positions[run.start])

    def _report(self) -> None:
        """Call `on_group_done` for every group whose turn has come."""
        assert self._on_group_done is not None
        with self._reporting:
            while self._next_report in self._groups and not self._pending[self._next_report]:
                group = self._next_report
                self._next_report += 1
                usable = self._blocks[: self._limit]
                self._on_group_done(group, sum(block.num_tokens for block in usable))

    def _tokens_ok(self) -> int:
        """Tokens of the leading blocks of which every value is in place."""
        tokens = 0
        for block, loaded in zip(self._blocks, self._loaded, strict=True):
            if loaded != len(self._groups):
                break
            tokens += block.num_tokens
        return tokens


def _runs(
    blocks: Sequence[StoredBlock], positions: Sequence[int], block_tokens: int, longest: int
) -> list[range]:
    """Cut the blocks into what is read in one go: whole neighbours, at most `longest` of them."""
    whole = [b.num_tokens == b.header.num_tokens == block_tokens for b in blocks]
    runs: list[range] = []
    for index in range(len(blocks)):
        if (
            runs
            and len(runs[-1]) < longest
            and whole[index - 1]
            and whole[index]
            and positions[index] == positions[index - 1] + block_tokens
            and blocks[index].header.codec == blocks[index - 1].header.codec
        ):
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
