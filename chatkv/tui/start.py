"""What the chat is given by the program that shows it, and how it was left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatkv.client import ChatRequest
from chatkv.commands.library import Library
from chatkv.tui.worker import Connect

if TYPE_CHECKING:
    from chatkv.session.turn import TurnOptions
    from chatkv_store.blocks import BlockStore


def default_options() -> TurnOptions:
    """How answers are made unless somebody says otherwise."""
    from chatkv.session.turn import TurnOptions

    return TurnOptions()


@dataclass(frozen=True)
class Start:
    """`explain`, `coverage` and `state` tell of a session's turn, of what is stored of a session
    and of what is loaded, in lines; `copy_to` is where a copy goes that no clipboard takes.
    `new_request` is what later conversations begin with."""

    connect: Connect
    library: Library
    request: ChatRequest = field(default_factory=ChatRequest)
    options: Callable[[], TurnOptions] = default_options  # asked for with the first message
    explain: Callable[[str, int], list[str]] = lambda session, turn: []
    coverage: Callable[[str, BlockStore | None], list[str]] = lambda session, opened: []
    state: Callable[[dict[str, Any]], list[str]] = lambda found: []
    copy_to: Path = Path("copied.txt")
    keymap: Mapping[str, str] = field(default_factory=dict)
    theme: str | None = None
    new_request: ChatRequest = field(default_factory=ChatRequest)


@dataclass(frozen=True)
class Left:
    """Where to go on (None: nothing was said), and whether line by line at once."""

    session: str | None = None
    num_unsaved: int = 0
    goes_on_plain: bool = False
