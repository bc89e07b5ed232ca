"""The full-screen chat: the keys that work anywhere, and the palette. Everything that they do is a
verb; everything that is seen is the screen's."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen

from chatkv.commands import slash
from chatkv.tui import keys, messages
from chatkv.tui.chat_screen import ChatScreen
from chatkv.tui.start import Left, Start
from chatkv.tui.verbs import Verbs

# A second Ctrl-C within this time leaves.
TWICE_S = 2.0
# After this the first frame is painted: what `call_after_refresh` does comes before it.
SETTLED_S = 0.2


class ChatApp(App[Left]):
    """Give it a Start; `run()` returns how it was left."""

    TITLE = "chatkv"
    BINDINGS: ClassVar[list[BindingType]] = [
        key.binding(priority=key.name in keys.FIRST) for key in keys.APP
    ]

    def __init__(self, start: Start) -> None:
        super().__init__()
        keys.know_alt_enter()
        self._start = start
        self.verbs = Verbs(self, start)
        self.chat = ChatScreen(start, self.verbs.values, self.verbs.on_full)
        self._interrupted_at = -TWICE_S
        if start.keymap:
            self.set_keymap(keys.check(start.keymap))
        if start.theme is not None:
            self.theme = start.theme

    def on_mount(self) -> None:
        self.set_timer(SETTLED_S, self._dress)

    def _dress(self) -> None:
        """Import what paints answers while nobody waits for it."""
        from chatkv.tui.rendering import THEME

        gc.enable()  # which the program had switched off, to start sooner
        self.console.push_theme(THEME)

    def get_default_screen(self) -> Screen[None]:
        return self.chat

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every command that can do without an argument, and Textual's own."""
        for command in slash.COMMANDS.values():
            if not command.needs_something:
                call = slash.Call(command.name)
                yield SystemCommand(
                    f"/{command.name}", command.help, lambda call=call: self._run(call)
                )
        own = {"Quit", "Keys", "Theme"}
        yield from (one for one in super().get_system_commands(screen) if one.title not in own)

    def leave(self, goes_on_plain: bool = False) -> None:
        """End, once what is being answered has been stopped and saved."""
        facts = self.chat.facts
        session = facts.session if facts is not None and self.chat.num_turns else None
        self.exit(Left(session, facts.num_unsaved if facts else 0, goes_on_plain))

    def write_to_terminal(self, sequence: str) -> None:
        """For what no widget shows."""
        if self._driver is not None:
            self._driver.write(sequence)

    # --- what the user types --------------------------------------------------------------------

    async def on_submitted(self, message: messages.Submitted) -> None:
        await self.verbs.submit(message.text)

    def on_typed(self, message: messages.Typed) -> None:
        self.verbs.on_typed()

    async def on_turn_action(self, message: messages.TurnAction) -> None:
        await self.verbs.on_turn(message.action, message.turn)

    # --- keys -----------------------------------------------------------------------------------

    def action_stop(self) -> None:
        self.verbs.stop()

    def action_interrupt(self) -> None:
        """Ctrl-C: copy what is selected, or stop, or empty the input; twice in a row, leave."""
        if self.screen.get_selected_text():
            self.screen.action_copy_text()
            return
        now, before = time.monotonic(), self._interrupted_at
        self._interrupted_at = now
        if now - before < TWICE_S:
            self.leave()
        elif self.chat.answering is not None:
            self.verbs.stop()
        elif self.chat.composer.text:
            self.chat.composer.text = ""
        else:
            self.notify("Ctrl-C once more leaves. Everything is saved.", timeout=TWICE_S)

    async def action_quit(self) -> None:
        self.leave()

    def action_timeline(self) -> None:
        self.chat.show_timeline()

    def action_turns(self) -> None:
        if views := self.chat.conversation.views:
            views[-1].focus()

    async def action_verb(self, name: str, argument: str = "") -> None:
        await self._run(slash.Call(name, argument))

    async def _run(self, call: slash.Call) -> None:
        await self.verbs.run(call)
