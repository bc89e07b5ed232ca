"""Talking to a conversation: what the input holds becomes a turn, a draft or a command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from textual.timer import Timer

from chatkv.client import ChatRequest, TurnText
from chatkv.commands import slash
from chatkv.commands.slash import Call
from chatkv.errors import ChatkvError, UsageError
from chatkv.tui import clipboard
from chatkv.tui.panels import Suggestions
from chatkv.tui.start import Start
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    from chatkv.session.turn import TurnOptions
    from chatkv.tui.app import ChatApp
    from chatkv.tui.chat_screen import ChatScreen

# A draft is prefilled when it has rested this long; a longer one than this is no draft.
DRAFT_S, MAX_DRAFT_CHARS = 0.4, 200_000
BUSY = "An answer is being made: Esc stops it."


class Talk:
    """What a user says; the commands themselves are methods of `Verbs`."""

    def __init__(self, app: ChatApp, start: Start) -> None:
        self._app, self._start = app, start
        self.system = start.request.system
        self._editing: int | None = None  # the turn whose message stands in the input
        self._draft: Timer | None = None

    @cached_property
    def options(self) -> TurnOptions:
        """How the next answer is made."""
        return self._start.options()

    @property
    def _chat(self) -> ChatScreen:
        return self._app.chat

    @property
    def _turns(self) -> Sequence[TurnText]:
        return self._chat.conversation.turns

    # --- the input ------------------------------------------------------------------------------

    async def submit(self, text: str) -> None:
        """A line of the input: a command, or a message to the model."""
        composer = self._chat.composer
        try:
            call = slash.parse(text)
        except UsageError as error:
            await self._chat.say(str(error))
            return
        if call is None and self._chat.answering is not None:
            self._app.notify(BUSY)
            return
        composer.sent()
        if call is not None:
            await self.run(call)
        else:
            await self.send(slash.message(text))

    async def run(self, call: Call) -> None:
        """Do what a command says; what it cannot do is said in the conversation."""
        try:
            await getattr(self, f"_{call.name}")(call.argument)
        except (ChatkvError, StoreError, OSError) as error:
            await self._chat.say(str(error))

    async def send(self, text: str, after: int | None = None) -> None:
        """Say something, instead of the turns behind `after` where that is given."""
        if after is None and self._editing is not None:
            after = self._editing - 1
        self._leave_edit()
        chat = self._chat
        if after == 0 and self._turns:  # what begins anew begins with the same system prompt
            self.system = self._turns[0].system
        if after is not None:
            await chat.conversation.show(self._turns[:after])
        system = None if self._turns else self.system
        chat.asked = text
        chat.answering = await chat.conversation.begin(text, system)
        chat.show_status("waiting", draft="")
        chat.worker.send(text, self.options, system, after)

    def on_typed(self) -> None:
        """Show what completes a command; prefill a message once it rests."""
        chat, composer = self._chat, self._chat.composer
        chat.query_one(Suggestions).show(_told(composer.suggestions()))
        if self._draft is not None:
            self._draft.stop()
        text = composer.unfolded
        is_message = bool(text.strip()) and not text.startswith("/")
        if not is_message or chat.answering is not None or len(text) > MAX_DRAFT_CHARS:
            chat.show_status(draft="")
        elif self._editing is None:  # an edited message begins where its turn does
            self._draft = chat.set_timer(DRAFT_S, lambda: self._prefill(text))

    def _prefill(self, text: str) -> None:
        if self._chat.is_open and self._chat.answering is None:
            self._chat.show_status(draft="draft: reading")
            self._chat.worker.draft(text, None if self._turns else self.system)

    def values(self, name: str) -> list[str]:
        """What may stand behind a command."""
        if name == "set":
            from chatkv.commands import answers

            return list(answers.NAMES)
        if name == "theme":
            return sorted(self._app.available_themes)
        if name == "copy":
            return ["code"]
        if name == "resume":
            try:
                return self._start.library.names()
            except StoreError:
                return []
        if name in ("edit", "fork", "why"):
            return [str(turn.turn) for turn in self._turns]
        return []

    def stop(self) -> None:
        """Esc: end what is being answered, else leave what is open."""
        chat = self._chat
        if chat.answering is not None:
            chat.show_status("stopping")
            chat.worker.stop()
        elif self._editing is not None:
            self._leave_edit()
            chat.composer.text = ""
        else:
            chat.composer.focus()

    async def on_turn(self, action: str, turn: int) -> None:
        """A key on a turn."""
        if action == "copy":
            await self._copy_text(self._turns[turn - 1].reply)
        elif action == "code":
            await self._copy_text(*clipboard.code_blocks(self._turns[turn - 1].reply)[-1:])
        elif action == "regen":
            await self.run(Call("regen", str(turn)))
        else:
            await self.run(Call(action, str(turn)))

    def on_full(self, why: str) -> None:
        """The message does not fit: nothing is cut off silently, so the user chooses."""
        from chatkv.tui.choice_screen import Choice, ChoiceScreen

        choices = [
            Choice("shift", "Let the oldest turns leave the model's view, and send it"),
            Choice("new", "Begin another conversation"),
            Choice("edit", "Go back: change an earlier message and send it again"),
            Choice("fork", "Fork: keep this one, and go on from an earlier turn in another"),
        ]

        def chosen(key: str | None) -> None:
            if key == "shift":
                self._app.run_worker(self._send_shifted())
            elif key == "new":
                self._app.run_worker(self.run(Call("new")))
            elif key is not None:
                self._app.action_turns()
                self._app.notify(f"Choose a turn with the arrows, then press {key[0]}.")

        self._app.push_screen(ChoiceScreen("The context is full", why, choices), chosen)

    async def _send_shifted(self) -> None:
        self.options = replace(self.options, overflow="shift")
        await self.submit(self._chat.composer.unfolded)

    # --- what they share ------------------------------------------------------------------------

    @property
    def _session(self) -> str:
        if self._chat.facts is None:
            raise UsageError("the conversation is still being opened")
        return self._chat.facts.session

    def _must_be_idle(self) -> None:
        if self._chat.answering is not None:
            raise UsageError(BUSY)

    def _leave_edit(self) -> None:
        self._editing, self._chat.composer.border_title = None, ""

    async def _open(self, request: ChatRequest) -> None:
        """Go to another conversation; what is on the disk of it is shown at once."""
        chat = self._chat
        self._leave_edit()
        chat.is_open, chat.request, chat.facts = False, request, None
        await chat.conversation.show([], afresh=True)
        await chat.show_saved()
        chat.show_status("opening", draft="")
        chat.worker.open(request)

    async def _copy_text(self, *texts: str) -> None:
        if not texts or not texts[0]:
            self._app.notify("There is nothing to copy.")
            return
        done = await asyncio.to_thread(
            clipboard.copy, texts[0], self._app.write_to_terminal, self._start.copy_to
        )
        self._app.notify(done)


def _told(lines: Sequence[str]) -> list[str]:
    """Suggestions, each with what it does."""
    known = slash.COMMANDS
    width = max((len(line) for line in lines), default=0)
    return [
        f"{line:<{width}}  {known[line[1:]].help}" if line[1:] in known else line for line in lines
    ]
