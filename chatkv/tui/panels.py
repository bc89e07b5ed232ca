"""The small widgets around the conversation; what they say is computed elsewhere."""

from __future__ import annotations

from typing import Any

from textual.containers import VerticalScroll
from textual.widgets import Static

from chatkv.tui import timeline
from chatkv.tui.progress import Progress
from chatkv.tui.status import Status
from chatkv.words import printable

MAX_SUGGESTIONS = 6


class StatusLine(Static):
    """The line at the bottom."""

    DEFAULT_CSS = "StatusLine { height: 1; padding: 0 1; background: $panel; color: $foreground; }"

    def __init__(self) -> None:
        super().__init__(id="status", markup=False)
        self._status = Status()

    def show(self, status: Status) -> None:
        self._status = status
        self.update(printable(status.line(max(1, self.app.size.width - 2))))

    def on_resize(self) -> None:
        self.show(self._status)


class ProgressLine(Static):
    """A bar while something is on its way; takes no room otherwise."""

    DEFAULT_CSS = "ProgressLine { height: 1; padding: 0 1; display: none; color: $accent; }"

    def __init__(self) -> None:
        super().__init__(id="progress", markup=False)
        self._progress: Progress | None = None

    def show(self, progress: Progress | None) -> None:
        self._progress = progress
        self.display = progress is not None
        if progress is not None:
            self.update(progress.line(max(1, self.app.size.width - 2)))

    def on_resize(self) -> None:
        self.show(self._progress)


class Suggestions(Static):
    """What a command that is being typed may become."""

    DEFAULT_CSS = """
    Suggestions { height: auto; padding: 0 1; display: none; color: $text-muted; }
    """

    def __init__(self) -> None:
        super().__init__(id="suggestions", markup=False)

    def show(self, lines: list[str]) -> None:
        self.display = bool(lines)
        more = [f"… {len(lines) - MAX_SUGGESTIONS} more"] if len(lines) > MAX_SUGGESTIONS else []
        self.update("\n".join([*map(printable, lines[:MAX_SUGGESTIONS]), *more]))


class TimelinePanel(VerticalScroll):
    """The last turn's way from the disk to its last word."""

    DEFAULT_CSS = """
    TimelinePanel {
        width: 52; height: 1fr; border-left: solid $primary; padding: 0 1;
        scrollbar-gutter: stable; scrollbar-size-vertical: 1;
    }
    TimelinePanel Static { height: auto; }
    """

    def __init__(self) -> None:
        super().__init__(Static(id="timeline-text", markup=False), id="timeline")
        self._turn, self._stats = 0, dict[str, Any]()
        self._why: list[str] = []

    def show(self, turn: int, stats: dict[str, Any], why: list[str] | None = None) -> None:
        """`why`: the turn in sentences, below its figures."""
        self._turn, self._stats, self._why = turn, stats, why or []
        self._paint()

    def on_resize(self) -> None:
        self._paint()

    def _paint(self) -> None:
        width = max(20, self.scrollable_content_region.width)
        lines = [f"Turn {self._turn}"] if self._stats else []
        lines += timeline.lines(self._stats, width)
        if self._why:
            lines += ["", *self._why]
        self.query_one("#timeline-text", Static).update(printable("\n".join(lines)))
