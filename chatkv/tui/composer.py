"""The input: several lines, history, folded pastes, completion of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual import events
from textual.widgets import TextArea

from chatkv.commands import slash
from chatkv.tui.folding import Folds
from chatkv.tui.history import History
from chatkv.tui.keys import COMPOSER, lookup
from chatkv.tui.messages import Scrolled, Submitted, Typed


class Composer(TextArea):
    """Posts Submitted and Typed. `values` gives what completes a command's argument.

    Its keys are no bindings of Textual's: one that goes before what the input does with a key is
    run as soon as the key arrives, which in a burst is before the letters in front of it are there.
    """

    DEFAULT_CSS = """
    Composer, Composer:focus {
        height: auto; min-height: 2; max-height: 9; padding: 0 1;
        border: none; border-top: solid $primary; background: transparent;
    }
    """

    def __init__(
        self,
        values: Callable[[str], list[str]] = lambda name: [],
        keymap: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            id="input",
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Message, or / for commands",
        )
        self._values = values
        self._keys = lookup(COMPOSER, keymap or {})
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
        return slash.matches(self.text, values)

    # --- keys -----------------------------------------------------------------------------------

    async def _on_key(self, event: events.Key) -> None:
        """One of our keys, unless it has nothing to do here: then it is the text's."""
        action = self._keys.get(event.key)
        if action is not None and getattr(self, f"_{action}")():
            event.stop()
            event.prevent_default()

    def _send(self) -> bool:
        row, column = self.cursor_location
        if self.document[row][:column].endswith("\\"):
            self.action_delete_left()
            return self._newline()
        text = self.unfolded
        if text.strip():
            self.post_message(Submitted(text))
        return True

    def sent(self) -> None:
        """What was submitted has been taken: make room for the next."""
        self.sent_lines.add(self.unfolded)
        self.text = ""
        self._folds.clear()

    def _newline(self) -> bool:
        self.insert("\n")
        return True

    def _older(self) -> bool:
        is_first = self.cursor_location[0] == 0
        return is_first and self._recall(self.sent_lines.older(self.unfolded))

    def _newer(self) -> bool:
        is_last = self.cursor_location[0] == self.document.line_count - 1
        return is_last and self._recall(self.sent_lines.newer())

    def _page_up(self) -> bool:
        self.post_message(Scrolled(-1))
        return True

    def _page_down(self) -> bool:
        self.post_message(Scrolled(1))
        return True

    def _complete(self) -> bool:
        found = self.suggestions()
        start = slash.common_start(found)
        if len(found) == 1 and " " not in start:
            start += " "
        if len(start) > len(self.text):
            self.put(start)
        return bool(found)

    def _unfold(self) -> bool:
        """Show pastes as they are; a very long one may take a while to lay out."""
        whole = self.unfolded
        self._folds.clear()
        self.text = whole
        self.move_cursor(self.document.end)
        return True

    def _leave(self) -> bool:
        if not self.text:
            self.post_message(Submitted("/quit"))
        return not self.text

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

    def _recall(self, line: str | None) -> bool:
        if line is not None:
            self._folds.clear()
            self.put(line)
        return line is not None
