"""All conversations: search in what was said, look at the end of one, open it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from chatkv.commands.library import Library, Listed
from chatkv_store.errors import StoreError

# Restoring begins when the cursor rests: skimming a list is no wish to open all of it.
REST_S, SEARCH_S = 0.3, 0.15


class SessionScreen(ModalScreen[str | None]):
    """Returns the id that was chosen. `warm` hears of the one that the cursor rests on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss(None)", "Back"),
        ("down", "move(1)", "Next"),
        ("up", "move(-1)", "Previous"),
    ]
    DEFAULT_CSS = """
    SessionScreen { align: center middle; background: $background 60%; }
    SessionScreen > Vertical {
        width: 90%; height: 90%; border: round $primary; background: $surface; padding: 0 1;
    }
    SessionScreen Input { border: none; height: 1; margin: 0 0 1 0; padding: 0; }
    SessionScreen Horizontal { height: 1fr; }
    SessionScreen OptionList {
        width: 1fr; height: 1fr; border: none; padding: 0; background: $surface;
    }
    SessionScreen VerticalScroll { width: 1fr; border-left: solid $primary; padding: 0 1; }
    SessionScreen.-narrow VerticalScroll { display: none; }
    SessionScreen.-narrow > Vertical { width: 100%; height: 100%; border: none; }
    """

    def __init__(self, library: Library, warm: Callable[[str], None]) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]
        self._library, self._warm = library, warm
        self._listed: list[Listed] = []
        self._rest: Timer | None = None
        self._typing: Timer | None = None

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Conversations"
            box.border_subtitle = "Enter opens · Esc goes back"
            yield Input(placeholder="search in all that was said", id="search", compact=True)
            with Horizontal():
                yield OptionList(id="sessions", markup=False)
                with VerticalScroll(can_focus=False):
                    yield Static(id="preview", markup=False)

    def on_mount(self) -> None:
        self._list("")

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._typing is not None:
            self._typing.stop()
        text = event.value
        self._typing = self.set_timer(SEARCH_S, lambda: self._list(text))

    def on_input_submitted(self) -> None:
        self._choose(self.query_one(OptionList).highlighted)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option_index)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        session = self._listed[event.option_index].session
        try:
            preview = self._library.preview(session)
        except StoreError as error:
            preview = str(error)
        self.query_one("#preview", Static).update(preview)
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(REST_S, lambda: self._warm(session))

    def action_move(self, step: int) -> None:
        """The arrows move in the list while the search keeps the keys."""
        found = self.query_one(OptionList)
        if found.option_count:
            at = found.highlighted if found.highlighted is not None else -1
            found.highlighted = max(0, min(found.option_count - 1, at + step))

    def _choose(self, index: int | None) -> None:
        if index is not None and index < len(self._listed):
            self.dismiss(self._listed[index].session)

    def _list(self, search: str) -> None:
        options = self.query_one(OptionList)
        try:
            self._listed = self._library.listed(search)
        except StoreError as error:
            self._listed = []
            self.query_one("#preview", Static).update(str(error))
        options.clear_options()
        options.add_options(Option(_shown(one)) for one in self._listed)
        if self._listed:
            options.highlighted = 0
        else:
            nothing = "nothing found" if search else "no conversations yet"
            options.add_option(Option(nothing, disabled=True))
            self.query_one("#preview", Static).update("")


def _shown(one: Listed) -> str:
    lines = [one.title, f"  {one.about}"]
    if one.found and one.found != one.title:
        lines.insert(1, f"  {one.found}")
    return "\n".join(lines)
