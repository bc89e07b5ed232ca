"""Loading KV layer by layer, while the layers that have come already compute the new prompt.

Prefill of what follows the history needs a layer's KV only when it gets to that layer. So it
begins at once, as if all were there, and waits in front of each layer. Where some of the KV turns
out to be damaged or missing, what was computed on it is thrown away, and prefill begins again
where the sound part ends. Where others would have to wait with it, it begins when all is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chatkv.engine.arriving import Gap, LayerMissing
from chatkv_store.layout import KVLayout

OnGroup = Callable[[int, int], None]  # group of layers, tokens from the first on


@dataclass(frozen=True)
class Arrived:
    """What a load brought. Tokens before num_cached are in the pool in all layers."""

    num_cached: int
    num_bytes: int  # of payload
    seconds: float
    cpu_s: float  # of all threads of the process
    damage: str | None = None  # why not more

    @property
    def notices(self) -> tuple[str, ...]:
        if self.damage is None:
            return ()
        return (f"stored KV is unusable and computed again: {self.damage}",)


class LayerLoad:
    """The KV of tokens [start, expected) of one sequence on its way into the pool.

    load(on_group) reads it: on_group(group, num_cached) says that a group of layers is as complete
    as it will be, for so many tokens from the first on. is_alone(): whether nobody else computes.
    """

    def __init__(
        self,
        start: int,
        expected: int,
        layout: KVLayout,
        load: Callable[[OnGroup], Arrived],
        is_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self._start, self._expected, self._layout, self._load = start, expected, layout, load
        self._is_alone = is_alone
        self._changed = threading.Condition()
        self._layers_ready = 0
        self._is_short = False
        self.waited_s = 0.0  # that prefill spent in front of layers
        self.arrived: Arrived | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-by-layer", daemon=True)
        self._thread.start()

    @property
    def num_loaded(self) -> int:
        """Tokens that came from the disk until now."""
        return self.arrived.num_cached - self._start if self.arrived else 0

    @property
    def num_bytes(self) -> int:
        """Payload bytes read until now."""
        return self.arrived.num_bytes if self.arrived else 0

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of it by now."""
        if self.error is not None:
            return (f"loading stopped, the rest was computed: {self.error}",)
        return self.arrived.notices if self.arrived else ()

    def next_gap(self, position: int, total: int, limit: int) -> Gap:
        """While layers are on their way, what follows the expected history; else what follows the
        part of it that is sound (see `Arriving`)."""
        if self._is_short or not self._is_alone():
            self.close()
        is_coming = self._thread.is_alive()
        if is_coming:
            start = self._expected
        else:
            start = self.arrived.num_cached if self.arrived else self._start
        start = max(start, position)
        wait_layer = self._wait_layer if is_coming else None
        return Gap(start, min(total, start + limit), wait_layer=wait_layer)

    def computed(self, position: int) -> None:
        """See `Arriving`."""

    def close(self) -> None:
        """Wait for the end of the load; nothing is written into the pool afterwards."""
        began = time.perf_counter()
        self._thread.join()
        self.waited_s += time.perf_counter() - began

    def _wait_layer(self, layer: int) -> None:
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_short or layer < self._layers_ready)
            self.waited_s += time.perf_counter() - began
            if self._is_short:
                raise LayerMissing

    def _run(self) -> None:
        try:
            self.arrived = self._load(self._group_done)
        except Exception as error:
            self.error = error
        with self._changed:
            whole = self.arrived is not None and self.arrived.num_cached >= self._expected
            self._is_short = self._is_short or not whole
            self._layers_ready = self._layout.num_layers if whole else self._layers_ready
            self._changed.notify_all()

    def _group_done(self, group: int, num_cached: int) -> None:
        with self._changed:
            if num_cached < self._expected:
                self._is_short = True
            else:
                self._layers_ready = self._layout.value_layers(group).stop
            self._changed.notify_all()
