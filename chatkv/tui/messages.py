"""Everything that the widgets are told: what happened in the engine, and what the user did."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from chatkv.client import Ready, TurnText


@dataclass(frozen=True)
class Facts:
    """A conversation as it is now."""

    session: str
    title: str
    model: str
    num_tokens: int
    max_tokens: int
    num_unsaved: int
    turns: tuple[TurnText, ...]


# --- from the engine ------------------------------------------------------------------------------


@dataclass
class Opened(Message):
    """A conversation is open. `notices` are lines for the user about the start."""

    facts: Facts
    is_resumed: bool
    notices: tuple[str, ...]


@dataclass
class OpenFailed(Message):
    error: str


@dataclass
class Restored(Message):
    """The history is in memory."""

    session: str
    ready: Ready


@dataclass
class Worked(Message):
    """`done` of `total` in a stage of a start, a restore or a prefill."""

    stage: str
    done: int
    total: int


@dataclass
class TextArrived(Message):
    """There is text in the worker's buffer where there was none."""


@dataclass
class Answered(Message):
    """A turn is over; its answer is the last of the turns."""

    facts: Facts
    notices: tuple[str, ...]


@dataclass
class TurnFailed(Message):
    """A turn could not be begun (then `was_kept` is False), or broke off. `facts`: what is left."""

    facts: Facts | None
    error: str
    is_context_full: bool
    was_kept: bool


@dataclass
class TurnsChanged(Message):
    """Turns were taken back, or another branch was chosen."""

    facts: Facts


@dataclass
class ChangeFailed(Message):
    error: str


@dataclass
class Drafted(Message):
    """Of what the input held, this much is ready."""

    text: str
    cached: int


# --- from the user --------------------------------------------------------------------------------


@dataclass
class Submitted(Message):
    """Enter: a message or a command."""

    text: str


@dataclass
class Typed(Message):
    """The input has changed."""

    text: str


@dataclass
class Scrolled(Message):
    """A page up (-1) or down (1) in the conversation."""

    pages: int


@dataclass
class TurnAction(Message):
    """A key on a turn: edit, fork, copy, code, regen or continue."""

    action: str
    turn: int
