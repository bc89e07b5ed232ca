"""When a prefill worker is asked: what that is expected to take, and how it is left alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from chatkv.apart.transport import Offered, Rates, RemoteGone, RemoteRefused, State, Stream
from chatkv.apart.wire import Model
from chatkv.restore import prefill_worker
from chatkv.restore.cost import CostModel
from chatkv.restore.plan import Remote, Situation, choose
from chatkv.restore.prefill_worker import PrefillWorker
from chatkv.restore.remote import RemotePrefill
from chatkv.restore.remote_cost import RemoteCost, Way
from chatkv_store.layout import KVLayout

MODEL = Model("weights", "config", "layout")
RATES = Rates(0.01, 1e-3, 0.0)
COST = CostModel(prefill_fixed_s=0, prefill_s_per_token=1e-3, prefill_s_per_token_pair=0)
NEW = Situation(total=1001, in_pool=0, available=0, history=0)


class Worker:
    """A transport without a worker behind it."""

    name = "there:1"

    def __init__(self) -> None:
        self.state_is: State | Exception = State(1, [Offered("m", MODEL, 4096, RATES)], 0.5)
        self.num_asked = 0

    def state(self, timeout_s: float) -> State:
        self.num_asked += 1
        if isinstance(self.state_is, Exception):
            raise self.state_is
        return self.state_is

    def sample(self, num_bytes: int, timeout_s: float) -> float:
        return 1e6

    def ask(self, request: bytes, timeout_s: float) -> Stream:
        raise RemoteGone("is away")


@pytest.fixture
def now() -> list[float]:
    return [100.0]


def remote_at(transport: Worker, now: list[float]) -> RemotePrefill:
    worker = PrefillWorker(transport, lambda: now[0])
    return RemotePrefill(worker, MODEL, KVLayout(2, 1, 64, "float32"), b"n" * 32)


def test_a_fetch_takes_the_longer_of_computing_and_sending_and_what_is_left_of_the_other() -> None:
    cost = RemoteCost(bytes_per_s=1e6, overhead_s=0.1)
    way = cost.way(RATES, queue_s=2.0, start=0, stop=1024, num_bytes=500_000, num_values=5)
    assert (way.prefill_s, way.transfer_s, way.num_pieces) == (1.034, 0.5, 10)
    assert way.seconds == pytest.approx(2.0 + 0.1 + 1.034 + 0.05)
    assert replace(way, transfer_s=4.0).seconds == pytest.approx(2.0 + 0.1 + 4.0 + 0.1034)


def test_every_fetch_moves_what_is_believed_towards_what_was() -> None:
    cost = RemoteCost(bytes_per_s=1e9, overhead_s=0.0)
    for _ in range(40):
        way = cost.way(RATES, 0.0, 0, 1000, 1_000_000, 4)
        cost = cost.after(way, seconds=2.5, queue_s=0.0, prefill_s=2.02, bytes_per_s=5e6)
    assert cost.scale == pytest.approx(2.0, rel=0.05)
    assert cost.bytes_per_s == pytest.approx(5e6, rel=0.05)
    assert cost.way(RATES, 0.0, 0, 1000, 1_000_000, 4).seconds == pytest.approx(2.5, rel=0.05)
    assert cost.error is not None and cost.error < 0.05


def test_what_is_never_tried_is_believed_to_be_faster_until_it_is() -> None:
    slow = RemoteCost(bytes_per_s=1e3)
    for _ in range(200):
        slow = slow.after_none()
    assert slow.bytes_per_s > 1e6


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "remote"), (0.99, "none"), (2.0, "none")])
def test_the_plan_asks_where_that_is_clearly_faster(seconds: float, chosen: str) -> None:
    plan = choose(NEW, COST, remote=Remote(seconds))
    assert plan.chosen == chosen
    assert plan.alternatives_ms == pytest.approx({"none": 1001.0, "remote": 1e3 * seconds + 1})
    assert plan.leaves_remote_untried == (chosen == "none")


def test_beside_answers_computing_here_takes_longer() -> None:
    plan = choose(NEW, COST, remote=Remote(2.0, slower=3.0))
    assert plan.chosen == "remote" and plan.alternatives_ms["none"] == pytest.approx(3003)


def test_what_is_on_disk_is_loaded_meanwhile() -> None:
    some = replace(NEW, available=500, history=900, stored_from=0, stored_to=500)
    cost = replace(COST, load_fixed_s=0.0, load_s_per_token=1e-5)
    plan = choose(some, cost, remote=Remote(0.1))
    assert plan.chosen == "remote"
    assert plan.alternatives_ms.keys() == {"reload", "re-prefill", "both", "remote"}
    assert plan.predicted_ms == pytest.approx(101)
    assert not choose(some, cost, "re-prefill").leaves_remote_untried


@pytest.mark.parametrize("wanted", ["reload", "re-prefill", "both"])
def test_who_wants_another_plan_gets_no_worker(wanted: str) -> None:
    plan = choose(NEW, COST, wanted, remote=Remote(0.0))  # type: ignore[arg-type]
    assert plan.chosen == "none" and not plan.alternatives_ms


def test_an_offer_knows_the_queue_and_the_link(now: list[float]) -> None:
    remote = remote_at(Worker(), now)
    offer, refusal = remote.offer(0, 1000)
    assert refusal is None and offer is not None
    assert offer.way.queue_s == 0.5
    assert offer.way.transfer_s == pytest.approx(1000 * remote.layout.bytes_per_token / 1e6)
    assert remote.offer(0, 10) == (None, None)
    assert remote.offer(0, 5000)[1] == "has room for 4096 tokens, not 5000"


def shared_at(transport: Worker, now: list[float]) -> RemotePrefill:
    """One whose store is ours, too."""
    transport.state_is = State(1, [Offered("m", MODEL, 4096, RATES, "ours")], 0.0)
    return replace(remote_at(transport, now), store="ours")


def test_kv_goes_through_a_shared_store_where_that_is_faster(now: list[float]) -> None:
    """The link brings 1 MB a second, and a token has 1024 bytes."""
    remote = shared_at(Worker(), now)
    assert remote.layout.bytes_per_token == 1024
    for load_s_per_token, through_store in ((1e-5, True), (1e-2, False)):
        remote.worker.store_cost = None
        offer, _ = remote.offer(0, 1000, load_s_per_token)
        assert offer is not None and offer.way.through_store is through_store
    offer, _ = remote.offer(0, 1000)  # nothing may come through it
    assert offer is not None and not offer.way.through_store
    other = replace(remote, store="another")
    offer, _ = other.offer(0, 1000, 1e-5)
    assert offer is not None and not offer.way.through_store


def test_each_way_is_corrected_by_what_it_took_and_the_other_tried_again(now: list[float]) -> None:
    remote = shared_at(Worker(), now)
    taken = []
    for _ in range(200):
        offer, _ = remote.offer(0, 1000, 1e-5)
        assert offer is not None
        way = offer.way
        taken.append(way.through_store)
        rate = 100.0 if way.through_store else 10e6  # the store is far slower than was believed
        seconds = 1.0 + 1024e3 / rate

        def correct(cost: RemoteCost, way: Way = way, s: float = seconds, r: float = rate) -> Any:
            return cost.after(way, s, 0.0, 1.0, r)

        remote.worker.observe(way, correct)
    assert taken[0] and not any(taken[1:50])
    assert True in taken[50:]  # once in a while


def test_a_state_is_asked_for_once_in_a_while(now: list[float]) -> None:
    transport = Worker()
    remote = remote_at(transport, now)
    for _ in range(5):
        remote.offer(0, 100)
    assert transport.num_asked == 1
    now[0] += prefill_worker.FRESH_S + 0.1
    remote.offer(0, 100)
    assert transport.num_asked == 2


def test_a_worker_that_is_away_is_asked_ever_more_rarely(now: list[float]) -> None:
    transport = Worker()
    transport.state_is = RemoteGone("is away: Connection refused")
    remote = remote_at(transport, now)
    asked_at = []
    for _ in range(2000):
        before = transport.num_asked
        assert remote.offer(0, 100) == (None, "is away: Connection refused")
        if transport.num_asked > before:
            asked_at.append(now[0])
        now[0] += 0.5
    waits = [after - before for before, after in pairwise(asked_at)]
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0] and max(waits) == prefill_worker.MAX_AWAY_S
    transport.state_is = State(1, [Offered("m", MODEL, 4096, RATES)], 0.0)
    now[0] += prefill_worker.MAX_AWAY_S
    assert remote.offer(0, 100)[0] is not None


def test_other_models_are_named(now: list[float]) -> None:
    transport = Worker()
    for changed, says in (
        (Model("w2", "config", "layout"), "has other weights"),
        (Model("weights", "c2", "layout"), "has another configuration"),
        (Model("weights", "config", "l2"), "has another KV layout or dtype"),
    ):
        transport.state_is = State(1, [Offered("m", changed, 4096, RATES)], 0.0)
        assert remote_at(transport, now).offer(0, 100) == (None, says)
    transport.state_is = State(1, [], 0.0)
    assert remote_at(transport, now).offer(0, 100) == (None, "has no model yet")
    transport.state_is = RemoteRefused("refuses the token")
    assert remote_at(transport, now).offer(0, 100) == (None, "refuses the token")
