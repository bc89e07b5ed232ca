"""What verification lets through is distributed as the model's own samples, whatever the draft."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.engine.drafts import Drawn, draw, spread, verified
from chatkv.engine.options import SamplingOptions
from chatkv.engine.sampling import Sampler
from drafted import ALPHA, pvalue

SIZE = 12


def distribution(weights: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    mass = torch.tensor(weights, dtype=torch.float64)
    kept = (mass > 0).nonzero()[:, 0]
    order = kept[mass[kept].argsort(descending=True)]
    return order, mass[order] / mass.sum()


weights = st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.0, 30.0]), min_size=4, max_size=4).filter(any)


@settings(max_examples=25)
@given(p=weights, q=weights)
def test_every_token_comes_as_often_as_the_model_would_say_it(
    p: list[float], q: list[float]
) -> None:
    """Exactly: the numbers of a draw are laid out on a grid, so that each has its share."""
    steps = 12
    model, drafter = distribution(p), distribution(q)
    heard = torch.zeros(4, dtype=torch.float64)
    grid = [(step + 0.5) / steps for step in range(steps)]
    for token, share in zip(drafter[0].tolist(), drafter[1].tolist(), strict=True):
        drawn = Drawn(token, drafter)
        for accept in grid:
            for redraw in grid:
                heard[verified(model, drawn, accept, redraw)] += share / steps**2
    expected = torch.zeros(4, dtype=torch.float64)
    expected[model[0]] = model[1]
    assert torch.allclose(heard, expected, atol=2.1 / steps)


@given(p=weights, q=weights, number=st.floats(0, 1, exclude_max=True))
def test_nothing_impossible_is_ever_said(p: list[float], q: list[float], number: float) -> None:
    model, drafter = distribution(p), distribution(q)
    for token in drafter[0].tolist():
        said = verified(model, Drawn(token, drafter), number, number)
        assert said in model[0].tolist()
    assert draw(*model, number) in model[0].tolist()


@given(p=weights, q=weights)
def test_as_much_is_accepted_as_can_be(p: list[float], q: list[float]) -> None:
    """The odds of acceptance are the mass that both distributions have in common."""
    model, drafter = distribution(p), distribution(q)
    common = torch.minimum(model[1], spread(drafter, model[0])).sum()
    accepted = sum(
        min(1.0, float(spread(model, torch.tensor([token]))) / share) * share
        for token, share in zip(drafter[0].tolist(), drafter[1].tolist(), strict=True)
    )
    assert accepted == pytest.approx(float(common))


def logits(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1.0, top_p=1.0, min_p=0.0),
        SamplingOptions(0.7, top_p=0.9, min_p=0.05),
        SamplingOptions(1.3, top_p=1.0, top_k=5, min_p=0.0),
    ],
    ids=["all", "top-p and min-p", "top-k"],
)
def test_drafted_tokens_are_distributed_as_plain_ones(options: SamplingOptions) -> None:
    """Pairs of tokens, the second depending on the first: over many seeds, drafted by a worse
    model and verified, they come as often as plain sampling says."""
    first, seconds = logits(1), [logits(10 + token) for token in range(SIZE)]
    guess, guesses = logits(2), [logits(10 + token) * 0.5 for token in range(SIZE)]
    exact = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    plain = Sampler(options, 0)
    ids, mass = plain.distribution(first)
    for id, share in zip(ids.tolist(), (mass / mass.sum()).tolist(), strict=True):
        its_ids, its_mass = plain.distribution(seconds[id])
        exact[id, its_ids] = share * its_mass / its_mass.sum()
    heard = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    num_seeds = num_accepted = 600
    for seed in range(num_seeds):
        sampler = Sampler(options, seed)
        drawn = sampler.propose(guess, ahead=0)
        next_drawn = sampler.propose(guesses[drawn.token], ahead=1)
        token = sampler.pick(first, drawn)
        if token == drawn.token:
            second = sampler.pick(seconds[token], next_drawn)
        else:  # drafted anew, as the next step would
            num_accepted -= 1
            second = sampler.pick(seconds[token], sampler.propose(guesses[token], ahead=0))
        assert sampler.draws == 2
        heard[token, second] += 1
    assert 0 < num_accepted < num_seeds
    possible = exact > 5 / num_seeds  # rarer ones in one class, as the test wants it
    counts = torch.cat([heard[possible], heard[~possible].sum()[None]])
    expected = torch.cat([exact[possible], exact[~possible].sum()[None]]) * num_seeds
    present = expected > 0
    assert counts[~present].sum() == 0
    assert pvalue(counts[present], expected[present]) > ALPHA


def test_plain_sampling_is_held_to_the_same_bar() -> None:
    """The comparison notices a draft that is taken as it comes."""
    options = SamplingOptions(1.0, top_p=1.0, min_p=0.0)
    ids, mass = Sampler(options, 0).distribution(logits(1))
    counts = {"plain": torch.zeros(SIZE), "unverified": torch.zeros(SIZE)}
    for seed in range(1500):
        counts["plain"][Sampler(options, seed).pick(logits(1))] += 1
        counts["unverified"][Sampler(options, seed).propose(logits(2), 0).token] += 1
    expected = spread((ids, mass), torch.arange(SIZE)) * 1500
    assert pvalue(counts["plain"], expected) > ALPHA
    assert pvalue(counts["unverified"], expected) < ALPHA


def test_numbers_are_a_function_of_seed_and_draw() -> None:
    options = SamplingOptions(1.0, top_p=1.0, min_p=0.0)
    model, drafter = logits(1, 500), logits(2, 500)
    whole, heard = Sampler(options, 3), []
    for _ in range(6):
        heard.append(whole.pick(model, whole.propose(drafter, 0)))
    later = Sampler(options, 3, draws=4)
    assert [later.pick(model, later.propose(drafter, 0)) for _ in range(2)] == heard[4:]
    ahead = Sampler(options, 3, draws=1)
    assert ahead.propose(drafter, ahead=2).token == Sampler(options, 3, 3).propose(drafter, 0).token


def test_a_sample_without_a_draft_is_what_it_always_was() -> None:
    """Conversations that were held before go on with the same numbers."""
    picks = [Sampler(SamplingOptions(1.0), 7, draws).pick(logits(1) / 2) for draws in range(12)]
    assert picks == PICKS


PICKS = [4, 0, 0, 7, 0, 7, 1, 3, 5, 7, 9, 2]  # as they were before there were drafts
