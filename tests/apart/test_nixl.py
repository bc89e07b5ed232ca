"""The same, by nixl: skipped where that is not installed (the extra `nixl`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillers import Link, Prefiller, prefiller

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    pytest.importorskip("nixl_cu12", reason="the extra `nixl` is not installed")


def test_kv_comes_by_nixl(worker: Prefiller, decoder: Any, alone: list[str]) -> None:
    """More of it than the ring holds, in turns; and a second stream after the first."""
    talk = decoder(worker.at(url=f"nixl+{worker.url}"))
    first = talk.say()
    assert first.text == alone[0]
    assert first.remote["failure"] is None and first.tokens.computed == 1
    more = "And what of the moon, which is said to pull at it from far away? " * 6
    assert talk.say(more).remote["failure"] is None


def test_a_ring_is_written_round_and_round(
    worker: Prefiller, decoder: Any, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from chatkv.apart import over_nixl

    monkeypatch.setattr(over_nixl, "RING_BYTES", 100_003)
    monkeypatch.setattr(over_nixl.agent(), "_free", [])
    first = decoder(worker.at(url=f"nixl+{worker.url}")).say()
    assert first.text == alone[0] and first.remote["failure"] is None
    assert first.remote["bytes"] > 7 * 100_003


def test_a_worker_that_is_killed_costs_time_only(
    tmp_path: Path, model: str, decoder: Any, alone: list[str]
) -> None:
    with prefiller(tmp_path / "prefill", model, min_value_bytes=1) as one:
        link = Link(one.url)
        link.on_kv = lambda passed: one.kill()
        with link.url() as url:
            first = decoder(one.at(url=f"nixl+{url}")).say()
    assert first.text == alone[0]
    assert any("the prefill worker at" in line for line in first.notices)
