"""What a process must be told before it computes: how its threads wait and how it keeps memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

# glibc's malloc: parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 512 << 20
_MAP_FROM_BYTES = 32 << 20  # the most that glibc accepts


def prepare_to_compute() -> None:
    """Use every CPU of this process, and keep freed memory instead of giving it back.

    Activations of a few megabytes are allocated and freed thousands of times a second. By default
    glibc returns each to the system, which hands it out again page by page, zeroed: prefill
    attention at 4k tokens took 2.4x as long.

    What is freed stays with one of several arenas, and each thread takes from its own: of eight
    per CPU, which is glibc's number, those of turns kept 200 MiB more than of one per CPU.
    """
    import torch

    num_cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_cpus)
    with suppress(OSError, AttributeError):  # not glibc: its malloc decides
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_ARENA_MAX, max(num_cpus, 2))


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return physical_bytes()


def resident_bytes() -> int:
    """Memory that this process takes."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def physical_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def leave_cores_to_others() -> None:
    """From now on the calling thread computes on one core, and keeps no threads for more.

    Every thread that computes on several has OpenMP threads of its own. Once a process has more of
    them than there are cores, those of all wait for each other by way of the system instead of
    spinning, hundreds of times a step: on two cores that made the steps of four answers take 1.8x
    as long, only because each sampled on a thread of its own. `prepare_to_compute` takes it back.
    """
    import torch

    if (openmp := _openmp()) is not None:
        torch.get_num_threads()  # sets the number for a thread that has not computed yet
        openmp.omp_pause_resource_all(_SOFT)
        openmp.omp_set_num_threads(1)


_SOFT = 1  # omp_pause_soft: what is given back comes again when it is needed


@cache
def _openmp() -> ctypes.CDLL | None:
    """The library that torch computes with; None where it cannot be told."""
    with suppress(OSError, AttributeError, StopIteration), open("/proc/self/maps") as maps:
        paths = [Path(line.split(maxsplit=5)[-1].strip()) for line in maps if "/torch/" in line]
        library = ctypes.CDLL(str(next(path for path in paths if "omp" in path.name)))
        assert library.omp_pause_resource_all and library.omp_set_num_threads
        return library
    return None
