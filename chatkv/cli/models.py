"""`chatkv models`: which models there are, what they are and need, getting one, removing copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from chatkv.cli.complete import complete_known_model
from chatkv.cli.lazy import LazyGroup
from chatkv.cli.output import Output, output_options, plural, printable, size
from chatkv.cli.table import Column
from chatkv.errors import ModelError
from chatkv.model.inventory import Inventory, KnownModel, inventory
from chatkv.paths import folders

VERBS = {
    "ls": ("chatkv.cli.models:ls", "List the models on this machine."),
    "show": ("chatkv.cli.models_show:show", "Show what a model is, and the memory that it needs."),
    "measure": ("chatkv.cli.models_measure:measure", "Measure what weights of fewer bits cost."),
    "pull": ("chatkv.cli.models_pull:pull", "Download a model from the hub."),
    "rm": ("chatkv.cli.models_remove:rm", "Delete prepared copies, and downloads on request."),
}
MODEL = click.argument("model", metavar="MODEL", shell_complete=complete_known_model)
ORIGINS = {
    "embedded": "comes with chatkv",
    "downloaded": "downloaded",
    "shared": "the hub's cache",
    "files": "your files",
}


@click.group(cls=LazyGroup, commands_at=VERBS)
def models() -> None:
    """List, show, download and remove models.

    MODEL is what --model takes: a hub id, a folder or a .gguf file; or a name that `ls` lists.
    """


def known_models() -> Inventory:
    place = folders()
    return inventory(place.cache, place.models)


def find_known(found: Inventory, wanted: str) -> KnownModel | None:
    """The model of this name or path, None where it is not known."""
    path = Path(wanted).expanduser()
    absolute = path.resolve() if path.exists() else None
    for model in found.models:
        if wanted == model.name or (absolute is not None and absolute == model.path):
            return model
    return None


def unknown(wanted: str) -> ModelError:
    return ModelError(f'there is no model "{printable(wanted)}" here: `chatkv models ls` lists all')


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@click.option("--all", "show_all", is_flag=True, help="Also what cannot be used, and why.")
@output_options
def ls(output: Output, quiet: bool, show_all: bool) -> None:
    """List the models on this machine.

    PREPARED is what was made of a model once, so that it starts at once; `chatkv models rm` deletes
    it. Files of your own are known after their first use.
    """
    found = known_models()
    listed = [model for model in found.models if show_all or model.problem is None]
    rows = [row(model) for model in listed]
    if quiet:
        for one in rows:
            click.echo(one["model"])
        return
    output.rows(
        rows,
        [
            Column("MODEL", lambda row: printable(row["model"]), is_flexible=True, colour="cyan"),
            Column("DTYPE", lambda row: row["dtype"]),
            Column("SIZE", lambda row: size(row["bytes"]), is_number=True),
            Column("PREPARED", _prepared),
            Column("FROM", lambda row: ORIGINS[row["origin"]], is_extra=True),
            *([Column("PROBLEM", lambda row: row["problem"] or "")] if show_all else []),
        ],
        empty="there are no models: `chatkv models pull ORG/NAME` downloads one",
    )
    if not output.is_human:
        return
    hidden = len(found.models) - len(listed)
    if hidden:
        output.note(f"{plural(hidden, 'model')} cannot be used: --all says why")
    if found.orphans:
        copies = plural(len(found.orphans), "prepared copy", "prepared copies")
        taken = size(sum(copy.num_bytes for copy in found.orphans))
        output.note(f"{copies} of files that are gone ({taken}): `chatkv models rm --orphans`")


def row(model: KnownModel) -> dict[str, Any]:
    """What programs get of a model."""
    return {
        "model": model.name,
        "origin": model.origin,
        "kind": model.kind,
        "dtype": model.dtype,
        "bytes": model.num_bytes,
        "path": str(model.path),
        "prepared": [
            {"stored": copy.stored, "bytes": copy.num_bytes, "path": str(copy.folder)}
            for copy in model.copies
        ],
        "problem": model.problem,
    }


def _prepared(row: dict[str, Any]) -> str:
    if row["kind"] == "hf" and not row["prepared"]:
        return "as it is"
    return ", ".join(f"{copy['stored']} {size(copy['bytes'])}" for copy in row["prepared"]) or "no"
