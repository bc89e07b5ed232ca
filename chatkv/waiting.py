"""How the threads that compute a product together wait for each other, in libgomp's words.

Between two products of a step lie tens of microseconds in which one thread works and the others
have nothing to do. Where they spin meanwhile, the next product begins at once; where they sleep,
waking them takes longer than the product (a virtual machine, 2 cores, SmolLM2: a step of 32 ms took
45, with weights in int4 24 instead of 14). But who spins holds a core, and where another program
wants that, it is the thread that is waited for that goes without: 106 ms a step instead of 52.
So they spin while the cores are ours, and sleep while they are not (`Patience`).
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft: what is given back comes again when it is needed
# Of the time that the engine computes, the part in which it was ready and had no core. Beside a
# program that uses a core it was 0.43 spinning and 0.37 sleeping, beside one that uses a quarter of
# it 0.19 and 0.14 (and spinning was still faster), alone 0.01.
_CONTENDED, _FREE = 0.3, 0.2
_LOOK_S = 0.2  # computed between two looks


class Patience:
    """Of the one thread of a process that computes on several cores.

    libgomp reads once how long to spin (`GOMP_SPINCOUNT`), but spins briefly where there are more
    of its threads in the process than cores. So one thread more that has a worker, and does
    nothing with it, makes all waiting brief, and its end long again.
    """

    def __init__(self) -> None:
        self._team: threading.Event | None = None  # ends the thread that does nothing
        self._computed_s = 0.0
        self._seen_s: float | None = None

    @property
    def is_brief(self) -> bool:
        return self._team is not None

    def observe(self, seconds: float) -> None:
        """The calling thread, always the same one, has computed for so long."""
        self._computed_s += seconds
        if self._computed_s < _LOOK_S:
            return
        waited_s = _waited_s()
        if waited_s is not None and self._seen_s is not None:
            self.decide((waited_s - self._seen_s) / self._computed_s)
        self._seen_s, self._computed_s = waited_s, 0.0

    def decide(self, contended: float) -> None:
        """contended: the part of its time in which it was ready and had no core."""
        if self._team is None and contended > _CONTENDED:
            self._team = threading.Event()
            work = threading.Thread(target=_hold_a_team, args=(self._team,), daemon=True)
            work.start()
        elif self._team is not None and contended < _FREE:
            self.close()

    def close(self) -> None:
        """Wait as long as at first."""
        if self._team is not None:
            self._team.set()
            self._team = None


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


def _hold_a_team(end: threading.Event) -> None:
    import torch

    if (openmp := _openmp()) is not None:
        torch.get_num_threads()
        openmp.omp_set_num_threads(2)
        torch.zeros(1 << 17).add_(1)  # long enough to be shared by two
        end.wait()


def _waited_s() -> float | None:
    """Seconds for which the calling thread was ready to run and had no core, ever; None where the
    system does not tell (proc(5): the second number is of nanoseconds)."""
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as told:
        return int(told.read().split()[1]) / 1e9
    return None


@cache
def _openmp() -> ctypes.CDLL | None:
    """The library that torch computes with; None where it cannot be told."""
    with suppress(OSError, AttributeError, StopIteration), open("/proc/self/maps") as maps:
        paths = [Path(line.split(maxsplit=5)[-1].strip()) for line in maps if "/torch/" in line]
        library = ctypes.CDLL(str(next(path for path in paths if "omp" in path.name)))
        assert library.omp_pause_resource_all and library.omp_set_num_threads
        return library
    return None
