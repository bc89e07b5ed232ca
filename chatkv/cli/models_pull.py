"""`chatkv models pull`: download a model."""

from __future__ import annotations

import sys

import click

from chatkv.cli.models import find_known, known_models, row
from chatkv.cli.output import Output, output_options, plural, size
from chatkv.errors import UsageError
from chatkv.model.catalog import is_hub_file, is_hub_id
from chatkv.paths import folders


@click.command()
@click.argument("model", metavar="MODEL")
@output_options
def pull(output: Output, model: str) -> None:
    """Download a model from the hub.

    MODEL is ORG/NAME, or ORG/NAME/FILE.gguf for one file. Only what chatkv reads is fetched:
    weights as safetensors, tokenizer and configuration. A download that was broken off goes on.
    """
    from chatkv.model.download import Wanted, on_this_machine, pull

    if not (is_hub_id(model) or is_hub_file(model)):
        raise UsageError(f'"{model}" is no model of the hub: write ORG/NAME or ORG/NAME/FILE.gguf')
    name = model
    place = folders().make()

    def told(wanted: Wanted) -> None:
        nonlocal name
        name = wanted.spec
        files = plural(wanted.num_files, "file")
        output.note(f"downloading {wanted.spec}: {files}, {size(wanted.num_bytes)}")

    is_new = (files := on_this_machine(model, place.cache)) is None
    if files is None:
        _show_progress(sys.stderr.isatty())
        files = pull(model, place.cache, told)
    if not output.is_human:
        known = find_known(known_models(), name)
        output.record({**(row(known) if known is not None else {"model": name}), "new": is_new})
        return
    click.echo(files.path)
    if is_new:
        output.note(f"`chatkv chat -m {name}` talks to it")
    else:
        output.note(f"{model} is here already")


def _show_progress(wanted: bool) -> None:
    try:
        from huggingface_hub import utils
    except ImportError:
        return  # which will be said
    switch = "enable_progress_bars" if wanted else "disable_progress_bars"
    getattr(utils, switch)()  # which it exports, and says to no type checker
