"""The GPU benchmark, where there is no GPU: its every section runs on a CPU over tiny models, so
that what is wrong with it shows here and not on a machine that is there for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benches import bench_script


@pytest.fixture
def bench() -> Iterator[Any]:
    with bench_script("bench_gpu") as bench:
        yield bench


@pytest.mark.slow
def test_every_section_measures_its_figures(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_figures
    import gpu_rig

    monkeypatch.setattr(gpu_figures.Rig, "seconds", once)
    monkeypatch.setattr(gpu_rig.Restorer, "calibrate", lambda *_: None)
    tiny = replace(
        gpu_rig.SMOLLM2,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position=2048,
    )
    sizes = gpu_figures.Sizes(
        decode=(5, 70), prefill=(130,), restored=130, stored=200, saved=2, copied=4096, prompt=3
    )
    rig = gpu_rig.Rig(tiny, 1024, torch.device("cpu"))
    found: dict[str, Any] = {}
    for section in bench.sections(rig, sizes):
        found |= section
    found |= bench.naive(rig, sizes)
    rig.close()
    # Both ends are compared only where they take about as long; the ledger needs a GPU.
    unsure = {"both ends", "ledger"} | {
        f"restore from disk, {c}, cold" for c in gpu_figures.STORED_CODECS
    }
    names = {figure.name for figure in bench.wanted(sizes)}
    assert set(found) <= names and names - set(found) <= unsure
    assert all(value > 0 for value, _ in found.values())
    for figure in bench.wanted(sizes):
        made = figure.figure(found, "no reason")
        assert made.note is None or made.value is None
        assert (made.baseline is not None) == (
            made.value is not None and made.baseline_name is not None
        )


def once(rig: Any, work: Any, repeats: int = 0) -> float:
    work()
    return 1e-3


def test_without_a_gpu_it_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "compiled", lambda quick: [])
    figures = bench.measure(bench.Options(quick=True))
    assert figures and all(figure.meets is None for figure in figures)
    assert {figure.note for figure in figures} == {bench.NO_GPU}
