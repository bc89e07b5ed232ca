"""`chatkv cache du`: how much disk the cache takes, by model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.cache_usage import ratio
from chatkv.cli.output import Output, count, output_options, size
from chatkv.cli.stores import open_blocks, open_conversations
from chatkv.cli.table import Column
from chatkv.paths import folders
from chatkv.session.codec_record import summary as codec_summary

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore


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
                Column("DTYPE", lambda row: row["dtype"], is_extra=True),
                Column(
                    "SESSIONS", lambda row: count(row["sessions"]), is_number=True, is_extra=True
                ),
                Column("BLOCKS", lambda row: count(row["blocks"]), is_number=True, is_extra=True),
                Column("TOKENS", lambda row: count(row["tokens"]), is_number=True, is_extra=True),
                Column("SIZE", lambda row: size(row["bytes"]), is_number=True),
                Column(
                    "UNIQUE", lambda row: size(row["unique_bytes"]), is_number=True, is_extra=True
                ),
                Column(
                    "SHARED", lambda row: size(row["shared_bytes"]), is_number=True, is_extra=True
                ),
                Column("UNUSED", lambda row: size(row["unused_bytes"]), is_number=True),
            ],
        )
        output.line()
    raw, encoded = (sum(model[key] for model in models) for key in ("raw_bytes", "bytes"))
    output.fields(
        [
            ("stored KV", f"{size(encoded)}{ratio(raw, encoded)}"),
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


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()
