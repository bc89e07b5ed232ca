"""The full-screen chat as a command shows it: what it is given, and what is said after it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from chatkv.cli.answer import say
from chatkv.cli.output import count, plural, size
from chatkv.client import ChatRequest, connect
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.session.turn import TurnOptions
    from chatkv.settings.read import Values
    from chatkv.tui.start import Left
    from chatkv_store.blocks import BlockStore


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


def explained(session: str, number: int) -> list[str]:
    """What `chatkv why` says of a turn."""
    from chatkv.cli.stores import open_conversations
    from chatkv.cli.why import explain

    with open_conversations() as store:
        turn = store.chain(session)[number - 1]
    return explain(turn.stats, num_new=len(turn.prompt_ids) + (number > 1))


def coverage(session: str, opened: BlockStore | None = None) -> list[str]:
    """What of a conversation is on the disk. opened: the KV cache, where this process has it open
    already."""
    from chatkv.cli.stores import NOTHING_STORED, open_blocks, open_conversations
    from chatkv_store.coverage import stretches

    with open_conversations() as store:
        found, blocks = store.get_session(session), opened or open_blocks()
        if blocks is None:
            return [NOTHING_STORED]
        with nullcontext() if opened is not None else blocks:
            pieces = [piece for piece in stretches(blocks, store, found) if piece.num_tokens]
    stored = [piece for piece in pieces if piece.why is None]
    kept = sum(piece.num_tokens for piece in stored)
    num_bytes = size(sum(piece.num_bytes for piece in stored))
    lines = [f"{count(kept)} of {plural(found.num_tokens, 'token')} are on the disk, {num_bytes}"]
    shared = sum(piece.num_tokens for piece in stored if piece.sharers)
    if shared:
        lines.append(f"{count(shared)} of them are shared with other conversations")
    lines += [
        f"tokens {count(piece.start)} to {count(piece.end)}: {piece.why}"
        for piece in pieces
        if piece.why is not None
    ]
    return lines
