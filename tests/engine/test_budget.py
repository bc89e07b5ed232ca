"""How much prefill a step takes: within bounds whatever it sees, and learnt from what it does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.engine.budget import CHUNK_TOKENS, PROBE_STEPS, StepBudget, StepRates

OBSERVATIONS = st.lists(
    st.tuples(st.integers(0, 64), st.integers(0, 600), st.floats(1e-6, 1e3)), max_size=60
)


@settings(max_examples=60)
@given(OBSERVATIONS, st.integers(1, 64))
def test_it_stays_within_bounds(seen: list[tuple[int, int, float]], num_decoding: int) -> None:
    budget = StepBudget()
    for decoding, prefilled, seconds in seen:
        if decoding or prefilled:
            budget.observe(decoding, prefilled, seconds)
    tokens = budget.prefill_tokens(num_decoding)
    assert 0 <= tokens <= CHUNK_TOKENS
    assert budget.prefill_tokens(0) == CHUNK_TOKENS
    budget.observe(num_decoding, 0, 0.01)
    assert budget.prefill_tokens(num_decoding) > 0


def run(budget: StepBudget, num_steps: int, answers: int, fixed_s: float, token_s: float) -> float:
    """Steps that take fixed_s + tokens * token_s; the largest piece of prefill among the last."""
    pieces = []
    for _ in range(num_steps):
        pieces.append(budget.prefill_tokens(answers))
        budget.observe(answers, pieces[-1], fixed_s + token_s * pieces[-1])
    return max(pieces[-3:])


@settings(max_examples=60)
@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.integers(1, 32))
def test_it_comes_to_what_the_stall_permits(fixed: float, token: float, answers: int) -> None:
    tokens = run(StepBudget(), 100, answers, fixed, token)
    assert fixed + token * tokens <= fixed * StepBudget.max_stall * 1.001
    if (
        tokens < CHUNK_TOKENS
    ):  # any more would have been too much, but for what tokens cost at least
        least = max(token, fixed / CHUNK_TOKENS / 8)
        assert fixed + least * tokens >= fixed * StepBudget.max_stall * 0.999


def test_it_follows_what_steps_take() -> None:
    budget = StepBudget(max_stall=1.4)
    assert 7 < run(budget, 100, 4, 0.02, 1e-3) < 9
    assert 79 < run(budget, 200, 4, 0.02, 1e-4) < 81
    assert 7 < run(budget, 200, 4, 0.02, 1e-3) < 9
    assert run(budget, 300, 4, 0.10, 1e-3) > 39, "steps without prefill are measured anew"


def test_of_many_steps_one_is_without_prefill() -> None:
    budget = StepBudget()
    pieces = []
    for _ in range(10 * PROBE_STEPS):
        pieces.append(budget.prefill_tokens(3))
        budget.observe(3, pieces[-1], 0.01 + 1e-4 * pieces[-1])
    assert 9 <= pieces.count(0) <= 12


def test_what_was_seen_beside_some_answers_serves_for_others() -> None:
    budget = StepBudget()
    run(budget, 20, 4, 0.02, 1e-4)
    assert budget.prefill_tokens(5) == 0, "first a look at the step itself"
    budget.observe(5, 0, 0.02)
    assert budget.prefill_tokens(5) > 79


def test_what_was_measured_holds_until_steps_tell_better() -> None:
    budget = StepBudget(1.5, StepRates(0.04, 0.01, 0.002))
    assert budget.prefill_tokens(4) == StepRates(0.04, 0.01, 0.002).prefill_tokens(4, 1.5) == 20
    for _ in range(7):
        budget.observe(4, 20, 0.08 + 20 * 0.004)
    assert round(budget.prefill_tokens(4)) == 10
    budget.observe(4, 0, 0.16)
    assert round(budget.prefill_tokens(4)) == 20
