"""The keys, by the names under which a user can change them, and what help says of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from textual.binding import Binding

from chatkv.errors import UsageError


@dataclass(frozen=True)
class Key:
    """`keys` are alternatives, as Textual names them, with commas between."""

    name: str
    keys: str
    action: str
    help: str

    def binding(self, priority: bool = False) -> Binding:
        return Binding(
            self.keys, self.action, self.help, show=False, id=self.name, priority=priority
        )


APP = (
    Key("stop", "escape", "stop", "Stop the answer; leave what is open."),
    Key("interrupt", "ctrl+c", "interrupt", "Stop the answer; twice within 2 s: leave."),
    Key("quit", "ctrl+q", "quit", "Leave."),
    Key("help", "f1", "verb('help')", "Keys and commands."),
    Key("timeline", "f2", "timeline", "Where the last turn's time went."),
    Key("sessions", "f3", "verb('resume')", "Other conversations, and search in all of them."),
    Key("branches", "f4", "verb('branch')", "Answers and questions that were left behind."),
    Key("regen", "f5", "verb('regen')", "Another answer to your last message."),
    Key("new", "ctrl+n", "verb('new')", "Begin another conversation."),
    Key("continue", "ctrl+g", "verb('continue')", "Go on with an answer that was stopped or cut."),
    Key("copy", "ctrl+y", "verb('copy')", "Copy the last answer."),
    Key("copy-code", "alt+y", "verb('copy', 'code')", "Copy its last block of code."),
    Key("turns", "alt+up,ctrl+up", "turns", "Choose a turn, to edit, fork or copy it."),
)
COMPOSER = (
    Key("send", "enter", "send", "Send."),
    Key("newline", "shift+enter,ctrl+j,alt+enter", "newline", "A new line (also \\ and Enter)."),
    Key("older", "up", "older", "On the first line: what you sent before."),
    Key("newer", "down", "newer", "On the last line: back again."),
    Key("page-up", "pageup", "page_up", "Scroll the conversation."),
    Key("page-down", "pagedown", "page_down", "Scroll back; at its end it follows again."),
    Key("complete", "tab", "complete", "Complete a command."),
    Key("unfold", "ctrl+o", "unfold", "Show a folded paste in full."),
    Key("leave", "ctrl+d", "leave", "In an empty input: leave."),
)
TURN = (
    Key("turn-up", "up,k", "move(-1)", "The turn before."),
    Key("turn-down", "down,j", "move(1)", "The turn after."),
    Key("turn-edit", "e", "act('edit')", "Edit your message and send it again."),
    Key("turn-regen", "r", "act('regen')", "Another answer."),
    Key("turn-fork", "f", "act('fork')", "Begin a conversation with the turns up to here."),
    Key("turn-copy", "y", "act('copy')", "Copy the answer."),
    Key("turn-code", "c", "act('code')", "Copy its last block of code."),
    Key("turn-back", "enter,i", "back", "Back to the input."),
)
FIRST = ("interrupt", "copy", "quit")  # though an input would take them too


class _Sequence(StrEnum):
    ALT_ENTER = "alt+enter"


def know_alt_enter() -> None:
    """Most terminals send Alt+Enter as Escape and a line end, which Textual knows as no key: it
    would make a letter and an Enter of it, and the message would be sent."""
    from textual._ansi_sequences import ANSI_SEQUENCES_KEYS

    known: dict[str, Any] = ANSI_SEQUENCES_KEYS  # type: ignore[assignment]  # any enumeration does
    for sequence in ("\x1b\r", "\x1b\n"):
        known.setdefault(sequence, (_Sequence.ALT_ENTER,))


GROUPS = {"Anywhere": APP, "In the input": COMPOSER, "On a turn": TURN}


def lookup(keys: Iterable[Key], keymap: Mapping[str, str]) -> dict[str, str]:
    """Every single key -> its action."""
    return {
        one.strip(): key.action for key in keys for one in keymap.get(key.name, key.keys).split(",")
    }


def check(keymap: Mapping[str, str]) -> dict[str, str]:
    """A user's name -> keys. Raises UsageError for a name that no key has."""
    names = [key.name for keys in GROUPS.values() for key in keys]
    for name in keymap:
        if name not in names:
            raise UsageError(f"there is no key named {name}: there are {', '.join(names)}")
    return dict(keymap)
