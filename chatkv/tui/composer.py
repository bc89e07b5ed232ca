"""The input: several lines, history, folded pastes, completion of commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.actions import SkipAction
from textual.binding import BindingType
from textual.widgets import TextArea

from chatkv.tui import commands
from chatkv.tui.folding import Folds
from chatkv.tui.history import History
from chatkv.tui.keys import COMPOSER
from chatkv.tui.messages import Submitted, Typed


class Composer(TextArea):
    """Posts Submitted and Typed. `values` gives what completes a command's argument."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding(priority=True) for key in COMPOSER]
    DEFAULT_CSS = """
    Composer, Composer:focus {
        height: auto; min-height: 2; max-height: 9; padding: 0 1;
        border: none; border-top: solid $primary; background: transparent;
    }
    """

    def __init__(self, values: Callable[[str], list[str]] = lambda name: []) -> None:
        super().__init__(
            id="input",
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Message, or / for commands",
        )
        self._values = values
        self._folds = Folds()
        self.sent_lines = History()

    @property
    def unfolded(self) -> str:
        """What would be sent."""
        return self._folds.unfold(self.text)

    def put(self, text: str) -> None:
        """Let `text` stand in the input, folded where it is long, the cursor behind it."""
        self.text = self._folds.fold(text)
        self.move_cursor(self.document.end)

    def suggestions(self) -> list[str]:
        """What a command that is being typed may become."""
        name = self.text[1:].partition(" ")[0].lower()
        values = self._values(name) if " " in self.text else []
        return commands.matches(self.text, values)

    # --- keys -----------------------------------------------------------------------------------

    def action_send(self) -> None:
        row, column = self.cursor_location
        if self.document[row][:column].endswith("\\"):
            self.action_delete_left()
            self.insert("\n")
            return
        text = self.unfolded
        if text.strip():
            self.post_message(Submitted(text))

    def sent(self) -> None:
        """What was submitted has been taken: make room for the next."""
        self.sent_lines.add(self.unfolded)
        self.text = ""
        self._folds.clear()

    def action_newline(self) -> None:
        self.insert("\n")

    def action_older(self) -> None:
        if self.cursor_location[0] > 0:
            raise SkipAction
        self._recall(self.sent_lines.older(self.text))

    def action_newer(self) -> None:
        if self.cursor_location[0] < self.document.line_count - 1:
            raise SkipAction
        self._recall(self.sent_lines.newer())

    def action_complete(self) -> None:
        found = self.suggestions()
        if not found:
            raise SkipAction
        start = commands.common_start(found)
        if len(found) == 1:
            start += "" if " " in start else " "
        if len(start) > len(self.text):
            self.put(start)

    def action_unfold(self) -> None:
        """Show pastes as they are; a very long one may take a while to lay out."""
        whole = self.unfolded
        self._folds.clear()
        self.text = whole
        self.move_cursor(self.document.end)

    def action_leave(self) -> None:
        if self.text:
            raise SkipAction
        self.app.exit()

    def action_delete_left(self) -> None:
        """A folded paste goes as one."""
        row, column = self.cursor_location
        mark = self._folds.mark_before(self.document[row], column)
        if mark is None or not self.selection.is_empty:
            super().action_delete_left()
        else:
            self.delete((row, column - len(mark)), (row, column))

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        self._replace_via_keyboard(self._folds.fold(text), *self.selection)

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(Typed(self.text))

    def _recall(self, line: str | None) -> None:
        if line is not None:
            self._folds.clear()
            self.put(line)
