"""`chatkv chat`: a conversation line by line, in any terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.answer import (
    Interrupt,
    Status,
    chat_options,
    chat_request,
    say,
    shown,
    summary,
    turn_options,
)
from chatkv.cli.output import plural
from chatkv.client import connect
from chatkv.errors import ContextFull
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.client import Chat
    from chatkv.session.turn import TurnOptions

PROMPT = "> "


@click.command()
@chat_options
def chat(**arguments: Any) -> None:
    """Chat with a model, line by line.

    A line that ends with a backslash goes on in the next. Ctrl-C stops an answer and keeps what
    was said; at the prompt, or twice, it leaves. So does Ctrl-D.
    """
    request = chat_request(arguments)
    options = turn_options(arguments)
    status = Status()
    status.show("starting")
    try:
        with connect(folders(), request, status.progress, where="start") as opened:
            status.clear()
            for notice in opened.notices:
                say(f"chatkv: {notice}")
            _greet(opened)
            interrupt = Interrupt()
            try:
                _converse(opened, options, arguments["system"], status, interrupt)
            except KeyboardInterrupt:
                if interrupt.was_second:
                    raise
                click.echo()  # between an answer and the prompt: as at the prompt
        if opened.num_unsaved:
            turns = plural(opened.num_unsaved, "turn")
            say(f"chatkv: {turns} of this conversation could not be saved")
    finally:
        status.clear()


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
        say(f"{PROMPT}{last.user}\n{last.reply}{mark}")


def _converse(
    chat: Chat,
    options: TurnOptions,
    system: str | None,
    status: Status,
    interrupt: Interrupt,
) -> None:
    from chatkv.session.turn import Listener

    def show(piece: str) -> None:
        status.clear()
        sys.stdout.write(shown(piece))
        sys.stdout.flush()

    listener = Listener(show, status.progress, interrupt)
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and history
    while (text := _read()) is not None:
        if not text.strip():
            continue
        try:
            with interrupt.listening():
                result = chat.send(text, options, listener, system)
        except ContextFull as error:
            say(f"chatkv: {error}")
            continue
        system = None
        click.echo("" if result.text.endswith("\n") else "\n", nl=False)
        for notice in result.notices:
            say(f"chatkv: {notice}")
        if sys.stderr.isatty():
            say(click.style(summary(result), dim=True))


def _read() -> str | None:
    """The next message, None at the end of input or on Ctrl-C at the prompt."""
    lines: list[str] = []
    prompt = PROMPT if sys.stdin.isatty() else ""
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
