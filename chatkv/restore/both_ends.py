"""Restoring from both ends: stored blocks arrive from the last to the first while prefill computes
from the first, and where they meet the history is whole.

To the engine this is ordinary chunked prefill whose next piece is asked for: it skips what has
arrived, waits for a block that is just arriving, and takes the rest. A block that is missing or
turns out to be damaged is simply never skipped, so a loader that fails costs time and nothing else.
The last step takes what follows the history too, and begins when the first layers of what is still
to come have come (`meeting`).

Each end takes only what it will have done before the other could, by what both were expected to
take at first and by what they take as it goes: an estimate that is far off is put right within a
few blocks. A last step that finds it waits for too much is given up, and prefill computes more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from chatkv.engine.arriving import Gap, LayerMissing
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore.claims import Claims, State
from chatkv.restore.cost import Measured, Range
from chatkv.restore.estimates import Estimates
from chatkv.restore.meeting import Pull
from chatkv_store.chain import StoredBlock

# The loader's runs of blocks take about so long: many are read faster, few leave less in flight.
RUN_S, MAX_RUN_BLOCKS = 0.02, 8
# How long the loader waits at first for prefill to say what it takes.
START_S = 0.02
# How often prefill asks, while it waits for the loader, whether that is still worth it.
POLL_S = 0.02

OnLayers = Callable[[int], None]
# load(blocks, on_layers, stop) puts blocks into the pool: how many leading ones are sound, the
# bytes read, and what is wrong with the next one. on_layers(n): the first n layers of all are
# there. It ends between values when stop() says so.
Load = Callable[[Sequence[StoredBlock], OnLayers, Callable[[], bool]], tuple[int, int, str | None]]


class BothEnds:
    """The KV of one history on its way into the pool.

    blocks, first: see `Claims`. load_block_s: what loading a block is expected to take;
    step_s(ranges): what a step is that computes these tokens. is_alone(): whether nobody else
    computes, who would have to wait for layers too. num_groups: in so many parts, one after the
    other, the layers of a load arrive.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock | None],
        first: int,
        load: Load,
        load_block_s: float,
        step_s: Callable[[Sequence[Range]], float],
        is_alone: Callable[[], bool] = lambda: True,
        num_groups: int = 1,
    ) -> None:
        self._claims, self._load, self._is_alone = Claims(blocks, first), load, is_alone
        self._estimates = Estimates(load_block_s, step_s, num_groups)
        self._loading, self._computing = self._estimates.loading, self._estimates.computing
        self._total = 0  # tokens, known when prefill has begun
        self._step: tuple[Range, ...] = ()  # that prefill computes
        self._awaited = range(0)  # blocks that it began without
        self._num_begun = 0  # tokens that it counts on
        self._waited_s = 0.0
        self._last_run = range(0)  # blocks to be loaded next, in one go
        self._changed = threading.Condition()
        self._is_closed = self._is_over = False  # over: the loader takes no more blocks
        self._stops_run = False  # what is just being loaded is not wanted any more
        self.num_loaded = 0  # tokens that prefill skipped
        self.num_bytes = 0  # read for that
        self.measured = Measured()
        self.damage: str | None = None  # of the first block that was not sound
        self.error: Exception | None = None
        target, name = self._keep_loading, "kv-from-the-end"
        self._thread = threading.Thread(target=target, name=name, daemon=True)
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

    def next_gap(self, position: int, total: int, limit: int) -> Gap:
        """See `Arriving`. Waits where prefill has nothing to do but what is just being loaded."""
        with self._changed:
            self._computing.forget()  # where the last step came to nothing
            self._awaited = self._last_run = range(0)
            self._total, self._num_begun, self._waited_s = total, 0, 0.0
            self._changed.notify_all()
            gap = self._next(position, limit)
            self._step = tuple(part for part in (gap[:2], gap.behind) if part is not None)
            self._computing.begin(self._estimates.step_s(self._step))
            self._changed.notify_all()
            return gap

    def computed(self, position: int) -> None:
        """See `Arriving`. Notes what the step took."""
        with self._changed:
            # The engine may stop sooner than it was told to, when others want to compute too.
            step = tuple((start, min(stop, position)) for start, stop in self._step)
            step_s = self._estimates.step_s(step)
            self.measured.prefill_s += self._computing.end(step_s, self._waited_s)
            self.measured.steps.append(step)

    def close(self) -> None:
        """Stop loading; afterwards nothing is written into the pool."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- prefill's end --------------------------------------------------------------------------

    def _next(self, position: int, limit: int) -> Gap:
        claims = self._claims
        while True:
            index = position // BLOCK_TOKENS
            if index >= len(claims):
                return Gap(position, min(self._total, position + limit))
            block = claims.blocks[index]
            if claims[index] is State.LOADED and block is not None:
                end = block.start + block.num_tokens
                self.num_loaded += max(0, end - position)
                position = max(position, end)
                if block.num_tokens < BLOCK_TOKENS:  # stored in part: the rest is prefill's
                    return Gap(position, self._end_of(index, position + limit))
                continue
            pull = self._pull(index)
            count = self._share(index, pull, limit)
            last = self._last_share(index, pull, count, limit)
            if last is not None:
                return self._last_step(index, last, position, limit)
            if count:
                claims.take(index, count)
                return Gap(position, self._end_of(index + count - 1, position + limit))
            self._changed.wait(POLL_S)  # what is overdue is not waited for any longer

    def _share(self, first: int, pull: Pull, limit: int) -> int:
        """How many blocks of the gap that begins at block `first` a step of its own should take,
        the other end coming nearer meanwhile; 0: the loader will have them sooner."""
        count = min(max(1, limit // BLOCK_TOKENS), pull.gap)
        if self._is_over or not self._claims.has_wanted(first, pull.gap):
            return count
        if not self._loading.is_known:
            count = min(count, -(-pull.gap // 2))
        least = 1 if self._claims[first] is State.COMPUTED else 0
        return max(least, pull.share_apart(count))

    def _last_share(self, first: int, pull: Pull, apart: int, limit: int) -> int | None:
        """How many blocks the last step takes; None: it should not be the next one."""
        least = self._claims.least_computed(first, loads_more=not self._is_over)
        most = min(pull.gap, max(0, limit - self._num_behind) // BLOCK_TOKENS)
        may_wait = self._claims.is_whole(first + least) and self._is_alone()
        if least > most or not may_wait or self._stops_run:
            return None
        last = pull.share_together(least, most)
        is_sooner = not apart or pull.together_s(last) <= pull.apart_s(apart)
        return last if is_sooner else None

    def _last_step(self, first: int, taken: int, position: int, limit: int) -> Gap:
        """`taken` blocks, and what follows the history as the layers of the others come."""
        claims = self._claims
        claims.take(first, taken)
        self._awaited = range(first + taken, len(claims))
        if not self._awaited:
            return Gap(position, min(self._total, position + limit))
        wanted = claims.wanted(self._awaited)
        self._last_run = range(wanted[0], wanted[-1] + 1) if wanted else range(0)
        start = max(position, self._awaited.start * BLOCK_TOKENS)
        self._num_begun = claims.end - start
        self.num_loaded += self._num_begun
        behind = claims.end, min(self._total, claims.end + limit)
        if not taken:
            return Gap(*behind, wait_layer=self._wait_layer)
        return Gap(position, start, behind, self._wait_layer)

    def _wait_layer(self, layer: int) -> None:
        began = time.perf_counter()
        with self._changed:
            try:
                while not self._has_come(layer):
                    if self._is_lost or self._gives_up():
                        self.num_loaded -= self._num_begun
                        self._num_begun = 0
                        raise LayerMissing
                    self._changed.wait(POLL_S)
            finally:
                self._waited_s += time.perf_counter() - began

    def _has_come(self, layer: int) -> bool:
        to_come = self._claims.to_come(self._awaited)
        return not to_come or self._loading.has(layer, to_come)

    @property
    def _is_lost(self) -> bool:
        """Whether a block that the step began without will not come."""
        to_come = [self._claims[index] for index in self._claims.to_come(self._awaited)]
        return State.COMPUTED in to_come or self._is_over

    def _gives_up(self) -> bool:
        """Whether what the step waits for takes too long. Then the loader is to let go of it."""
        first = min(self._step[0][0], self._awaited.start * BLOCK_TOKENS)
        wanted, missing = self._claims.wanted(self._awaited), (first, self._claims.end)
        is_too_slow = self._estimates.is_too_slow(len(wanted), missing, self._total)
        if is_too_slow:
            self._stops_run, self._last_run = bool(self._loading.run), range(0)
        return is_too_slow

    def _pull(self, index: int) -> Pull:
        gap, rest = self._claims.gap_at(index), (self._claims.end, self._total)
        return self._estimates.pull(index, gap, rest, self._is_alone())

    @property
    def _num_behind(self) -> int:
        """Tokens that follow the blocks."""
        return max(0, self._total - self._claims.end)

    def _end_of(self, index: int, wanted: int) -> int:
        """Where a piece that ends in block `index` stops: at the block's end, or, where nothing
        is stored behind it, as far on as is wanted."""
        is_last = index + 1 >= len(self._claims)
        return min(wanted if is_last else (index + 1) * BLOCK_TOKENS, self._total)

    # --- the loader's end -----------------------------------------------------------------------

    def _keep_loading(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._total or self._is_closed, START_S)
        try:
            while self.error is None and (run := self._claim()) is not None:
                self._fetch(run)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _fetch(self, run: range) -> None:
        wanted = [block for block in self._claims.blocks[run.start : run.stop] if block is not None]
        sound, damage = 0, None
        try:
            sound, num_bytes, damage = self._load(wanted, self._layers_came, self._is_to_stop)
            self.num_bytes += num_bytes
            self.damage = self.damage or damage
        except Exception as error:
            self.error = error
        with self._changed:
            load_s = self._loading.end_run(is_whole=not self._stops_run)
            if sound == len(run):  # else it says nothing about the disk's rate
                self.measured.load_s += load_s
                self.measured.loaded += sum(block.num_tokens for block in wanted)
            self._claims.mark(run[:sound], State.LOADED)
            # What follows a damaged block in the run was not read; it is read next.
            self._claims.mark(run[sound:], State.WANTED)
            if damage is not None or self.error is not None:
                self._claims.mark(run[sound : sound + 1], State.COMPUTED)
            self._changed.notify_all()

    def _layers_came(self, num_layers: int) -> None:
        with self._changed:
            self._loading.layers_came(num_layers)
            self._changed.notify_all()

    def _is_to_stop(self) -> bool:
        return self._is_closed or self._stops_run

    def _claim(self) -> range | None:
        """What to load next, marked as loading: what prefill has left to the loader, or the last
        blocks that are still wanted; None when there are none, or prefill will sooner have been
        there."""
        with self._changed:
            wanted = self._claims.wanted()
            if self._is_closed or not wanted or not (run := self._next_run(wanted)):
                self._is_over = True
                return None
            self._claims.mark(run, State.LOADING)
            self._loading.begin_run(run)
            self._stops_run = False
            return run

    def _next_run(self, wanted: list[int]) -> range:
        if self._last_run:
            run, self._last_run = self._last_run, range(0)
            return run
        pull, stop = self._pull(wanted[0]), wanted[-1] + 1
        computing_s = self._claims.num_open(stop) * pull.compute_s + pull.fixed_s + pull.rest_s
        if pull.load_s > self._computing.left_s + computing_s and self._loading.is_known:
            return range(0)
        # Many are read together; towards the meeting point one by one.
        room = min(RUN_S / max(pull.load_s, 1e-9), MAX_RUN_BLOCKS, len(wanted) / 4)
        return self._claims.run_before(stop, int(room))
