"""The replayer of conversations: its traces look like people's, and its sums add up."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from block_tier import LAYOUT, Blocks, open_blocks
from replay import POLICIES, Clock, Pool, Report, percentile, replay
from tiers import Machine, NoPersistence, Snapshots, spend
from traces import TraceConversation, TraceSpec, TraceTurn, generate

from chatkv.restore.cost import CostModel
from chatkv.restore.plan import Situation

# A pool of one or two conversations, so that most turns come back to one that has left it.
TINY = Machine(pool_tokens=3000, cap_bytes=math.inf)
SPEC = TraceSpec(num_conversations=10, seed=3, conversations_per_hour=60, max_tokens=2500)


@pytest.fixture(scope="module")
def trace() -> list[TraceConversation]:
    return generate(SPEC)


@pytest.fixture(scope="module")
def reports(trace: list[TraceConversation]) -> dict[str, Report]:
    """Every policy under a cap of a third of all KV."""
    cap = TINY.kv_bytes_per_token * sum(one.num_tokens for one in trace) / 3
    return {policy: replay(trace, policy, replace(TINY, cap_bytes=cap)) for policy in POLICIES}


def conversation(number: int, *turns: tuple[int, int], system_tokens: int = 0) -> TraceConversation:
    said = tuple(TraceTurn(prompt, reply, 60.0) for prompt, reply in turns)
    return TraceConversation(number, float(number), 0, system_tokens, said)


# --- traces -----------------------------------------------------------------------------------


def test_a_trace_has_the_published_statistics() -> None:
    trace = generate(TraceSpec(num_conversations=4000))
    num_turns = [len(one.turns) for one in trace]
    turns = [turn for one in trace for turn in one.turns]
    assert sum(n > 1 for n in num_turns) / len(trace) == pytest.approx(0.73, abs=0.02)
    assert 5 <= sum(num_turns) / len(trace) <= 6
    assert sum(turn.prompt_tokens for turn in turns) / len(turns) == pytest.approx(161, rel=0.05)
    assert sum(turn.reply_tokens for turn in turns) / len(turns) == pytest.approx(338, rel=0.05)
    arrivals = [one.arrival_s for one in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(trace) == pytest.approx(3600 / 30, rel=0.05)


def test_a_trace_is_its_seeds(trace: list[TraceConversation]) -> None:
    assert generate(SPEC) == trace
    assert generate(replace(SPEC, seed=4)) != trace


def test_no_log_outgrows_the_context() -> None:
    for one in generate(TraceSpec(num_conversations=300, max_tokens=500)):
        assert one.turns and one.num_tokens <= 500
        assert all(turn.prompt_tokens >= 1 and turn.reply_tokens >= 1 for turn in one.turns)


def test_conversations_share_their_system_prompt_and_nothing_else() -> None:
    first, second = (conversation(n, (50, 50), (10, 5), system_tokens=20) for n in (1, 2))
    assert first.token_ids(30)[:20] == second.token_ids(30)[:20]
    assert not set(first.token_ids(135)[20:]) & set(second.token_ids(135))
    assert first.token_ids(135)[:120] == first.token_ids(120)
    assert [first.history(turn) for turn in (0, 1, 2)] == [0, 120, 135]
    assert [first.prompt_end(turn) for turn in (0, 1)] == [70, 130]


# --- a replay ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_of_a_prompt_is_accounted_for(
    policy: str, reports: dict[str, Report], trace: list[TraceConversation]
) -> None:
    report = reports[policy]
    prompts = [one.prompt_end(turn) for one in trace for turn in range(len(one.turns))]
    assert report.num_turns == len(prompts) == len(report.ttft_s)
    assert report.reused + report.loaded + report.computed == report.prompt_tokens == sum(prompts)
    assert sum(report.plans.values()) == report.num_turns
    assert report.reused + report.found <= report.reusable <= report.prompt_tokens
    assert 0 <= report.pool_hit_rate <= 1 and 0 <= report.disk_hit_rate <= 1
    assert min(report.ttft_s) > 0


def test_under_a_tight_cap_there_is_something_to_compare(reports: dict[str, Report]) -> None:
    memory, snapshots, ours = (reports[policy] for policy in POLICIES)
    assert memory.loaded == memory.disk.bytes_written == memory.disk_hit_rate == 0
    for one in (snapshots, ours):
        assert one.loaded > 0 and one.disk.evicted > 0 and 0 < one.disk_hit_rate < 1
        assert one.computed < memory.computed
        assert sum(one.ttft_s) < sum(memory.ttft_s)
    assert ours.disk.bytes_written < snapshots.disk.bytes_written


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_its_traces(policy: str, trace: list[TraceConversation]) -> None:
    machine = replace(TINY, cap_bytes=100e6)
    assert replay(trace[:5], policy, machine) == replay(trace[:5], policy, machine)


@pytest.mark.parametrize("policy", [Snapshots.name, Blocks.name])
def test_a_cap_of_nothing_is_no_persistence(policy: str, trace: list[TraceConversation]) -> None:
    without = replay(trace, NoPersistence.name, TINY)
    nothing = replay(trace, policy, replace(TINY, cap_bytes=0))
    nothing.policy, nothing.disk = without.policy, without.disk
    assert nothing == without


def test_without_a_cap_nothing_goes_and_everything_is_found(trace: list[TraceConversation]) -> None:
    for policy in (Snapshots.name, Blocks.name):
        report = replay(trace, policy, TINY)
        assert (report.disk.evicted, report.disk.refused) == (0, 0)
        assert policy == Snapshots.name or report.disk_hit_rate == 1
    # Written once: each token's block, and the unfinished blocks that later turns have extended.
    shared = {one.system: one.system_tokens for one in trace}
    own = sum(one.num_tokens - one.system_tokens for one in trace)
    at_least = (own + sum(shared.values())) * TINY.kv_bytes_per_token
    rewritten = 64 * report.num_turns * TINY.kv_bytes_per_token
    assert at_least <= report.disk.bytes_written <= 1.03 * (at_least + rewritten)


def test_a_restart_empties_the_pool_and_not_the_disk() -> None:
    trace = [conversation(0, (100, 50), (100, 50))]
    for restart_every_s, is_there in ((math.inf, True), (30.0, False)):
        machine = Machine(restart_every_s=restart_every_s, cap_bytes=math.inf)
        report = replay(trace, Blocks.name, machine)
        assert (report.reused, report.loaded) == ((150, 0) if is_there else (0, 150))
        assert report.computed == 200


def test_turns_queue_for_one_server() -> None:
    cost = CostModel(prefill_fixed_s=0, prefill_s_per_token=0.01, prefill_s_per_token_pair=0)
    machine = Machine(cost=cost, decode_s_per_token=0.1)
    trace = [conversation(0, (200, 30)), conversation(1, (100, 10))]
    report = replay(trace, NoPersistence.name, machine)
    # The second arrives a second after the first, whose prompt takes 2 s and whose reply 3 s.
    assert report.ttft_s == pytest.approx([2.0, 5.0 - 1.0 + 1.0])


def test_a_turn_takes_what_its_plan_was_said_to() -> None:
    for load_s_per_token, chosen in ((1e-6, "reload"), (400e-6, "both"), (1, "re-prefill")):
        cost = CostModel(load_s_per_token=load_s_per_token)
        served = spend(Situation(total=4100, in_pool=0, available=4000, history=4000), cost)
        assert served.plan.chosen == chosen
        assert served.seconds == served.plan.predicted_ms / 1e3
        assert served.loaded == {"reload": 4000, "re-prefill": 0}.get(chosen, served.loaded)


def test_both_ends_meet_at_a_border_when_both_are_done() -> None:
    cost = CostModel(load_s_per_token=400e-6)
    served = spend(Situation(total=4100, in_pool=0, available=4000, history=4000), cost)
    meeting = 4000 - served.loaded
    assert 0 < meeting < 4000 and meeting % 64 == 0
    waiting_s = abs(cost.load_s(served.loaded) - cost.prefill_s(0, meeting))
    assert waiting_s < cost.prefill_s(meeting - 64, meeting) + cost.load_s(64)


def test_a_machines_bytes_are_scaled_to_the_stores_and_back() -> None:
    """The store is as full as the model's would be, and what it reports is at the model's size."""
    num_tokens = 640
    machine = Machine(kv_bytes_per_token=1e6, cap_bytes=math.inf)
    with open_blocks(machine, Clock()) as tier:
        one = conversation(0, (num_tokens - 1, 1))
        tier.serve(one, 0, 0)
        tier.save(one, 0, 0)
        stored = tier.store.counters()["written_bytes"]
        assert stored == pytest.approx(num_tokens * LAYOUT.bytes_per_token, rel=0.001)
        assert tier.counts().bytes_written == pytest.approx(num_tokens * 1e6, rel=0.001)


def test_the_pool_drops_what_was_used_longest_ago() -> None:
    pool = Pool(100)
    for number, num_tokens in ((1, 40), (2, 40), (1, 50), (3, 40)):
        pool.hold(number, num_tokens)
    assert [pool.tokens_of(number) for number in (1, 2, 3)] == [50, 0, 40]
    pool.hold(4, 101)  # more than it has room for: held by nobody
    assert [pool.tokens_of(number) for number in (1, 3, 4)] == [0, 0, 0]


def test_reports_add_up(reports: dict[str, Report]) -> None:
    one = reports[Blocks.name]
    both = one + one
    assert both.policy == one.policy
    assert both.num_turns == 2 * one.num_turns == len(both.ttft_s)
    assert both.disk.evicted == 2 * one.disk.evicted
    assert both.disk_hit_rate == one.disk_hit_rate
    assert sum(both.plans.values()) == both.num_turns


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.99)] == [1, 2, 4]
    assert percentile([], 0.5) == 0
