#!/usr/bin/env python
"""The full-screen chat: how soon it is there, and how it bears long answers, pastes and typing.

First paint is the real program at a terminal of its own, until its input is shown, beside an empty
Textual program; the rest runs over a scripted engine in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from bench_common import Figure, Options, run, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

EMPTY = """
from textual.app import App
from textual.widgets import Static

class Empty(App):
    def compose(self):
        yield Static("all there is")

Empty().run()
"""
SCREEN = (120, 40)
FRAGMENT = 4  # characters, as a token has


def measure(options: Options) -> Iterator[Figure]:
    repeats = 3 if options.quick else 9
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"CHATKV_HOME": home, "CHATKV_CALIBRATE": "0", "TEXTUAL_ANIMATIONS": "none"}
        yield _first_paint(repeats)
        yield from asyncio.run(_in_process(options.quick))


# --- the real program -------------------------------------------------------------------------


def _first_paint(repeats: int) -> Figure:
    """Medians of runs that take turns, so that both meet the same machine. A first run of each, as
    after an installation, compiles their modules and is not counted."""
    ours, empty = [], []
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = os.environ["CHATKV_HOME"]
    for number in range(repeats + 1):
        say(f"first paint, {number} of {repeats}")
        empty.append(_until_shown([sys.executable, "-c", EMPTY], b"all there is"))
        ours.append(_until_shown([sys.executable, "-m", "chatkv", "chat"], b"essage, or /"))
        _stop_engine()
    return Figure(
        "first paint",
        statistics.median(ours[1:]),
        "s",
        baseline=statistics.median(empty[1:]),
        baseline_name="empty Textual program",
        goal=0.5,
        goal_of="value",
        goal_is="<=",
        less_is_better=True,
    )


def _until_shown(command: list[str], wanted: bytes) -> float:
    """Seconds from the start of a program at a terminal until it shows `wanted`."""
    began = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", SCREEN[1], SCREEN[0], 0, 0))
    shown = b""
    try:
        while wanted not in shown:
            if not select.select([terminal], [], [], 60)[0]:
                raise SystemExit(f"{command} showed no {wanted!r}: {shown[-200:]!r}")
            shown += os.read(terminal, 65536)
        return time.perf_counter() - began
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def _stop_engine() -> None:
    from chatkv.client import engine
    from chatkv.paths import folders

    with contextlib.suppress(Exception):
        engine.stop(folders())


# --- over a scripted engine -------------------------------------------------------------------


async def _in_process(is_quick: bool) -> list[Figure]:
    answer = _markdown(10_000 if is_quick else 40_000)
    return [
        await _streamed(answer),
        await _shown_at_once(answer),
        await _pasted(1_000_000),
        await _typed(answer, 40 if is_quick else 150),
    ]


@contextlib.asynccontextmanager
async def _chat() -> AsyncIterator[tuple[Any, Any, Any]]:
    """A running chat: (app, pilot, script)."""
    from chatkv.commands.library import Library
    from chatkv.paths import folders
    from chatkv.tui.app import ChatApp
    from chatkv.tui.start import Start
    from chatkv_store.conversations import Conversations
    from scripted_chat import Script

    folders().make()
    with Conversations(folders().conversations) as store:
        script = Script(store)
        library = Library(store.path)
        app = ChatApp(Start(script.connect, library))
        async with app.run_test(size=SCREEN) as pilot:
            await _until(pilot, lambda: app.chat.is_open)
            yield app, pilot, script
        app.chat.worker.close()
        library.close()


async def _until(pilot: Any, holds: Callable[[], object]) -> None:
    while not holds():
        await pilot.pause(0.005)


async def _streamed(answer: str) -> Figure:
    """A whole answer as fast as the screen takes it, painted in pieces of 50 ms."""
    say("a long answer, streamed")
    async with _chat() as (app, pilot, script):
        script.pieces = [answer[at : at + FRAGMENT] for at in range(0, len(answer), FRAGMENT)]
        app.chat.composer.insert("go on")
        began = time.perf_counter()
        await pilot.press("enter")
        await _until(pilot, lambda: app.chat.num_turns == 1 and app.chat.answering is None)
        taken = time.perf_counter() - began
    return Figure(f"answer of {len(answer) // 1000} kB, streamed", taken, "s")


async def _shown_at_once(answer: str) -> Figure:
    """The same answer when its conversation is opened again."""
    say("a long answer, shown at once")
    async with _chat() as (app, pilot, _):
        from chatkv.client import TurnText

        turn = TurnText(1, None, "go on", answer, "done", "stop")
        began = time.perf_counter()
        await app.chat.conversation.show([turn], afresh=True)
        await pilot.pause()
        taken = time.perf_counter() - began
    return Figure(f"answer of {len(answer) // 1000} kB, shown again", taken, "s")


async def _pasted(num_chars: int) -> Figure:
    """A paste, folded; the baseline is a text area that takes all of it in."""
    from textual.events import Paste
    from textual.widgets import TextArea

    say("a large paste")
    text = ("x" * 79 + "\n") * (num_chars // 80)
    async with _chat() as (app, pilot, _):
        composer = app.chat.composer
        began = time.perf_counter()
        composer.post_message(Paste(text))
        await _until(pilot, lambda: composer.text)
        await pilot.pause()
        taken = time.perf_counter() - began
        assert composer.unfolded == text
        plain = TextArea()
        await app.chat.mount(plain)
        began = time.perf_counter()
        plain.insert(text)
        await pilot.pause()
        unfolded = time.perf_counter() - began
    return Figure(
        "paste of 1 MB",
        taken,
        "s",
        baseline=unfolded,
        baseline_name="unfolded",
        less_is_better=True,
    )


async def _typed(answer: str, num_keys: int) -> Figure:
    """From a key to its letter in the input while an answer streams at 50 tokens a second; the
    baseline is the same without an answer. Medians; the worst is noted."""
    say("typing while an answer streams")
    async with _chat() as (app, pilot, script):
        quiet = await _latencies(app, pilot, num_keys)
        app.chat.composer.text = "go on"
        script.pieces = [answer[:8000], "", "end"]
        script.hold = threading.Event()
        await pilot.press("enter")
        await _until(pilot, lambda: app.chat.answering is not None)
        over = threading.Event()
        talk = threading.Thread(target=_talk, args=(app, answer, over))
        talk.start()
        busy = await _latencies(app, pilot, num_keys)
        over.set()
        talk.join()
        script.hold.set()
        await _until(pilot, lambda: app.chat.answering is None)
    worst = max(busy) * 1e3
    return Figure(
        "key to screen while an answer streams",
        statistics.median(busy) * 1e3,
        "ms",
        baseline=statistics.median(quiet) * 1e3,
        baseline_name="while nothing streams",
        less_is_better=True,
        note=f"the worst of {num_keys} keys took {worst:.0f} ms",
    )


def _talk(app: Any, answer: str, over: threading.Event) -> None:
    """Tokens, 50 a second, as the engine's thread would hear them."""
    at = 8000
    while not over.wait(0.02):
        app.chat.worker._hear(answer[at % len(answer) :][:FRAGMENT])
        at += FRAGMENT


async def _latencies(app: Any, pilot: Any, num_keys: int) -> list[float]:
    from textual.events import Key

    composer, found = app.chat.composer, []
    for _ in range(num_keys):
        before = len(composer.text)
        began = time.perf_counter()
        app.post_message(Key("a", "a"))
        while len(composer.text) == before:
            await asyncio.sleep(0)
        painted = asyncio.Event()
        app.chat.call_after_refresh(painted.set)
        await painted.wait()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.03)
    return found


def _markdown(num_chars: int) -> str:
    """Prose, lists, code and tables, as answers have them."""
    part = (
        "## A heading\n\nSome prose with *emphasis*, `code` and [a link](https://example.org) that "
        "goes on for a line or two, as prose does. "
        + "It has a few more sentences, so that the paragraph is one as answers have them. "
        * 8
        + "\n\n- one thing\n- another thing\n\n"
        "```python\ndef work(items: list[int]) -> int:\n    return sum(items)\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    )
    return (part * (num_chars // len(part) + 1))[:num_chars]


if __name__ == "__main__":
    run("the full-screen chat", measure)
