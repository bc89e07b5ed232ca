"""One answer: Markdown while it is of a size to be read, plain text beyond.

It is a column of pieces. Only the last one is painted again while the answer grows; what is settled
is never touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from chatkv.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

# Beyond this nobody reads Markdown, and parsing it would make the chat slow.
MAX_LINES, PLAIN_LINES = 2_000, 200


class Answer(Vertical):
    """`write` adds to it; one that is given a text may be added to as well."""

    DEFAULT_CSS = """
    Answer { height: auto; }
    Answer > Static { height: auto; margin: 0 0 1 0; }
    Answer > Static.plain, Answer > Static:last-child { margin: 0; }
    """

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._parts = [text] if text else []
        self._lines = text.count("\n")
        self._last: Static | None = None
        self._tail = ""  # what `_last` shows
        self.is_plain = self._lines > MAX_LINES

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def num_last_lines(self) -> int:
        """What painting once more costs: lines of the piece that is not settled."""
        return self._tail.count("\n")

    def compose(self) -> ComposeResult:
        for piece in self._cut(printable(self.text)) if self._parts else []:
            self._tail, self._last = piece, self._piece()
            self._last.update(self._shown(piece))
            yield self._last

    async def write(self, text: str) -> None:
        """Show more text."""
        self._parts.append(text)
        self._lines += text.count("\n")
        if self._lines > MAX_LINES and not self.is_plain:
            self.is_plain, self._last, self._tail = True, None, ""  # what stands there stays
        *settled, self._tail = self._cut(self._tail + printable(text))
        for piece in settled:
            (await self._open_piece()).update(self._shown(piece))
            self._last = None
        (await self._open_piece()).update(self._shown(self._tail))

    async def _open_piece(self) -> Static:
        """The piece that grows."""
        if self._last is None:
            self._last = self._piece()
            await self.mount(self._last)
        return self._last

    def _piece(self) -> Static:
        return Static(markup=False, classes="plain" if self.is_plain else None)

    def _shown(self, piece: str) -> RenderableType:
        if self.is_plain:
            return piece.removesuffix("\n")
        from chatkv.tui.rendering import Piece  # its parser takes a while to import

        return Piece(piece, self.app.current_theme.dark)

    def _cut(self, text: str) -> list[str]:
        if self.is_plain:
            lines = text.splitlines(keepends=True)
            starts = range(0, len(lines), PLAIN_LINES)
            return ["".join(lines[start : start + PLAIN_LINES]) for start in starts]
        from chatkv.tui.rendering import pieces

        return pieces(text)
