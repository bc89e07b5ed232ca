"""How the full-screen chat shall look and be held, from the settings.

Only Textual knows its themes and keys, so these settings are checked where it is needed anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from chatkv.errors import UsageError

if TYPE_CHECKING:
    from chatkv.settings.read import Values


def theme(values: Values) -> str | None:
    """The theme's name, None for the default. Raises UsageError for one that there is not."""
    from textual.theme import BUILTIN_THEMES

    found = values["tui.theme"]
    if found.value is not None and found.value not in BUILTIN_THEMES:
        raise UsageError(
            f'{found.where}: there is no theme "{found.value}": there are '
            f"{', '.join(sorted(BUILTIN_THEMES))}"
        )
    return found.value if found.value is None else str(found.value)


def keymap(values: Values) -> dict[str, str]:
    """Name -> keys. Raises UsageError for what is no name or no key, and for one key twice."""
    from chatkv.tui.keys import GROUPS, check

    found = values["keys"]
    try:
        keymap = check(found.value)
        for name, keys in keymap.items():
            for key in _single(keys):
                if not _exists(key):
                    raise UsageError(f'{name}: there is no key "{key}": write it like ctrl+s or f5')
        for group in GROUPS.values():
            taken: dict[str, str] = {}
            for one in group:
                for key in _single(keymap.get(one.name, one.keys)):
                    other = taken.setdefault(key, one.name)
                    if other != one.name and keymap.keys() & {other, one.name}:
                        raise UsageError(f"{key} would be both {other} and {one.name}")
    except UsageError as error:
        raise UsageError(f"{found.where}: {error}") from None
    return keymap


def _single(keys: str) -> Iterator[str]:
    return (key.strip() for key in keys.split(","))


def _exists(key: str) -> bool:
    """Whether Textual could ever report a key of this name."""
    from textual.keys import Keys

    *modifiers, name = key.split("+")
    if any(one not in ("ctrl", "shift", "alt", "super", "meta", "hyper") for one in modifiers):
        return False
    return len(name) == 1 or key in {one.value for one in Keys} or name in _NAMED


_NAMED = {
    *("enter", "escape", "tab", "space", "backspace", "delete", "insert", "home", "end"),
    *("pageup", "pagedown", "up", "down", "left", "right", "minus", "plus", "comma"),
    *("full_stop", "slash", "backslash", "question_mark", "colon", "semicolon", "equals_sign"),
    *(f"f{number}" for number in range(1, 25)),
}
