"""Turns in processes that may be killed at any instant."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import CONTEXT


@dataclass
class Heard:
    """What came out of a process until its end: (seconds on our clock, text or event)."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    events: dict[str, float] = field(default_factory=dict)
    killed_at: float = 0.0
    error: str | None = None

    def text(self, until: float = float("inf")) -> str:
        return "".join(piece for at, piece in self.pieces if at <= until)


def say_and_kill(
    home: Path, session: str, text: str, options: dict[str, Any], when: str, delay_s: float
) -> Heard:
    """Say `text` in a process of its own and kill -9 it `delay_s` after the event `when`
    ("start", "open", "finish", "done"), or when it ends by itself before."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_child, args=(theirs, home, session, text, options))
    process.start()
    theirs.close()
    heard = Heard(events={"start": time.monotonic()})
    try:
        while True:
            deadline = heard.events.get(when, float("inf")) + delay_s
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if ours.poll(min(left, 60.0)):
                kind, value = ours.recv()
                _note(heard, kind, value)
                if kind in ("closed", "error"):
                    break
    except (EOFError, OSError):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    heard.killed_at = time.monotonic()
    process.join()
    with suppress(EOFError, OSError):  # the last message may have been cut in the middle
        while True:  # written before the kill, read after it
            _note(heard, *ours.recv())
    ours.close()
    return heard


def _note(heard: Heard, kind: str, value: str) -> None:
    now = time.monotonic()
    if kind == "text":
        heard.pieces.append((now, value))
    elif kind == "error":
        heard.error = value
    heard.events.setdefault(kind, now)


def _child(
    connection: Connection, home: Path, session: str, text: str, options: dict[str, Any]
) -> None:
    os.environ["CHATKV_HOME"] = str(home)
    from chatkv.client import ChatRequest, open_chat
    from chatkv.engine.options import SamplingOptions
    from chatkv.paths import folders
    from chatkv.session.turn import Listener, TurnOptions

    def tell(kind: str, value: str = "") -> None:
        connection.send((kind, value))

    try:
        request = ChatRequest(options["model"], options["dtype"], resume=session)
        with open_chat(folders(), request) as chat:
            tell("open")
            _announce(chat.conversation, "_finish", lambda: tell("finish"))
            chat.conversation.send(
                text,
                TurnOptions(
                    SamplingOptions(temperature=options.get("temperature", 0)),
                    max_tokens=options["max_tokens"],
                ),
                Listener(on_text=lambda piece: tell("text", piece)),
            )
            tell("done")
        tell("closed")
    except BaseException as error:
        tell("error", repr(error))
        raise


def _announce(target: object, method: str, before: Callable[[], None]) -> None:
    original = getattr(target, method)

    def announced(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    setattr(target, method, announced)
