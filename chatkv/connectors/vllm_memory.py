"""Having the memory of vLLM's KV before it is needed.

On a CPU vLLM takes zeroed memory, which the system hands out page by page when it is first written.
To load KV into such memory took 3 times as long as into memory that is there already (raw float32
on a virtual machine), and attention that writes it pays the same. So a thread of the least priority
asks for it in the order in which vLLM hands out blocks, and changes nothing in it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from chatkv.process import available_bytes, physical_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14 and newer
_AT_ONCE = 2 << 20  # bytes in one call: other threads that ask for memory may wait for it
_LEAST_FREE = 0.25  # of the machine's memory is left to others


def have(layers: Sequence[Tensor]) -> threading.Thread:
    """Begin to ask for the memory of these tensors [blocks, ...]."""
    thread = threading.Thread(target=_ask, args=(layers,), name="kv-memory", daemon=True)
    thread.start()
    return thread


def _ask(layers: Sequence[Tensor]) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        madvise = ctypes.CDLL(None).madvise
        page = os.sysconf("SC_PAGE_SIZE")
        for address, num_bytes in _pieces(layers):
            if available_bytes() < _LEAST_FREE * physical_bytes():
                return
            first = address // page * page
            length = ctypes.c_size_t(address + num_bytes - first)
            if madvise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE):
                return  # an older system: vLLM asks for each page itself
            time.sleep(0)


def _pieces(layers: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes: a few blocks of each layer, then the next few."""
    first = layers[0]
    step, block_bytes = first.stride(0) * first.element_size(), first[0].nbytes
    at_once = max(1, _AT_ONCE // step)
    for block in range(0, first.shape[0], at_once):
        count = min(at_once, first.shape[0] - block)
        for layer in layers:
            yield layer.data_ptr() + block * step, (count - 1) * step + block_bytes
