"""What the serving benchmark says at equal p99 TPOT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benches import bench_script


@pytest.fixture
def bench() -> Iterator[Any]:
    with bench_script("bench_serving") as bench:
        yield bench


@pytest.mark.parametrize(
    ("p99_ms", "tokens_per_s"),
    [
        ((60, 70, 80), None),  # even the fewest exceed it
        ((30, 40, 50), 180.0),  # so do none
        ((30, 40, 60), 160.0),  # halfway between two
        ((30, 60, 40), 120.0 + 40 * 2 / 3),  # what is luck behind the first that exceeds it
    ],
)
def test_between_two_numbers_of_answers(
    bench: Any, p99_ms: tuple[int, ...], tokens_per_s: float | None
) -> None:
    speeds = (120.0, 160.0 if p99_ms[1] == 60 else 140.0, 180.0)
    chunks = {
        at_once: bench.Served(speed, [], [ms / 1e3] * 2, [])
        for at_once, ms, speed in zip((6, 8, 10), p99_ms, speeds, strict=True)
    }
    found, _ = bench.best_within(0.05, chunks)
    assert found == (None if tokens_per_s is None else pytest.approx(tokens_per_s))
