"""Restoring from both ends: stored blocks arrive from the last to the first while prefill computes
from the first, and where they meet the history is whole.

To the engine this is ordinary chunked prefill whose next piece is asked for: it skips what has
arrived, waits for a block that is just arriving, and takes the rest. A block that is missing or
turns out to be damaged is simply never skipped, so a loader that fails costs time and nothing else.
What follows the history need not wait for the last block to be whole: it begins with the layers
that have come.

Each end takes only what it will have done before the other could, by what both were expected to
take at first and by what they take as it goes: an estimate that is far off is put right within a
few blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto

from chatkv.engine.engine import LayerMissing
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore.cost import Measured
from chatkv.restore.pace import Pace
from chatkv_store.chain import StoredBlock

# The loader reads runs of blocks that take about this long: many are read faster, few leave less
# in flight for prefill to wait for when the ends meet.
RUN_S, MAX_RUN_BLOCKS = 0.02, 8


# load(blocks, on_layers) puts blocks into the pool: how many leading ones are sound, the bytes
# read, and what is wrong with the next one. on_layers(n): the first n layers of all are there.
Load = Callable[[Sequence[StoredBlock], Callable[[int], None]], tuple[int, int, str | None]]


class _State(Enum):
    WANTED = auto()  # stored, and nobody's yet
    LOADING = auto()
    LOADED = auto()
    COMPUTED = auto()  # prefill has taken it, or must: it is damaged or not stored


class BothEnds:
    """The KV of one history on its way into the pool.

    blocks[i]: what is stored for tokens from i * BLOCK_TOKENS on, None where nothing is. Those in
    front of block `first` are prefill's.
    load_block_s: what loading a block is expected to take. compute_s(start, stop): what prefill is.
    is_alone(): whether nobody else computes, who would have to wait for layers too.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock | None],
        first: int,
        load: Load,
        load_block_s: float,
        compute_s: Callable[[int, int], float],
        is_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self._blocks, self._load, self._is_alone = list(blocks), load, is_alone
        self._load_block_s, self._compute_s = load_block_s, compute_s
        self._states = [
            _State.WANTED if block is not None and index >= first else _State.COMPUTED
            for index, block in enumerate(blocks)
        ]
        self._frontier = first  # the block behind prefill's last piece
        self._piece = (0, 0)
        self.wait_layer: Callable[[int], None] | None = None  # of the last gap (see `Arriving`)
        self._awaited = range(0)  # blocks that the last piece began without
        self._num_begun = 0  # tokens before it that prefill skipped
        self._layers_ready = 0  # of the blocks that are just being loaded
        self._rest_s = 0.0  # that prefill takes for what follows the history
        self._loading, self._computing = Pace(), Pace()
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
            self._note_rest(total)
            self.wait_layer, self._awaited = None, range(0)
            self._piece = start, stop = self._next(position, total, limit)
            if self.wait_layer is None:  # else it takes what the loader takes
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

    def _note_rest(self, total: int) -> None:
        """Expect prefill of what follows the blocks, which goes on while the last ones arrive."""
        last = self._blocks[-1] if self._blocks else None
        if last is not None and self._is_alone():
            rest_s = self._compute_s(last.start + last.num_tokens, total)
            self._rest_s = rest_s * self._computing.factor

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
            elif state is _State.LOADING and self._is_last_to_come(index) and self._is_alone():
                return self._begin_without(index, position, total, limit)
            elif state is _State.LOADING or not (count := self._share(index, limit)):
                self._changed.wait()
            else:
                for taken in range(index, index + count):
                    self._states[taken] = _State.COMPUTED
                self._frontier = index + count
                return position, self._end_of(index + count - 1, position + limit, total)

    def _is_last_to_come(self, index: int) -> bool:
        """Whether all blocks from `index` on are there or on their way, without a gap."""
        states = self._states[index:]
        whole = all(block and block.num_tokens == BLOCK_TOKENS for block in self._blocks[index:-1])
        return whole and all(state in (_State.LOADING, _State.LOADED) for state in states)

    def _begin_without(self, index: int, position: int, total: int, limit: int) -> tuple[int, int]:
        """What follows the blocks that are still being loaded, to be computed as their layers
        come."""
        last = self._blocks[-1]
        assert last is not None
        end = last.start + last.num_tokens
        loading = [i for i in range(index, len(self._states)) if self._states[i] is _State.LOADING]
        self._awaited = range(loading[0], loading[-1] + 1)
        self.wait_layer = self._wait_layer
        self._num_begun = end - position
        self.num_loaded += self._num_begun
        return end, min(total, end + limit)

    def _wait_layer(self, layer: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._layers_ready > layer or not self._is_awaiting)
            if self._layers_ready <= layer and not self._has_come:
                self.num_loaded -= self._num_begun
                self._num_begun = 0
                raise LayerMissing

    @property
    def _is_awaiting(self) -> bool:
        return any(self._states[index] is _State.LOADING for index in self._awaited)

    @property
    def _has_come(self) -> bool:
        return all(self._states[index] is _State.LOADED for index in self._awaited)

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
            return max(computing_s + self._rest_s, left_s + (gap - first - taken) * load_s)

        even = (left_s + (gap - first) * load_s - fixed_s - self._rest_s) / (load_s + compute_s)
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
            sound, num_bytes, damage = self._load(wanted, self._layers_came)
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

    def _layers_came(self, num_layers: int) -> None:
        with self._changed:
            self._layers_ready = num_layers
            self._changed.notify_all()

    def _claim(self) -> range | None:
        """The last blocks that are still wanted, marked as loading; None when there are none, or
        prefill will sooner have been there."""
        with self._changed:
            wanted = [i for i, state in enumerate(self._states) if state is _State.WANTED]
            if self._is_closed or not wanted:
                return None
            stop = wanted[-1] + 1
            load_s, compute_s, fixed_s = self._block_s(wanted[0])
            between = self._states[self._frontier : stop]
            num_left = sum(state in (_State.WANTED, _State.COMPUTED) for state in between)
            until_met_s = self._computing.left_s + num_left * compute_s + fixed_s + self._rest_s
            if load_s > until_met_s and self._loading.is_known:
                return None
            # Equally long neighbours are read together; towards the meeting point one by one.
            room = min(RUN_S / max(load_s, 1e-9), MAX_RUN_BLOCKS, len(wanted) / 4)
            start = stop - 1
            while start > 0 and stop - start < int(room) and self._fits(start - 1, start):
                start -= 1
            for index in range(start, stop):
                self._states[index] = _State.LOADING
            self._layers_ready = 0
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
