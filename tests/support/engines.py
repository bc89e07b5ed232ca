"""Engine processes for tests, forked (see `forked`), and as real as one that a face starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chatkv.client import ChatRequest, connect, engine
from chatkv.client.link import Link
from chatkv.engine.options import SamplingOptions
from chatkv.paths import Folders, folders
from chatkv.session.turn import TurnOptions
from forked import CONTEXT

GREEDY = SamplingOptions(temperature=0)


class Forked:
    """An engine's process, as far as whoever has started one looks at it."""

    def __init__(self, log: Path | None = None) -> None:
        self.process = CONTEXT.Process(target=_be_engine, args=(dict(os.environ),), daemon=True)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode


def spawn() -> Any:
    """An engine in the home that is in force, once it answers; the process."""
    process = Forked().process
    eventually(lambda: engine.running(folders()) is not None or not process.is_alive())
    return process


def _be_engine(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.umask(0o077)
    os.setsid()
    from chatkv.server.process import serve

    serve(folders())


@contextmanager
def running_engine() -> Iterator[Link]:
    """An engine that is gone at the end, whoever started the last one."""
    process = spawn()
    try:
        yield Link(folders().socket)
    finally:
        end(folders())
        process.join(10)


def end(place: Folders) -> None:
    """No engine is left behind."""
    try:
        engine.stop(place, force=True)
    except Exception:
        kill(place)


def kill(place: Folders) -> None:
    """kill -9 the engine. Where somebody waits for one, another may start at once."""
    holder = engine._holder(place)
    if holder is not None:
        with suppress(ProcessLookupError):
            os.kill(holder, 9)
        eventually(lambda: engine._holder(place) != holder)


def eventually(is_true: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait for something that other processes or threads are about to do."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@contextmanager
def chat_with(model: str | None, **request: Any) -> Iterator[Any]:
    """A conversation in the engine that runs."""
    wanted = ChatRequest(model=model, **{"dtype": "float32", "seed": 7} | request)
    with connect(folders(), wanted, where="running") as chat:
        yield chat


def greedy(max_tokens: int = 12) -> TurnOptions:
    return TurnOptions(GREEDY, max_tokens=max_tokens)
