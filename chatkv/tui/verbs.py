"""What a user can do to a conversation, however it was asked for: a key, a command, the palette."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from chatkv.client import ChatRequest
from chatkv.commands import saved, slash
from chatkv.commands.branches import branches
from chatkv.commands.slash import Call
from chatkv.errors import UsageError
from chatkv.tui.panels import TimelinePanel
from chatkv.tui.talk import Talk


class Verbs(Talk):
    """One method a command: `_name(argument)`. What one cannot do it raises."""

    async def _help(self, argument: str) -> None:
        from chatkv.tui.help_screen import HelpScreen

        self._app.push_screen(HelpScreen(self._start.keymap))

    async def _new(self, argument: str) -> None:
        self._must_be_idle()
        self.system = argument or self.system
        await self._open(replace(self._start.new_request, seed=None))

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
        turn = slash.turn_number(Call("fork", argument), len(self._turns))
        fork = self._start.library.fork(self._session, turn)
        await self._open(ChatRequest(resume=fork))
        await self._chat.say(f"this is a fork: it shares the turns up to {turn}")

    async def _branch(self, argument: str) -> None:
        self._must_be_idle()
        found = branches(*self._start.library.tree(self._session))
        if len(found) < 2:
            raise UsageError("nothing was left behind: there is one way through this conversation")
        if argument:
            number = slash.turn_number(Call("branch", argument), len(found))
            self._chat.worker.switch(found[number - 1].turn_id)
            return

        def chosen(turn_id: str | None) -> None:
            if turn_id is not None and turn_id != found[0].turn_id:
                self._chat.worker.switch(turn_id)

        from chatkv.tui.choice_screen import ChoiceScreen, branch_choices

        self._app.push_screen(ChoiceScreen("Branches", "", branch_choices(found)), chosen)

    async def _edit(self, argument: str) -> None:
        self._must_be_idle()
        turn = slash.turn_number(Call("edit", argument), len(self._turns))
        self._editing = turn
        composer = self._chat.composer
        composer.border_title = f"editing turn {turn} · Esc leaves it"
        composer.put(self._turns[turn - 1].user)
        composer.focus()

    async def _regen(self, argument: str) -> None:
        self._must_be_idle()
        turn = slash.turn_number(Call("regen", argument), len(self._turns))
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
        turn = slash.turn_number(Call("undo"), len(self._turns))
        self._chat.composer.put(self._turns[-1].user)
        if turn == 1:
            self.system = self._turns[0].system
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
        from chatkv.commands import answers

        name, _, value = argument.partition(" ")
        if value:
            self.options = answers.changed(self.options, name, value.strip())
        elif name:
            raise UsageError(f"/set {name} needs a value")
        await self._chat.say(answers.shown(self.options))

    async def _save(self, argument: str) -> None:
        title = self._chat.facts.title if self._chat.facts else ""
        path = saved.save(title, self._turns, argument)
        await self._chat.say(f"saved to {path}")

    async def _copy(self, argument: str) -> None:
        if argument not in ("", "code"):
            raise UsageError("/copy copies the last answer, /copy code its last block of code")
        turn = slash.turn_number(Call("copy"), len(self._turns))
        await self.on_turn(argument or "copy", turn)

    async def _why(self, argument: str) -> None:
        number = slash.turn_number(Call("why", argument), len(self._turns))
        turn, panel = self._turns[number - 1], self._chat.query_one(TimelinePanel)
        if "tokens" not in turn.stats:
            raise UsageError(f"nothing was measured of turn {number}")
        panel.show(number, turn.stats, self._start.explain(self._session, number))
        self._chat.show_timeline(True)

    async def _cache(self, argument: str) -> None:
        opened = self._chat.worker.look(lambda chat: chat.blocks)
        for line in await asyncio.to_thread(self._start.coverage, self._session, opened):
            await self._chat.say(line)

    async def _status(self, argument: str) -> None:
        found = await asyncio.to_thread(self._chat.worker.look, lambda chat: chat.status())
        for line in self._start.state(found):
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
