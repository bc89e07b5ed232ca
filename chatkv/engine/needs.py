"""How much memory conversations of a length would take with a model, and whether that is here.

Pure arithmetic over shapes: nothing is loaded. On a GPU the ledger's rules hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.engine.ledger import SPARE_SHARE, activation_bytes, block_bytes, ledger, weight_bytes
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.model.config import ModelConfig
from chatkv.model.linear import has_half_product
from chatkv.model.quantise import LAYOUTS, Layout, is_quantised
from chatkv.model.tiled_product import tile_outputs
from chatkv.model.weights import expected_shapes
from chatkv.process import resident_bytes
from chatkv_kernels.attention import QUERY_TILE
from chatkv_kernels.linear_quantised import RUN

# What a process takes beside what it has when it is asked, in main memory: pages of the library's
# code, a tokenizer of 49,000 tokens, threads, and what malloc keeps between allocations.
PROGRAM_BYTES = 38 << 20
# Of a step's work: logits of drawing, blocks of the library's products.
WORK_BYTES = 27 << 20
# New KV is copied on its way to the disk, where the writer keeps at most so much of it.
MOST_SAVING_BYTES = 256 << 20


@dataclass(frozen=True)
class Needs:
    """Bytes. `program` is what the process takes by itself, of main memory; `work` is what a step
    computes with; `room` is what KV may take here beside the rest, and `num_sessions` how many
    conversations of the length that holds."""

    weights: int
    work: int
    kv: int
    room: int
    num_sessions: int
    program: int = 0
    resident: int = 0  # of `program`, what this process has already

    @property
    def fixed(self) -> int:
        """All but KV."""
        return self.program + self.weights + self.work

    @property
    def total(self) -> int:
        return self.fixed + self.kv

    @property
    def fits(self) -> bool:
        return self.kv <= self.room


@dataclass(frozen=True)
class Asked:
    """`sessions` conversations of `context` tokens; the pool never holds more than most_tokens.
    weights: how projections are stored, as `prepare` is told; layouts: which of them how, where
    that is "own"; is_converted: whether the files hold another dtype than is computed in."""

    context: int
    sessions: int
    most_tokens: int
    weights: str = "full"
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    is_converted: bool = False


def needs_on_cpu(
    config: ModelConfig,
    itemsize: int,
    asked: Asked,
    free_bytes: int,
    share: float,
    resident: int | None = None,
) -> Needs:
    """In main memory, of whose free_bytes KV may take `share`; itemsize: bytes per number of
    weights and KV; resident: what the process has beside the model, by default what it has now."""
    weights = weight_bytes(config, itemsize) - _saved_bytes(config, itemsize, asked)
    weights -= _halved_bytes(config, itemsize, asked)
    weights += _second_form_bytes(config, asked) + _embedding_bytes(config, itemsize, asked)
    work = WORK_BYTES + activation_bytes(config, itemsize, CHUNK_TOKENS, 1)
    if itemsize == 2:  # scores of a tile of queries, as they are made, and their shares
        work += 3 * itemsize * config.num_heads * QUERY_TILE * asked.context
    needs = _needs(config, itemsize, asked, weights, work, int(free_bytes * share))
    work += _tile_bytes(config, itemsize, asked)
    needs = replace(needs, work=work + min(needs.kv, MOST_SAVING_BYTES))
    resident = resident_bytes() if resident is None else resident
    return replace(needs, program=resident + PROGRAM_BYTES, resident=resident)


def needs_on_gpu(
    config: ModelConfig, itemsize: int, asked: Asked, free_bytes: int, staging: int
) -> Needs:
    """On a GPU with so much free memory; staging: bytes of slabs."""
    held = ledger(config, itemsize, 0, staging, _saved_bytes(config, itemsize, asked))
    room = max(0, int(free_bytes * (1 - SPARE_SHARE)) - held.fixed)
    return _needs(config, itemsize, asked, held.weights, held.fixed - held.weights, room)


def _needs(
    config: ModelConfig, itemsize: int, asked: Asked, weights: int, work: int, room: int
) -> Needs:
    per_block = block_bytes(config, itemsize)
    room = min(room // per_block, -(-asked.most_tokens // BLOCK_TOKENS)) * per_block
    per_session = -(-asked.context // BLOCK_TOKENS) * per_block
    return Needs(weights, work, asked.sessions * per_session, room, room // per_session)


def _saved_bytes(config: ModelConfig, itemsize: int, asked: Asked) -> int:
    """By how much quantised matrices are smaller."""
    shapes = expected_shapes(config)
    return sum(
        itemsize * prod(shapes[name]) - layout.num_bytes(shapes[name])
        for name, layout in _layouts(config, asked).items()
    )


def _halved_bytes(config: ModelConfig, itemsize: int, asked: Asked) -> int:
    """By how much a CPU's matrices of float16 are smaller (`HalfLinear`): of weights that are asked
    for so, and the head beside any that have fewer bits."""
    if itemsize <= 2 or not has_half_product():
        return 0
    halved, shapes = 0, expected_shapes(config)
    if asked.weights == "fp16":
        halved = sum(prod(shapes[name]) for name in filter(is_quantised, shapes))
    if halved or _layouts(config, asked):
        halved += config.vocab_size * config.hidden_size
    return (itemsize - 2) * halved


def _second_form_bytes(config: ModelConfig, asked: Asked) -> int:
    """Of codes that a CPU keeps in two forms, for a few rows (`cpu_product`: planes of 4 bits, with
    a scale and a shift of 16 bits per group) and for many (`TiledProduct`)."""
    shapes, found = expected_shapes(config), 0
    for name, layout in _layouts(config, asked).items():
        planes = 1 if layout.kind == "int4" else 2
        if layout.has_cpu_kernel and layout.group_size:
            num_out, num_in = shapes[name]
            found += planes * num_out * (num_in // 2 + 4 * -(-num_in // layout.group_size))
        if layout.kind == "int4":  # without the end of its last run
            found -= num_out * (-num_in % RUN) // 2
    return found


def _tile_bytes(config: ModelConfig, itemsize: int, asked: Asked) -> int:
    """What many rows are multiplied by: some outputs of the widest matrix, made dense; from 4 bits
    by way of float32, which leaves a hole as large when the next one is taken."""
    shapes, layouts = expected_shapes(config), _layouts(config, asked)
    inputs = {shapes[name][1] for name in layouts}
    is_int4 = any(layout.kind == "int4" for layout in layouts.values())
    numbers = max((tile_outputs(count) * count for count in inputs), default=0)
    # In 16 bits the library multiplies a copy in a layout of its own; who loads the model, and who
    # computes with it, keep one each.
    copies = 2 * itemsize if itemsize == 2 else 0
    return numbers * (itemsize + (9 if is_int4 else 0) + copies)


def _embedding_bytes(config: ModelConfig, itemsize: int, asked: Asked) -> int:
    """How much more than once in all the matrix of a tied embedding is held, or how much less than
    one that is not: the head is a copy in its own layout; of the embedding only those rows are in
    memory that tokens ask for, unless it was converted."""
    matrix = config.vocab_size * config.hidden_size * itemsize
    rows = min(config.vocab_size, asked.context * asked.sessions) * config.hidden_size * itemsize
    held = matrix if asked.is_converted else rows
    return held if config.tie_embeddings else held - matrix


def _layouts(config: ModelConfig, asked: Asked) -> Mapping[str, Layout]:
    for kind, layout in LAYOUTS.items():
        if kind == asked.weights:
            return dict.fromkeys(filter(is_quantised, expected_shapes(config)), layout)
    return asked.layouts
