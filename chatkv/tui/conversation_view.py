"""What was said, turn by turn, and the turn that is being answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from chatkv.client import TurnText
from chatkv.tui.answer import Answer
from chatkv.tui.keys import TURN
from chatkv.tui.messages import TurnAction
from chatkv.words import plural, printable

# Turns that are shown at once: more come when they are asked for, since each is widgets.
PAGE_TURNS = 30
# Of a message of the user; the whole of it is what the model read.
MAX_USER_LINES = 60

HELLO = (
    "Say something. Everything is kept: close this whenever you like, and go on another day.\n\n"
    "F1 shows keys and commands, F3 your other conversations."
)
WHY_STOPPED = {
    "interrupted": "[interrupted] /continue goes on from here",
    "length": "[cut at the length limit] /continue goes on from here",
}


class TurnView(Vertical, can_focus=True):
    """One turn. With the focus on it, single keys act on it."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding() for key in TURN]
    DEFAULT_CSS = """
    TurnView { height: auto; margin: 0 0 1 0; padding: 0 1 0 0; border-left: blank; }
    TurnView:focus { border-left: thick $accent; }
    TurnView .user { color: $text-primary; text-style: bold; margin: 0 0 1 0; }
    TurnView .mark, Notice { color: $text-muted; text-style: italic; }
    TurnView .mark { display: none; }
    TurnView .mark.-on { display: block; margin: 1 0 0 0; }
    """

    def __init__(self, turn: TurnText) -> None:
        super().__init__()
        self.turn = turn
        self._beside = ""
        self.answer = Answer(turn.reply)

    def compose(self) -> ComposeResult:
        if self.turn.system:
            system = f"system: {_shortened(self.turn.system)}"
            yield Static(system, markup=False, classes="mark -on")
        yield Static(self._said(), markup=False, classes="user")
        yield self.answer
        mark = _mark(self.turn)
        yield Static(mark, markup=False, classes="mark end -on" if mark else "mark end")

    def become(self, turn: TurnText) -> None:
        """The turn is over: it ended so."""
        self.turn = turn
        for end in self.query(".end").results(Static):
            end.update(_mark(turn))
            end.set_class(bool(_mark(turn)), "-on")

    def beside(self, which: int, total: int) -> None:
        """There are other answers or messages in its place."""
        self._beside = f"  ({which} of {total}, F4)" if total > 1 else ""
        for said in self.query(".user").results(Static):
            said.update(self._said())

    def action_act(self, action: str) -> None:
        self.post_message(TurnAction(action, self.turn.turn))

    def action_move(self, step: int) -> None:
        views = list(self.screen.query(TurnView))
        at = views.index(self) + step
        if 0 <= at < len(views):
            views[at].focus()

    def action_back(self) -> None:
        self.screen.query_one("#input").focus()

    def _said(self) -> str:
        return f"> {_shortened(self.turn.user)}{self._beside}"


class Notice(Static):
    """A line of the program's own between the turns."""

    DEFAULT_CSS = "Notice { height: auto; margin: 0 0 1 1; }"

    def __init__(self, text: str) -> None:
        super().__init__(f"· {printable(text)}", markup=False)


class Earlier(Static, can_focus=True):
    """Stands for the turns above. Enter, or a click, shows more of them."""

    BINDINGS: ClassVar[list[BindingType]] = [("enter", "more", "Show earlier turns")]
    DEFAULT_CSS = """
    Earlier { height: auto; color: $text-muted; }
    Earlier:focus { text-style: reverse; }
    """

    def __init__(self, num_turns: int) -> None:
        super().__init__(f"… {plural(num_turns, 'earlier turn')} (Enter shows more)", markup=False)

    async def action_more(self) -> None:
        await self.screen.query_one(ConversationView).show_earlier()

    async def on_click(self) -> None:
        await self.action_more()


class ConversationView(VerticalScroll, can_focus=False):
    """The turns of one conversation. Follows its end until the user scrolls away."""

    DEFAULT_CSS = "ConversationView { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }"

    def __init__(self) -> None:
        super().__init__(id="conversation")
        self.turns: list[TurnText] = []
        self._hidden = 0

    def compose(self) -> ComposeResult:
        yield Static(HELLO, id="hello", markup=False)

    def on_mount(self) -> None:
        self.anchor()

    @property
    def views(self) -> list[TurnView]:
        return list(self.query(TurnView))

    async def show(self, turns: Sequence[TurnText], afresh: bool = False) -> None:
        """Show these turns. Those that are shown already, as they are, stay untouched."""
        views = {view.turn.turn: view for view in self.views}
        kept = 0
        if not afresh:
            for mine, turn in zip(self.turns, turns, strict=False):
                if _says(mine) != _says(turn):
                    break
                kept += 1
        gone: list[Widget] = [view for number, view in views.items() if number > kept]
        if afresh:
            gone += [*self.query(Notice), *self.query(Earlier)]
        if gone:
            await self.remove_children(gone)
        if afresh:
            self._hidden = max(0, len(turns) - PAGE_TURNS)
            if self._hidden:
                await self.mount(Earlier(self._hidden))
        new = turns[max(kept, self._hidden) :]
        await self.mount_all([TurnView(turn) for turn in new])
        self.turns = list(turns)
        self._greet()
        if afresh:
            self.anchor()

    async def show_earlier(self) -> None:
        """One more page of turns above."""
        start = max(0, self._hidden - PAGE_TURNS)
        more = [TurnView(turn) for turn in self.turns[start : self._hidden]]
        self._hidden = start
        await self.query(Earlier).remove()
        first = self.views[0] if self.views else None
        front: list[Widget] = [Earlier(start)] if start else []
        await self.mount_all([*front, *more], before=first)
        more[-1].focus()

    async def begin(self, user: str, system: str | None = None) -> TurnView:
        """A turn that is being answered, behind those that are shown."""
        turn = TurnText(len(self.turns) + 1, system, user, "", "streaming", None)
        self.turns.append(turn)
        view = TurnView(turn)
        await self.mount(view)
        self._greet()
        self.anchor()
        return view

    async def finish(self, view: TurnView, turn: TurnText) -> None:
        """The turn is over. Where it ended otherwise than it was heard, `show` corrects that."""
        if view.answer.text == turn.reply:
            view.become(turn)
            self.turns[-1:] = [turn]

    async def notice(self, text: str) -> None:
        await self.mount(Notice(text))
        self._greet()

    def number(self, alternatives: Mapping[int, tuple[int, int]]) -> None:
        """Show which turns have others in their place."""
        for view in self.views:
            view.beside(*alternatives.get(view.turn.turn, (1, 1)))

    def _greet(self) -> None:
        self.query_one("#hello").display = not self.turns and not self.query(Notice)


def _says(turn: TurnText) -> tuple[object, ...]:
    return (turn.turn, turn.user, turn.reply, turn.state, turn.finish_reason)


def _mark(turn: TurnText) -> str:
    why = "interrupted" if turn.state == "interrupted" else turn.finish_reason or ""
    return WHY_STOPPED.get(why, "")


def _shortened(text: str) -> str:
    lines = printable(text).split("\n")
    if len(lines) <= MAX_USER_LINES and len(text) <= 8_000:
        return printable(text)
    start = "\n".join(lines[: MAX_USER_LINES // 2])[:4_000]
    return f"{start}\n[… {plural(len(text), 'character')} in all]"
