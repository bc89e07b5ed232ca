"""Which value each setting has, and where it comes from: the file, then the environment above it.

Flags stand above both: what is read here becomes the defaults of commands' options. What somebody
else reads from a variable is carried there, so that the engine's process hears of it too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chatkv.errors import UsageError
from chatkv.settings.kinds import Names, Table
from chatkv.settings.table import CHATS, SETTINGS, Setting

Source = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True)
class Value:
    """What a setting is, and `where` that stands: "…/config.toml, line 3", or a variable."""

    setting: Setting
    value: Any
    source: Source = "default"
    where: str = ""


Values = Mapping[str, Value]


def read(path: Path, environment: Mapping[str, str]) -> dict[str, Value]:
    """Every setting by its key. Raises UsageError, in one line, for what makes no sense."""
    values = {key: Value(setting, setting.default) for key, setting in SETTINGS.items()}
    text = _text(path)
    for key, given in _entries(path, text):
        where = _where(path, text, key)
        values[key] = Value(SETTINGS[key], _parsed(SETTINGS[key], given, where), "file", where)
    for key, setting in SETTINGS.items():
        if given := environment.get(setting.variable, ""):  # an empty variable says nothing
            value = _parsed(setting, given, setting.variable)
            values[key] = Value(setting, value, "environment", setting.variable)
    return values


def carry(values: Values, environment: MutableMapping[str, str]) -> None:
    """Put what others read from the environment there."""
    for key, value in values.items():
        if value.setting.is_carried and value.source != "default":
            environment[value.setting.variable] = SETTINGS[key].kind.written(value.value)


def defaults(values: Values) -> dict[str, Any]:
    """Command -> parameter -> value, as click takes it: what the file and the environment say. A
    subcommand's stand below its group's name; what conversations remember, chats ask for."""
    found: dict[str, Any] = {}
    for value in values.values():
        setting = value.setting
        for command in setting.commands if value.source != "default" else ():
            if setting.is_carried or (setting.is_remembered and command in CHATS):
                continue
            place = found
            for name in command.split():
                place = place.setdefault(name, {})
            one = value.value
            # In an option of one text, names stand with commas between.
            is_joined = isinstance(setting.kind, Names) and setting.key != "serve.models"
            place[setting.parameter] = ",".join(one) if is_joined else one
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no UTF-8 text") from None


def _entries(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """Every key and what it is given. Raises UsageError for a key that there is none of."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no valid TOML: {error}") from None
    tables = {key.partition(".")[0] for key in SETTINGS if "." in key}
    for name, value in given.items():
        if name in tables and isinstance(value, Mapping):
            for inner, one in value.items():
                yield _known(path, text, f"{name}.{inner}"), one
        else:
            yield _known(path, text, name), value


def _known(path: Path, text: str, key: str) -> str:
    if key in SETTINGS:
        return key
    import difflib

    by_name = {known.rpartition(".")[2]: known for known in SETTINGS}
    name = key.rpartition(".")[2].replace("_", "-").lower()
    if name in by_name:  # the right name in the wrong table
        near = [by_name[name]]
    else:
        near = difflib.get_close_matches(key, SETTINGS, 1)
        near = near or [by_name[one] for one in difflib.get_close_matches(name, by_name, 1)]
    hint = f"do you mean {_place(near[0])}?" if near else f"there are {', '.join(SETTINGS)}"
    raise UsageError(f"{_where(path, text, key)}: there is no setting {key}: {hint}")


def _place(key: str) -> str:
    """How a key is written in the file."""
    table, _, name = key.rpartition(".")
    return f"{name} in [{table}]" if table else f"{name}, above the first [table]"


def _parsed(setting: Setting, given: object, where: str) -> Any:
    try:
        return setting.kind.parse(given)
    except (ValueError, OverflowError):
        shown = f'"{given[:80]}"' if isinstance(given, str) else str(given)[:80]
        what = where if where == setting.variable else f"{where}: {setting.key}"
        raise UsageError(f"{what} must be {setting.kind.allowed}, not {shown}") from None


def _where(path: Path, text: str, key: str) -> str:
    line = line_of(text, key)
    return f"{path}, line {line}" if line else str(path)


def line_of(text: str, key: str) -> int | None:
    """The line, from 1 on, on which the file sets `key`; None where it is written unusually."""
    table, _, name = key.rpartition(".")
    is_table = key in SETTINGS and isinstance(SETTINGS[key].kind, Table)
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            current = header[1]
            if is_table and current == key:
                return number
        for prefix, inside in ((name, table), (key, "")):
            if current == inside and re.match(rf"""\s*["']?{re.escape(prefix)}["']?\s*=""", line):
                return number
    return None
