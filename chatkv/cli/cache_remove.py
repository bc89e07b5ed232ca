"""`chatkv cache prune`, `rm` and `clear`: deleting KV, never a word of any conversation."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.consent import ask_before
from chatkv.cli.filters import parse_age, parse_bytes
from chatkv.cli.output import Output, output_options, plural, printable, size
from chatkv.cli.stores import (
    NOTHING_STORED,
    complete_session,
    open_conversations,
    open_to_remove,
    users,
)
from chatkv.errors import UsageError

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore

YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")


@click.command()
@click.option("--older-than", metavar="AGE", help="KV of conversations not used for so long: 30d.")
@click.option("--max-size", metavar="SIZE", help="The least worthy, until this is left: 20GiB.")
@click.option(
    "--model", metavar="MODEL", help="Of this model only: a name, or a namespace's start."
)
@click.option("--orphans", is_flag=True, help="KV that no conversation finds.")
@DRY_RUN
@YES
@output_options
def prune(
    output: Output,
    older_than: str | None,
    max_size: str | None,
    model: str | None,
    orphans: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Delete KV by age, model, use or size; pinned conversations keep theirs.

    KV that a conversation of another age still uses stays. With --model alone, all KV of that
    model goes.
    """
    from chatkv_store.pruning import Wanted, choose

    if not (older_than or max_size or model or orphans):
        raise UsageError("say what: --older-than, --max-size, --model or --orphans")
    older_than_s = None if older_than is None else parse_age(older_than)
    max_bytes = None if max_size is None else parse_bytes(max_size)
    blocks = open_to_remove()
    if blocks is None:
        _said_nothing(output, dry_run)
        return
    with blocks, open_conversations() as store:
        spaces = None if model is None else _namespaces(blocks, model)
        wanted = Wanted(older_than_s, orphans, max_bytes, spaces)
        chosen = choose(blocks, store, wanted, time.time())
        sizes = {one.key: one.num_bytes for one in chosen}
        _remove(output, blocks, sizes, dry_run, yes)


@click.command()
@click.argument(
    "sessions", shell_complete=complete_session, nargs=-1, required=True, metavar="SESSION..."
)
@DRY_RUN
@YES
@output_options
def rm(output: Output, sessions: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Delete the KV of conversations. They stay, and are computed again when they go on.

    KV that another conversation uses as well stays with it.
    """
    from chatkv_store.pruning import unshared_keys

    with open_conversations() as store, ExitStack() as open_here:
        blocks = open_to_remove()
        if blocks is not None:
            open_here.enter_context(blocks)
        logs = users(blocks, store)
        found = {one.id: one for one in map(logs.get_session, sessions)}
        for one in found.values():
            if one.pinned:
                raise UsageError(f'"{printable(one.title)}" ({one.id}) is pinned: unpin it first')
        if blocks is None:
            _said_nothing(output, dry_run)
            return
        sizes, num_shared = unshared_keys(blocks, store, set(found))
        if _remove(output, blocks, sizes, dry_run, yes):
            logs.remove_uses(found.values())
        if num_shared and output.is_human:
            output.note(f"left {plural(num_shared, 'block')} that others use too")


@click.command()
@DRY_RUN
@YES
@output_options
def clear(output: Output, dry_run: bool, yes: bool) -> None:
    """Delete all KV, that of pinned conversations too."""
    from chatkv_store.uses import Uses

    blocks = open_to_remove()
    if blocks is None:
        _said_nothing(output, dry_run)
        return
    with blocks:
        # By key: a header that cannot be read has to go as well.
        sizes = dict.fromkeys((key for key, _ in blocks.scan("blocks")), 0)
        sizes |= {header.key: header.num_payload_bytes for header in blocks.headers()}
        if _remove(output, blocks, sizes, dry_run, yes):
            uses = Uses(blocks)
            uses.remove(one.key for one in uses.every())


def _remove(
    output: Output, blocks: BlockStore, sizes: dict[bytes, int], dry_run: bool, yes: bool
) -> bool:
    """Delete the blocks after asking, and say what went; whether anything was to go."""
    what = f"{plural(len(sizes), 'block')}, {size(sum(sizes.values()))}"
    if sizes and not dry_run:
        ask_before(f"delete {what} of KV", yes)
        blocks.remove(list(sizes))
    values: dict[str, Any] = {
        "dry_run": dry_run,
        "blocks": len(sizes),
        "bytes": sum(sizes.values()),
    }
    if not output.is_human:
        output.record(values)
    elif not sizes:
        output.note("nothing to delete")
    else:
        output.note(f"would delete {what}" if dry_run else f"deleted {what}")
        if not dry_run:
            output.note("`chatkv cache compact` gives the room back to the disk")
    return not dry_run


def _said_nothing(output: Output, dry_run: bool) -> None:
    if output.is_human:
        output.note(NOTHING_STORED)
    else:
        output.record({"dry_run": dry_run, "blocks": 0, "bytes": 0})


def _namespaces(blocks: BlockStore, model: str) -> set[bytes]:
    """The namespaces of the model of this name, or those that begin so (4 characters or more)."""
    known = blocks.namespaces()
    found = {space for space, info in known.items() if info.get("model") == model}
    if not found and len(model) >= 4:
        found = {space for space in known if space.hex().startswith(model.lower())}
    if not found:
        names = sorted({printable(str(info.get("model"))) for info in known.values()})
        raise UsageError(f'no KV of a model "{printable(model)}"; there is: {", ".join(names)}')
    return found
