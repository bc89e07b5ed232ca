"""Restoring from both ends: stored blocks arrive from the last to the first while prefill computes
from the first, and where they meet the history is whole.

To the engine this is ordinary chunked prefill whose next piece is asked for: it skips what has
arrived, waits for a block that is just arriving, and takes the rest. A block that is missing or
turns out to be damaged is simply never skipped, so a loader that fails costs time and nothing else.

Each end takes only what it will have done before the other could, by what both were expected to
take at first and by what they take as it goes: an estimate that is far off is put right within a
few blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore.cost import Measured
from chatkv_store.chain import StoredBlock

# The loader reads runs of blocks that take about this long: many are read faster, few leave less
# in flight for prefill to wait for when the ends meet.
RUN_S, MAX_RUN_BLOCKS = 0.02, 8


class _State(Enum):
    WANTED = auto()  # stored, and nobody's yet
    LOADING = auto()
    LOADED = auto()
    COMPUTED = auto()  # prefill has taken it, or must: it is damaged or not stored


class _Pace:
    """How many times longer than expected one end takes, followed from piece to piece."""

    def __init__(self) -> None:
        self.is_known = False
        self._factor = 1.0
        self._expected_s = 1e-9  # of the piece that is on its way
        self._began: float | None = None

    def begin(self, expected_s: float) -> None:
        self._expected_s, self._began = max(expected_s, 1e-9), time.perf_counter()

    def end(self, expected_s: float | None = None) -> float:
        """The piece is done, or a part of it that was expected to take expected_s; the seconds
        that it took."""
        seconds = self._elapsed_s
        factor = seconds / max(expected_s or self._expected_s, 1e-9)
        self._factor = (self._factor + factor) / 2 if self.is_known else factor
        self.is_known, self._began = True, None
        return seconds

    @property
    def is_busy(self) -> bool:
        return self._began is not None

    @property
    def factor(self) -> float:
        return max(self._factor, self._elapsed_s / self._expected_s)

    @property
    def left_s(self) -> float:
        """Until the piece on its way is done; what is overdue will be so for as long again."""
        return abs(self._expected_s * self._factor - self._elapsed_s) if self.is_busy else 0.0

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began


class BothEnds:
    """The KV of one history on its way into the pool.

    blocks[i]: what is stored for tokens from i * BLOCK_TOKENS on, None where nothing is. Those in
    front of block `first` are prefill's.
    load(blocks) puts blocks into the pool; how many leading ones are sound, the bytes read, and
    what is wrong with the next one.
    load_block_s: what loading a block is expected to take. compute_s(start, stop): what prefill is.
    """

    wait_layer = None  # a block counts as there when all its layers are

    def __init__(
        self,
        blocks: Sequence[StoredBlock | None],
        first: int,
        load: Callable[[Sequence[StoredBlock]], tuple[int, int, str | None]],
        load_block_s: float,
        compute_s: Callable[[int, int], float],
    ) -> None:
        self._blocks, self._load = list(blocks), load
        self._load_block_s, self._compute_s = load_block_s, compute_s
        self._states = [
            _State.WANTED if block is not None and index >= first else _State.COMPUTED
            for index, block in enumerate(blocks)
        ]
        self._frontier = first  # the block behind prefill's last piece
        self._piece = (0, 0)
        self._loading, self._computing = _Pace(), _Pace()
        self._changed = threading.Condition()
        self._is_closed = self._is_over = False  # over: the loader takes no more blocks
        self.num_loaded = 0  # tokens that prefill skipped
        self.num_bytes = 0  # read for that
        self.measured = Measured()
        self.damage: str | None = None  # of the first block that was not sound
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-from-the-end", daemon=True)
        self._thread.start()

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of it by now."""
        lines = []
        if self.damage is not None:
            lines.append(f"stored KV is unusable and computed again: {self.damage}")
        if self.error is not None:
            lines.append(f"loading stopped, the rest was computed: {self.error}")
        return tuple(lines)

    def next_gap(self, position: int, total: int, limit: int) -> tuple[int, int]:
        """The next tokens to compute, [start, stop) with start >= position and at most `limit` of
        them; all before start have their KV. Waits for a block that is just being loaded."""
        with self._changed:
            self._piece_done(position)
            start, stop = self._next(position, total, limit)
            self._piece = start, stop
            self._computing.begin(self._compute_s(start, stop))
            return start, stop

    def close(self) -> None:
        """Stop loading; afterwards nothing is written into the pool."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- prefill's end --------------------------------------------------------------------------

    def _piece_done(self, position: int) -> None:
        """Prefill has come to `position`: note what its last piece took."""
        start = self._piece[0]
        if self._computing.is_busy and position > start:
            # The engine may stop sooner than it was told to, when others want to compute too.
            self.measured.prefill_s += self._computing.end(self._compute_s(start, position))
            self.measured.pieces.append((start, position))

    def _next(self, position: int, total: int, limit: int) -> tuple[int, int]:
        while True:
            index = position // BLOCK_TOKENS
            if index >= len(self._states):
                return position, min(total, position + limit)
            state, block = self._states[index], self._blocks[index]
            if state is _State.LOADED and block is not None:
                end = block.start + block.num_tokens
                self.num_loaded += max(0, end - position)
                position = max(position, end)
                if block.num_tokens < BLOCK_TOKENS:  # stored in part: the rest is prefill's
                    return position, self._end_of(index, position + limit, total)
            elif state is _State.LOADING or not (count := self._share(index, limit)):
                self._changed.wait()
            else:
                for taken in range(index, index + count):
                    self._states[taken] = _State.COMPUTED
                self._frontier = index + count
                return position, self._end_of(index + count - 1, position + limit, total)

    def _share(self, first: int, limit: int) -> int:
        """How many blocks of the gap that begins at block `first` prefill should take next, the
        other end coming nearer meanwhile; 0: the loader will have them sooner."""
        gap = first
        while gap < len(self._states) and self._states[gap] in (_State.WANTED, _State.COMPUTED):
            gap += 1
        count = min(max(1, limit // BLOCK_TOKENS), gap - first)
        if self._is_over or _State.WANTED not in self._states[first:gap]:
            return count
        if not self._loading.is_known:
            count = min(count, -(-(gap - first) // 2))
        load_s, compute_s, fixed_s = self._block_s(first)
        left_s = self._loading.left_s

        def met_s(taken: int) -> float:
            """Until both ends have done all of the gap, if prefill takes so much of it now."""
            computing_s = taken * compute_s + fixed_s if taken else 0.0
            return max(computing_s, left_s + (gap - first - taken) * load_s)

        even = (left_s + (gap - first) * load_s - fixed_s) / (load_s + compute_s)
        at_least = 1 if self._states[first] is _State.COMPUTED else 0
        below = max(0, int(even))
        return max(at_least, min(count, min(below, below + 1, key=met_s)))

    def _end_of(self, index: int, wanted: int, total: int) -> int:
        """Where a piece that ends in block `index` stops: at the block's end, or, where nothing
        is stored behind it, as far on as is wanted."""
        is_last = index + 1 >= len(self._states)
        return min(wanted if is_last else (index + 1) * BLOCK_TOKENS, total)

    def _block_s(self, index: int) -> tuple[float, float, float]:
        """Seconds to load one block, to compute it, and of each piece beside that, by the pace of
        both until now."""
        start = index * BLOCK_TOKENS
        one_s = self._compute_s(start, start + BLOCK_TOKENS) * self._computing.factor
        two_s = self._compute_s(start, start + 2 * BLOCK_TOKENS) * self._computing.factor
        return self._load_block_s * self._loading.factor, two_s - one_s, 2 * one_s - two_s

    # --- the loader's end -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.error is None and (run := self._claim()) is not None:
                self._fetch(run)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _fetch(self, run: range) -> None:
        wanted = [block for block in self._blocks[run.start : run.stop] if block is not None]
        sound = 0
        try:
            sound, num_bytes, damage = self._load(wanted)
            self.num_bytes += num_bytes
            self.damage = self.damage or damage
        except Exception as error:
            self.error = error
        with self._changed:
            load_s = self._loading.end()
            if sound == len(run):  # else it says nothing about the disk's rate
                self.measured.load_s += load_s
                self.measured.loaded += sum(block.num_tokens for block in wanted)
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

    def _claim(self) -> range | None:
        """The last blocks that are still wanted, marked as loading; None when there are none, or
        prefill will sooner have been there."""
        with self._changed:
            wanted = [i for i, state in enumerate(self._states) if state is _State.WANTED]
            if self._is_closed or not wanted:
                return None
            stop = wanted[-1] + 1
            load_s, compute_s, _ = self._block_s(wanted[0])
            between = self._states[self._frontier : stop]
            num_left = sum(state in (_State.WANTED, _State.COMPUTED) for state in between)
            until_met_s = self._computing.left_s + num_left * compute_s
            if load_s > until_met_s and self._loading.is_known:
                return None
            # Equally long neighbours are read together; towards the meeting point one by one.
            room = min(RUN_S / max(load_s, 1e-9), MAX_RUN_BLOCKS, len(wanted) / 4)
            start = stop - 1
            while start > 0 and stop - start < int(room) and self._fits(start - 1, start):
                start -= 1
            for index in range(start, stop):
                self._states[index] = _State.LOADING
            self._loading.begin(self._load_block_s * (stop - start))
            return range(start, stop)

    def _fits(self, index: int, following: int) -> bool:
        block, other = self._blocks[index], self._blocks[following]
        return (
            self._states[index] is _State.WANTED
            and block is not None
            and other is not None
            and block.num_tokens == other.num_tokens
        )
