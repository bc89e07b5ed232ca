"""`chatkv cache verify`: whether what is stored is sound, as far as somebody wants to look."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.output import Output, count, output_options, plural, printable, size
from chatkv.cli.stores import complete_session, open_blocks, open_conversations, users
from chatkv.cli.table import Column
from chatkv.errors import UsageError
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.session.recomputed import Recomputed
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Session
    from chatkv_store.integrity import Finding


@click.command()
@click.argument("sessions", shell_complete=complete_session, nargs=-1, metavar="[SESSION]...")
@click.option("--quick", is_flag=True, help="Headers and lengths alone, in a moment.")
@click.option(
    "--full", is_flag=True, help="Also compute some of the KV again, with its model, and compare."
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="N",
    help="How many blocks --full computes again.",
)
@click.option(
    "--repair", is_flag=True, help="Drop what is wrong; it is computed again when needed."
)
@output_options
def verify(
    output: Output, sessions: tuple[str, ...], quick: bool, full: bool, sample: int, repair: bool
) -> None:
    """Check every block against its digests, or those of some conversations.

    Exits with 1 when something was found, repaired or not. Who uses a block is derived from the
    conversations each time, so there is no count that could be wrong.
    """
    if quick and full:
        raise UsageError("give either --quick or --full, not both")
    from chatkv_store import integrity
    from chatkv_store.integrity import Finding

    blocks = open_blocks(read_only=not repair, replace_damaged=repair, thorough=True)
    if blocks is None:
        _named(None, sessions)
        _report(output, [], _no_references(), repair, replaced=None)
        return
    with blocks:
        found = _named(blocks, sessions)
        keys = _keys_of(blocks, found) if found else None
        if sys.stderr.isatty():
            num_blocks = blocks.stats()["blocks"] if keys is None else len(keys)
            output.note(f"checking {plural(num_blocks, 'block')} ...")
        references = _references(blocks, keys)  # of what is checked, not of what a repair leaves
        findings = integrity.verify(blocks, repair, keys, reads_values=not quick)
        computed = _recompute(output, blocks, found, sample, repair) if full else None
    if computed is not None:
        references |= {"recomputed_blocks": computed.num_blocks}
        findings += [
            Finding("content", block.key.hex(), wrong, block.header.num_payload_bytes)
            for block, wrong in computed.wrong
        ]
    _report(output, findings, references, repair, blocks.replaced)
    if findings or blocks.replaced:
        raise SystemExit(1)


def _named(blocks: BlockStore | None, references: tuple[str, ...]) -> list[Session]:
    with open_conversations() as store:
        found = map(users(blocks, store).get_session, references)
        return list({one.id: one for one in found}.values())


def _keys_of(blocks: BlockStore, sessions: Iterable[Session]) -> set[bytes]:
    """The blocks that the sessions find, and damaged ones in their places."""
    from chatkv_store.integrity import stored
    from chatkv_store.keys import chain_keys
    from chatkv_store.sharing import known_layouts, stored_blocks

    layouts = known_layouts(blocks)
    keys: set[bytes] = set()
    with open_conversations() as store:
        for session in sessions:
            space = bytes.fromhex(session.namespace or "")
            if space in layouts:
                log = users(blocks, store).token_log(session)
                keys.update(chain_keys(space, log, layouts[space].block_tokens))
                keys |= {one.key for one in stored_blocks(blocks, store, session, layouts)}
    return {key for key, _ in stored(blocks, keys)}


def _recompute(
    output: Output, blocks: BlockStore, sessions: list[Session], num_blocks: int, repair: bool
) -> Recomputed:
    """Some of the blocks of `sessions`, or of all, computed once more; with `repair`, those that
    are wrong are dropped."""
    from chatkv.cli.answer import Status
    from chatkv.process import prepare_to_compute
    from chatkv.session.recomputed import recompute

    prepare_to_compute()
    status = Status()
    try:
        with open_conversations() as store:
            wanted = sessions or store.list_sessions()
            done = recompute(folders(), blocks, store, wanted, num_blocks, status.progress)
    finally:
        status.clear()
    for model, why in done.left_out.items():
        output.note(f"{printable(model) or 'a model'} is left out: {printable(why)}")
    if repair and done.wrong:
        blocks.remove([block.key for block, _ in done.wrong])
    return done


def _references(blocks: BlockStore, keys: Collection[bytes] | None) -> dict[str, int]:
    """How many blocks one conversation uses, several use, and none does; of `keys`, or of all."""
    from chatkv_store.sharing import usage

    with open_conversations() as store:
        found = usage(blocks, store)
    num_blocks = blocks.stats()["blocks"] if keys is None else len(keys)
    used = found.used_keys if keys is None else found.used_keys.intersection(keys)
    shared = found.shared_keys & used
    return {
        "blocks": num_blocks,
        "unique_blocks": len(used) - len(shared),
        "shared_blocks": len(shared),
        "unused_blocks": num_blocks - len(used),
    }


def _no_references() -> dict[str, int]:
    return dict.fromkeys(("blocks", "unique_blocks", "shared_blocks", "unused_blocks"), 0)


def _report(
    output: Output,
    findings: list[Finding],
    references: dict[str, int],
    repair: bool,
    replaced: str | None,
) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": one.kind, "key": one.key, "detail": one.detail, "bytes": one.num_bytes}
        for one in findings
    ]
    if replaced:
        rows.insert(0, {"kind": "file", "key": "", "detail": replaced, "bytes": 0})
    num_blocks = references["blocks"]
    if not output.is_human:
        output.record({**references, "sound": not rows, "repaired": repair, "findings": rows})
        return
    if not rows:
        again = references.get("recomputed_blocks")
        computed = f", {count(again)} computed again" if again is not None else ""
        click.echo(f"{plural(num_blocks, 'block')}, all sound{computed}")
        return
    output.table(
        rows,
        [
            Column("KIND", lambda row: row["kind"]),
            Column("BLOCK", lambda row: row["key"][:12], colour="cyan"),
            Column("FINDING", lambda row: row["detail"], is_flexible=True),
            Column("SIZE", lambda row: size(row["bytes"]), is_number=True),
        ],
    )
    freed = sum(row["bytes"] for row in rows)
    done = "dropped" if repair else "`chatkv cache verify --repair` would drop"
    output.note(
        f"{plural(len(rows), 'finding')} in {plural(num_blocks, 'block')}; {done} {size(freed)}"
    )
