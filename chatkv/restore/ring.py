"""Slabs of host memory between the disk and a device: few, large, and allocated once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from torch import Tensor

from chatkv.engine.pool import Pool
from chatkv.restore.device_codecs import DeviceCodecs

# All slabs together, and one of them: larger copies are hardly faster.
RING_BYTES = 256 << 20
SLAB_BYTES = 16 << 20


class Ring:
    """Slabs of host memory, allocated when the first one is needed and from then on kept; pinned
    where they are for a GPU, as many as the system grants: containers may grant little."""

    def __init__(self, num_slabs: int, slab_bytes: int, is_pinned: bool) -> None:
        self.num_slabs, self.slab_bytes, self._is_pinned = num_slabs, slab_bytes, is_pinned
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._is_allocated = False
        self._lock = threading.Lock()

    @contextmanager
    def slab(self) -> Iterator[Tensor]:
        """Bytes for one thread; waits until some are free."""
        with self._lock:
            if not self._is_allocated:
                self._allocate()
                self._is_allocated = True
        slab = self._free.get()
        try:
            yield slab
        finally:
            self._free.put(slab)

    def _allocate(self) -> None:
        for index in range(self.num_slabs):
            try:
                slab = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            except RuntimeError:
                if index:
                    return
                slab = torch.empty(self.slab_bytes, dtype=torch.uint8)
            self._free.put(slab)


class Way:
    """Between the host and the device of a pool: slabs, codecs, and a stream each way (None: not a
    GPU). One for each pool, whoever moves its KV."""

    def __init__(self, ring: Ring, pool: Pool) -> None:
        self.ring, self.codecs = ring, DeviceCodecs(pool)
        is_gpu = pool.device.type == "cuda"
        self.into = torch.cuda.Stream(pool.device) if is_gpu else None  # type: ignore[no-untyped-call]
        self.out = torch.cuda.Stream(pool.device) if is_gpu else None  # type: ignore[no-untyped-call]


def wait(stream: torch.cuda.Stream | None) -> None:
    """Until what this thread has put on the stream is done."""
    if stream is not None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        event.synchronize()
