"""What a chat tells of itself when it is asked, in lines: /why, /cache and /status."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from chatkv.cli.output import count, plural, size

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore


def explained(session: str, number: int) -> list[str]:
    """What `chatkv why` says of a turn."""
    from chatkv.cli.stores import open_conversations
    from chatkv.cli.why import explain

    with open_conversations() as store:
        turn = store.chain(session)[number - 1]
    return explain(turn.stats, num_new=len(turn.prompt_ids) + (number > 1))


def coverage(session: str, opened: BlockStore | None = None) -> list[str]:
    """What of a conversation is on the disk. opened: the KV cache, where this process has it open
    already."""
    from chatkv.cli.stores import NOTHING_STORED, open_blocks, open_conversations
    from chatkv_store.coverage import stretches

    with open_conversations() as store:
        found, blocks = store.get_session(session), opened or open_blocks()
        if blocks is None:
            return [NOTHING_STORED]
        with nullcontext() if opened is not None else blocks:
            pieces = [piece for piece in stretches(blocks, store, found) if piece.num_tokens]
    stored = [piece for piece in pieces if piece.why is None]
    kept = sum(piece.num_tokens for piece in stored)
    num_bytes = size(sum(piece.num_bytes for piece in stored))
    lines = [f"{count(kept)} of {plural(found.num_tokens, 'token')} are on the disk, {num_bytes}"]
    shared = sum(piece.num_tokens for piece in stored if piece.sharers)
    if shared:
        lines.append(f"{count(shared)} of them are shared with other conversations")
    lines += [
        f"tokens {count(piece.start)} to {count(piece.end)}: {piece.why}"
        for piece in pieces
        if piece.why is not None
    ]
    return lines


def state(found: dict[str, Any]) -> list[str]:
    """What is loaded and doing something, in this process or in the engine's."""
    where = "this process" if found["pid"] == os.getpid() else f"the engine, process {found['pid']}"
    num_open, num_answering = len(found["open_sessions"]), len(found["answering"])
    return [
        f"computing in {where}, {size(found['memory_bytes'])} of memory",
        *(line for model in found["models"] for line in model_lines(model)),
        f"{plural(num_open, 'conversation')} open, {count(num_answering)} answering",
    ]


def model_lines(model: dict[str, Any]) -> list[str]:
    """A model that is loaded, how much of its memory for KV is taken, and why its weights are
    stored so."""
    kv, numbers = model["kv_tokens"], str(model["dtype"])
    if model["weights"] != "full":
        numbers += f" with {model['weights']} weights"
    return [
        f"{model['model']}  {numbers} on {model['device']}, KV of "
        f"{count(kv['total'] - kv['free'])} of {count(kv['total'])} tokens in memory",
        f"  {model['weights']} weights: {model['weights_why']}",
    ]
