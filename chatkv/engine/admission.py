"""Whether a model and a conversation fit into the main memory that is free, said before any of it
is allocated: memory that runs out midway ends the process and every conversation in it."""

from __future__ import annotations

from collections.abc import Mapping

from chatkv.engine.needs import Asked, Needs, needs_on_cpu
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.errors import ModelError
from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.own_codes import own_layouts
from chatkv.model.prepared import Dtype, PreparedModel, Stored
from chatkv.model.quantise import Layout
from chatkv.model.weights import stored_layouts
from chatkv.process import available_bytes
from chatkv.words import size

# From the least loss on.
KINDS: tuple[Stored, ...] = ("full", "own", "fp16", "int8", "fp8", "int4")
_SMALLER: tuple[Stored, ...] = ("own", "fp16", "int8", "int4")


def admit(files: ModelFiles, prepared: PreparedModel, resident: int) -> Needs:
    """What the model takes here with a conversation of one block, beside the `resident` bytes that
    the process had before it was prepared. Raises ModelError, with the numbers and with what would
    fit, where that is not free."""
    config, dtype, weights = prepared.config, prepared.dtype, prepared.stored
    stored = stored_layouts(prepared) if weights == "own" else {}
    needs = needed(files, config, dtype, weights, stored, resident=resident)
    free = available_bytes() + needs.resident
    if needs.total <= free:
        return needs
    own = own_layouts(files, config)
    others = {
        kind: needed(files, config, dtype, kind, own, resident=resident).total
        for kind in _SMALLER
        if kind != weights and (own or kind != "own")
    }
    fitting = [f"--weights {kind} takes {size(num)}" for kind, num in others.items() if num <= free]
    advice = ", ".join(fitting) or "take a smaller model"
    raise ModelError(
        f"{files.name} with {weights} weights needs {size(needs.total)} of memory "
        f"({size(needs.weights)} of weights), and {size(free)} are free: close other programs, or "
        f"{advice}"
    )


def needed(
    files: ModelFiles,
    config: ModelConfig,
    dtype: Dtype,
    weights: str,
    own: Mapping[str, Layout],
    context: int = BLOCK_TOKENS,
    sessions: int = 1,
    resident: int | None = None,
) -> Needs:
    """What a model takes of main memory; own: the layouts of codes that its files hold; resident:
    see `needs_on_cpu`."""
    asked = asked_for(files, config, dtype, weights, own, context, sessions)
    return needs_on_cpu(config, itemsize_of(dtype), asked, 0, 0.0, resident)


def asked_for(
    files: ModelFiles,
    config: ModelConfig,
    dtype: Dtype,
    weights: str,
    own: Mapping[str, Layout],
    context: int,
    sessions: int,
    conversations: int = 1,
) -> Asked:
    """conversations: how many whole contexts the pool may hold at most."""
    most = conversations * config.max_position
    is_converted = files.kind == "hf" and weights == "full" and _stored_dtype(files) != dtype
    layouts = own if weights == "own" else {}
    return Asked(context, sessions, most, weights, layouts, is_converted)


def itemsize_of(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 2


def _stored_dtype(files: ModelFiles) -> str | None:
    """Of a checkpoint's embedding; None where that cannot be told."""
    from chatkv.model.weights import map_file

    for file in files.files:
        for name, tensor in map_file(file).items():
            if name == "model.embed_tokens.weight":
                return str(tensor.dtype).removeprefix("torch.")
    return None
