"""The simulated cluster: nothing is lost, what can be computed by hand comes out, and a faster link
never holds anybody up."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import simulate_cluster
from cluster import serve, simulate
from cluster_check import NotMeasured, compare
from cluster_parts import Cluster, Link, Rates, Request
from cluster_workers import MAX_STALL
from traces import TraceSpec, generate

from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.restore.cost import CostModel

# 1 ms a token of prefill and 10 ms more for each prompt; 20 ms a step, 50 ms one of eight.
COST = CostModel(prefill_fixed_s=0.01, prefill_s_per_token=1e-3, prefill_s_per_token_pair=0)
RATES = Rates(COST, {1: 0.02, 8: 0.05})
APART = Cluster(1, 1, RATES, Link(1e8, 0.001), kv_bytes_per_token=40_000)
TOGETHER = replace(APART, num_prefill=0)
TRACE = generate(TraceSpec(40, seed=3, conversations_per_hour=400, away_odds=0.0))


def alone(cluster: Cluster, prompt: int = 1001, reply: int = 10) -> Request:
    request = Request(0, 1.0, 0, prompt, reply)
    serve(cluster, [request])
    return request


@pytest.mark.parametrize(
    "cluster",
    [
        TOGETHER,
        APART,
        replace(TOGETHER, num_decode=3),
        replace(APART, num_prefill=2, num_decode=2, send="when it pays"),
        replace(APART, link=Link(1e6), is_store_shared=True),
    ],
    ids=lambda cluster: cluster.name,
)
def test_every_turn_is_answered_once_and_in_order(cluster: Cluster) -> None:
    ran = simulate(cluster, TRACE)
    seen = Counter((one.conversation, one.history) for one in ran.requests)
    wanted = Counter(
        (one.number, one.history(turn)) for one in TRACE for turn in range(len(one.turns))
    )
    assert seen == wanted
    for one in ran.requests:
        assert one.arrived_s <= one.began_s < one.kv_s <= one.first_s <= one.last_s < math.inf
    assert sum(count for _, _, count in ran.gaps) == sum(
        one.reply_tokens - 1 for one in ran.requests
    )
    assert ran.ended_s == max(one.last_s for one in ran.requests)
    busy_s = ran.prefill_busy_s + ran.decode_busy_s
    assert busy_s <= cluster.num_workers * ran.ended_s
    assert simulate(cluster, TRACE).gaps == ran.gaps


def test_one_request_alone_takes_what_its_parts_take() -> None:
    here = alone(TOGETHER)
    assert here.ttft_s == pytest.approx(0.01 + 1.001)
    assert here.tpot_s == pytest.approx(0.02)
    there, link = alone(APART), APART.link
    # Asked for, computed, the last layer of the last chunk sent, and the last token computed here.
    rest_s = (1000 - CHUNK_TOKENS) * 40_000 / link.bytes_per_s / APART.pieces
    assert there.ttft_s == pytest.approx(2 * link.delay_s + 0.01 + 1.0 + rest_s + 0.02)
    assert there.tpot_s == pytest.approx(0.02)
    # Over a slow link, the bytes behind the first layer are what is waited for.
    slow = alone(replace(APART, link=Link(1e6, 0.001)))
    assert slow.ttft_s == pytest.approx(0.002 + 0.01 + CHUNK_TOKENS * 1e-3 / 30 + 40 + 0.02)


def test_waiting_for_a_prefill_worker_is_that_of_a_queue() -> None:
    """M/D/1: Poisson arrivals, equal prompts; waiting is rho / (1 - rho) of half a service."""
    random, service_s = Random(1), 0.1
    free = Rates(CostModel(prefill_fixed_s=0, prefill_s_per_token=service_s / 100), {1: 1e-9})
    free = replace(free, cost=replace(free.cost, prefill_s_per_token_pair=0))
    cluster = replace(APART, rates=free, link=Link(1e18))
    for load in (0.3, 0.7):
        now_s, requests = 0.0, []
        for number in range(8_000):
            now_s += random.expovariate(load / service_s)
            requests.append(Request(number, now_s, 0, 101, 1))
        serve(cluster, requests)
        waited_s = sum(one.began_s - one.arrived_s for one in requests) / len(requests)
        assert waited_s == pytest.approx(service_s / 2 * load / (1 - load), rel=0.08)


def test_answers_that_run_at_once_share_their_steps() -> None:
    requests = [Request(number, 0.0, 0, 2, 101) for number in range(8)]
    ran = serve(replace(APART, link=Link(1e15)), requests)
    # All have joined before the first is through; then a step of eight takes 50 ms.
    assert ran.requests[-1].tpot_s == pytest.approx(0.05, rel=0.03)


def test_a_prompt_beside_an_answer_stalls_it_by_no_more_than_is_allowed() -> None:
    running = Request(0, 0.0, 0, 1, 1000)
    prompt = Request(1, 5.0, 0, 2000, 1)
    ran = serve(TOGETHER, [running, prompt])
    assert max(gap for _, gap, _ in ran.gaps) <= 0.02 * MAX_STALL + 1e-9
    assert prompt.ttft_s > 2 * (0.01 + 2.0)  # of each step, less than a third is its own
    apart = serve(APART, [replace(running), replace(prompt)])
    assert max(gap for _, gap, _ in apart.gaps) <= RATES.decode_s(2)


def test_a_faster_link_holds_nobody_up() -> None:
    random = Random(2)
    arrivals = sorted(random.uniform(0, 60) for _ in range(80))
    lengths = [random.randint(2, 3000) for _ in arrivals]

    def come(rate: float) -> list[float]:
        requests = [
            Request(number, at_s, 0, length, 20)
            for number, (at_s, length) in enumerate(zip(arrivals, lengths, strict=True))
        ]
        serve(replace(APART, link=Link(rate)), requests)
        return [one.kv_s for one in requests]

    rates = [1e6, 1e7, 3e7, 1e8, 1e10]
    for slow, fast in zip(map(come, rates), map(come, rates[1:]), strict=False):
        assert all(b <= a + 1e-9 for a, b in zip(slow, fast, strict=True))


def test_history_is_computed_again_where_it_cannot_be_read() -> None:
    turns = [Request(0, 0.0, 0, 500, 200), Request(0, 100.0, 700, 800, 1)]
    shared = [replace(one) for one in turns]
    serve(APART, turns)
    serve(replace(APART, is_store_shared=True), shared)
    assert turns[1].ttft_s - shared[1].ttft_s == pytest.approx(0.201)  # the reply, and its token
    lost = Request(0, 0.0, 700, 800, 1)
    serve(APART, [lost])
    assert lost.ttft_s > 0.8  # to a worker that has never seen the conversation


def test_sending_pays_where_the_worker_is_busy_and_not_where_the_link_is_slow() -> None:
    pays = replace(APART, send="when it pays")
    assert not alone(replace(pays, link=Link(1e6))).was_sent
    beside = Request(1, 5.0, 0, 2000, 1)
    serve(pays, [Request(0, 0.0, 0, 2, 1000), beside])
    assert beside.was_sent


@pytest.mark.parametrize(("num", "expected"), [(1, 20), (4, 32.857), (8, 50), (15, 80)])
def test_steps_between_those_that_were_measured(num: int, expected: float) -> None:
    assert RATES.decode_s(num) * 1e3 == pytest.approx(expected, rel=1e-4)
    assert Rates(COST, {4: 0.04}).decode_s(2) == 0.04
    assert Rates(COST, {4: 0.04}).decode_s(8) == pytest.approx(0.08)


def test_it_is_held_against_what_two_processes_did(tmp_path: Path) -> None:
    """A report in which everything went as it is simulated."""

    def figure(name: str, value: float, baseline: float | None = None) -> dict[str, object]:
        return {"name": name, "value": value, "baseline": baseline}

    wired = "apart over the wire"
    figures = [
        figure("TPOT p50 without prompts, one core", 40, 30),
        figure("KV per token", 50_000),
        figure("KV moved per prompt", 50),  # MB: of 1000 tokens
        figure("prefill on one core", 500),
        figure("KV out of one pool into another, verified", 1),
        figure(f"TPOT p50 while prompts are read, {wired}", 40, 30 * MAX_STALL),
        figure(f"TTFT of a prompt, {wired}", 2060, 4000),
    ]
    cost = CostModel(prefill_fixed_s=0, prefill_s_per_token=1e-3, prefill_s_per_token_pair=0)
    found = {one.name: one for one in compare({"figures": figures}, cost)}
    assert found[f"TPOT p50 while prompts are read, {wired}"].error == pytest.approx(0, abs=1e-6)
    assert found["TPOT p50 while prompts are read, together"].error == pytest.approx(0, abs=0.03)
    # One core reads 500 tokens a second, then a step of three.
    assert found[f"TTFT of a prompt, {wired}"].simulated == pytest.approx(2000, abs=110)
    beside_ms = 1000 * MAX_STALL / (MAX_STALL - 1)  # the part of each step that is its own
    assert found["TTFT of a prompt, together"].simulated == pytest.approx(beside_ms, rel=0.1)
    for missing in range(len(figures)):
        with pytest.raises(NotMeasured):
            compare({"figures": figures[:missing] + figures[missing + 1 :]}, cost)
    report = tmp_path / "apart.json"
    report.write_text(json.dumps({"figures": figures[1:]}))
    with pytest.raises(SystemExit, match="no value of 'TPOT p50"):
        simulate_cluster.main(["--check", str(report)])


def test_the_script_finds_the_load_that_each_cluster_bears(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--quick", "--workers", "2", "--link-mb-s", "1000", "--step-ms", "1=20,8=50"]
    words += ["--prefill-s-per-token", "0.001"]

    def rows(*more: str) -> list[dict[str, float]]:
        simulate_cluster.main([*words, "--json", "-", *more])
        found: list[dict[str, float]] = json.loads(capsys.readouterr().out)["rows"]
        return found

    together, apart = rows()
    assert (together["layout"], apart["layout"]) == ("2 together", "1:1 apart")
    assert min(together["turns_per_s"], apart["turns_per_s"]) > 0.05
    assert apart["tpot_p50_s"] < 0.1 and apart["sent_share"] == 1
    stricter = rows("--ttft-s", "0.5")
    assert all(
        b["turns_per_s"] <= a["turns_per_s"]
        for a, b in zip([together, apart], stricter, strict=True)
    )
    assert [one["turns_per_s"] for one in rows("--ttft-s", "0.0001")] == [0, 0]
    for wrong in (["--step-ms", "no"], ["--workers", "1"], ["--link-mb-s", "0"]):
        with pytest.raises(SystemExit) as ended:
            simulate_cluster.main(wrong)
        assert ended.value.code == 2
