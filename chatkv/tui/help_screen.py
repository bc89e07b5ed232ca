"""Keys and commands, from the tables that define them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from chatkv.commands.slash import COMMANDS
from chatkv.tui.keys import GROUPS

_NAMES = {
    "f1": "F1",
    "f2": "F2",
    "f3": "F3",
    "f4": "F4",
    "f5": "F5",
    "escape": "Esc",
    "enter": "Enter",
    "tab": "Tab",
    "up": "Up",
    "down": "Down",
}


def text(keymap: Mapping[str, str], width: int) -> str:
    """Help in lines of at most `width` cells, where names leave room for it."""
    rows: list[tuple[str, str] | str] = []
    for group, keys in GROUPS.items():
        rows += ["", group]
        rows += [(_shown(keymap.get(key.name, key.keys)), key.help) for key in keys]
    rows += ["", "Commands"]
    rows += [
        (f"/{command.name} {command.argument}".strip(), command.help)
        for command in COMMANDS.values()
    ]
    left = max(len(row[0]) for row in rows if isinstance(row, tuple)) + 2
    lines = []
    for row in rows[1:]:
        if isinstance(row, str):
            lines.append(row)
        elif width - left >= 24:
            lines.append(f"  {row[0]:<{left}}{row[1]}")
        else:
            lines += [f"  {row[0]}", f"    {row[1]}"]
    return "\n".join(lines)


class HelpScreen(ModalScreen[None]):
    """Closes with Esc, Enter or the key that opened it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,enter,f1,q", "dismiss(None)", "Back")]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; background: $background 60%; }
    HelpScreen > VerticalScroll {
        width: 90%; max-width: 92; height: 90%; border: round $primary;
        background: $surface; padding: 0 1;
    }
    HelpScreen Static { height: auto; }
    HelpScreen.-narrow > VerticalScroll { width: 100%; height: 100%; }
    """

    def __init__(self, keymap: Mapping[str, str]) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-wide")]
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "Keys and commands"
            box.border_subtitle = "Esc goes back"
            yield Static(id="keys", markup=False)

    def on_resize(self) -> None:
        width = min(92, int(self.app.size.width * 0.9)) - 6
        self.query_one("#keys", Static).update(text(self._keymap, width))


def _shown(keys: str) -> str:
    """ "ctrl+j" as "Ctrl+J"."""
    return ", ".join(_named(key.split("+")) for key in keys.split(","))


def _named(parts: list[str]) -> str:
    is_single = len(parts) == 1 and len(parts[0]) == 1
    return "+".join(_NAMES.get(part, part if is_single else part.capitalize()) for part in parts)
