"""The screen of one conversation: its widgets, and what the engine's news change in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from chatkv.client import ChatRequest
from chatkv.commands.branches import alternatives
from chatkv.tui import messages
from chatkv.tui.composer import Composer
from chatkv.tui.conversation_view import ConversationView, TurnView
from chatkv.tui.history import History
from chatkv.tui.panels import ProgressLine, StatusLine, Suggestions, TimelinePanel
from chatkv.tui.progress import NONE, Progress
from chatkv.tui.start import Start
from chatkv.tui.status import Status, restored
from chatkv.tui.worker import Worker
from chatkv.words import count, printable
from chatkv_store.errors import StoreError

# Text is painted this often: more would cost more than anybody sees.
PAINT_S = 0.05
# Time for the first frame. (`call_after_refresh` calls before it is painted.)
FIRST_FRAME_S = 0.02


class ChatScreen(Screen[None]):
    """`facts` is the conversation as the engine told it last, None until it has; `answering` the
    turn that is being answered."""

    DEFAULT_CSS = """
    #title { height: 1; padding: 0 1; color: $text-muted; }
    #body { height: 1fr; layout: horizontal; }
    ChatScreen.-short #title { display: none; }
    ChatScreen.-narrow #body { layout: vertical; }
    TimelinePanel { display: none; }
    ChatScreen.-timeline TimelinePanel { display: block; }
    ChatScreen.-timeline.-short ConversationView { display: none; }
    ChatScreen.-short TimelinePanel { height: 1fr; }
    ChatScreen.-narrow TimelinePanel {
        width: 100%; height: 1fr; border-left: none; border-top: solid $primary;
    }
    """

    def __init__(
        self, start: Start, values: Callable[[str], list[str]], on_full: Callable[[str], object]
    ) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-tall")]
        self.library, self.request = start.library, start.request
        self.worker = Worker(start.connect, self.post_message)
        self.facts: messages.Facts | None = None
        self.answering: TurnView | None = None
        self.is_open = False
        self.asked = ""  # what is being answered, to be given back where it is refused
        self._values, self._on_full, self._keymap = values, on_full, start.keymap
        self._status = Status()
        self._progress = NONE
        self._flush: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Static("chatkv", id="title", markup=False)
        with Container(id="body"):
            yield ConversationView()
            yield TimelinePanel()
        yield Suggestions()
        yield Composer(self._values, self._keymap)
        yield ProgressLine()
        yield StatusLine()

    def on_mount(self) -> None:
        self.composer.focus()
        self.show_status("starting")
        self.set_timer(FIRST_FRAME_S, self._begin)

    async def _begin(self) -> None:
        """Everything that can wait until there is something to see."""
        self.worker.start()
        self.worker.open(self.request)
        await self.show_saved()

    # --- what is shown --------------------------------------------------------------------------

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @property
    def conversation(self) -> ConversationView:
        return self.query_one(ConversationView)

    @property
    def num_turns(self) -> int:
        return len(self.conversation.turns)

    async def show_saved(self) -> None:
        """The conversation that is being opened, as it lies on the disk."""
        if self.request.resume is not None:
            with suppress(StoreError):
                session = self.library.find(self.request.resume)
                self._show_title(session.title)
                await self.conversation.show(self.library.turns(session.id), afresh=True)

    def show_status(self, doing: str = "", **changes: object) -> None:
        """Change what the line at the bottom says."""
        if doing:
            changes["doing"] = doing
        self._status = replace(self._status, **changes)  # type: ignore[arg-type]
        self.query_one(StatusLine).show(self._status)

    async def say(self, line: str) -> None:
        """A line of the program's own, in the conversation."""
        await self.conversation.notice(line)

    def show_branches(self) -> None:
        """Mark the turns that have others in their place."""
        if self.facts is not None:
            with suppress(StoreError):  # in no file yet
                self.conversation.number(alternatives(*self.library.tree(self.facts.session)))

    def show_timeline(self, is_shown: bool | None = None) -> None:
        """Show it, or not; None: the other way round."""
        now = self.has_class("-timeline")
        self.set_class(not now if is_shown is None else is_shown, "-timeline")

    def _show_title(self, title: str) -> None:
        shown = printable(" ".join(title.split())) or "new conversation"
        self.query_one("#title", Static).update(shown)

    def _show_facts(self, facts: messages.Facts) -> None:
        self.facts = facts
        self._show_title(facts.title)
        last = facts.turns[-1] if facts.turns else None
        stats = last.stats if last is not None else {}
        stats = stats if "tokens" in stats else {}
        self.show_status(
            model=facts.model, used=facts.num_tokens, limit=facts.max_tokens, stats=stats
        )
        self.query_one(TimelinePanel).show(last.turn if last is not None else 0, stats)

    def _show_progress(self, progress: Progress) -> None:
        self._progress = progress
        self.query_one(ProgressLine).show(None if progress.is_over else progress)

    def on_scrolled(self, message: messages.Scrolled) -> None:
        self.conversation.release_anchor()  # or it would hold on to the end
        if message.pages < 0:
            self.conversation.scroll_page_up(animate=False)
        else:
            self.conversation.scroll_page_down(animate=False)

    # --- what the engine says -------------------------------------------------------------------

    async def on_opened(self, message: messages.Opened) -> None:
        self.is_open, facts = True, message.facts
        self.request = ChatRequest(resume=facts.session)
        self._show_progress(NONE)
        self.composer.sent_lines = History(turn.user for turn in facts.turns)
        if self.answering is None:
            await self.conversation.show(facts.turns)
            self.show_status("ready")
        self._show_facts(facts)
        self.show_branches()
        for notice in message.notices:
            await self.say(notice)

    async def on_open_failed(self, message: messages.OpenFailed) -> None:
        self.is_open = False
        self._show_progress(NONE)
        self.show_status("not connected")
        await self.say(message.error)

    async def on_restored(self, message: messages.Restored) -> None:
        if self.facts is not None and message.session == self.facts.session:
            await self.say(restored(message.ready, self.facts.num_tokens))

    def on_worked(self, message: messages.Worked) -> None:
        progress = self._progress.follow(message.stage, message.done, message.total)
        self._show_progress(progress)
        if self.answering is not None:
            doing = "reading" if message.stage == "prefill" else message.stage
            self.show_status("answering" if progress.is_over and doing == "reading" else doing)
            if message.stage == "prefill":
                self.show_status(used=message.total)
        elif not self.is_open:
            self.show_status(message.stage)

    def on_text_arrived(self) -> None:
        if self._flush is None and self.answering is not None:
            # A piece that takes long to paint, such as a long table, is painted less often.
            lines = self.answering.answer.num_last_lines
            self._flush = self.set_timer(PAINT_S * (1 + lines / 50), self._paint_text)

    async def _paint_text(self) -> None:
        self._flush = None
        if self.answering is not None and (text := self.worker.take_text()):
            if self._status.doing != "stopping":
                self.show_status("answering")
            await self.answering.answer.write(text)

    async def on_answered(self, message: messages.Answered) -> None:
        turns = message.facts.turns
        await self._end_turn()
        if self.answering is not None:
            await self.conversation.finish(self.answering, turns[-1])
        self.answering = None
        await self.conversation.show(turns)
        self._show_facts(message.facts)
        self.show_status("stopped" if turns[-1].state == "interrupted" else "ready")
        self.show_branches()
        for notice in message.notices:
            await self.say(notice)

    async def on_turn_failed(self, message: messages.TurnFailed) -> None:
        await self._end_turn()
        view, self.answering = self.answering, None
        if view is not None and message.was_kept:
            ended = replace(view.turn, reply=view.answer.text, state="interrupted")
            await self.conversation.finish(view, ended)
        elif view is not None:
            left = message.facts.turns if message.facts else self.conversation.turns[:-1]
            await self.conversation.show(left)
            if not self.composer.text:
                self.composer.put(self.asked)
        if message.facts is not None and not message.was_kept:
            self._show_facts(message.facts)
        self.show_status("failed")
        await self.say(message.error)
        if message.is_context_full:
            self._on_full(message.error)

    async def on_turns_changed(self, message: messages.TurnsChanged) -> None:
        await self.conversation.show(message.facts.turns)
        self._show_facts(message.facts)
        self.show_branches()

    async def on_change_failed(self, message: messages.ChangeFailed) -> None:
        if self.facts is not None:
            await self.conversation.show(self.facts.turns)
        await self.say(message.error)

    def on_drafted(self, message: messages.Drafted) -> None:
        if self.facts is None or self.answering is not None:
            return
        ready = max(0, message.cached - self.facts.num_tokens)
        is_all = message.text == self.composer.unfolded
        if self.composer.text:
            more = "" if is_all else ", reading on"
            self.show_status(draft=f"draft: {count(ready)} tokens ready{more}")

    async def _end_turn(self) -> None:
        """Paint what is left of the text, and take the bar away."""
        if self._flush is not None:
            self._flush.stop()
        await self._paint_text()
        self._show_progress(NONE)
