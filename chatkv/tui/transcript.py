"""A conversation as a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from chatkv.client import TurnText


def markdown(title: str, turns: Sequence[TurnText]) -> str:
    """Title, system prompt and turns, under headings."""
    parts = [f"# {' '.join(title.split()) or 'untitled'}"]
    for turn in turns:
        if turn.system:
            parts += ["## System", turn.system.strip()]
        parts += ["## You", turn.user.strip(), "## Assistant", turn.reply.strip()]
        if turn.state != "done":
            parts.append("*(interrupted)*")
    return "\n\n".join(parts) + "\n"


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
