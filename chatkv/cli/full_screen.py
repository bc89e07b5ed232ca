"""The full-screen chat as a command shows it: what it is given, and what is said after it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from chatkv.cli.answer import say
from chatkv.cli.output import plural
from chatkv.cli.told import coverage, explained, state
from chatkv.client import ChatRequest, connect
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.session.turn import TurnOptions
    from chatkv.settings.read import Values
    from chatkv.tui.start import Left


def is_possible() -> bool:
    """Whether there is a terminal that can show it, and nobody who could not read it."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or is_read_aloud():
        return False
    return os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def is_read_aloud() -> bool:
    """Whether somebody listens to the screen, who is to hear who speaks."""
    return os.environ.get("CHATKV_A11Y", "") not in ("", "0")


def show(
    request: ChatRequest,
    new_request: ChatRequest,
    options: Callable[[], TurnOptions],
    settings: Values,
) -> Left:
    """Chat until the user leaves. new_request: what later conversations begin with."""
    gc.disable()  # collecting while all of Textual is imported took a tenth of the start
    from chatkv.cli.look import keymap, theme
    from chatkv.commands.library import Library
    from chatkv.tui.app import ChatApp
    from chatkv.tui.start import Left, Start

    place = folders()
    start = Start(
        partial(connect, place, where="start"),
        Library(place.conversations),
        request,
        options,
        explained,
        coverage,
        state,
        copy_to=place.runtime / "copied.txt",
        keymap=keymap(settings),
        theme=theme(settings),
        new_request=new_request,
    )
    app = ChatApp(start)
    try:
        left = app.run() or Left()
    finally:
        app.chat.worker.close()
        start.library.close()
    if left.num_unsaved:
        turns = plural(left.num_unsaved, "turn")
        say(f"chatkv: {turns} of this conversation could not be saved")
    if left.session is not None and not left.goes_on_plain:
        say(f"To go on: chatkv resume {left.session}")
    return left
