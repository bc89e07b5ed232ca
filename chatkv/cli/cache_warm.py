"""`chatkv cache warm`: the KV of conversations into memory, before anybody waits for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.cache_request import request_options
from chatkv.cli.output import Output, count, output_options, plural, printable, size
from chatkv.cli.stores import (
    NOTHING_STORED,
    complete_session,
    open_blocks,
    open_conversations,
    users,
)
from chatkv.errors import PersistenceError, UsageError
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.chain import StoredBlock

THREADS = 4  # so that a disk has several reads to do at once


@click.command()
@click.argument("sessions", shell_complete=complete_session, nargs=-1, metavar="[SESSION]...")
@request_options
@output_options
def warm(
    output: Output, sessions: tuple[str, ...], file: Path | None, model: str | None, dtype: Any
) -> None:
    """Bring the KV of conversations into memory, so that opening one need not wait for the disk.

    Reads and verifies their blocks, which leaves them in the system's page cache for as long as
    nothing else needs that memory. Exits with 1 where a block is damaged.

    With --messages, compute and store the KV of a prompt that conversations are going to begin
    with. Until one does, nobody uses it, and it is the first to go where room is needed. --model
    and --dtype say what is to read it.
    """
    if file is not None and not sessions:
        _warm_messages(output, file, model, dtype)
        return
    if file is not None or not sessions:
        raise UsageError("name either conversations, or --messages FILE")
    from chatkv_store.sharing import stored_blocks

    began = time.perf_counter()
    wanted: dict[bytes, StoredBlock] = {}
    misses: list[str] = []
    with open_conversations() as store, ExitStack() as open_here:
        blocks = open_blocks()
        if blocks is not None:
            open_here.enter_context(blocks)
        found = {one.id: one for one in map(users(blocks, store).get_session, sessions)}
        if blocks is not None:
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


def _warm_messages(output: Output, file: Path, model: str | None, dtype: Any) -> None:
    from chatkv.cli.answer import Status
    from chatkv.server.foreseen import read_request

    messages, tools = read_request(file)
    status = Status()
    status.show("starting")
    from chatkv.model.template import ChatTemplate
    from chatkv.runtime import Runtime
    from chatkv.session.warming import warm_prompt

    began = time.perf_counter()
    try:
        with (
            open_conversations() as store,
            Runtime(folders().make(), store, model, dtype, status.progress) as runtime,
        ):
            if runtime.restorer.disk is None:
                raise PersistenceError("; ".join(runtime.notices) or "KV is not kept here")
            template = ChatTemplate.from_prepared(runtime.prepared, runtime.tokenizer)
            done = warm_prompt(
                runtime.restorer,
                runtime.tokenizer,
                template.with_tools(tools),
                messages,
                status.progress,
            )
            name = runtime.prepared.name
    finally:
        status.clear()
    took_s = time.perf_counter() - began
    if not output.is_human:
        output.record(
            {
                "model": name,
                "tokens": done.num_tokens,
                "computed_tokens": done.num_computed,
                "seconds": took_s,
            }
        )
        return
    output.note(
        f"{plural(done.num_tokens, 'token')} of {printable(name)}, "
        f"{count(done.num_computed)} of them computed, in {took_s:.1f} s"
    )


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
