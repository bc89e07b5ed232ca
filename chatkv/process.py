"""What a process must be told before it computes: how its threads wait and how it keeps memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# glibc's malloc: parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 512 << 20
_MAP_FROM_BYTES = 32 << 20  # the most that glibc accepts


def prepare_to_compute() -> None:
    """Use every CPU of this process, and keep freed memory instead of giving it back.

    Activations of a few megabytes are allocated and freed thousands of times a second. By default
    glibc returns each to the system, which hands it out again page by page, zeroed: prefill
    attention at 4k tokens took 2.4x as long.
    """
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with suppress(OSError, AttributeError):  # not glibc: its malloc decides
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
