"""`chatkv cache warm`: the KV of conversations into memory, before anybody waits for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from chatkv.cli.output import Output, output_options, plural, size
from chatkv.cli.stores import NOTHING_STORED, complete_session, open_blocks, open_conversations

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.chain import StoredBlock

THREADS = 4  # so that a disk has several reads to do at once


@click.command()
@click.argument(
    "sessions", shell_complete=complete_session, nargs=-1, required=True, metavar="SESSION..."
)
@output_options
def warm(output: Output, sessions: tuple[str, ...]) -> None:
    """Bring the KV of conversations into memory, so that opening one need not wait for the disk.

    Reads and verifies their blocks, which leaves them in the system's page cache for as long as
    nothing else needs that memory. Exits with 1 where a block is damaged.
    """
    from chatkv_store.sharing import stored_blocks

    began = time.perf_counter()
    wanted: dict[bytes, StoredBlock] = {}
    misses: list[str] = []
    with open_conversations() as store:
        found = {one.id: one for one in map(store.get_session, sessions)}
        blocks = open_blocks()
        if blocks is not None:
            with blocks:
                for session in found.values():
                    wanted |= {one.key: one for one in stored_blocks(blocks, store, session)}
                misses = _read(blocks, list(wanted.values()))
    took_s = time.perf_counter() - began
    num_bytes = sum(block.header.num_payload_bytes for block in wanted.values())
    if not output.is_human:
        output.record(
            {
                "sessions": list(found),
                "blocks": len(wanted),
                "bytes": num_bytes,
                "seconds": took_s,
                "damaged": misses,
            }
        )
    elif not wanted:
        output.note(NOTHING_STORED if blocks is None else "nothing is stored of this")
    else:
        output.note(f"{plural(len(wanted), 'block')}, {size(num_bytes)}, read in {took_s:.1f} s")
        if misses:
            output.note(
                f"{plural(len(misses), 'block')} damaged ({misses[0]}): "
                "`chatkv cache verify --repair` drops what is"
            )
    if misses:
        raise SystemExit(1)


def _read(store: BlockStore, blocks: list[StoredBlock]) -> list[str]:
    """Read all values of `blocks`, the earliest tokens first; what is wrong with any."""
    from chatkv_store.errors import StoreError

    def miss(block: StoredBlock) -> str | None:
        try:
            store.payloads(block)
        except StoreError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return [reason for reason in pool.map(miss, blocks) if reason is not None]
