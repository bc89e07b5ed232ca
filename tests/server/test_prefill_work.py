"""A prefill worker's requests: one after the other, and none held up by another's link."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from chatkv.apart.receive import Receiver
from chatkv.apart.wire import Model, Request
from chatkv.engine.engine import Engine
from chatkv.engine.scheduler import Cancelled
from chatkv.restore.cost import CostFile
from chatkv.restore.restorer import Restorer
from chatkv.server.prefill_queue import PrefillQueue
from chatkv.server.prefill_work import PrefillWork
from chatkv_store.layout import KVLayout
from small_engine import CONFIG, Turn, make_engine, some_ids

SPACE = b"w" * 32


class Sink:
    """Holds frames back until it is open."""

    def __init__(self, is_open: bool = True) -> None:
        self.open = threading.Event()
        if is_open:
            self.open.set()
        self.sent = bytearray()

    def send(self, parts: Sequence[memoryview | bytes]) -> None:
        assert self.open.wait(60)
        for part in parts:
            self.sent += part

    def close(self) -> None: ...


@pytest.fixture
def restorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Restorer]:
    """Without a disk; each layer is a value of its own."""
    monkeypatch.setattr("chatkv_store.layout.MIN_VALUE_BYTES", 1)
    engine = make_engine()
    layout = KVLayout(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, "float32")
    yield Restorer(engine, layout, None, CostFile(tmp_path / "costs"), "test")
    engine.close()


def work(
    restorer: Restorer, ids: list[int], sink: Sink, name: str = "a", start: int = 0
) -> PrefillWork:
    request = Request(Model("w", "c", "l"), start, name)
    return PrefillWork(restorer, SPACE, request, ids, sink, threading.Event())


def received(restorer: Restorer, engine: Engine, ids: list[int], sent: bytes) -> int:
    """How many tokens of KV came, all of them as this engine computes them."""
    sequence = restorer.scratch_sequence()
    sequence.become(ids, 0)
    engine.reserve(sequence)

    def put(group: int, start: int, bits: object) -> None:
        restorer.reach.put(sequence.run, group, start, bits)  # type: ignore[arg-type]

    at = 0

    def read_into(buffer: memoryview) -> None:
        nonlocal at
        buffer[:] = sent[at : at + len(buffer)]
        at += len(buffer)

    receiver = Receiver(restorer.layout, SPACE, ids, 0, put)
    receiver.run(read_into)
    own = restorer.scratch_sequence()
    own.become(ids, 0)
    engine.prefill(own)
    pool, count = engine.pool, receiver.received.num_ready
    found = [pool.slots(one.run, 0, count) for one in (sequence, own)]  # type: ignore[attr-defined]
    torch.testing.assert_close(*found)  # a row alone may round differently
    return count


def test_frames_hold_what_was_computed(restorer: Restorer) -> None:
    ids, sink, queue = some_ids(200, 1), Sink(), PrefillQueue()
    one = work(restorer, ids, sink)
    one.run(queue.ticket(1.0))
    assert one.failure is None and (one.num_computed, one.num_cached) == (200, 0)
    assert received(restorer, restorer.engine, ids, bytes(sink.sent)) == 200
    again = work(restorer, [*ids, *some_ids(50, 2)], Sink())
    again.run(queue.ticket(1.0))
    assert (again.num_computed, again.num_cached) == (50, 200)


def test_a_link_that_is_stuck_holds_up_nobody_else(restorer: Restorer) -> None:
    """Its request has computed and still sends; others have their turn, the same conversation on
    KV of its own too."""
    ids, queue, stuck = some_ids(200, 1), PrefillQueue(), Sink(is_open=False)
    first = work(restorer, ids, stuck)
    sending = Turn(lambda: first.run(queue.ticket(1.0)))
    while len(queue) or not first.num_computed:
        time.sleep(0.01)
    for name in ("b", "a"):
        other = some_ids(200, 3)
        sink = Sink()
        work(restorer, other, sink, name).run(queue.ticket(1.0))
        assert received(restorer, restorer.engine, other, bytes(sink.sent)) == 200
    assert sending.is_alive()
    stuck.open.set()
    sending.result()
    assert received(restorer, restorer.engine, ids, bytes(stuck.sent)) == 200


def test_who_comes_first_is_served_first_and_who_leaves_is_not_waited_for() -> None:
    queue, order = PrefillQueue(), []
    tickets = [queue.ticket(2.0) for _ in range(3)]
    cancelled = [threading.Event() for _ in tickets]
    assert queue.expected_s == pytest.approx(6.0)

    def serve(index: int) -> None:
        with tickets[index].turn(cancelled[index]):
            order.append(index)

    waiting = [Turn(lambda index=index: serve(index)) for index in (2, 1)]  # type: ignore[misc]
    cancelled[1].set()
    with pytest.raises(Cancelled):
        waiting[1].result()
    assert order == [] and len(queue) == 2
    serve(0)
    waiting[0].result()
    assert order == [0, 2] and not len(queue) and queue.expected_s == 0
