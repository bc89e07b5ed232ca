"""`chatkv cache`: what the KV cache holds, and whether it is sound. Needs no model, no torch.

Everything here may be deleted without losing a word of any conversation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.output import Output, ago, count, output_options, plural, printable, size, when
from chatkv.cli.stores import complete_session, open_blocks, open_conversations
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.integrity import Finding
    from chatkv_store.sharing import SessionUsage

NOTHING_STORED = "the KV cache is empty: it fills as you chat"


@click.group()
def cache() -> None:
    """Look into the KV cache and check it.

    The cache is what models have read of your conversations. Losing it costs time, never words.
    """


@cache.command()
@click.option("-q", "--quiet", is_flag=True, help="Print ids of sessions only.")
@output_options
def ls(output: Output, quiet: bool) -> None:
    """List what is stored for each conversation, by model.

    STORED tokens need not be computed again. UNIQUE is what this conversation alone uses, SHARED
    what forks of it, or an equal beginning, use as well.
    """
    from chatkv_store.sharing import usage

    blocks = open_blocks()
    if blocks is None:
        output.rows([], [], empty=NOTHING_STORED)
        return
    with blocks, open_conversations() as store:
        short = store.short_ids()
        found = usage(blocks, store)
        num_blocks, num_bytes = blocks.stats()["blocks"], blocks.stats()["used_bytes"]
    rows = [_row(share) for share in found.sessions]
    if quiet:
        for row in rows:
            if row["blocks"]:
                click.echo(row["session"])
        return
    if not output.is_human:
        output.rows(rows, [])
        return
    columns = [
        Column("ID", lambda row: short[row["session"]], colour="cyan"),
        Column("TITLE", lambda row: printable(row["title"]) or "untitled", is_flexible=True),
        Column("TOKENS", lambda row: count(row["tokens"]), is_number=True),
        Column("STORED", lambda row: count(row["stored_tokens"]), is_number=True),
        Column("BLOCKS", lambda row: count(row["blocks"]), is_number=True),
        Column("UNIQUE", lambda row: size(row["unique_bytes"]), is_number=True),
        Column("SHARED", lambda row: size(row["shared_bytes"]), is_number=True),
        Column("USED", lambda row: ago(row["updated_at"])),
    ]
    stored = [row for row in rows if row["blocks"]]
    output.rows(
        stored, columns, group=lambda row: row["model"] or "unknown model", empty=NOTHING_STORED
    )
    used = len(found.used_keys)
    output.note(
        f"{plural(used, 'block')} of {plural(len(stored), 'session')}"
        + (f", {count(num_blocks - used)} of none" if num_blocks > used else "")
        + f"; {size(num_bytes)} on disk"
    )


@cache.command()
@click.argument("session", shell_complete=complete_session, metavar="SESSION")
@output_options
def show(output: Output, session: str) -> None:
    """Show what is stored for one conversation."""
    from chatkv_store.sharing import usage

    blocks = open_blocks()
    with open_conversations() as store:
        found = store.get_session(session)
        if blocks is None:
            output.note(NOTHING_STORED)
            raise SystemExit(1)
        with blocks:
            (share,) = usage(blocks, store, [found]).sessions
            info = blocks.namespaces().get(bytes.fromhex(found.namespace or ""), {})
    values = {
        **_row(share),
        "namespace": found.namespace,
        "raw_bytes": share.raw_bytes,
        "layout": json.loads(info["layout"]) if "layout" in info else None,
        "miss": share.miss,
    }
    if not output.is_human:
        output.record(values)
        return
    output.line(printable(found.title) or "untitled", bold=True)
    output.fields(
        [
            ("id", found.id),
            ("model", found.model),
            ("used", when(found.updated_at)),
            ("tokens", count(found.num_tokens)),
            ("stored", count(share.num_stored_tokens)),
            ("missing", share.miss or ""),
            ("blocks", count(share.num_blocks)),
            ("size", f"{size(share.num_bytes)}{_ratio(share.raw_bytes, share.num_bytes)}"),
            ("unique", size(share.unique_bytes)),
            ("shared", size(share.shared_bytes)),
            ("namespace", found.namespace or ""),
        ]
    )


@cache.command()
@output_options
def du(output: Output) -> None:
    """Show how much disk the cache takes, by model.

    UNUSED is what no conversation finds any more.
    """
    blocks = open_blocks()
    models: list[dict[str, Any]] = []
    stats = dict.fromkeys(("file_bytes", "used_bytes", "free_bytes"), 0)
    if blocks is not None:
        with blocks:
            models, stats = _models(blocks), blocks.stats()
    place = folders()
    values: dict[str, Any] = {
        "folder": str(place.cache),
        "models": models,
        "kv_file_bytes": stats["file_bytes"],
        "kv_used_bytes": stats["used_bytes"],
        "kv_reusable_bytes": stats["free_bytes"],
        "prepared_models_bytes": _folder_bytes(place.models),
        "disk_free_bytes": _disk_free_bytes(place.cache),
    }
    if not output.is_human:
        output.record(values)
        return
    if models:
        output.table(
            models,
            [
                Column("MODEL", lambda row: row["model"] or "unknown", is_flexible=True),
                Column("DTYPE", lambda row: row["dtype"]),
                Column("SESSIONS", lambda row: count(row["sessions"]), is_number=True),
                Column("BLOCKS", lambda row: count(row["blocks"]), is_number=True),
                Column("TOKENS", lambda row: count(row["tokens"]), is_number=True),
                Column("SIZE", lambda row: size(row["bytes"]), is_number=True),
                Column("UNUSED", lambda row: size(row["unused_bytes"]), is_number=True),
            ],
        )
        output.line()
    raw, encoded = (sum(model[key] for model in models) for key in ("raw_bytes", "bytes"))
    output.fields(
        [
            ("stored KV", f"{size(encoded)}{_ratio(raw, encoded)}"),
            ("KV file", f"{size(stats['file_bytes'])}, {size(stats['free_bytes'])} of it reusable"),
            ("prepared models", size(values["prepared_models_bytes"])),
            ("free on this disk", size(values["disk_free_bytes"])),
            ("folder", str(place.cache)),
        ]
    )


@cache.command()
@click.option(
    "--repair", is_flag=True, help="Drop what is wrong; it is computed again when needed."
)
@output_options
def verify(output: Output, repair: bool) -> None:
    """Check every block against its digests.

    Exits with 1 when something was found, repaired or not.
    """
    blocks = open_blocks(read_only=not repair, replace_damaged=repair)
    if blocks is None:
        _report(output, [], 0, repair, replaced=None)
        return
    with blocks:
        num_blocks = blocks.stats()["blocks"]
        if sys.stderr.isatty():
            output.note(f"checking {plural(num_blocks, 'block')} ...")
        findings = blocks.verify(repair=repair)
    _report(output, findings, num_blocks, repair, blocks.replaced)
    if findings or blocks.replaced:
        raise SystemExit(1)


@cache.command()
def dir() -> None:
    """Print the folder of the cache."""
    click.echo(folders().cache)


def _row(share: SessionUsage) -> dict[str, Any]:
    """What programs get of a session's share."""
    return {
        "session": share.session.id,
        "title": share.session.title,
        "model": share.session.model,
        "tokens": share.session.num_tokens,
        "stored_tokens": share.num_stored_tokens,
        "blocks": share.num_blocks,
        "unique_bytes": share.unique_bytes,
        "shared_bytes": share.shared_bytes,
        "updated_at": share.session.updated_at,
    }


