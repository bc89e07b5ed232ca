"""A conversation line by line: for pipes, simple terminals and screen readers. Append-only: what
was written stays as it is."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from chatkv.cli.answer import Interrupt, Status, say, shown, summary
from chatkv.cli.full_screen import is_read_aloud
from chatkv.cli.output import plural, wants_colour
from chatkv.client import ChatRequest, connect
from chatkv.client.link import EngineGone
from chatkv.errors import ContextFull
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.client import Chat
    from chatkv.session.turn import TurnOptions

PROMPT = "> "
# A stage that lasts is told in words this often.
TELL_S = 3.0


def converse(request: ChatRequest, options: TurnOptions, system: str | None) -> None:
    """Open what `request` names, and talk until the user leaves."""
    status = Status() if wants_colour(sys.stderr) and not is_read_aloud() else ToldStatus()
    status.show("starting")
    try:
        with connect(folders(), request, status.progress, where="start") as opened:
            status.clear()
            for notice in opened.notices:
                say(f"chatkv: {notice}")
            _greet(opened)
            interrupt = Interrupt()
            try:
                _talk(opened, options, system, status, interrupt)
            except KeyboardInterrupt:
                if interrupt.was_second:
                    raise
                click.echo()  # between an answer and the prompt: as at the prompt
        if opened.num_unsaved:
            turns = plural(opened.num_unsaved, "turn")
            say(f"chatkv: {turns} of this conversation could not be saved")
    finally:
        status.clear()


class ToldStatus(Status):
    """What is being waited for, as lines of their own, where it takes long enough to wonder."""

    def __init__(self) -> None:
        super().__init__()
        self._told_at = time.monotonic()

    def show(self, text: str) -> None:
        """Overwrites nothing, and says nothing of what is over soon."""
        now = time.monotonic()
        if not text:
            self._told_at = now
        elif self._is_live and now - self._told_at >= TELL_S:
            self._told_at = now
            say(text)


def _greet(chat: Chat) -> None:
    """What is open, and the end of the conversation so far."""
    if not chat.is_resumed:
        say(f"{chat.model} · new session {chat.session} · Ctrl-D leaves")
        return
    say(
        f"{chat.model} · session {chat.session} · {chat.title or 'untitled'} · "
        f"{plural(len(chat.turns), 'turn')}, {plural(chat.num_tokens, 'token')}"
    )
    if chat.turns:
        last = chat.turns[-1]
        mark = " [interrupted]" if last.state == "interrupted" else ""
        me, model = _speakers()
        say(f"{me or PROMPT}{last.user}\n{model}{last.reply}{mark}")


def _talk(
    chat: Chat, options: TurnOptions, system: str | None, status: Status, interrupt: Interrupt
) -> None:
    from chatkv.session.turn import Listener

    speaker = _speakers()[1]
    is_first = True

    def show(piece: str) -> None:
        nonlocal is_first
        status.clear()
        sys.stdout.write((speaker if is_first else "") + shown(piece))
        sys.stdout.flush()
        is_first = False

    listener = Listener(show, status.progress, interrupt)
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and history
    while (text := _read()) is not None:
        if not text.strip():
            continue
        is_first = True
        try:
            with interrupt.listening():
                result = chat.send(text, options, listener, system)
        except (ContextFull, EngineGone) as error:
            if not sys.stdin.isatty() and not isinstance(error, ContextFull):
                raise  # nobody is there to say it again
            status.clear()
            say(f"chatkv: {error}" if is_first else f"\nchatkv: {error}")
            continue
        system = None
        click.echo("" if result.text.endswith("\n") else "\n", nl=False)
        for notice in result.notices:
            say(f"chatkv: {notice}")
        if sys.stderr.isatty():
            line = summary(result)
            say(click.style(line, dim=True) if wants_colour(sys.stderr) else line)


def _speakers() -> tuple[str, str]:
    """What stands before a message and before an answer."""
    return ("You: ", "Assistant: ") if is_read_aloud() else ("", "")


def _read() -> str | None:
    """The next message, None at the end of input or on Ctrl-C at the prompt."""
    lines: list[str] = []
    prompt = (_speakers()[0] or PROMPT) if sys.stdin.isatty() else ""
    try:
        while True:
            line = input(prompt if not lines else "… " * bool(prompt))
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
    except EOFError:
        if lines:
            return "\n".join(lines)
    except KeyboardInterrupt:
        pass
    if prompt:
        click.echo()
    return None
