"""What the serving benchmark says at equal p99 TPOT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "bench_common", raising=False)
        import bench_serving

        yield bench_serving
    for name in ("bench_serving", "bench_common", "traces"):
        sys.modules.pop(name, None)


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
