"""A stream between a thread that works and one who reads: a slow reader makes the work wait."""

from __future__ import annotations

import asyncio
import threading

from chatkv.server.stream import MAX_WAITING, Emit, events
from chatkv.server.wire import Event


def test_a_reader_that_stops_holds_the_work_up_and_one_that_leaves_lets_it_end() -> None:
    num_emitted, is_over = [0], threading.Event()

    def work(emit: Emit, cancel: threading.Event) -> None:
        while not cancel.is_set():
            emit(Event("text", text="word "))
            num_emitted[0] += 1
        is_over.set()

    async def read() -> tuple[int, int]:
        stream = events(work)
        assert (await anext(stream)).text == "word "
        before = -1
        while before != num_emitted[0]:  # until the work waits
            before = num_emitted[0]
            await asyncio.sleep(0.05)
        for _ in range(10):
            await anext(stream)
        await asyncio.sleep(0.2)
        after = num_emitted[0]
        await stream.aclose()
        return before, after

    before, after = asyncio.run(read())
    assert before == MAX_WAITING + 1
    assert after == before + 10
    assert is_over.wait(60)


def test_what_is_not_text_never_waits() -> None:
    def work(emit: Emit, cancel: threading.Event) -> None:
        for done in range(2 * MAX_WAITING):
            emit(Event("progress", "prefill", done, 2 * MAX_WAITING))

    async def read() -> int:
        return sum([event.event == "progress" async for event in events(work)])

    assert asyncio.run(read()) == 2 * MAX_WAITING
