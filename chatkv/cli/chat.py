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
from chatkv.client import OpenChat, open_chat
from chatkv.errors import ContextFull
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.session.conversation import Conversation
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
        with open_chat(folders(), request, status.progress) as opened:
            status.clear()
            for notice in opened.runtime.notices:
                say(f"chatkv: {notice}")
            _greet(opened)
            interrupt = Interrupt()
            try:
                _converse(opened.conversation, options, arguments["system"], status, interrupt)
            except KeyboardInterrupt:
                if interrupt.was_second:
                    raise
                click.echo()  # between an answer and the prompt: as at the prompt
        if opened.conversation.journal.num_unsaved:
            turns = plural(opened.conversation.journal.num_unsaved, "turn")
            say(f"chatkv: {turns} of this conversation could not be saved")
    finally:
        status.clear()


def _greet(opened: OpenChat) -> None:
    """What is open, and the end of the conversation so far."""
    conversation = opened.conversation
    session = conversation.session
    if not opened.is_resumed:
        say(f"{opened.runtime.prepared.name} · new session {session.id} · Ctrl-D leaves")
        return
    say(
        f"{opened.runtime.prepared.name} · session {session.id} · {session.title or 'untitled'} · "
        f"{len(conversation.turns)} turns, {len(conversation.log)} tokens"
    )
    if conversation.turns:
        last = conversation.turns[-1]
        mark = " [interrupted]" if last.state == "interrupted" else ""
        say(f"{PROMPT}{last.user_text}\n{last.reply_text}{mark}")


def _converse(
    conversation: Conversation,
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
                result = conversation.send(text, options, listener, system)
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
