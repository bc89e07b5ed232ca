"""One answer: Markdown while it is of a size to be read, plain text beyond.

While it streams, only its last block is parsed again. A long one would make that slow in the end,
so what follows the first MAX_LINES lines is appended as text, a piece of bounded size at a time.
"""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownStream

from chatkv.words import printable

MAX_LINES, PIECE_LINES = 2_000, 200
# Parsing this much at once takes a quarter of a second; more is shown as it is.
MAX_AT_ONCE_CHARS = 20_000


class Answer(Vertical):
    """`write` adds to it, `freeze` ends that; one that is given a text is complete."""

    DEFAULT_CSS = """
    Answer { height: auto; }
    Answer Markdown { padding: 0; margin: 0; background: transparent; }
    Answer MarkdownBlock:last-of-type { margin-bottom: 0; }
    Answer MarkdownFence { margin: 0 0 1 0; }
    Answer Static { height: auto; }
    """

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._parts = [text]
        self._lines = text.count("\n")
        self._whole = text
        self._stream: MarkdownStream | None = None
        self._tail: list[str] = []  # of the last plain piece
        self._plain: Static | None = None
        self.is_plain = len(text) > MAX_AT_ONCE_CHARS or self._lines > MAX_LINES

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def compose(self) -> ComposeResult:
        if self.is_plain:
            lines = printable(self._whole).splitlines(keepends=True)
            for start in range(0, len(lines), PIECE_LINES):
                piece = "".join(lines[start : start + PIECE_LINES])
                yield Static(piece.removesuffix("\n"), markup=False)
        else:
            yield Markdown(printable(self._whole), open_links=False)

    async def write(self, text: str) -> None:
        """Show more text. Returns at once: what cannot be painted as fast is put together."""
        self._parts.append(text)
        self._lines += text.count("\n")
        if self.is_plain or self._lines > MAX_LINES:
            self.is_plain = True
            await self.freeze()
            await self._append_plain(printable(text))
            return
        if self._stream is None:
            self._stream = Markdown.get_stream(self.query_one(Markdown))
        await self._stream.write(printable(text))

    async def freeze(self) -> None:
        """Paint what is left, and be done."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.stop()

    async def _append_plain(self, text: str) -> None:
        if self._plain is None or len(self._tail) > PIECE_LINES:
            self._tail, self._plain = [], Static(markup=False)
            await self.mount(self._plain)
        self._tail = ("".join(self._tail) + text).splitlines(keepends=True)
        self._plain.update("".join(self._tail).removesuffix("\n"))
