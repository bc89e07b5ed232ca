"""Work that blocks, on a thread of its own, as a stream of events for an asynchronous server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from chatkv.engine.scheduler import Cancelled
from chatkv.errors import ChatkvError
from chatkv.server.wire import ALIVE_S, Event, error_event
from chatkv_store.errors import StoreError

log = logging.getLogger("chatkv.server")

Emit = Callable[[Event], None]

# Pieces of text that wait for a slow reader, a long answer's; behind them its turn waits, and its
# memory is for others to have.
MAX_WAITING = 4096
_POLL_S = 0.1


async def events(work: Callable[[Emit, threading.Event], None]) -> AsyncGenerator[Event, None]:
    """What `work(emit, cancel)` emits, as it does, and `alive` in between when it is silent.

    An exception becomes the last event. Where nobody reads any more, `cancel` is set and the
    thread is left to end by itself; who reads slowly makes `emit` wait with text.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event | None]()
    cancel, slots = threading.Event(), threading.Semaphore(MAX_WAITING)

    def emit(event: Event | None) -> None:
        if event is not None and event.event == "text":
            while not slots.acquire(timeout=_POLL_S) and not cancel.is_set():
                pass
        with suppress(RuntimeError):  # the loop has ended: so has whoever listened
            loop.call_soon_threadsafe(queue.put_nowait, event)

    def run() -> None:
        try:
            work(emit, cancel)
        except Cancelled:
            pass  # before it began: nobody waits for it any more
        except (ChatkvError, StoreError, OSError) as error:
            emit(error_event(error))
        except Exception as error:
            log.exception("a request failed")
            emit(error_event(RuntimeError(f"the engine failed: {error!r}; its log has more")))
        finally:
            emit(None)

    threading.Thread(target=run, name="turn", daemon=True).start()
    try:
        while True:
            try:  # wait_for would swallow a cancel that comes with an event, before Python 3.12
                async with asyncio.timeout(ALIVE_S):
                    event = await queue.get()
            except TimeoutError:
                event = Event("alive")
            if event is None:
                return
            if event.event == "text":
                slots.release()
            yield event
    finally:
        cancel.set()
