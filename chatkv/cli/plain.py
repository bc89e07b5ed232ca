"""A conversation line by line: for pipes, simple terminals and screen readers. Append-only: what
was written stays as it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from chatkv.cli.answer import Interrupt, Status, say, shown, summary
from chatkv.cli.full_screen import is_read_aloud
from chatkv.cli.output import plural, printable, wants_colour
from chatkv.client import ChatRequest, connect
from chatkv.commands import slash
from chatkv.errors import ChatkvError, ContextFull
from chatkv.paths import folders
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    from chatkv.client import Chat
    from chatkv.session.turn import Listener, TurnOptions, TurnResult

PROMPT = "> "
# A stage that lasts is told in words this often.
TELL_S = 3.0


def converse(
    request: ChatRequest,
    options: TurnOptions,
    system: str | None,
    new_request: ChatRequest | None = None,
) -> None:
    """Open what `request` names, and talk until the user leaves. new_request: what later
    conversations begin with."""
    from chatkv.cli.plain_commands import PlainCommands

    status = Status() if wants_colour(sys.stderr) and not is_read_aloud() else ToldStatus()
    status.show("starting")
    new = replace(new_request or ChatRequest(model=request.model), seed=None)
    talk = PlainTalk(options, system, status, new)
    try:
        with talk:
            talk.open(request)
            try:
                talk.listen(PlainCommands(talk))
            except KeyboardInterrupt:
                if talk.interrupt.was_second:
                    raise
                click.echo()  # between an answer and the prompt: as at the prompt
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


class PlainTalk:
    """The conversation that is open, and what is said to it. `options` say how it answers."""

    chat: Chat

    def __init__(
        self, options: TurnOptions, system: str | None, status: Status, new_request: ChatRequest
    ) -> None:
        self.options, self.system, self.new_request = options, system, new_request
        self.interrupt = Interrupt()
        self._status = status
        self._open = ExitStack()
        self._is_first_piece = True
        self._is_open = False

    def __enter__(self) -> PlainTalk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, request: ChatRequest) -> None:
        """Go to the conversation that `request` names, from the one that is open."""
        self.chat = self._open.enter_context(
            connect(folders(), request, self._status.progress, where="start")
        )
        self._is_open = True
        self._status.clear()
        self.tell(self.chat.notices)
        _greet(self.chat)

    def close(self) -> None:
        """Leave what is open."""
        self._open.close()
        if self._is_open and self.chat.num_unsaved:
            turns = plural(self.chat.num_unsaved, "turn")
            say(f"chatkv: {turns} of this conversation could not be saved")
        self._is_open = False

    def listen(self, commands: Callable[[slash.Call], bool]) -> None:
        """Until the input ends, or a command says so by returning False."""
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() editing and history
        while (text := read()) is not None:
            if not text.strip():
                continue
            try:
                call = slash.parse(text, PLAIN_COMMANDS)
                if call is None:
                    self.send(slash.message(text))
                elif not commands(call):
                    return
            except (ChatkvError, StoreError, OSError) as error:
                if not sys.stdin.isatty() and not isinstance(error, ContextFull):
                    raise  # nobody is there to say it again
                self._status.clear()
                if not self._is_first_piece:  # it ends in the middle of an answer
                    click.echo()
                    self._is_first_piece = True
                say(f"chatkv: {printable(' '.join(str(error).split()))}")

    def send(self, text: str) -> None:
        """Say something and write the answer."""
        system = None if self.chat.turns else self.system
        self._answer(lambda heard: self.chat.send(text, self.options, heard, system))

    def go_on(self) -> None:
        """Write the rest of the last answer."""
        self._answer(lambda heard: self.chat.resume_reply(self.options, heard))

    def tell(self, notices: list[str] | tuple[str, ...]) -> None:
        for notice in notices:
            say(f"chatkv: {printable(notice)}")

    def _answer(self, ask: Callable[[Listener], TurnResult]) -> None:
        from chatkv.session.turn import Listener

        with self.interrupt.listening():
            result = ask(Listener(self._show, self._status.progress, self.interrupt))
        self._is_first_piece = True
        click.echo("" if result.text.endswith("\n") else "\n", nl=False)
        self.tell(result.notices)
        if sys.stderr.isatty():
            line = summary(result)
            say(click.style(line, dim=True) if wants_colour(sys.stderr) else line)

    def _show(self, piece: str) -> None:
        self._status.clear()
        sys.stdout.write((_speakers()[1] if self._is_first_piece else "") + shown(piece))
        sys.stdout.flush()
        self._is_first_piece = False


PLAIN_COMMANDS = {
    name: command for name, command in slash.COMMANDS.items() if not command.needs_screen
}


def read(typed: str = "") -> str | None:
    """The next message, None at the end of input or on Ctrl-C at the prompt. `typed` stands in the
    line already, where that can be edited."""
    lines: list[str] = []
    prompt = (_speakers()[0] or PROMPT) if sys.stdin.isatty() else ""
    try:
        with _prefilled(typed if prompt else ""):
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


def _prefilled(typed: str) -> ExitStack:
    """While this is held, a line that is asked for begins with `typed`."""
    held = ExitStack()
    if typed:
        with suppress(ImportError):
            import readline

            readline.set_startup_hook(lambda: readline.insert_text(typed))
            held.callback(readline.set_startup_hook)
    return held


def _greet(chat: Chat) -> None:
    """What is open, and the end of the conversation so far."""
    if not chat.is_resumed:
        say(f"{chat.model} · new session {chat.session} · /help lists commands, Ctrl-D leaves")
        return
    say(
        f"{chat.model} · session {chat.session} · {printable(chat.title) or 'untitled'} · "
        f"{plural(len(chat.turns), 'turn')}, {plural(chat.num_tokens, 'token')}"
    )
    if chat.turns:
        last = chat.turns[-1]
        mark = " [interrupted]" if last.state == "interrupted" else ""
        me, model = _speakers()
        say(f"{me or PROMPT}{printable(last.user)}\n{model}{printable(last.reply)}{mark}")


def _speakers() -> tuple[str, str]:
    """What stands before a message and before an answer."""
    return ("You: ", "Assistant: ") if is_read_aloud() else ("", "")
