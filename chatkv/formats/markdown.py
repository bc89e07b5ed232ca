"""A conversation as Markdown: a heading for its title, and one for who says what follows.

    # A title
    <!-- chatkv: model SmolLM2; 2026-11-30 14:00 UTC -->
    ## System            ## You           ## Assistant          ## Assistant (interrupted)

Text is kept to the character. A line of it that would pass for such a heading gets a backslash in
front, which Markdown does not show; reading takes it away again. Each text stands between one
empty line and the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from chatkv.formats.told import NotUnderstood, Told, digest_of, turns_of

_NAMES = {"system": "System", "user": "You", "assistant": "Assistant", "tool": "Tool"}
_ROLES = {
    "system": "system",
    "you": "user",
    "user": "user",
    "me": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_HEADING = re.compile(rf"#{{1,6}} +({'|'.join(_ROLES)}):?( +\(interrupted\))?[ \t]*", re.IGNORECASE)
_ESCAPED = re.compile(rf"\\+{_HEADING.pattern}", re.IGNORECASE)
_BACKSLASH = "\\"
_ROLE_TITLE = re.compile(rf"\\*({'|'.join(_ROLES)}):?( +\(interrupted\))?", re.IGNORECASE)
_ABOUT = re.compile(r"<!-- chatkv: .* -->")


def write(
    title: str,
    messages: Iterable[tuple[str, str, bool]],
    model: str = "",
    created_at: float | None = None,
) -> str:
    """The whole file, of (role, content, whether it is whole)."""
    name = " ".join(title.split()) or "untitled"
    blocks = [f"# {_BACKSLASH if _ROLE_TITLE.fullmatch(name) else ''}{name}\n"]
    about = [f"model {' '.join(model.split())}"] if model else []
    if created_at is not None:
        about.append(f"{datetime.fromtimestamp(created_at, UTC):%Y-%m-%d %H:%M} UTC")
    if about:
        blocks.append(f"<!-- chatkv: {'; '.join(about).replace('--', '- -')} -->\n")
    for role, content, is_whole in messages:
        mark = "" if is_whole else " (interrupted)"
        blocks.append(f"## {_NAMES.get(role, 'You')}{mark}\n\n{_escaped(content)}\n")
    return "\n".join(blocks)


def read(text: str) -> Told:
    """The inverse of `write`; headings may have any level, and a few more names."""
    text = text.removeprefix("\ufeff")
    if _is_windows(text):
        text = text.replace("\r\n", "\n")
    title, messages, lines = "", list[tuple[str, str, bool]](), list[str]()
    role: str | None = None
    is_whole = True

    def close() -> None:
        if role is not None:
            messages.append((role, _content(lines), is_whole))

    for line in text.split("\n"):
        found = _HEADING.fullmatch(line)
        if found is not None:
            close()
            role, is_whole, lines = _ROLES[found[1].lower()], found[2] is None, []
        elif role is not None:
            lines.append(line[1:] if _ESCAPED.fullmatch(line) else line)
        elif line.startswith("# ") and not title:
            title = line[2:].strip()
        elif line.strip() and not _ABOUT.fullmatch(line.strip()):
            raise NotUnderstood(
                "this Markdown begins with text that nobody says: put it below a heading like "
                "## You or ## Assistant"
            )
    close()
    if not messages:
        raise NotUnderstood("it holds no heading like ## You or ## Assistant")
    if title.startswith(_BACKSLASH) and _ROLE_TITLE.fullmatch(title):
        title = title[1:]
    title = "" if title == "untitled" else title
    return Told(digest_of("markdown", [title, messages]), turns_of(messages), title)


def _escaped(text: str) -> str:
    if "#" not in text:
        return text
    return "\n".join(
        f"\\{line}" if _HEADING.fullmatch(line) or _ESCAPED.fullmatch(line) else line
        for line in text.split("\n")
    )


def _content(lines: list[str]) -> str:
    """What stands between two headings, less the empty line behind the one and before the other."""
    if lines and not lines[0].strip():
        lines = lines[1:]
    if lines and not lines[-1].strip():
        lines = lines[:-1]
    return "\n".join(lines)


def _is_windows(text: str) -> bool:
    """Whether an editor has ended every line with a carriage return."""
    return "\r\n" in text and text.count("\r\n") == text.count("\n")
