"""What a user can do to a conversation, however it was asked for: a key, a command, the palette."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from textual.timer import Timer

from chatkv.client import ChatRequest, TurnText
from chatkv.errors import ChatkvError, UsageError
from chatkv.tui import clipboard, commands, transcript
from chatkv.tui.branches import branches
from chatkv.tui.commands import Call
from chatkv.tui.panels import Suggestions, TimelinePanel
from chatkv.tui.start import Start
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    from chatkv.session.turn import TurnOptions
    from chatkv.tui.app import ChatApp
    from chatkv.tui.chat_screen import ChatScreen

# A draft is prefilled when it has rested this long; a longer one than this is no draft.
DRAFT_S, MAX_DRAFT_CHARS = 0.4, 200_000
BUSY = "An answer is being made: Esc stops it."


class Verbs:
    """One method a command, `_name(argument)`, and what they share."""

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
            call = commands.parse(text)
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
            await self.send(commands.message(text))

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
        if after is not None:
            await chat.conversation.show(self._turns[:after])
        if not chat.is_open and chat.facts is not None:
            chat.worker.open(chat.request)
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
            from chatkv.tui import settings

            return list(settings.NAMES)
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

    # --- commands -------------------------------------------------------------------------------

    async def _help(self, argument: str) -> None:
        from chatkv.tui.help_screen import HelpScreen

        self._app.push_screen(HelpScreen(self._start.keymap))

    async def _new(self, argument: str) -> None:
        self._must_be_idle()
        self.system = argument or self.system
        await self._open(ChatRequest(model=self._start.request.model))

    async def _resume(self, argument: str) -> None:
        self._must_be_idle()
        library = self._start.library
        if argument:
            await self._open(ChatRequest(resume=library.find(argument).id))
            return

        def chosen(session: str | None) -> None:
            current = self._chat.facts.session if self._chat.facts else None
            if session is not None and session != current:
                self._app.run_worker(self._open(ChatRequest(resume=session)))

        from chatkv.tui.session_screen import SessionScreen

        self._app.push_screen(SessionScreen(library, self._chat.worker.warm), chosen)

    async def _fork(self, argument: str) -> None:
        self._must_be_idle()
        turn = commands.turn_number(Call("fork", argument), len(self._turns))
        fork = self._start.library.fork(self._session, turn)
        await self._open(ChatRequest(resume=fork))
        await self._chat.say(f"this is a fork: it shares the turns up to {turn}")

    async def _branch(self, argument: str) -> None:
        self._must_be_idle()
        found = branches(*self._start.library.tree(self._session))
        if len(found) < 2:
            raise UsageError("nothing was left behind: there is one way through this conversation")
        if argument:
            number = commands.turn_number(Call("branch", argument), len(found))
            self._chat.worker.switch(found[number - 1].turn_id)
            return

        def chosen(turn_id: str | None) -> None:
            if turn_id is not None and turn_id != found[0].turn_id:
                self._chat.worker.switch(turn_id)

        from chatkv.tui.choice_screen import ChoiceScreen, branch_choices

        self._app.push_screen(ChoiceScreen("Branches", "", branch_choices(found)), chosen)

    async def _edit(self, argument: str) -> None:
        self._must_be_idle()
        turn = commands.turn_number(Call("edit", argument), len(self._turns))
        self._editing = turn
        composer = self._chat.composer
        composer.border_title = f"editing turn {turn} · Esc leaves it"
        composer.put(self._turns[turn - 1].user)
        composer.focus()

    async def _regen(self, argument: str) -> None:
        self._must_be_idle()
        turn = commands.turn_number(Call("regen", argument), len(self._turns))
        await self.send(self._turns[turn - 1].user, after=turn - 1)

    async def _continue(self, argument: str) -> None:
        self._must_be_idle()
        if not self._turns or self._turns[-1].finish_reason == "stop":
            raise UsageError("there is no answer to go on with: the last one is complete")
        chat = self._chat
        view = chat.conversation.views[-1]
        view.become(replace(view.turn, state="streaming", finish_reason=None))
        chat.asked, chat.answering = "", view
        chat.conversation.anchor()
        chat.show_status("waiting")
        chat.worker.go_on(self.options)

    async def _undo(self, argument: str) -> None:
        self._must_be_idle()
        turn = commands.turn_number(Call("undo"), len(self._turns))
        self._chat.composer.put(self._turns[-1].user)
        await self._chat.conversation.show(self._turns[: turn - 1])
        self._chat.worker.rewind(turn - 1)

    async def _system(self, argument: str) -> None:
        if self._turns:
            system = self._turns[0].system
            if argument:
                raise UsageError("a system prompt begins a conversation: /new SYSTEM PROMPT")
        else:
            system = self.system = argument or self.system
        await self._chat.say(f"system prompt: {system}" if system else "there is no system prompt")

    async def _model(self, argument: str) -> None:
        facts = self._chat.facts
        if not argument:
            await self._chat.say(f"model: {facts.model}" if facts else "the model is being loaded")
            return
        self._must_be_idle()
        resume = self._session if self._turns else None
        await self._open(ChatRequest(model=argument, resume=resume))

    async def _set(self, argument: str) -> None:
        from chatkv.tui import settings

        name, _, value = argument.partition(" ")
        if value:
            self.options = settings.changed(self.options, name, value.strip())
        elif name:
            raise UsageError(f"/set {name} needs a value")
        await self._chat.say(settings.shown(self.options))

    async def _save(self, argument: str) -> None:
        if not self._turns:
            raise UsageError("/save: nothing was said yet")
        title = self._chat.facts.title if self._chat.facts else ""
        path = Path(argument).expanduser() if argument else None
        if path is None:
            path = transcript.free_name(Path.cwd(), transcript.file_name(title))
        elif path.exists():
            raise UsageError(f"{path} exists: give another name")
        path.write_text(transcript.markdown(title, self._turns), encoding="utf-8")
        await self._chat.say(f"saved to {path}")

    async def _copy(self, argument: str) -> None:
        if argument not in ("", "code"):
            raise UsageError("/copy copies the last answer, /copy code its last block of code")
        turn = commands.turn_number(Call("copy"), len(self._turns))
        await self.on_turn(argument or "copy", turn)

    async def _why(self, argument: str) -> None:
        number = commands.turn_number(Call("why", argument), len(self._turns))
        turn, panel = self._turns[number - 1], self._chat.query_one(TimelinePanel)
        if "tokens" not in turn.stats:
            raise UsageError(f"turn {number} was cut off before anything was measured")
        panel.show(number, turn.stats, self._start.explain(self._session, number))
        self._chat.show_timeline(True)

    async def _cache(self, argument: str) -> None:
        lines = await asyncio.to_thread(self._start.coverage, self._session)
        for line in lines:
            await self._chat.say(line)

    async def _theme(self, argument: str) -> None:
        if not argument:
            self._app.search_themes()
        elif argument in self._app.available_themes:
            self._app.theme = argument
        else:
            themes = ", ".join(sorted(self._app.available_themes))
            raise UsageError(f"there is no theme {argument}: there are {themes}")

    async def _plain(self, argument: str) -> None:
        self._app.leave(goes_on_plain=True)

    async def _quit(self, argument: str) -> None:
        self._app.leave()

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
    known = commands.COMMANDS
    width = max((len(line) for line in lines), default=0)
    return [
        f"{line:<{width}}  {known[line[1:]].help}" if line[1:] in known else line for line in lines
    ]
