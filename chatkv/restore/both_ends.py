"""Restoring from both ends: stored blocks arrive from the last to the first while prefill computes
from the first, and where they meet the history is whole.

To the engine this is ordinary chunked prefill whose next piece is asked for: it skips what has
arrived, waits for a block that is just arriving, and takes the rest. A block that is missing or
turns out to be damaged is simply never skipped, so a loader that fails costs time and nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv_store.chain import StoredBlock


class _State(Enum):
    WANTED = auto()  # stored, and nobody's yet
    LOADING = auto()
    LOADED = auto()
    COMPUTED = auto()  # prefill has taken it, or must: it is damaged or not stored


class BothEnds:
    """The KV of one history on its way into the pool.

    blocks[i]: what is stored for tokens from i * BLOCK_TOKENS on, None where nothing is.
    load(blocks) puts blocks into the pool; how many leading ones are sound, and the bytes read.
    share(position): the part of a remaining gap that prefill should take, by the rates of both.
    run_blocks: how many blocks the loader takes at a time. Many are read faster, few leave less in
    flight for prefill to wait for when the ends meet.
    """

    wait_layer = None  # a block counts as there when all its layers are

    def __init__(
        self,
        blocks: Sequence[StoredBlock | None],
        first: int,
        load: Callable[[Sequence[StoredBlock]], tuple[int, int]],
        share: Callable[[int], float],
        run_blocks: int = 1,
    ) -> None:
        self._blocks, self._load, self._share = list(blocks), load, share
        self._run_blocks = run_blocks
        self._states = [
            _State.WANTED if block is not None and index >= first else _State.COMPUTED
            for index, block in enumerate(blocks)
        ]
        self._changed = threading.Condition()
        self._is_closed = False
        self.num_loaded = 0  # tokens that prefill skipped
        self.num_bytes = 0  # read for that
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-from-the-end", daemon=True)
        self._thread.start()

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of it by now."""
        if self.error is None:
            return ()
        return (f"loading stopped, the rest was computed: {self.error}",)

    def next_gap(self, position: int, total: int, limit: int) -> tuple[int, int]:
        """The next tokens to compute, [start, stop) with start >= position and at most `limit` of
        them; all before start have their KV. Waits for a block that is just being loaded."""
        with self._changed:
            while True:
                index = position // BLOCK_TOKENS
                if index >= len(self._states):
                    return position, min(total, position + limit)
                state, block = self._states[index], self._blocks[index]
                if state is _State.LOADING:
                    self._changed.wait()
                elif state is _State.LOADED and block is not None:
                    end = block.start + block.num_tokens
                    self.num_loaded += max(0, end - position)
                    position = max(position, end)
                    if block.num_tokens < BLOCK_TOKENS:  # stored in part: the rest is prefill's
                        return position, self._end_of(index, position + limit, total)
                else:
                    return position, self._take(position, total, limit)

    def close(self) -> None:
        """Stop loading; afterwards nothing is written into the pool."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _take(self, position: int, total: int, limit: int) -> int:
        """Give prefill the next piece of the gap that begins at `position`; its end."""
        first = position // BLOCK_TOKENS
        gap = first
        while gap < len(self._states) and self._states[gap] in (_State.WANTED, _State.COMPUTED):
            gap += 1
        wanted = sum(state is _State.WANTED for state in self._states[first:gap])
        count = max(1, limit // BLOCK_TOKENS)
        if wanted:  # the other end is coming nearer: leave it what it will have loaded meanwhile
            count = min(count, max(1, math.ceil((gap - first) * self._share(position))))
        last = min(first + count, gap)
        for index in range(first, last):
            self._states[index] = _State.COMPUTED
        return self._end_of(last - 1, position + limit, total)

    def _end_of(self, index: int, wanted: int, total: int) -> int:
        """Where a piece that ends in block `index` stops: at the block's end, or, where nothing
        is stored behind it, as far on as is wanted."""
        is_last = index + 1 >= len(self._states)
        return min(wanted if is_last else (index + 1) * BLOCK_TOKENS, total)

    def _run(self) -> None:
        while (run := self._claim()) is not None:
            try:
                wanted = [b for b in self._blocks[run.start : run.stop] if b is not None]
                sound, num_bytes = self._load(wanted)
                self.num_bytes += num_bytes
            except Exception as error:
                self.error, sound = error, 0
            with self._changed:
                for offset, index in enumerate(run):
                    # What follows a damaged block in the run was not read; it is read next.
                    self._states[index] = (
                        _State.LOADED
                        if offset < sound
                        else _State.COMPUTED
                        if offset == sound
                        else _State.WANTED
                    )
                self._changed.notify_all()
                if self.error is not None:
                    return

    def _claim(self) -> range | None:
        """The last blocks that are still wanted, marked as loading; None when there are none."""
        with self._changed:
            if self._is_closed:
                return None
            wanted = [i for i, state in enumerate(self._states) if state is _State.WANTED]
            if not wanted:
                return None
            stop = wanted[-1] + 1
            start = stop - 1
            # Equally long neighbours are read together; towards the meeting point one by one.
            room = min(self._run_blocks, max(1, len(wanted) // 4))
            while start > 0 and stop - start < room and self._fits(start - 1, start):
                start -= 1
            for index in range(start, stop):
                self._states[index] = _State.LOADING
            return range(start, stop)

    def _fits(self, index: int, following: int) -> bool:
        block, other = self._blocks[index], self._blocks[following]
        return (
            self._states[index] is _State.WANTED
            and block is not None
            and other is not None
            and block.num_tokens == other.num_tokens
        )
