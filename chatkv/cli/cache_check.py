"""`chatkv cache verify`, `compact` and `readers`: the state of the store itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.output import Output, output_options, plural, size
from chatkv.cli.stores import (
    NOTHING_STORED,
    complete_session,
    is_stored,
    open_blocks,
    open_conversations,
)
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Session
    from chatkv_store.integrity import Finding


@click.command()
@click.argument("sessions", shell_complete=complete_session, nargs=-1, metavar="[SESSION]...")
@click.option(
    "--repair", is_flag=True, help="Drop what is wrong; it is computed again when needed."
)
@output_options
def verify(output: Output, sessions: tuple[str, ...], repair: bool) -> None:
    """Check every block against its digests, or those of some conversations.

    Exits with 1 when something was found, repaired or not. Who uses a block is derived from the
    conversations each time, so there is no count that could be wrong.
    """
    found = _named(sessions)
    from chatkv_store import integrity

    blocks = open_blocks(read_only=not repair, replace_damaged=repair, thorough=True)
    if blocks is None:
        _report(output, [], _no_references(), repair, replaced=None)
        return
    with blocks:
        keys = _keys_of(blocks, found) if found else None
        if sys.stderr.isatty():
            num_blocks = blocks.stats()["blocks"] if keys is None else len(keys)
            output.note(f"checking {plural(num_blocks, 'block')} ...")
        references = _references(blocks, keys)  # of what is checked, not of what a repair leaves
        findings = integrity.verify(blocks, repair, keys)
    _report(output, findings, references, repair, blocks.replaced)
    if findings or blocks.replaced:
        raise SystemExit(1)


@click.command()
@output_options
def compact(output: Output) -> None:
    """Give free pages back to the disk, by rewriting the file.

    The file of the cache never shrinks by itself: deleted KV leaves pages that new KV fills. This
    takes room for a copy while it runs. An idle engine ends for it, and starts again when it is
    needed; chats that compute by themselves have to be closed.
    """
    from chatkv.client import engine
    from chatkv_store.compaction import compact as rewrite

    if not is_stored():
        output.note(NOTHING_STORED)
        return
    engine.make_way(folders())
    done = rewrite(folders().kv)
    freed = done.before_bytes - done.after_bytes
    if output.is_human:
        output.note(f"gave {size(max(0, freed))} back: {size(done.after_bytes)} are left")
    else:
        output.record(
            {
                "before_bytes": done.before_bytes,
                "after_bytes": done.after_bytes,
                "freed_bytes": freed,
            }
        )


@click.command()
@click.option("--clear-stale", is_flag=True, help="Free the slots of dead processes; say how many.")
@output_options
def readers(output: Output, clear_stale: bool) -> None:
    """List who has the cache open and has read it, from LMDB's reader table.

    A process that died while it read keeps a slot, and with it pages that could be used again.
    Such slots are freed whenever the cache is opened, which this command does too.
    """
    blocks = open_blocks()
    if blocks is None:
        if clear_stale and not output.is_human:
            output.record({"freed_slots": 0})
        else:
            output.rows([], [], empty=NOTHING_STORED)
        return
    with blocks:
        freed, text = blocks.env.num_stale_readers, blocks.env.readers()
    if clear_stale:
        if output.is_human:
            output.note(f"freed {plural(freed, 'slot')} of dead processes")
        else:
            output.record({"freed_slots": freed})
        return
    rows = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdigit() and int(words[0]) != os.getpid():
            rows.append(
                {
                    "pid": int(words[0]),
                    "thread": words[1],
                    "transaction": int(words[2]) if words[2].isdigit() else None,
                }
            )
    output.rows(
        rows,
        [
            Column("PID", lambda row: str(row["pid"]), is_number=True),
            Column("THREAD", lambda row: row["thread"]),
            Column(
                "TRANSACTION",
                lambda row: "none" if row["transaction"] is None else str(row["transaction"]),
            ),
        ],
        empty="nobody is reading",
    )


def _named(references: tuple[str, ...]) -> list[Session]:
    with open_conversations() as store:
        return list({one.id: one for one in map(store.get_session, references)}.values())


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
                log = store.token_log(session.id)
                keys.update(chain_keys(space, log, layouts[space].block_tokens))
                keys |= {one.key for one in stored_blocks(blocks, store, session, layouts)}
    return {key for key, _ in stored(blocks, keys)}


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
        click.echo(f"{plural(num_blocks, 'block')}, all sound")
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
