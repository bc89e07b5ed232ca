"""Slash commands without a screen: each writes lines, and what it cannot do it raises."""

from __future__ import annotations

import sys
from dataclasses import replace

from chatkv.cli.answer import say
from chatkv.cli.output import printable
from chatkv.cli.plain import PLAIN_COMMANDS, PlainTalk, read
from chatkv.cli.told import coverage, explained, state
from chatkv.client import ChatRequest, TurnText, resolved
from chatkv.commands import answers, saved, slash
from chatkv.commands.branches import branches
from chatkv.commands.library import Library
from chatkv.commands.slash import Call
from chatkv.errors import ChatkvError, UsageError
from chatkv.paths import folders
from chatkv_store.errors import StoreError

# Conversations that /resume without a name lists, and characters of a text that stands for more.
NUM_LISTED, MAX_CHARS = 10, 60


class PlainCommands:
    """One method a command: `_name(argument)`."""

    def __init__(self, talk: PlainTalk) -> None:
        self._talk = talk

    def __call__(self, call: Call) -> bool:
        """Do it; False: the user leaves."""
        if call.name == "quit":
            return False
        getattr(self, f"_{call.name}")(call.argument)
        return True

    def _help(self, argument: str) -> None:
        width = max(len(f"{one.name} {one.argument}") for one in PLAIN_COMMANDS.values())
        for one in PLAIN_COMMANDS.values():
            name = f"{one.name} {one.argument}"
            say(f"/{name:<{width}}  {one.help}")
        say(
            "a line that ends with a backslash goes on in the next; // sends one that begins with /"
        )

    def _new(self, argument: str) -> None:
        self._talk.system = argument or self._talk.system
        self._go_to(self._talk.new_request)

    def _resume(self, argument: str) -> None:
        library = Library(folders().conversations)
        try:
            if argument:
                found = library.find(argument).id
                if found != self._talk.chat.session:
                    self._go_to(ChatRequest(resume=found))
                return
            listed, ids = library.listed(), library.names()
            for one, short_id in list(zip(listed, ids, strict=True))[:NUM_LISTED]:
                say(f"{short_id}  {_short(one.title)} · {one.about}")
            say("/resume ID goes on with one of them; the start of an id or a title will do")
        finally:
            library.close()

    def _fork(self, argument: str) -> None:
        turn = slash.turn_number(Call("fork", argument), len(self._turns))
        library = Library(folders().conversations)
        try:
            fork = library.fork(self._talk.chat.session, turn)
        finally:
            library.close()
        self._go_to(ChatRequest(resume=fork))
        say(f"this is a fork: it shares the turns up to {turn}")

    def _branch(self, argument: str) -> None:
        library = Library(folders().conversations)
        try:
            found = branches(*library.tree(self._talk.chat.session))
        finally:
            library.close()
        if len(found) < 2:
            raise UsageError("nothing was left behind: there is one way through this conversation")
        if argument:
            number = slash.turn_number(Call("branch", argument), len(found))
            self._talk.chat.switch(found[number - 1].turn_id)
            self._show_last()
            return
        for number, one in enumerate(found, start=1):
            where = "the current one" if one.is_current else f"parts at turn {one.parts_at}"
            say(f"{number}  {where}: {_short(one.user)} · {_short(one.reply)}")
        say("/branch N goes to one of them")

    def _edit(self, argument: str) -> None:
        turn = slash.turn_number(Call("edit", argument), len(self._turns))
        before = self._turns[turn - 1].user
        say(f"turn {turn} was: {printable(before)}")
        say("write it anew; an empty line leaves it")
        text = read(before if "\n" not in before else "")
        if text is None or not text.strip():
            say("left as it was")
            return
        self._send_instead(turn, slash.message(text))

    def _regen(self, argument: str) -> None:
        turn = slash.turn_number(Call("regen", argument), len(self._turns))
        self._send_instead(turn, self._turns[turn - 1].user)

    def _continue(self, argument: str) -> None:
        self._talk.go_on()

    def _undo(self, argument: str) -> None:
        turn = slash.turn_number(Call("undo"), len(self._turns))
        text = self._turns[-1].user
        self._rewind(turn - 1)
        say(f"turn {turn} was taken back: {printable(text)}")

    def _system(self, argument: str) -> None:
        if self._turns:
            if argument:
                raise UsageError("a system prompt begins a conversation: /new SYSTEM PROMPT")
            system = self._turns[0].system
        else:
            system = self._talk.system = argument or self._talk.system
        say(f"system prompt: {printable(system)}" if system else "there is no system prompt")

    def _model(self, argument: str) -> None:
        chat = self._talk.chat
        if not argument:
            say(f"model: {printable(chat.model)}")
            return
        self._go_to(ChatRequest(model=argument, resume=chat.session if self._turns else None))

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if value:
            self._talk.options = answers.changed(self._talk.options, name, value.strip())
        elif name:
            raise UsageError(f"/set {name} needs a value")
        say(answers.shown(self._talk.options))

    def _save(self, argument: str) -> None:
        say(f"saved to {saved.save(self._talk.chat.title, self._turns, argument)}")

    def _why(self, argument: str) -> None:
        number = slash.turn_number(Call("why", argument), len(self._turns))
        if "tokens" not in self._turns[number - 1].stats:
            raise UsageError(f"nothing was measured of turn {number}")
        for line in explained(self._talk.chat.session, number):
            say(printable(line))

    def _cache(self, argument: str) -> None:
        chat = self._talk.chat
        for line in coverage(chat.session, chat.blocks):
            say(printable(line))

    def _status(self, argument: str) -> None:
        for line in state(self._talk.chat.status()):
            say(printable(line))

    # --- what they share ------------------------------------------------------------------------

    @property
    def _turns(self) -> list[TurnText]:
        return list(self._talk.chat.turns)

    def _rewind(self, num_turns: int) -> None:
        """Take turns back; what begins anew begins with the same system prompt."""
        system = self._turns[0].system
        self._talk.chat.rewind(num_turns)
        if not num_turns:
            self._talk.system = system

    def _send_instead(self, turn: int, text: str) -> None:
        self._rewind(turn - 1)
        self._talk.send(text)

    def _go_to(self, request: ChatRequest) -> None:
        """Open another conversation; back to this one where that is not possible."""
        request = resolved(folders(), request)
        chat = self._talk.chat
        back = ChatRequest(resume=chat.session) if self._turns else self._talk.new_request
        self._talk.close()
        try:
            self._talk.open(request)
        except (ChatkvError, StoreError, OSError) as error:
            say(f"chatkv: {printable(' '.join(str(error).split()))}")
            self._talk.open(replace(back, seed=None))
            if not sys.stdin.isatty():
                raise

    def _show_last(self) -> None:
        if self._turns:
            last = self._turns[-1]
            say(f"turn {last.turn}: {_short(last.user)} · {_short(last.reply)}")


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"
