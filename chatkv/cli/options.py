"""Options made of the table of settings: one name, one meaning, one default, in every command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chatkv.cli.complete import complete_model
from chatkv.settings.kinds import Choice, Flag, Number
from chatkv.settings.table import SETTINGS, Setting

if TYPE_CHECKING:
    from chatkv.settings.read import Values

Command = TypeVar("Command", bound=Callable[..., Any])

_METAVARS = {"model": "MODEL", "system": "TEXT", "max-tokens": "N"}


def setting_option(
    key: str, *names: str, is_remembered: bool = False, **more: Any
) -> Callable[[Command], Command]:
    """The option of a setting. Of what a conversation remembers, a chat's option is None where it
    is not given (`is_remembered`); `more` goes to click."""
    setting = SETTINGS[key]
    kind, default = setting.kind, setting.default
    about: dict[str, Any] = {"help": setting.meaning, "metavar": _METAVARS.get(key)}
    if key in ("model", "serve.models"):
        about["shell_complete"] = complete_model
    if isinstance(kind, Flag):
        about |= {"is_flag": True, "default": default}
        names = (*names, f"{setting.flag}/--no-{setting.flag[2:]}")
    else:
        about["type"] = _type(kind)
        said = f"the session's own, else {default or setting.unset}" if is_remembered else None
        if default in (None, ()) or is_remembered:
            about["help"] = _with_default(setting, said or setting.unset)
        else:
            about |= {"default": default, "show_default": True}
        names = (*names, setting.flag)
    return click.option(*names, setting.parameter, **about | more)


def values_in_force() -> Values:
    """The settings as the program has read them for the command that is running."""
    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context is not None else None
    if isinstance(found, Mapping):
        return found
    from chatkv.settings.read import Value

    return {key: Value(setting, setting.default) for key, setting in SETTINGS.items()}


def _type(kind: Any) -> Any:
    if isinstance(kind, Choice):
        return click.Choice(kind.names)
    if isinstance(kind, Number) and kind.is_whole:
        most = None if kind.most is None else int(kind.most)
        return click.IntRange(int(kind.least), most)
    return float if isinstance(kind, Number) else str


def _with_default(setting: Setting, default: str) -> str:
    return f"{setting.meaning.rstrip('.')} [default: {default}]."
