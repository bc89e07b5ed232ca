"""`chatkv cache ls`, `show` and `du`: which conversation, which model takes how much."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.filters import Keys, select
from chatkv.cli.output import Output, ago, count, output_options, plural, printable, size, when
from chatkv.cli.stores import NOTHING_STORED, complete_session, open_blocks, open_conversations
from chatkv.cli.table import Column
from chatkv.paths import folders
from chatkv.session.codec_record import summary as codec_summary

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.sharing import SessionUsage

KEYS: Keys = {
    "title": ("title", "text"),
    "model": ("model", "text"),
    "tokens": ("tokens", "number"),
    "stored": ("stored_tokens", "number"),
    "blocks": ("blocks", "number"),
    "size": ("bytes", "size"),
    "unique": ("unique_bytes", "size"),
    "shared": ("shared_bytes", "size"),
    "used": ("updated_at", "age"),
    "pinned": ("pinned", "flag"),
}


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Print ids of sessions only.")
@click.option(
    "--filter", "filters", multiple=True, metavar="EXPR", help='Such as "size>100MiB" or "used>7d".'
)
@click.option("--sort", metavar="KEY[:asc|desc]", help="By a column, such as size or used.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=0, metavar="N", help="At most N [0: all]."
)
@output_options
def ls(output: Output, quiet: bool, filters: tuple[str, ...], sort: str | None, limit: int) -> None:
    """List what is stored for each conversation, by model.

    STORED tokens need not be computed again. UNIQUE is what this conversation alone uses, SHARED
    what forks of it, or an equal beginning, use as well. Filters may be given several times; their
    keys are title, model, tokens, stored, blocks, size, unique, shared, used and pinned.
    """
    from chatkv_store.sharing import usage

    select([], KEYS, filters, sort, 0, 0.0)  # nonsense is said before anything is read
    blocks = open_blocks()
    if blocks is None:
        output.rows([], [], empty=NOTHING_STORED)
        return
    with blocks, open_conversations() as store:
        short = store.short_ids()
        found = usage(blocks, store)
        num_blocks, num_bytes = blocks.stats()["blocks"], blocks.stats()["used_bytes"]
    every = [_row(share) for share in found.sessions]
    rows = select(every, KEYS, filters, sort, limit, time.time())
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
        Column(
            "TITLE",
            lambda row: ("* " if row["pinned"] else "") + (printable(row["title"]) or "untitled"),
            is_flexible=True,
        ),
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
        f"{plural(used, 'block')} of {plural(sum(bool(row['blocks']) for row in every), 'session')}"
        + (f", {count(num_blocks - used)} of none" if num_blocks > used else "")
        + f"; {size(num_bytes)} on disk"
        + ("; * pinned" if any(row["pinned"] for row in stored) else "")
    )


@click.command()
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
            ("pinned", "yes" if found.pinned else ""),
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


@click.command()
@output_options
def du(output: Output) -> None:
    """Show how much disk the cache takes, by model.

    UNIQUE is what one conversation uses, SHARED what several do, UNUSED what none finds any more.
    Unused KV goes first when room is needed; `chatkv cache prune --orphans` deletes it at once.
    """
    from chatkv_store.budget import default_budget, disk_free_bytes

    blocks = open_blocks()
    models: list[dict[str, Any]] = []
    stats = dict.fromkeys(("file_bytes", "used_bytes", "free_bytes"), 0)
    if blocks is not None:
        with blocks:
            models, stats = _models(blocks), blocks.stats()
    place = folders()
    budget = default_budget(place.kv)
    values: dict[str, Any] = {
        "folder": str(place.cache),
        "models": models,
        "unique_bytes": sum(model["unique_bytes"] for model in models),
        "shared_bytes": sum(model["shared_bytes"] for model in models),
        "reclaimable_bytes": sum(model["unused_bytes"] for model in models) + stats["free_bytes"],
        "kv_file_bytes": stats["file_bytes"],
        "kv_used_bytes": stats["used_bytes"],
        "kv_reusable_bytes": stats["free_bytes"],
        "kv_max_bytes": budget.max_bytes,
        "min_free_bytes": budget.min_free_bytes,
        "prepared_models_bytes": _folder_bytes(place.models),
        "disk_free_bytes": disk_free_bytes(place.cache),
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
                Column("UNIQUE", lambda row: size(row["unique_bytes"]), is_number=True),
                Column("SHARED", lambda row: size(row["shared_bytes"]), is_number=True),
                Column("UNUSED", lambda row: size(row["unused_bytes"]), is_number=True),
            ],
        )
        output.line()
    raw, encoded = (sum(model[key] for model in models) for key in ("raw_bytes", "bytes"))
    output.fields(
        [
            ("stored KV", f"{size(encoded)}{_ratio(raw, encoded)}"),
            ("KV file", f"{size(stats['file_bytes'])}, {size(stats['free_bytes'])} of it reusable"),
            ("reclaimable", size(values["reclaimable_bytes"])),
            (
                "budget",
                f"{size(budget.max_bytes or 0)}, leaving {size(budget.min_free_bytes)} of the "
                "disk free",
            ),
            ("prepared models", size(values["prepared_models_bytes"])),
            *codec_summary(place.models),
            ("free on this disk", size(values["disk_free_bytes"])),
            ("folder", str(place.cache)),
        ]
    )


def _row(share: SessionUsage) -> dict[str, Any]:
    """What programs get of a session's share."""
    return {
        "session": share.session.id,
        "title": share.session.title,
        "model": share.session.model,
        "tokens": share.session.num_tokens,
        "stored_tokens": share.num_stored_tokens,
        "blocks": share.num_blocks,
        "bytes": share.num_bytes,
        "unique_bytes": share.unique_bytes,
        "shared_bytes": share.shared_bytes,
        "pinned": share.session.pinned,
        "updated_at": share.session.updated_at,
    }


def _models(blocks: BlockStore) -> list[dict[str, Any]]:
    """One row per namespace: a model in one precision, whose KV serves no other."""
    from chatkv.session.codec_record import known_qualities
    from chatkv_store.layout import KVLayout
    from chatkv_store.sharing import usage

    with open_conversations() as store:
        found = usage(blocks, store)
    totals: dict[bytes, dict[str, int]] = {}
    for header in blocks.headers():
        key, num_bytes = header.key, header.num_payload_bytes
        kind = "unique" if key in found.used_keys else "unused"
        if key in found.shared_keys:
            kind = "shared"
        total = totals.setdefault(header.namespace, dict.fromkeys(_TOTALS, 0))
        total["blocks"] += 1
        total["tokens"] += header.num_tokens
        total["bytes"] += num_bytes
        total["raw_bytes"] += header.num_raw_bytes
        total[f"{kind}_bytes"] += num_bytes
    qualities = known_qualities(folders().models)
    rows = []
    for space, info in blocks.namespaces().items():
        shares = [share for share in found.sessions if share.session.namespace == space.hex()]
        rows.append(
            {
                "namespace": space.hex(),
                "model": info.get("model"),
                "dtype": KVLayout.from_json(info["layout"]).dtype,
                "sessions": len(shares),
                **totals.get(space, dict.fromkeys(_TOTALS, 0)),
                "codecs": qualities.get(space.hex(), {}),
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])


_TOTALS = (
    "blocks",
    "tokens",
    "bytes",
    "raw_bytes",
    "unique_bytes",
    "shared_bytes",
    "unused_bytes",
)


def _ratio(raw: int, encoded: int) -> str:
    return f" ({raw / encoded:.2f}x smaller than in memory)" if encoded else ""


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()
