"""The full-screen chat over a scripted engine: `async with tui() as chat:` is a running one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from chatkv.client import ChatRequest
from chatkv.commands.library import Library
from chatkv.tui.app import ChatApp
from chatkv.tui.conversation_view import Notice
from chatkv.tui.start import Start
from chatkv_store.conversations import Conversations
from scripted_chat import Script

WAIT_S = 20.0  # never waited for in a test that passes


@dataclass
class Tui:
    """A running chat, and hands and eyes for it."""

    app: ChatApp
    pilot: Pilot[Any]
    script: Script

    async def type(self, text: str) -> None:
        """Put text into the input, as a terminal that pastes nothing would."""
        self.app.chat.composer.insert(text)
        await self.pilot.pause()

    async def enter(self, text: str) -> None:
        self.app.chat.composer.insert(text)
        await self.pilot.press("enter")

    async def ask(self, text: str) -> None:
        """Send a message and wait for the whole answer."""
        before = self.app.chat.num_turns
        await self.enter(text)
        await self.until(
            lambda: self.app.chat.num_turns > before and self.app.chat.answering is None
        )

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for something that a thread brings about."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def idle(self) -> None:
        await self.until(lambda: self.app.chat.answering is None and self.app.chat.is_open)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """What the conversation shows: (message, answer)."""
        return [(view.turn.user, view.answer.text) for view in self.app.chat.conversation.views]

    @property
    def notices(self) -> list[str]:
        found = self.app.chat.conversation.query(Notice)
        return [str(notice.visual).removeprefix("· ") for notice in found]

    @property
    def status(self) -> str:
        return self.text("#status")

    def text(self, selector: str) -> str:
        return str(self.app.screen.query_one(selector, Static).visual)

    @property
    def lines(self) -> list[str]:
        """The screen as it is painted, row by row."""
        compositor = self.app.screen._compositor
        width = self.app.size.width
        return [
            "".join(segment.text for segment in strip)[:width].rstrip()
            for strip in compositor.render_strips()
        ]


@pytest.fixture
def store(home: Path) -> Iterator[Conversations]:
    with Conversations(home / "data" / "conversations.sqlite3") as opened:
        yield opened


@pytest.fixture
def script(store: Conversations) -> Script:
    return Script(store)


@pytest.fixture
def tui(
    script: Script, store: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractAsyncContextManager[Tui]]:
    """`tui(request, size=(100, 30), **start)` -> a running chat; `connect` may be another."""
    for name in ("WAYLAND_DISPLAY", "DISPLAY", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    @asynccontextmanager
    async def running(
        request: ChatRequest | None = None, size: tuple[int, int] = (100, 26), **start: Any
    ) -> AsyncIterator[Tui]:
        library = Library(store.path)
        given = Start(
            start.pop("connect", script.connect),
            library,
            request or ChatRequest(),
            copy_to=tmp_path / "copied.txt",
            **start,
        )
        app = ChatApp(given)
        app.animation_level = "none"
        try:
            async with app.run_test(size=size) as pilot:
                await pilot.pause()
                yield Tui(app, pilot, script)
        finally:
            for event in (script.hold, script.hold_open):
                if event is not None:
                    event.set()
            app.chat.worker.close()
            library.close()

    return running
