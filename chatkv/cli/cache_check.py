"""`chatkv cache verify`, `compact` and `readers`: the state of the store itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.output import Output, output_options, plural, size
from chatkv.cli.stores import NOTHING_STORED, open_blocks, open_conversations
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.integrity import Finding


@click.command()
@click.option(
    "--repair", is_flag=True, help="Drop what is wrong; it is computed again when needed."
)
@output_options
def verify(output: Output, repair: bool) -> None:
    """Check every block against its digests.

    Exits with 1 when something was found, repaired or not. Who uses a block is derived from the
    conversations each time, so there is no count that could be wrong.
    """
    blocks = open_blocks(read_only=not repair, replace_damaged=repair)
    if blocks is None:
        _report(output, [], _no_references(), repair, replaced=None)
        return
    with blocks:
        if sys.stderr.isatty():
            output.note(f"checking {plural(blocks.stats()['blocks'], 'block')} ...")
        findings = blocks.verify(repair=repair)
        references = _references(blocks)
    # What was checked: what is there now and, after a repair, what has gone.
    if repair:
        references["blocks"] += len({one.key for one in findings if one.kind in _DROPPED})
    _report(output, findings, references, repair, blocks.replaced)
    if findings or blocks.replaced:
        raise SystemExit(1)


@click.command()
@output_options
def compact(output: Output) -> None:
    """Give free pages back to the disk, by rewriting the file.

    The file of the cache never shrinks by itself: deleted KV leaves pages that new KV fills. This
    takes room for a copy while it runs, and needs every chat and server to be closed.
    """
    from chatkv_store.compaction import compact as rewrite

    path = folders().kv
    if not (path / "data.mdb").is_file():
        output.note(NOTHING_STORED)
        return
    done = rewrite(path)
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
@output_options
def readers(output: Output) -> None:
    """List who is reading the cache, from LMDB's reader table.

    A slot of a dead process is freed whenever the cache is opened, so that its pages can be used
    again.
    """
    blocks = open_blocks()
    if blocks is None:
        output.rows([], [], empty=NOTHING_STORED)
        return
    with blocks:
        text = blocks.env.readers()
    rows = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdigit():
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


_DROPPED = ("header", "value")  # findings that a repair removes a block for


def _references(blocks: BlockStore) -> dict[str, int]:
    """How many blocks one conversation uses, several use, and none does."""
    from chatkv_store.sharing import usage

    with open_conversations() as store:
        found = usage(blocks, store)
    num_blocks = blocks.stats()["blocks"]
    return {
        "blocks": num_blocks,
        "unique_blocks": len(found.used_keys) - len(found.shared_keys),
        "shared_blocks": len(found.shared_keys),
        "unused_blocks": num_blocks - len(found.used_keys),
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
