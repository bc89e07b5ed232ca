"""`chatkv config`: which settings are in force and where each comes from; changing the file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from chatkv.cli.look import keymap, theme
from chatkv.cli.options import setting_option
from chatkv.cli.output import Output, Row, output_options, printable
from chatkv.cli.table import Column
from chatkv.errors import UsageError
from chatkv.paths import folders
from chatkv.settings.kinds import Kind, Names, Number, Table, shown
from chatkv.settings.read import Value, read
from chatkv.settings.table import SETTINGS, Setting

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def config() -> None:
    """Show and change settings.

    They stand in a file, which `chatkv config path` names; a variable of the environment stands
    above it, and a command's own option above both. docs/configuration.md lists them.
    """


def _complete_key(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [
        CompletionItem(key, help=setting.meaning)
        for key, setting in SETTINGS.items()
        if key.startswith(incomplete)
    ]


def _every_flag(command: Command) -> Command:
    """Every option that is made of a setting, each once."""
    flags = {setting.flag: key for key, setting in reversed(SETTINGS.items()) if setting.flag}
    for key in flags.values():
        command = setting_option(key, hidden=True, default=None, show_default=False)(command)
    return command


@config.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...", shell_complete=_complete_key)
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@_every_flag
@output_options
@click.pass_context
def show(
    context: click.Context, /, output: Output, keys: tuple[str, ...], quiet: bool, **flags: Any
) -> None:
    """Show settings, and where each comes from.

    Options of other commands may be given too, such as --temperature 0, to see what they change.
    """
    values = read(folders().settings, os.environ)
    theme(values), keymap(values)
    for key, setting in SETTINGS.items():
        source = context.get_parameter_source(setting.parameter) if setting.flag else None
        if source is ParameterSource.COMMANDLINE and setting.key != "serve.models":
            given = flags[setting.parameter]
            given = setting.kind.parse(given) if isinstance(setting.kind, Names) else given
            values[key] = Value(setting, given, "flag", setting.flag)
    rows = [_row(values[_known(key)]) for key in keys or SETTINGS]
    if quiet:
        for row in rows:
            click.echo(row["key"])
        return
    output.rows(
        rows,
        [
            Column("SETTING", lambda row: row["key"], colour="cyan"),
            Column("VALUE", lambda row: printable(_words(values[row["key"]])), is_flexible=True),
            Column("FROM", lambda row: printable(_origin(row)), is_flexible=True),
        ],
    )


@config.command()
@click.argument("key", metavar="KEY", shell_complete=_complete_key)
def get(key: str) -> None:
    """Print one value, as a script needs it; nothing where none is set."""
    value = read(folders().settings, os.environ)[_known(key)]
    if value.value is not None:
        click.echo(value.setting.kind.written(value.value))


@config.command()
def path() -> None:
    """Print where the file is, or would be."""
    click.echo(folders().settings)


@config.command("set")
@click.argument("key", metavar="KEY", shell_complete=_complete_key)
@click.argument("value", metavar="VALUE")
def set_(key: str, value: str) -> None:
    """Write a setting into the file, whose comments stay.

    KEY is a name that `chatkv config show` lists; keys.NAME is one key of the full-screen chat. A
    list is written with commas between, as in serve.models a,b.
    """
    setting, name = _named(key)
    try:
        parsed = setting.kind.parse({name: value} if name else value)
    except (ValueError, OverflowError):
        raise UsageError(f'{key} must be {setting.kind.allowed}, not "{value}"') from None
    _write(key, parsed[name] if name else _toml(setting.kind, value, parsed))


@config.command()
@click.argument("key", metavar="KEY", shell_complete=_complete_key)
def unset(key: str) -> None:
    """Take a setting out of the file, so that its default holds again."""
    _named(key)
    _write(key, None)


def _write(key: str, value: Any) -> None:
    """Change one key of the file, None: take it out. What comes of it is read before it is kept."""
    import tomlkit

    place = folders().make().settings
    read(place, {})  # a file that is wrong now is not made worse
    document = tomlkit.parse(place.read_text(encoding="utf-8-sig") if place.exists() else "")
    table, _, name = key.rpartition(".")
    if value is None:
        holder: Any = document.get(table, {}) if table else document
        if name not in holder:
            click.echo(f"chatkv: {key} is not set in {place}", err=True)
            return
        del holder[name]
    elif table:
        if table not in document:
            document[table] = tomlkit.table()
        document[table][name] = value
    else:
        document[name] = value
    text = tomlkit.dumps(document)
    target = place.resolve()  # a link to where somebody keeps such files stays one
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=".config-", suffix=".toml")
    try:
        with open(handle, "w", encoding="utf-8") as out:
            out.write(text)
        values = read(Path(scratch), {})
        theme(values), keymap(values)
        os.replace(scratch, target)
    except UsageError as error:
        os.unlink(scratch)
        raise UsageError(f"{key}: {str(error).partition(': ')[2]}") from None
    except BaseException:
        os.unlink(scratch)
        raise
    variable = SETTINGS[key].variable if key in SETTINGS else ""
    if variable and os.environ.get(variable):
        click.echo(f"chatkv: {variable} is set, which stands above the file", err=True)


def _named(key: str) -> tuple[Setting, str]:
    """The setting, and of keys.NAME the name. Raises UsageError."""
    table, _, name = key.partition(".")
    if table in SETTINGS and isinstance(SETTINGS[table].kind, Table):
        if not name:
            raise UsageError(f"give one of them: {table}.NAME")
        return SETTINGS[table], name
    return SETTINGS[_known(key)], ""


def _known(key: str) -> str:
    if key not in SETTINGS:
        raise UsageError(f"there is no setting {key}: there are {', '.join(SETTINGS)}")
    return key


def _toml(kind: Kind, given: str, parsed: Any) -> Any:
    """A value as the file should show it: sizes and times as they were given."""
    if isinstance(kind, Names):
        return list(parsed)
    if isinstance(kind, Number) or isinstance(parsed, bool):
        return parsed
    return given


def _row(value: Value) -> Row:
    setting = value.setting
    return {
        "key": setting.key,
        "value": list(value.value) if isinstance(value.value, tuple) else value.value,
        "source": value.source,
        "where": value.where,
        "default": list(setting.default) if isinstance(setting.default, tuple) else setting.default,
        "variable": setting.variable or None,
        "flag": setting.flag or None,
        "meaning": setting.meaning,
    }


def _origin(row: Row) -> str:
    return row["where"] if row["source"] in ("file", "flag", "environment") else "default"


def _words(value: Value) -> str:
    if value.value in (None, (), {}):
        return value.setting.unset
    return shown(value.setting.kind, value.value)
