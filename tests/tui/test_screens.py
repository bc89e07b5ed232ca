"""Every screen as it looks, in a roomy terminal and in one of 40x12.

The pictures are Textual's SVG export; compared are the words and where they stand. After a change
that is meant, CHATKV_TEST_UPDATE=1 writes them anew: look at what git shows then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import svg_screen
from asynchronous import asynchronous
from scripted_chat import Script

Tui = Callable[..., AbstractAsyncContextManager[Any]]

SCREENS = Path(__file__).parent / "screens"
ANSWER = """Two steps:

1. Read the *file*
2. Print **it**

```python
print(open("a").read())
```

| mode | meaning |
|------|---------|
| r    | read    |
"""


class Screens:
    """Looks at a running chat and compares with what it looked like before."""

    def __init__(self, chat: Any, size: tuple[int, int]) -> None:
        self._chat, self._size = chat, size
        self.changed: list[str] = []

    async def look(self, name: str) -> None:
        for _ in range(3):  # a layout may ask for another one
            await self._chat.pilot.pause()
        shown = svg_screen.rows(self._chat.app.export_screenshot())
        width, height = self._size
        assert len(shown) <= height and max(map(len, shown)) <= width, name
        path = SCREENS / f"{name}-{width}x{height}.txt"
        text = "\n".join(shown) + "\n"
        if os.environ.get("CHATKV_TEST_UPDATE"):
            SCREENS.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            self.changed.append(f"{path.name}:\n{text}")


@pytest.mark.parametrize("size", [(110, 32), (40, 12)], ids=["roomy", "small"])
@asynchronous
async def test_screens(tui: Tui, script: Script, size: tuple[int, int]) -> None:
    script.hold_open = threading.Event()
    async with tui(size=size) as chat:
        screens = Screens(chat, size)
        chat.app.chat.composer.cursor_blink = False
        await chat.until(lambda: "25%" in chat.text("#progress"))
        await screens.look("starting")
        script.hold_open.set()
        await chat.idle()
        script.pieces = [ANSWER[:100], ANSWER[100:]]
        await chat.ask("How is a file read?")
        await screens.look("answer")
        await chat.press("f2")
        await screens.look("timeline")
        await chat.press("f2")
        await chat.type("/re")
        await screens.look("suggestions")
        await chat.press("ctrl+c", "f1")
        await screens.look("help")
        await chat.press("escape", "f5")
        await chat.until(lambda: len(script.sent) == 2)
        await chat.idle()
        await chat.press("f4")
        await screens.look("branches")
        await chat.press("escape", "f3")
        await screens.look("conversations")
        await chat.press("escape", "alt+up")
        await screens.look("turn")
        await chat.press("e")
        await screens.look("editing")
        await chat.press("escape")
        script.progress = [("prefill", 1200, 5000), ("prefill", 2400, 5000)]
        script.pieces, script.hold = ["Half", " an answer"], threading.Event()
        await chat.enter("And now?")
        await chat.until(lambda: chat.turns[-1][1] == "Half")
        await screens.look("answering")
        await chat.press("escape")
        await chat.idle()
        await screens.look("stopped")
        assert not screens.changed, "\n".join(screens.changed)


@asynchronous
async def test_states_are_told_without_colours(
    tui: Tui, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    script.hold, script.pieces = threading.Event(), ["Half", " an answer"]
    async with tui() as chat:
        await chat.idle()
        await chat.enter("hello")
        await chat.until(lambda: chat.turns[-1][1] == "Half")
        await chat.press("escape")
        await chat.idle()
        svg = chat.app.export_screenshot()
        used = svg_screen.colours(svg)
        coloured = {one for one in used if len({one[1:3], one[3:5], one[5:7]}) > 1}
        assert used and not coloured
        shown = "\n".join(svg_screen.rows(svg))
        assert "[interrupted]" in shown and "stopped" in shown and "> hello" in shown
        await chat.press("alt+up")  # the turn with the focus has a bar beside it
        with_focus = svg_screen.rows(chat.app.export_screenshot())
        assert with_focus != shown.split("\n")


@asynchronous
async def test_a_terminal_may_change_its_size(tui: Tui, script: Script) -> None:
    script.pieces = [ANSWER, "end"]
    async with tui(size=(120, 40)) as chat:
        await chat.idle()
        await chat.ask("hello")
        await chat.press("f2")
        for width, height in ((40, 12), (20, 6), (200, 60), (60, 15)):
            await chat.pilot.resize_terminal(width, height)
            await chat.pilot.pause()
            shown = svg_screen.rows(chat.app.export_screenshot())
            assert len(shown) <= height and max(map(len, shown)) <= width
            assert any("ready" in row for row in shown[-1:]), (width, height)
            assert any("Message" in row for row in shown), (width, height)
