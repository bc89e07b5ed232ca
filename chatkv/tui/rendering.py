"""Markdown as a model writes it, in pieces that can be painted on their own.

Each piece is one widget however much is in it: as one widget per block and table cell, which is how
Textual's own Markdown does it, an answer of 10 kB took seconds to lay out.
"""

from __future__ import annotations

from functools import cache

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, TableElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.theme import Theme

# Attributes where the library has colours: they are there on any background, and without colours.
THEME = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "italic",
        "markdown.code": "bold",
        "markdown.block_quote": "italic",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.table.border": "none",
        "markdown.table.header": "bold",
        "markdown.link_url": "underline",
    }
)
# A piece of this many lines is as much as can be painted again with every bit of text.
PIECE_LINES = 40


class _Code(CodeBlock):
    """A block of code, set in, without the blank lines around it that a background would need."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2))


class _Table(TableElement):
    """A table without blank lines in place of its edges."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for made in super().__rich_console__(console, options):
            if isinstance(made, Table):
                made.show_edge = False
            yield made


class Piece(Markdown):
    """A renderable. HTML is text like any other, and addresses are shown, not hidden in links."""

    elements = Markdown.elements | {"fence": _Code, "code_block": _Code, "table_open": _Table}

    def __init__(self, text: str, is_dark: bool = True) -> None:
        theme = "ansi_dark" if is_dark else "ansi_light"
        super().__init__("", code_theme=theme, hyperlinks=False)
        self.parsed = _parser().parse(text)
        self._width, self._segments = 0, list[Segment]()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Made once for a width: a layout asks for the height before it asks for the lines."""
        if options.max_width != self._width:
            self._width = options.max_width
            self._segments = []
            for made in super().__rich_console__(console, options):
                if isinstance(made, Segment):
                    self._segments.append(made)
                else:
                    self._segments += console.render(made, options)
        yield from self._segments


def pieces(text: str) -> list[str]:
    """`text`, cut between blocks into pieces of about PIECE_LINES lines. More text behind it can
    change the last one only."""
    lines = text.splitlines(keepends=True)
    starts = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map]
    cuts = [0]
    for start in sorted(starts):
        if start - cuts[-1] >= PIECE_LINES:
            cuts.append(start)
    ends = [*cuts[1:], len(lines)]
    return ["".join(lines[begin:end]) for begin, end in zip(cuts, ends, strict=True)]


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
