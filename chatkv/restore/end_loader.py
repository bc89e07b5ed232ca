"""The loader's end of a restore from both ends: a thread that takes blocks from the last one on.

It takes what it will have brought before prefill could have computed it; where it has nothing to do
beside the step on its way, it looks again when the next one begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from chatkv.restore.claims import State
from chatkv.restore.ends import Ends
from chatkv.restore.last_step import LastStep, Layers
from chatkv_store.chain import StoredBlock

# Runs of blocks take about so long: many are read faster, few leave less in flight.
RUN_S, MAX_RUN_BLOCKS = 0.02, 32
# How long it waits at first for prefill to say what it takes.
START_S = 0.02

OnLayers = Callable[[int], None]
# load(blocks, layers, on_layers, stop) puts these layers of the blocks into the pool: how many
# leading blocks are sound, the bytes read, and what is wrong with the next one. on_layers(n): of
# these layers, those in front of layer n are there. It ends between values when stop() says so.
Load = Callable[
    [Sequence[StoredBlock], Layers, OnLayers, Callable[[], bool]], tuple[int, int, str | None]
]


class Run(NamedTuple):
    """What is loaded in one go: layers of some blocks."""

    blocks: range
    layers: Layers
    last: LastStep | None = None  # whose own blocks these are


class EndLoader:
    def __init__(self, ends: Ends, load: Load) -> None:
        self._ends, self._load, self._loading = ends, load, ends.estimates.loading
        target, name = self._keep_loading, "kv-from-the-end"
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop loading; afterwards nothing is written into the pool."""
        with self._ends.changed:
            self._ends.is_closed = True
            self._ends.changed.notify_all()
        self._thread.join()

    def _keep_loading(self) -> None:
        ends = self._ends
        with ends.changed:
            ends.changed.wait_for(lambda: ends.total or ends.is_closed, START_S)
        try:
            while ends.error is None and (run := self._claim()) is not None:
                self._fetch(run)
        finally:
            with ends.changed:
                ends.is_over = True
                ends.changed.notify_all()

    def _fetch(self, run: Run) -> None:
        ends = self._ends
        stored = ends.claims.blocks[run.blocks.start : run.blocks.stop]
        blocks = [block for block in stored if block is not None]
        sound, damage = 0, None
        try:
            arguments = blocks, run.layers, self._layers_came, self._is_to_stop
            sound, num_bytes, damage = self._load(*arguments)
            ends.num_bytes += num_bytes
            ends.damage = ends.damage or damage
        except Exception as error:
            ends.error = error
        with ends.changed:
            load_s = self._loading.end_run(is_whole=not ends.stops_run)
            if sound == len(run.blocks):  # else it says nothing about the disk's rate
                share = len(run.layers.groups) / len(ends.groups)
                ends.measured.load_s += load_s
                ends.measured.loaded += share * sum(block.num_tokens for block in blocks)
            if run.last is not None:
                self._brought_layers(run.last, is_sound=sound == len(run.blocks))
            else:
                self._brought(run.blocks, sound, damage is not None or ends.error is not None)
            ends.changed.notify_all()

    def _brought_layers(self, last: LastStep, is_sound: bool) -> None:
        if is_sound:
            last.brought()
        elif not last.failed() and self._ends.last is last:
            self._ends.lose_step()

    def _brought(self, blocks: range, sound: int, is_damaged: bool) -> None:
        claims = self._ends.claims
        claims.mark(blocks[:sound], State.LOADED)
        # What follows a damaged block in the run was not read; it is read next.
        claims.mark(blocks[sound:], State.WANTED)
        if is_damaged:
            claims.mark(blocks[sound : sound + 1], State.COMPUTED)
        if sound < len(blocks) and self._ends.last is not None:
            self._ends.lose_step()

    def _layers_came(self, num_layers: int) -> None:
        with self._ends.changed:
            self._loading.layers_came(num_layers)
            self._ends.changed.notify_all()

    def _is_to_stop(self) -> bool:
        return self._ends.is_closed or self._ends.stops_run

    def _claim(self) -> Run | None:
        """What to load next; None: prefill will sooner have done all that is left."""
        ends = self._ends
        with ends.changed:
            while not ends.is_closed:
                run = self._next_run()
                if run is not None:
                    if run.last is None:
                        ends.claims.mark(run.blocks, State.LOADING)
                    self._loading.begin_run(run.blocks, len(run.layers.groups))
                    ends.stops_run = False
                    return run
                if ends.last is not None or not ends.claims.wanted():
                    break
                ends.declines = True
                ends.changed.notify_all()
                ends.changed.wait()
            ends.is_over = True
            return None

    def _next_run(self) -> Run | None:
        ends, claims = self._ends, self._ends.claims
        whole = Layers(range(len(ends.groups)), 0)
        if ends.last is not None:
            if wanted := claims.wanted(ends.last.awaited):
                return Run(range(wanted[0], wanted[-1] + 1), whole)
            layers = self._next_layers(ends.last)
            return Run(ends.last.taken, layers, ends.last) if layers else None
        blocks = self._next_blocks(claims.wanted())
        return Run(blocks, whole) if blocks else None

    def _next_layers(self, last: LastStep) -> Layers | None:
        """Of what the last step itself has taken."""
        ends, computing = self._ends, self._ends.estimates.computing
        load_s = self._loading.block_s * len(last.taken) / len(ends.groups)
        most = int(RUN_S / max(load_s, 1e-9)) if self._loading.is_known else 1
        compute_s = computing.expected_s * computing.settled / ends.groups[-1].stop
        if last.low > 1:  # of one that is on its way, half is done
            compute_s = (computing.elapsed_s - ends.waited_s) / (last.low - 0.5)
        return last.claim(load_s, compute_s, most)

    def _next_blocks(self, wanted: list[int]) -> range:
        """What prefill has left to the loader, or the last blocks that are still wanted; none where
        prefill will sooner have been there."""
        ends, claims, computing = self._ends, self._ends.claims, self._ends.estimates.computing
        if not wanted:
            return range(0)
        pull, stop = ends.pull(wanted[0]), wanted[-1] + 1
        computing_s = claims.num_open(stop) * pull.compute_s + pull.fixed_s + pull.rest_s
        if pull.load_s > computing.left_s + computing_s and self._loading.is_known:
            return range(0)
        # Many are read together; towards the meeting point one by one.
        room = min(RUN_S / max(pull.load_s, 1e-9), MAX_RUN_BLOCKS, len(wanted) / 4)
        return claims.run_before(stop, int(room))
