"""Saving KV in the background, so that it never delays a token.

The queue is bounded in bytes. When the disk cannot follow, blocks are dropped and counted instead
of making the caller wait: a dropped block is recomputed some day, and costs time only. Those that
were not written after all are added to the store's counters when the writer closes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv_store.errors import BudgetFull, StoreError, StoreFull
from chatkv_store.keys import block_key

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.chain import NewBlock
    from chatkv_store.layout import KVLayout

MAX_QUEUED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class WriterStats:
    queued: int  # blocks waiting or being written
    written: int
    skipped: int  # stored already
    dropped: int  # refused because the queue was full, or lost to an error
    num_bytes: int  # payload bytes written
    error: str | None  # the last StoreError that blocks were lost to, but for a full budget


@dataclass(frozen=True, slots=True)
class _Job:
    namespace: bytes
    layout: KVLayout | None
    blocks: Sequence[NewBlock]
    codec: str
    num_bytes: int
    work: Callable[[], object] | None = None  # instead of blocks


class BlockWriter:
    """A thread that stores what is submitted, in order. A context manager: leaving it flushes.

    The arrays of a submitted block belong to the writer until they are written: hand over copies,
    or callables that make them (called on the writer's thread).
    """

    def __init__(self, store: BlockStore, *, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._store = store
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # the first one is being written
        self._queued_bytes = 0
        self._closing = False
        self._written = self._skipped = self._dropped = self._num_bytes = 0
        self._error: str | None = None
        self._lost: set[bytes] = set()  # keys of blocks that were dropped, and not queued since
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        namespace: bytes,
        layout: KVLayout,
        blocks: Sequence[NewBlock],
        codec: str = "lossless",
    ) -> bool:
        """Queue `blocks`; False when they were dropped because the queue is full. Never waits."""
        num_bytes = sum(len(block.token_ids) for block in blocks) * layout.bytes_per_token
        with self._changed:
            if self._closing or self._queued_bytes + num_bytes > self._max_queued_bytes:
                self._drop(blocks)
                return False
            if self._lost:
                self._lost.difference_update(_keys(blocks))
            self._jobs.append(_Job(namespace, layout, blocks, codec, num_bytes))
            self._queued_bytes += num_bytes
            self._changed.notify_all()
            return True

    def call(self, work: Callable[[], object]) -> None:
        """Have `work` done on the writer's thread, behind what was queued before it. Its StoreError
        is kept for `stats`, as one of a write is; after `close` nothing is done."""
        with self._changed:
            if not self._closing:
                self._jobs.append(_Job(b"", None, (), "", 0, work))
                self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was submitted is on disk; False when `timeout` seconds passed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Refuse new blocks, write the queued ones and end the thread; False on `timeout`.

        After a timeout the rest is dropped at the next block border. Without one the caller helps:
        nobody computes any more, and its thread has a higher priority than the writer's.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while timeout is None and (job := self._take_last()) is not None:
            self._write(job)
        done = self.flush(timeout)
        with self._changed:
            while len(self._jobs) > 1:  # none where the flush was complete
                job = self._jobs.pop()
                self._queued_bytes -= job.num_bytes
                self._drop(job.blocks)
        self._thread.join(timeout)
        if done:
            self._count_lost()
        return done

    def stats(self) -> WriterStats:
        with self._changed:
            queued = sum(len(job.blocks) for job in self._jobs)
            return WriterStats(
                queued, self._written, self._skipped, self._dropped, self._num_bytes, self._error
            )

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_last(self) -> _Job | None:
        """The job that was queued last, unless the thread is at it."""
        with self._changed:
            if len(self._jobs) < 2:
                return None
            job = self._jobs.pop()
            self._queued_bytes -= job.num_bytes
            return job

    def _run(self) -> None:
        _yield_to_others()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs[0]
            self._write(job)
            with self._changed:
                self._jobs.popleft()
                self._queued_bytes -= job.num_bytes
                self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        if job.work is not None:
            self._do(job.work)
            return
        assert job.layout is not None
        try:
            result = self._store.put(job.namespace, job.layout, job.blocks, job.codec)
        except Exception as error:  # a lost block is no reason to lose the thread and all others
            with self._changed:
                self._drop(job.blocks)
                if not isinstance(error, BudgetFull):
                    self._error = str(error) if isinstance(error, StoreError) else repr(error)
                if isinstance(error, StoreFull):  # the store has counted them as refused
                    self._lost.difference_update(_keys(job.blocks))
            return
        with self._changed:
            self._written += result.written
            self._skipped += result.skipped
            self._num_bytes += result.num_bytes

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # as with a block that cannot be written
            with self._changed:
                self._error = str(error) if isinstance(error, StoreError) else repr(error)

    def _drop(self, blocks: Sequence[NewBlock]) -> None:
        self._dropped += len(blocks)
        self._lost.update(_keys(blocks))

    def _count_lost(self) -> None:
        with self._changed:
            num_lost = len(self._lost)
            self._lost.clear()
        if num_lost:
            with suppress(StoreError):  # a number for `cache stats`, no more
                self._store.count(dropped_blocks=num_lost)


def _keys(blocks: Sequence[NewBlock]) -> list[bytes]:
    return [block_key(block.parent, block.token_ids) for block in blocks]


def _yield_to_others() -> None:
    """Let this thread run only when the cores have nothing better to do (Linux; elsewhere nothing).

    Compute threads wait for each other after every operation, so a writer at the same priority
    slowed prefill down by a factor of ten; at the lowest one the difference is not measurable.
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
