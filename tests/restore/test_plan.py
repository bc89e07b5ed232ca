"""The planner as a pure function: never worse than the best method by its own model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.errors import PersistenceError
from chatkv.restore.cost import CostFile, CostModel
from chatkv.restore.measured import Measured
from chatkv.restore.plan import (
    EXACT_IS_WORTH_MS,
    EXACT_IS_WORTH_SHARE,
    Plan,
    Situation,
    choose,
    survey,
)
from chatkv_store.chain import StoredBlock
from chatkv_store.layout import BLOCK_TOKENS

RATES = st.builds(
    CostModel,
    load_fixed_s=st.floats(0, 0.1),
    load_s_per_token=st.floats(1e-7, 1e-2),
    prefill_fixed_s=st.floats(0, 0.1),
    prefill_s_per_token=st.floats(1e-6, 1e-2),
    prefill_s_per_token_pair=st.floats(0, 1e-6),
)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    total = draw(st.integers(1, 10_000))
    history = draw(st.integers(0, total - 1))
    in_pool = draw(st.integers(0, history))
    return Situation(total, in_pool, draw(st.integers(in_pool, total)), history)


@given(situations(), RATES)
def test_never_much_worse_than_the_best_single_method(here: Situation, cost: CostModel) -> None:
    plan = choose(here, cost)
    if plan.alternatives_ms:
        best = min(plan.alternatives_ms.values())
        assert plan.predicted_ms <= max(best * (1 + EXACT_IS_WORTH_SHARE), best + EXACT_IS_WORTH_MS)
        assert plan.predicted_ms == plan.alternatives_ms[plan.chosen]
    else:
        assert plan.chosen == "none"


@given(situations(), RATES, st.floats(0.1, 1.0))
def test_a_faster_disk_never_makes_it_slower(
    here: Situation, cost: CostModel, factor: float
) -> None:
    faster = replace(cost, load_s_per_token=cost.load_s_per_token * factor)
    before, after = choose(here, cost), choose(here, faster)
    reload_ms = [plan.alternatives_ms.get("reload", 0.0) for plan in (before, after)]
    assert reload_ms[1] <= reload_ms[0] + 1e-6  # of rounding
    if before.chosen == "reload":
        assert after.chosen == "reload"


@given(situations(), RATES)
def test_exact_reloads_or_refuses(here: Situation, cost: CostModel) -> None:
    loaded = here.in_pool + here.loadable
    if loaded < here.history:
        with pytest.raises(PersistenceError, match="--exact"):
            choose(here, cost, exact=True)
    else:
        assert choose(here, cost, exact=True).chosen in ("none", "reload")


@given(situations(), RATES, st.sampled_from(["reload", "re-prefill"]))
def test_what_is_wanted_is_done_where_it_is_possible(
    here: Situation, cost: CostModel, wanted: str
) -> None:
    plan = choose(here, cost, wanted)  # type: ignore[arg-type]
    if wanted in plan.alternatives_ms:
        assert (plan.chosen, plan.because) == (wanted, "asked")


def test_a_plan_says_why_it_was_chosen() -> None:
    here = Situation(total=1001, in_pool=0, available=1000, history=1000, stored_to=1000)
    slow_disk = CostModel(load_s_per_token=1.0)
    assert choose(here, CostModel()).because == "exact"
    assert choose(here, slow_disk).because == "fastest"
    assert choose(here, slow_disk, "reload").because == "asked"
    assert choose(here, slow_disk, exact=True).because == "only-exact"
    # Reloading takes 15 ms more than the best, which nobody notices.
    close = CostModel(load_fixed_s=0.0, load_s_per_token=50e-6, prefill_s_per_token=35e-6)
    plan = choose(here, close)
    assert (plan.chosen, plan.because) == ("reload", "exact")
    assert min(plan.alternatives_ms.values()) < plan.predicted_ms


@given(situations(), RATES)
def test_both_ends_are_never_slower_than_one_by_the_model(here: Situation, cost: CostModel) -> None:
    """But for what loading takes from prefill: a free loader is never worse than either alone."""
    free = replace(cost, load_cpu_s_per_token=0.0)
    plan = choose(here, free)
    if "both" in plan.alternatives_ms:
        ways = plan.alternatives_ms
        assert ways["both"] <= ways["re-prefill"] + 1e3 * free.prefill_fixed_s + 1e-6
        if "reload" in ways and here.available == here.both_range[1]:
            assert ways["both"] <= ways["reload"] + 1e-6


@given(situations(), RATES, st.floats(0, 1))
def test_both_ends_cannot_do_more_than_the_cores_do(
    here: Situation, cost: CostModel, share: float
) -> None:
    """Each token that is loaded or computed takes its part of their time, whatever overlaps."""
    cost = replace(cost, load_cpu_s_per_token=share * cost.load_s_per_token)
    first, last = here.both_range
    if last > first:
        least = min(cost.load_cpu_s_per_token, cost.prefill_s_per_token)
        both_s = cost.both_s(here.in_pool, first, last, here.total)
        assert both_s >= (last - here.in_pool) * least * (1 - 1e-9)


@given(st.lists(st.sampled_from([None, 1, 40, BLOCK_TOKENS]), max_size=12))
def test_a_survey_finds_what_can_be_loaded_from_the_end(lengths: list[int | None]) -> None:
    header: Any = None
    stored = [
        None if length is None else StoredBlock(b"", BLOCK_TOKENS * index, length, header)
        for index, length in enumerate(lengths)
    ]
    here = survey(total=1000, history=990, in_pool=0, matched=0, stored=stored)
    if here.stored_from is None or here.stored_to is None:
        assert not any(lengths)
        return
    tokens = {
        BLOCK_TOKENS * index + token
        for index, length in enumerate(lengths)
        for token in range(length or 0)
    }
    stretch = set(range(here.stored_from, here.stored_to))
    assert stretch and stretch <= tokens and max(stretch) == max(tokens)
    assert here.stored_from - 1 not in tokens  # it is the longest such


@given(RATES, st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_the_meeting_point_is_the_best(cost: CostModel, start: int, gap: int, stored: int) -> None:
    first, last = start + gap, start + gap + stored
    best = cost.both_s(start, first, last, last)
    for meeting in range(first, last + 1, max(1, stored // 50)):
        loaded = last - meeting
        computing = cost.prefill_s(start, meeting) + loaded * cost.load_cpu_s_per_token
        where_they_meet = 64 * (cost.load_s_per_token + cost.prefill_s_per_token)
        slack = where_they_meet + cost.prefill_fixed_s
        assert best <= max(cost.load_s(loaded), computing) + slack + 1e-9


@given(RATES, st.integers(1, 8000), st.floats(1e-4, 100))
def test_rates_follow_what_was_measured_and_never_jump(
    cost: CostModel, tokens: int, seconds: float
) -> None:
    learnt = cost.after_load(tokens, seconds)
    before, after = cost.load_s(tokens), learnt.load_s(tokens)
    assert min(before, seconds) * 0.999 <= after <= max(before, seconds) * 1.001
    assert 0.6 <= learnt.load_s_per_token / cost.load_s_per_token <= 1.6
    for _ in range(200):
        learnt = learnt.after_prefill(0, tokens, seconds)
    if seconds > 2 * cost.prefill_fixed_s:
        assert learnt.prefill_s(0, tokens) == pytest.approx(seconds, rel=0.05)


def taken(here: Situation, chosen: str, truth: CostModel) -> tuple[float, Measured | None]:
    """What a plan takes where `truth` holds, and what each end took for itself."""
    start, total = here.in_pool, here.total
    if chosen == "re-prefill":
        return truth.prefill_s(start, total), None
    if chosen == "reload":
        loaded = start + here.loadable
        return truth.reload_s(here.loadable, total, loaded), None
    first, last = here.both_range
    meeting = min(
        range(first, last + 1, 64),
        key=lambda at: max(truth.load_s(last - at), truth.prefill_s(start, at)),
    )
    seconds = truth.both_s(start, first, last, total)
    steps = [[(at, min(at + 512, meeting))] for at in range(start, meeting, 512)]
    prefill_s = sum(truth.step_s(step) for step in steps)
    loaded = last - meeting
    beside_s = loaded * truth.load_cpu_s_per_token
    return seconds, Measured(loaded, truth.load_s(loaded), steps, prefill_s + beside_s)


def learnt(cost: CostModel, here: Situation, plan: Plan, truth: CostModel) -> CostModel:
    """As Restorer.learn does it."""
    _, ends = taken(here, plan.chosen, truth)
    if ends is not None:
        cost = cost.after_both(ends)
    elif plan.chosen == "reload":
        cost = cost.after_load(here.loadable, truth.load_s(here.loadable))
        loaded = here.in_pool + here.loadable
        cost = cost.after_prefill(loaded, here.total, truth.prefill_s(loaded, here.total))
    else:
        cost = cost.after_prefill(
            here.in_pool, here.total, truth.prefill_s(here.in_pool, here.total)
        )
    return cost.after_no_load() if plan.leaves_loading_untried else cost


@given(
    st.integers(500, 8000),
    st.floats(1e-5, 1e-2),
    st.floats(1e-5, 1e-2),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_estimates_that_are_far_off_are_put_right(
    history: int, load_s: float, prefill_s: float, load_off: float, prefill_off: float
) -> None:
    """Ten times too fast or too slow, whichever plan that leads to at first."""
    truth = CostModel(
        load_s_per_token=load_s,
        load_cpu_s_per_token=load_s / 10,
        prefill_s_per_token=prefill_s,
        prefill_s_per_token_pair=prefill_s / 10_000,
    )
    cost = replace(
        truth,
        load_fixed_s=truth.load_fixed_s * load_off,
        load_s_per_token=truth.load_s_per_token * load_off,
        prefill_fixed_s=truth.prefill_fixed_s * prefill_off,
        prefill_s_per_token=truth.prefill_s_per_token * prefill_off,
        prefill_s_per_token_pair=truth.prefill_s_per_token_pair * prefill_off,
    )
    here = Situation(history + 40, 0, history, history)
    for _ in range(60):
        cost = learnt(cost, here, choose(here, cost), truth)
    took = {way: 1e3 * taken(here, way, truth)[0] for way in ("reload", "re-prefill", "both")}
    best = min(took.values())
    assert took[choose(here, cost).chosen] <= max(1.15 * best, best + 2 * EXACT_IS_WORTH_MS)


@given(RATES, st.integers(1, 8000), st.floats(1e-3, 1e3))
def test_one_busy_turn_moves_little(cost: CostModel, tokens: int, busy: float) -> None:
    steps = [[(0, tokens)]]
    prefill_s = cost.prefill_s(0, tokens) + tokens * cost.load_cpu_s_per_token
    ends = Measured(tokens, busy * cost.load_s(tokens), steps, busy * prefill_s)
    after = cost.after_both(ends)
    for rate in ("load_s_per_token", "prefill_s_per_token"):
        assert 0.6 <= getattr(after, rate) / getattr(cost, rate) <= 1.6


@given(situations(), RATES, st.floats(1.0, 10.0))
def test_slower_rates_never_promise_less(here: Situation, cost: CostModel, factor: float) -> None:
    before = choose(here, cost).alternatives_ms
    for rate in ("load_s_per_token", "prefill_s_per_token", "prefill_fixed_s", "load_fixed_s"):
        after = choose(here, replace(cost, **{rate: factor * getattr(cost, rate)})).alternatives_ms
        assert all(after[way] >= before[way] * (1 - 1e-9) for way in before)


@given(RATES, st.integers(64, 8000), st.floats(0, 1), st.floats(0.1, 10))
def test_pages_from_the_disk_take_longer_and_have_a_rate_of_their_own(
    rates: CostModel, tokens: int, cold: float, busy: float
) -> None:
    cost = replace(rates, cold_s_per_token=2 * rates.load_s_per_token)
    assert cost.with_cold(None) == cost
    seconds = cost.with_cold(cold).load_s(tokens)
    more_s = tokens * cold * 2 * rates.load_s_per_token
    assert seconds == pytest.approx(cost.load_s(tokens) + more_s)
    same = cost.after_load(tokens, seconds, cold=cold)
    assert same.with_cold(cold).load_s(tokens) == pytest.approx(seconds)
    after = cost.after_load(tokens, busy * seconds, cold=cold)
    changed = [
        rate
        for rate in ("load_s_per_token", "cold_s_per_token")
        if getattr(after, rate) != pytest.approx(getattr(cost, rate))
    ]
    assert changed in ([], ["cold_s_per_token" if cold >= 0.5 else "load_s_per_token"])
    assert rates.after_load(tokens, seconds, cold=1.0).cold_s_per_token is None


def test_the_file_keeps_models_apart_and_survives_nonsense(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = CostFile(tmp_path / "costs.json")
    assert file.load("a") == CostModel()
    learnt = CostModel().after_load(100, 1.0)
    file.save("a", "model a", learnt)
    file.save("b", "model b", CostModel(load_fixed_s=1.0))
    assert file.load("a") == learnt
    assert file.entries()["a"] == ("model a", learnt)
    fields = ('{"other_version": 1}', '{"load_fixed_s": null}', '{"load_s_per_token": NaN}', "3")
    for nonsense in ("", "[]", *(f'{{"a": {one}}}' for one in fields)):
        file.path.write_text(nonsense)
        assert file.load("a") == CostModel()
