"""`--device`: where the model computes, for all that the command does or starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from chatkv.cli.options import setting_option

Command = TypeVar("Command", bound=Callable[..., Any])


def device_option(command: Command) -> Command:
    """Adds --device, which CHATKV_DEVICE carries on to whoever loads a model."""
    option = setting_option(
        "device", expose_value=False, callback=_remember, default=None, show_default="auto"
    )
    return option(command)


def _remember(context: click.Context, parameter: click.Parameter, wanted: str | None) -> None:
    if wanted is None:
        return
    if wanted == "cuda":  # else who asks for it would wait for a model to hear that there is none
        from chatkv.engine.device import choose_device

        choose_device(wanted)
    os.environ["CHATKV_DEVICE"] = wanted
