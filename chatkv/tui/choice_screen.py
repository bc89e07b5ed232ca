"""A question with a few answers: which branch, what to do when the context is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from chatkv.commands.branches import Branch
from chatkv.words import plural, printable


@dataclass(frozen=True)
class Choice:
    """`key` is what the screen returns; `text` may have several lines."""

    key: str
    text: str


class ChoiceScreen(ModalScreen[str | None]):
    """Returns the key of what was chosen, None for nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "Back")]
    DEFAULT_CSS = """
    ChoiceScreen { align: center middle; background: $background 60%; }
    ChoiceScreen > Vertical {
        width: 80%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    ChoiceScreen Static { margin: 0 0 1 0; }
    ChoiceScreen OptionList, ChoiceScreen OptionList:focus {
        height: auto; border: none; padding: 0; background: $surface;
    }
    ChoiceScreen.-narrow > Vertical { width: 100%; max-height: 100%; }
    """

    def __init__(self, title: str, about: str, choices: Sequence[Choice]) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]
        self._title, self._about, self._choices = title, about, choices

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = "Enter chooses · Esc goes back"
            if self._about:
                yield Static(self._about, markup=False)
            options = [Option(choice.text, choice.key) for choice in self._choices]
            yield OptionList(*options, markup=False)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


def branch_choices(found: Sequence[Branch]) -> list[Choice]:
    """A conversation's branches as choices; the current one says so."""
    choices = []
    for branch in found:
        where = "you are here" if branch.is_current else f"parts at turn {branch.parts_at}"
        head = f"{plural(branch.num_turns, 'turn')}, {where}"
        said = f"  > {_line(branch.user)}\n  {_line(branch.reply) or '(no answer)'}"
        choices.append(Choice(branch.turn_id, f"{head}\n{said}"))
    return choices


def _line(text: str, max_chars: int = 80) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
