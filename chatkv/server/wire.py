"""What travels between a face and the engine's process: JSON, and streams of one object a line.

A stream ends with one of the events `result`, `session` (of a session that was opened) or `error`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chatkv.engine.options import SamplingOptions
from chatkv.errors import ChatkvError, ContextFull, ModelError, PersistenceError, UsageError
from chatkv.session.request import ChatRequest
from chatkv.session.turn import TurnOptions

# Silence is broken this often, so that a face notices a Ctrl-C, and either side a dead peer.
ALIVE_S = 0.2


class SendRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One turn: what is said, and how it is to be answered. `num_turns`: behind the first so many
    turns, which takes the others back (to edit, or to have another answer)."""

    text: str
    system: str | None = None
    options: TurnOptions = msgspec.field(default_factory=TurnOptions)
    num_turns: int | None = None


class OptionsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Going on with an answer."""

    options: TurnOptions = msgspec.field(default_factory=TurnOptions)


class DraftRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What is being typed, all of it each time; "" restores the history alone."""

    text: str = ""
    system: str | None = None


class RewindRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Keep the first num_turns turns."""

    num_turns: int


class SwitchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Go on from behind another turn of the session's tree; `turn` is its id."""

    turn: str


class OpenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A new session with one of the models that are offered, "" the default; or `session`, an id,
    "" with the model that it was held with last."""

    model: str = ""
    session: str | None = None
    seed: int | None = None


class RenameRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Another title."""

    title: str


class ForkRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Keep the first `at` turns, None: all."""

    at: int | None = None


class StopRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`force`: also where turns are lost that could not be written."""

    force: bool = False


class Event(msgspec.Struct, omit_defaults=True):
    """One line of a stream."""

    event: Literal["progress", "text", "alive", "session", "result", "error"]
    stage: str = ""
    done: int = 0
    total: int = 0
    text: str = ""
    data: dict[str, Any] = {}


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    return msgspec.json.decode(line, type=Event)


_ERRORS: dict[str, type[ChatkvError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, ContextFull, PersistenceError)
}


class EngineError(ChatkvError):
    """An error of the store or the engine itself, as the engine's process told it."""


def error_event(error: Exception) -> Event:
    """A failure that a user can do something about."""
    return Event("error", text=str(error), data={"kind": type(error).__name__})


def raised(event: Event) -> ChatkvError:
    """The error that an `error` event stands for."""
    return _ERRORS.get(str(event.data.get("kind")), EngineError)(event.text)


__all__ = ["ChatRequest", "SamplingOptions", "TurnOptions"]
