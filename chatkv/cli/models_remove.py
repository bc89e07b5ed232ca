"""`chatkv models rm`: what was made of models and what was downloaded, never a user's own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import click

from chatkv.cli.complete import complete_known_model
from chatkv.cli.consent import ask_before
from chatkv.cli.models import find_known, known_models, unknown
from chatkv.cli.output import Output, output_options, plural, size
from chatkv.errors import UsageError
from chatkv.model.catalog import downloads, split_hub_file
from chatkv.model.identity import forget_digest
from chatkv.model.inventory import Inventory, KnownModel, PreparedCopy, remove_copy
from chatkv.paths import folders


@dataclass
class Going:
    """What is to be deleted, and what is left of what was asked for, and why."""

    copies: list[PreparedCopy] = field(default_factory=list)
    downloads: list[KnownModel] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        copies = sum(copy.num_bytes for copy in self.copies)
        return copies + sum(model.num_bytes for model in self.downloads)


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1, shell_complete=complete_known_model)
@click.option("--downloads", "with_downloads", is_flag=True, help="Also what chatkv downloaded.")
@click.option("--orphans", is_flag=True, help="Prepared copies of files that are gone.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_options
def rm(
    output: Output,
    models: tuple[str, ...],
    with_downloads: bool,
    orphans: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Delete what was prepared of models, which is made again when they are used.

    Files of your own stay, and so does what lies in the hub's own cache, which other programs use.
    Conversations and their KV stay too.
    """
    if not (models or orphans):
        raise UsageError("say what: models, or --orphans")
    found = known_models()
    going = _going(found, models, with_downloads)
    if orphans:
        going.copies += found.orphans
    what = _words(going)
    if what and not dry_run:
        ask_before(f"delete {what}", yes)
        _delete(found, going)
    if not output.is_human:
        output.record(
            {
                "dry_run": dry_run,
                "prepared": [str(copy.folder) for copy in going.copies],
                "downloads": [model.name for model in going.downloads],
                "bytes": going.num_bytes,
                "left": going.left,
            }
        )
        return
    for line in going.left:
        output.note(line)
    if not what:
        output.note("nothing to delete")
    else:
        output.note(f"would delete {what}" if dry_run else f"deleted {what}")


def _going(found: Inventory, models: tuple[str, ...], with_downloads: bool) -> Going:
    going = Going()
    for wanted in dict.fromkeys(models):
        model = find_known(found, wanted)
        if model is None:
            raise unknown(wanted)
        going.copies += model.copies
        if model.origin == "downloaded" and with_downloads:
            going.downloads.append(model)
        elif model.origin == "downloaded":
            going.left.append(f"{model.name} stays downloaded: --downloads deletes it too")
        elif model.origin == "shared" and with_downloads:
            name, _ = split_hub_file(model.name)
            going.left.append(
                f"{model.name} lies in the hub's own cache, which other programs use: "
                f"`hf cache rm model/{name}` deletes it there"
            )
        elif with_downloads:
            going.left.append(f"{model.path} was not downloaded by chatkv, and stays")
    return going


def _words(going: Going) -> str:
    parts = []
    if going.copies:
        parts.append(plural(len(going.copies), "prepared copy", "prepared copies"))
    if going.downloads:
        parts.append(plural(len(going.downloads), "downloaded model"))
    return f"{' and '.join(parts)}, {size(going.num_bytes)}" if parts else ""


def _delete(found: Inventory, going: Going) -> None:
    place = folders()
    for copy in going.copies:
        remove_copy(copy)
    gone = {model.name for model in going.downloads}
    for model in going.downloads:
        for file in model.files:
            forget_digest(file, place.models)
        repository, _ = split_hub_file(model.name)
        others = [
            other
            for other in found.models
            if other.origin == "downloaded"
            and split_hub_file(other.name)[0] == repository
            and other.name not in gone
        ]
        if others:  # another file of it stays
            for file in model.files:
                file.resolve().unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        else:
            shutil.rmtree(_folder_of(repository, downloads(place.cache)))


def _folder_of(repository: str, cache: Path) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return cache / repo_folder_name(repo_id=repository, repo_type="model")
