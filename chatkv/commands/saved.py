"""A conversation as /save writes it: a Markdown file that can be imported again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from chatkv.client import TurnText
from chatkv.errors import UsageError


def save(title: str, turns: Sequence[TurnText], file: str) -> Path:
    """Write turns to `file`, "" for a name after the title in this folder; returns where.

    Raises UsageError where nothing was said or the file is there, and OSError.
    """
    if not turns:
        raise UsageError("/save: nothing was said yet")
    path = Path(file).expanduser() if file else free_name(Path.cwd(), file_name(title))
    if path.exists():
        raise UsageError(f"{path} exists: give another name")
    from chatkv.formats import markdown

    path.write_text(markdown.write(title, _messages(turns)), encoding="utf-8", newline="")
    return path


def file_name(title: str) -> str:
    """A name that says what is inside, and is no path."""
    words = re.sub(r"[^\w-]+", "-", title.lower()).strip("-_")[:60]
    return f"{words or 'conversation'}.md"


def free_name(folder: Path, name: str) -> Path:
    """`name` in `folder`, with a number where it is taken."""
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{Path(name).stem}-{number}{Path(name).suffix}"
    return path


def _messages(turns: Sequence[TurnText]) -> Iterator[tuple[str, str, bool]]:
    for turn in turns:
        if turn.system:
            yield "system", turn.system, True
        yield "user", turn.user, True
        is_whole = turn.state == "done"
        if turn.reply or is_whole:
            yield "assistant", turn.reply, is_whole
