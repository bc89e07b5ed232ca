"""Sampling: the filters against a plain reading of their definitions, the draws against the
distribution, and the state as two integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.engine.options import SamplingOptions
from chatkv.engine.sampling import HEAD_TOKENS, Sampler
from chatkv.errors import UsageError


def plain_distribution(logits: torch.Tensor, options: SamplingOptions) -> dict[int, float]:
    """Token → probability, by the definitions, one after the other."""
    scaled = (logits.double() / options.temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if options.top_k:
        order = order[: options.top_k]
    weights = torch.tensor([scaled[t] for t in order], dtype=torch.float64).softmax(0).tolist()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= options.top_p and kept:
            break
        mass += weight
        kept.append((token, weight))
    kept = [(t, w) for t, w in kept if w >= options.min_p * kept[0][1]]
    total = sum(weight for _, weight in kept)
    return {token: weight / total for token, weight in kept}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([5, 50, 2000]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_distribution_is_that_of_the_definitions(
    seed: int, size: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    options = SamplingOptions(temperature, top_p, top_k, min_p)
    ids, probabilities = Sampler(options, seed=0).distribution(logits)
    probabilities = probabilities / probabilities.sum()
    expected = plain_distribution(logits, options)
    assert set(ids.tolist()) == set(expected)
    for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True):
        assert probability == pytest.approx(expected[token], rel=1e-9)


def test_a_flat_distribution_needs_more_than_its_head() -> None:
    logits = torch.zeros(4 * HEAD_TOKENS)
    ids, _ = Sampler(SamplingOptions(1.0, top_p=0.9), seed=0).distribution(logits)
    assert len(ids) == pytest.approx(0.9 * 4 * HEAD_TOKENS, abs=1)


def test_draws_follow_the_distribution() -> None:
    """Chi-square at alpha = 0.001 with 7 degrees of freedom (24.3), fixed seeds."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    expected = logits.double().softmax(0)
    count = 4000
    sampler = Sampler(SamplingOptions(1.0, top_p=1.0, min_p=0.0), seed=11)
    drawn = torch.bincount(
        torch.tensor([sampler.pick(logits) for _ in range(count)]), minlength=len(logits)
    )
    chi_square = ((drawn - count * expected) ** 2 / (count * expected)).sum()
    assert chi_square < 24.3


def test_the_state_is_seed_and_number_of_draws() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(3))
    whole = Sampler(SamplingOptions(1.0), seed=5)
    tokens = [whole.pick(logits) for _ in range(20)]
    first = Sampler(SamplingOptions(1.0), seed=5)
    head = [first.pick(logits) for _ in range(8)]
    resumed = Sampler(SamplingOptions(1.0), seed=5, draws=first.draws)
    assert head + [resumed.pick(logits) for _ in range(12)] == tokens
    other = Sampler(SamplingOptions(1.0), seed=6)
    assert [other.pick(logits) for _ in range(20)] != tokens


def test_greedy_takes_the_largest_and_draws_nothing() -> None:
    sampler = Sampler(SamplingOptions(0.0), seed=1)
    assert sampler.pick(torch.tensor([0.1, 3.0, 2.9])) == 1
    assert sampler.draws == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
    ],
)
def test_nonsense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="makes no sense"):
        SamplingOptions(**fields)  # type: ignore[arg-type]
