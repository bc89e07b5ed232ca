"""`chatkv cache compact` and `readers`: the file of the store itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from chatkv.cli.output import Output, output_options, plural, size
from chatkv.cli.stores import (
    NOTHING_STORED,
    is_stored,
    open_blocks,
)
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    pass


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
