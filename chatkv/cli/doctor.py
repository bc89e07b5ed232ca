"""`chatkv doctor`: everything that chatkv stands on, and what to do where it does not hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial

import click

from chatkv.cli.checks import computing, keeping, surroundings
from chatkv.cli.checks.finding import Check, Finding, problem
from chatkv.cli.output import Output, output_options, plural, printable, wants_colour
from chatkv.paths import Folders, folders

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print the names of problems only.")
@output_options
def doctor(output: Output, quiet: bool) -> None:
    """Check what chatkv stands on, and say what to do.

    Python, torch, GPU, memory and disk, folders, both stores at a glance, the engine, models,
    settings and the terminal. Changes nothing. Exits with 1 where something needs doing.
    """
    found = list(_findings(folders()))
    problems = [one for one in found if one.state == "problem"]
    if quiet:
        for one in dict.fromkeys(one.area for one in problems):
            click.echo(one)
    elif output.is_human:
        _tell(output, found)
        things = plural(len(problems), "problem")
        output.note(f"\n{things}" if problems else "\nall is well")
    else:
        keys = ("area", "state", "text", "advice")
        output.rows([{key: getattr(one, key) for key in keys} for one in found], [])
    if problems:
        raise SystemExit(1)


def _findings(place: Folders) -> Iterator[Finding]:
    torch = computing.Torch()  # it takes the longest, so it begins
    before = dict(os.environ)
    try:
        yield from _checked("settings", partial(surroundings.settings, place))
        checks: dict[str, Check] = {
            "python": computing.python,
            "torch": torch.checks,
            "memory": computing.memory,
            "folders": partial(keeping.folders, place),
            "disk": partial(keeping.disk, place),
            "conversations": partial(keeping.conversations, place),
            "KV cache": partial(keeping.kv, place),
            "model": partial(keeping.models, place, _wanted_model(place)),
            "engine": partial(surroundings.engine, place),
            "terminal": surroundings.terminal,
        }
        for area, check in checks.items():
            yield from _checked(area, check)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _checked(area: str, check: Check) -> Iterator[Finding]:
    """A check that fails is a finding too: what is broken must not hide the rest."""
    try:
        yield from check()
    except Exception as error:
        text = f"could not be looked at: {printable(str(error)) or type(error).__name__}"
        yield problem(area, text, "see whether its files can be read")


def _wanted_model(place: Folders) -> str | None:
    from chatkv.errors import UsageError
    from chatkv.settings.read import read

    try:
        value = read(place.settings, os.environ)["model"].value
    except UsageError:  # which was told
        return None
    return None if value is None else str(value)


def _tell(output: Output, found: list[Finding]) -> None:
    width = max(len(one.area) for one in found)
    has_colour = wants_colour(sys.stdout)
    for one in found:
        state = f"{one.state:<8}"
        state = click.style(state, fg=_COLOURS[one.state]) if has_colour else state
        click.echo(f"{state} {one.area:<{width}}  {printable(one.text)}", color=True)
        if one.advice:
            click.echo(f"{'':<8} {'':<{width}}  -> {printable(one.advice)}", color=True)
