"""The fit of the cost model: it finds the rates that made the samples, and never negative ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Run
from chatkv.restore.calibration import (
    ANSWERS,
    Sample,
    _time_steps,
    _untouch,
    fit_loads,
    fit_prefill,
    fit_steps,
)
from chatkv.restore.cost import CostFile, CostModel
from small_engine import CONFIG, make_engine

LENGTHS = (32, 256, 1024, 4096)


@given(
    fixed=st.floats(0, 0.05),
    linear=st.floats(1e-5, 1e-2),
    pairs=st.floats(0, 1e-6),
    noise=st.lists(st.floats(0.97, 1.03), min_size=4, max_size=4),
)
def test_prefill_is_predicted_as_it_was_measured(
    fixed: float, linear: float, pairs: float, noise: list[float]
) -> None:
    true = CostModel(
        prefill_fixed_s=fixed, prefill_s_per_token=linear, prefill_s_per_token_pair=pairs
    )
    samples = [
        Sample(n, true.prefill_s(0, n) * factor) for n, factor in zip(LENGTHS, noise, strict=True)
    ]
    fitted = fit_prefill(CostModel(), samples)
    assert fitted.prefill_fixed_s >= 0 and fitted.prefill_s_per_token_pair >= 0
    for length in LENGTHS:
        assert fitted.prefill_s(0, length) == pytest.approx(true.prefill_s(0, length), rel=0.1)


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=4))
def test_any_samples_give_a_usable_model(seconds: list[float]) -> None:
    samples = [Sample(n, s) for n, s in zip(LENGTHS, seconds, strict=False)]
    fitted = fit_prefill(CostModel(), samples)
    assert fitted.prefill_s(0, 100) > 0
    assert fitted.prefill_s(0, 2000) > fitted.prefill_s(0, 1000)


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4))
def test_a_busy_machine_does_not_make_tokens_free(noise: list[float]) -> None:
    """The first samples may be ten times too slow: then a longer prefill still takes longer."""
    true = CostModel()
    samples = [
        Sample(n, true.prefill_s(0, n) * factor) for n, factor in zip(LENGTHS, noise, strict=True)
    ]
    fitted = fit_prefill(CostModel(), samples)
    longest = 8192
    assert fitted.prefill_s(0, longest) > 0.02 * true.prefill_s(0, longest)


@given(fixed=st.floats(0, 0.05), rate=st.floats(1e-6, 1e-3), count=st.integers(8, 5000))
def test_loads_are_a_line(fixed: float, rate: float, count: int) -> None:
    samples = [Sample(n, fixed + n * rate, n * rate) for n in (max(1, count // 4), count)]
    fitted = fit_loads(CostModel(), samples)
    # A fixed cost that dwarfs the rest is believed to three quarters only: it may be a stray one.
    dwarfed = fixed > 2 * count * rate
    assert fitted.load_s(count) == pytest.approx(fixed + count * rate, rel=0.3 if dwarfed else 1e-6)
    assert fitted.load_fixed_s >= 0


def test_without_samples_the_guess_stays() -> None:
    assert fit_loads(CostModel(), []) == CostModel()


def test_memory_that_is_given_back_is_the_runs_alone() -> None:
    pool = BlockPool(CONFIG, 120, torch.float32, torch.device("cpu"))
    runs = [Run(), Run(), Run()]
    for run in runs:
        pool.reserve(run, 20 * BLOCK_TOKENS)
    pool.kv.fill_(1.0)
    _untouch(pool, runs[1])
    middle = pool.slots(runs[1], 0, runs[1].capacity)
    num_lost = int((middle == 0).sum())
    assert num_lost > middle.numel() / 2, "whole pages are zeros"
    assert int((pool.kv == 0).sum()) == num_lost, "and no others"


def test_steps_are_a_line_through_few_answers_and_more() -> None:
    assert fit_steps(CostModel(), []).steps is None
    rates = fit_steps(CostModel(), [Sample(1, 0.04), Sample(4, 0.055)]).steps
    assert rates is not None and rates.plain_s(8) == pytest.approx(0.075)
    tokens = rates.prefill_tokens(4, max_stall=1.5)
    assert tokens * CostModel().prefill_s_per_token == pytest.approx(0.5 * 0.055)
    # A machine that was busy for a moment does not make answers cheaper than none.
    rates = fit_steps(CostModel(), [Sample(1, 0.06), Sample(4, 0.055)]).steps
    assert rates is not None and rates.plain_s(8) == pytest.approx(0.06)


def test_a_stray_step_of_many_leaves_rates_that_are_read_again(tmp_path: Path) -> None:
    file = CostFile(tmp_path / "costs.json")
    cost = fit_steps(CostModel(), [Sample(1, 0.01), Sample(4, 0.055)])
    file.save("key", "label", cost)
    assert file.load("key") == cost and cost.steps is not None
    assert cost.steps.plain_s(4) == pytest.approx(0.055)


def test_steps_of_a_model_are_measured_and_expected_of_it() -> None:
    engine = make_engine()
    samples = _time_steps(engine)
    assert [sample.num_tokens for sample in samples] == list(ANSWERS)
    assert all(sample.seconds > 0 for sample in samples)
    assert engine.pool.free_blocks == 40
    engine.close()