def _models(blocks: BlockStore) -> list[dict[str, Any]]:
    """One row per namespace: a model in one precision, whose KV serves no other."""
    from chatkv_store.layout import KVLayout
    from chatkv_store.sharing import usage

    with open_conversations() as store:
        found = usage(blocks, store)
    unused = dict.fromkeys(blocks.namespaces(), 0)
    for header in blocks.headers():
        if header.key not in found.used_keys:
            unused[header.namespace] = unused.get(header.namespace, 0) + header.num_payload_bytes
    totals = blocks.usage()
    rows = []
    for space, info in blocks.namespaces().items():
        shares = [share for share in found.sessions if share.session.namespace == space.hex()]
        total = totals.get(space, {"blocks": 0, "tokens": 0, "bytes": 0, "raw_bytes": 0})
        rows.append(
            {
                "namespace": space.hex(),
                "model": info.get("model"),
                "dtype": KVLayout.from_json(info["layout"]).dtype,
                "sessions": len(shares),
                **total,
                "unused_bytes": unused[space],
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])


def _report(
    output: Output, findings: list[Finding], num_blocks: int, repair: bool, replaced: str | None
) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": one.kind, "key": one.key, "detail": one.detail, "bytes": one.num_bytes}
        for one in findings
    ]
    if replaced:
        rows.insert(0, {"kind": "file", "key": "", "detail": replaced, "bytes": 0})
    if not output.is_human:
        output.record(
            {"blocks": num_blocks, "sound": not rows, "repaired": repair, "findings": rows}
        )
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


def _ratio(raw: int, encoded: int) -> str:
    return f" ({raw / encoded:.2f}x smaller than in memory)" if encoded else ""


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()


def _disk_free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds `folder`, or would."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
