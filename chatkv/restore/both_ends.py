"""Restoring from both ends: stored blocks arrive from the last to the first while prefill computes
from the first, and where they meet the history is whole.

To the engine this is ordinary chunked prefill whose next piece is asked for: it skips what has
arrived, waits for a block that is just arriving, and takes the rest. A block that is missing or
turns out to be damaged is simply never skipped, so a loader that fails costs time and nothing else.
The last step takes what follows the history too, and begins when the first layers of what is still
to come have come; there both meet in front of some layer (`last_step`).

Each end takes only what it will have done before the other could, by what both were expected to
take at first and by what they take as it goes: an estimate that is far off is put right within a
few blocks. A last step that finds it waits for too much is given up, and prefill computes more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from chatkv.engine.arriving import Gap, LayerMissing
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore.claims import Claims, State
from chatkv.restore.end_loader import EndLoader, Load
from chatkv.restore.ends import Ends
from chatkv.restore.estimates import Estimates
from chatkv.restore.last_step import LastStep
from chatkv.restore.measured import Measured, Range, left_step_s
from chatkv.restore.meeting import Pull
from chatkv_store.chain import StoredBlock

# How often prefill asks, while it waits for the loader, whether that is still worth it.
POLL_S = 0.02


class BothEnds:
    """The KV of one history on its way into the pool.

    blocks, first: see `Claims`. load_block_s: what loading a block is expected to take;
    step_s(ranges): what a step is that computes these tokens. is_alone, groups: see `Ends`.
    can_leave: whether a step asks how far its front is to be computed.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock | None],
        first: int,
        load: Load,
        load_block_s: float,
        step_s: Callable[[Sequence[Range]], float],
        is_alone: Callable[[], bool] = lambda: True,
        groups: Sequence[range] = (range(1),),
        can_leave: bool = False,
    ) -> None:
        self._can_leave = can_leave
        self._claims = Claims(blocks, first)
        self._estimates = Estimates(load_block_s, step_s, len(groups))
        self._loading, self._computing = self._estimates.loading, self._estimates.computing
        self._ends = Ends(self._claims, self._estimates, groups, is_alone)
        self._changed = self._ends.changed
        self._step: tuple[Range, ...] = ()  # that prefill computes
        self._loader = EndLoader(self._ends, load)

    @property
    def num_loaded(self) -> int:
        """Tokens that prefill skipped; of those that it skipped in some layers, that share."""
        return self._ends.num_loaded

    @property
    def num_bytes(self) -> int:
        """Read for that."""
        return self._ends.num_bytes

    @property
    def measured(self) -> Measured:
        return self._ends.measured

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of it by now."""
        lines = []
        if self._ends.damage is not None:
            lines.append(f"stored KV is unusable and computed again: {self._ends.damage}")
        if self._ends.error is not None:
            lines.append(f"loading stopped, the rest was computed: {self._ends.error}")
        return tuple(lines)

    def next_gap(self, position: int, total: int, limit: int) -> Gap:
        """See `Arriving`. Waits where prefill has nothing to do but what is just being loaded."""
        ends = self._ends
        with self._changed:
            self._computing.forget()  # where the last step came to nothing
            taken = ends.last.taken if ends.last is not None else None
            ends.lose_step()
            if taken:  # nobody writes into what is to be computed anew
                self._changed.wait_for(lambda: self._loading.run != taken)
            ends.total, ends.waited_s, ends.declines = total, 0.0, False
            self._changed.notify_all()
            gap = self._next(position, limit)
            self._step = tuple(part for part in (gap[:2], gap.behind) if part is not None)
            self._computing.begin(self._estimates.step_s(self._step))
            self._changed.notify_all()
            return gap

    def computed(self, position: int) -> None:
        """See `Arriving`. Notes what the step took."""
        ends, share = self._ends, 1.0
        with self._changed:
            # The engine may stop sooner than it was told to, when others want to compute too.
            step = tuple((start, min(stop, position)) for start, stop in self._step)
            if ends.last is not None and ends.last.has_left:
                share = ends.last.share
                ends.num_loaded += round((1 - share) * (step[0][1] - step[0][0]))
                index, num_layers = len(ends.measured.steps), ends.groups[-1].stop
                ends.measured.left = index, ends.last.low, num_layers
            step_s = left_step_s(self._estimates.step_s, step, share)
            ends.measured.prefill_s += self._computing.end(step_s, ends.waited_s)
            ends.measured.steps.append(step)
            ends.num_begun = 0

    def close(self) -> None:
        """Stop loading; afterwards nothing is written into the pool."""
        self._loader.close()

    # --- prefill's end --------------------------------------------------------------------------

    def _next(self, position: int, limit: int) -> Gap:
        claims = self._claims
        while True:
            index = position // BLOCK_TOKENS
            if index >= len(claims):
                return Gap(position, min(self._ends.total, position + limit))
            block = claims.blocks[index]
            if claims[index] is State.LOADED and block is not None:
                end = block.start + block.num_tokens
                self._ends.num_loaded += max(0, end - position)
                position = max(position, end)
                if block.num_tokens < BLOCK_TOKENS:  # stored in part: the rest is prefill's
                    return Gap(position, self._end_of(index, position + limit))
                continue
            pull = self._ends.pull(index)
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
        is_alone_there = self._ends.is_over or self._ends.declines
        if is_alone_there or not self._claims.has_wanted(first, pull.gap):
            return count
        if not self._loading.is_known:
            count = min(count, -(-pull.gap // 2))
        least = 1 if self._claims[first] is State.COMPUTED else 0
        return max(least, pull.share_apart(count))

    def _last_share(self, first: int, pull: Pull, apart: int, limit: int) -> int | None:
        """How many blocks the last step takes; None: it should not be the next one."""
        least = self._claims.least_computed(first, loads_more=not self._ends.is_over)
        most = min(pull.gap, max(0, limit - self._num_behind) // BLOCK_TOKENS)
        may_wait = self._claims.is_whole(first + least) and self._ends.is_alone()
        if least > most or not may_wait or self._ends.stops_run:
            return None
        pull = replace(pull, is_shared=self._can_leave and not least)
        last = pull.share_together(least, most)
        is_sooner = not apart or pull.together_s(last) <= pull.apart_s(apart)
        return last if is_sooner else None

    def _last_step(self, first: int, count: int, position: int, limit: int) -> Gap:
        """`count` blocks, and what follows the history as the layers of the others come."""
        ends, claims = self._ends, self._claims
        is_shared = self._can_leave and not claims.least_computed(first, not ends.is_over)
        last = LastStep(claims, first, count, ends.groups if is_shared and count else ())
        if not last.awaited and not last.is_shared:
            return Gap(position, min(ends.total, position + limit))
        ends.last = last
        start = min(max(position, last.awaited.start * BLOCK_TOKENS), claims.end)
        ends.num_begun = claims.end - start
        ends.num_loaded += ends.num_begun
        behind = claims.end, min(ends.total, claims.end + limit)
        if not count:
            return Gap(*behind, wait_layer=self._wait_layer)
        goes_on = self._goes_on if last.is_shared else None
        return Gap(position, start, behind, self._wait_layer, goes_on)

    def _goes_on(self, layer: int) -> int:
        with self._changed:
            if self._ends.last is None:
                raise LayerMissing
            self._changed.notify_all()
            return self._ends.last.goes_on(layer)

    def _wait_layer(self, layer: int) -> None:
        began, ends = time.perf_counter(), self._ends
        with self._changed:
            try:
                while ends.last is not None and not ends.last.has_come(layer, self._loading):
                    if ends.is_over or self._gives_up(ends.last):
                        ends.lose_step()
                    else:
                        self._changed.wait(POLL_S)
                if ends.last is None:
                    raise LayerMissing
            finally:
                ends.waited_s += time.perf_counter() - began

    def _gives_up(self, last: LastStep) -> bool:
        """Whether what the step waits for takes too long. Then the loader is to let go of it."""
        if not self._claims.to_come(last.awaited):
            return False
        first = min(self._step[0][0], last.awaited.start * BLOCK_TOKENS)
        wanted, missing = self._claims.wanted(last.awaited), (first, self._claims.end)
        is_too_slow = self._estimates.is_too_slow(len(wanted), missing, self._ends.total)
        if is_too_slow:
            self._ends.stops_run = bool(self._loading.run)
        return is_too_slow

    @property
    def _num_behind(self) -> int:
        """Tokens that follow the blocks."""
        return max(0, self._ends.total - self._claims.end)

    def _end_of(self, index: int, wanted: int) -> int:
        """Where a piece that ends in block `index` stops: at the block's end, or, where nothing
        is stored behind it, as far on as is wanted."""
        is_last = index + 1 >= len(self._claims)
        return min(wanted if is_last else (index + 1) * BLOCK_TOKENS, self._ends.total)
