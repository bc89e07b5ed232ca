"""Which of several ways is faster, found out on a machine that others use too.

They take turns, so that what slows one slows the others, and the best time of each counts. Where
two halves of the rounds do not find the same, somebody else was computing: there are more rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROUNDS = 6
# How far the best times of two halves may lie apart.
AGREES = 1.15
# No CPU's cache for one core holds what a decode step reads.
_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Compared:
    """The best seconds of each way, and whether they would be found again."""

    seconds: tuple[float, ...]
    is_steady: bool


def compare(ways: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> Compared:
    """Time all of them, each with a cold cache; up to four times as many rounds where it takes
    that for a result that holds."""
    halves: tuple[list[list[float]], ...] = ([[] for _ in ways], [[] for _ in ways])
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
    done = 0
    while True:
        for index in range(rounds):
            for times, way in zip(halves[index % 2], ways, strict=True):
                others.add_(1)
                began = time.perf_counter()
                way()
                times.append(time.perf_counter() - began)
        done += rounds
        best = [[min(times) for times in half] for half in halves]
        is_steady = all(max(pair) <= AGREES * min(pair) for pair in zip(*best, strict=True))
        if is_steady or done >= 4 * rounds:
            return Compared(tuple(map(min, zip(*best, strict=True))), is_steady)
