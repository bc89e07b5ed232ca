"""`chatkv ask`: one question, one answer on stdout, everything else on stderr."""

from __future__ import annotations

import json
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
from chatkv.cli.piped import PATIENCE_S, Piped, standard_input
from chatkv.client import connect
from chatkv.errors import ChatkvError, UsageError
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.client import Chat
    from chatkv.session.turn import TurnOptions, TurnResult


@click.command()
@click.argument("question", required=False)
@chat_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def ask(question: str | None, as_json: bool, **arguments: Any) -> None:
    """Ask QUESTION and print the answer.

    Text on standard input is added to the question, or is the question. A pipe that takes its time
    is read while the model makes ready for the answer.
    """
    piped, text = standard_input(), None
    if piped is None:
        is_silent = sys.stdin is None or sys.stdin.isatty()
        text = _text(question, "" if is_silent else sys.stdin.read())
    elif piped.has_ended(PATIENCE_S):
        text = _text(question, piped.text)
    request = chat_request(arguments)
    options = turn_options(arguments)
    status, interrupt = Status(), Interrupt()
    status.show("starting")
    try:
        with connect(folders(), request, status.progress) as chat:
            status.clear()
            for notice in chat.notices:
                say(f"chatkv: {notice}")
            if text is None:
                assert piped is not None
                status.show("reading")
                text = _text(question, _listen(chat, question, piped, request.system))
                status.clear()
            result = _answer(chat, text, options, request.system, as_json, status, interrupt)
            for notice in result.notices:
                say(f"chatkv: {notice}")
            if as_json:
                click.echo(json.dumps(result.to_json(), ensure_ascii=False))
            elif sys.stderr.isatty() or chat.is_resumed:
                say(summary(result))
    finally:
        status.clear()
    if result.finish_reason == "interrupted":
        raise SystemExit(130)


def _text(question: str | None, piped: str) -> str:
    """The argument, then what was piped in."""
    text = _joined(question, piped)
    if not text.strip():
        raise UsageError('nothing to ask: give a question, as in chatkv ask "How are you?"')
    return text


def _joined(question: str | None, piped: str) -> str:
    return "\n\n".join(part for part in (question, piped.strip("\n")) if part)


def _listen(chat: Chat, question: str | None, piped: Piped, system: str | None) -> str:
    """All that is piped in; what has arrived is prefilled meanwhile."""
    for text in piped.growing():
        with suppress(ChatkvError):  # the turn will meet it, and say it
            chat.draft(_joined(question, text), system)
    return piped.text


def _answer(
    chat: Chat,
    text: str,
    options: TurnOptions,
    system: str | None,
    as_json: bool,
    status: Status,
    interrupt: Interrupt,
) -> TurnResult:
    from chatkv.session.turn import Listener

    def show(piece: str) -> None:
        status.clear()
        if not as_json:
            sys.stdout.write(shown(piece))
            sys.stdout.flush()

    listener = Listener(show, status.progress, interrupt)
    with interrupt.listening():
        result = chat.send(text, options, listener, system)
    if not as_json and not result.text.endswith("\n"):
        click.echo()
    return result
