"""Slash commands: their names, what they take, how a line becomes one, how one is completed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chatkv.errors import UsageError


@dataclass(frozen=True)
class Command:
    """One command as /help shows it."""

    name: str
    argument: str  # how it is written: "N", "[N]", "" for none
    help: str
    needs_screen: bool = False

    @property
    def takes_nothing(self) -> bool:
        return not self.argument

    @property
    def needs_something(self) -> bool:
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = {
    command.name: command
    for command in (
        Command("help", "", "Keys and commands."),
        Command("new", "[SYSTEM PROMPT]", "Begin another conversation."),
        Command("resume", "[ID|TITLE]", "Go on with another conversation; without a name, choose."),
        Command("fork", "[N]", "Begin a conversation with the turns up to N, else all."),
        Command("branch", "[N]", "Go to another answer or question that was left behind."),
        Command("edit", "[N]", "Change your message of turn N, else the last, and send it again."),
        Command("regen", "[N]", "Another answer to your message of turn N, else the last."),
        Command("continue", "", "Go on with an answer that was stopped or cut."),
        Command("undo", "", "Take the last turn back; your message returns to the input."),
        Command("system", "[TEXT]", "Show the system prompt, or set that of a new conversation."),
        Command("model", "[MODEL]", "Show the model, or go on with another one."),
        Command("set", "[NAME VALUE]", "Show how answers are made, or change it."),
        Command("save", "[FILE]", "Write the conversation to a Markdown file."),
        Command("copy", "[code]", "Copy the last answer, or its last block of code.", True),
        Command("why", "[N]", "Explain where the time of turn N, else the last, went."),
        Command("cache", "", "What of this conversation is stored."),
        Command("status", "", "Where answers are computed, with what, and in how much memory."),
        Command("theme", "[NAME]", "Choose the colours.", True),
        Command("plain", "", "Go on line by line, without the full screen.", True),
        Command("quit", "", "Leave. Everything is saved."),
    )
}


@dataclass(frozen=True)
class Call:
    """A command as it was typed."""

    name: str
    argument: str = ""


def parse(line: str, known: Mapping[str, Command] = COMMANDS) -> Call | None:
    """The command in `line`, None for a message to the model; "//..." is a message with one slash.

    Names may be cut short as long as they name one of the known commands. Raises UsageError.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    typed, _, argument = line[1:].partition(" ")
    if "\n" in typed or "/" in typed:  # a path, or a text that begins like one
        return None
    name, argument = _named(typed, known), argument.strip()
    command = known[name]
    if command.takes_nothing and argument:
        raise UsageError(f"/{name} takes nothing behind it")
    if command.needs_something and not argument:
        raise UsageError(f"/{name} {command.argument}: {command.help}")
    return Call(name, argument)


def message(line: str) -> str:
    """What is sent of a line that is no command."""
    return line[1:] if line.startswith("//") else line


def turn_number(call: Call, num_turns: int) -> int:
    """The turn that a command names, 1-based, the last one by default. Raises UsageError."""
    if not num_turns:
        raise UsageError(f"/{call.name}: nothing was said yet")
    if not call.argument:
        return num_turns
    if not call.argument.isdecimal() or not 1 <= int(call.argument) <= num_turns:
        raise UsageError(f"/{call.name} {call.argument}: give a turn from 1 to {num_turns}")
    return int(call.argument)


def matches(line: str, values: Iterable[str] = ()) -> list[str]:
    """The whole lines that `line` may be meant to become; `values` complete its argument."""
    if not line.startswith("/") or "\n" in line or line.startswith("//"):
        return []
    typed, space, argument = line[1:].partition(" ")
    if not space:
        return [f"/{name}" for name in COMMANDS if name.startswith(typed.lower())]
    wanted = argument.strip().lower()
    return [f"/{typed} {value}" for value in values if value.lower().startswith(wanted)]


def common_start(lines: list[str]) -> str:
    """What all of `lines` begin with."""
    if not lines:
        return ""
    first, last = min(lines), max(lines)
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:same] if same is not None else first


def _named(typed: str, known: Mapping[str, Command]) -> str:
    if typed.lower() in known:
        return typed.lower()
    meant = [name for name in known if typed and name.startswith(typed.lower())]
    if len(meant) != 1:
        names = " or ".join(f"/{name}" for name in meant)
        unclear = f"/{typed} may be {names}" if meant else f"there is no command /{typed}"
        raise UsageError(f"{unclear}: /help lists them, and // sends a text that begins with a /")
    return meant[0]
