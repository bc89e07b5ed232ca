"""How much memory conversations of a length would take with a model, and whether that is here.

Pure arithmetic over shapes: nothing is loaded. On a GPU the ledger's rules hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.engine.ledger import SPARE_SHARE, activation_bytes, block_bytes, ledger, weight_bytes
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.model.config import ModelConfig
from chatkv.model.quantise import LAYOUTS, Layout, is_quantised
from chatkv.model.weights import expected_shapes


@dataclass(frozen=True)
class Needs:
    """Bytes. `work` is what a step computes with; `room` is what KV may take here beside the rest,
    and `num_sessions` how many conversations of the length that holds."""

    weights: int
    work: int
    kv: int
    room: int
    num_sessions: int

    @property
    def total(self) -> int:
        return self.weights + self.work + self.kv

    @property
    def fits(self) -> bool:
        return self.kv <= self.room


@dataclass(frozen=True)
class Asked:
    """`sessions` conversations of `context` tokens; the pool never holds more than most_tokens.
    weights: how projections are stored, as `prepare` is told; layouts: which of them how, where
    that is "own"."""

    context: int
    sessions: int
    most_tokens: int
    weights: str = "full"
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def needs_on_cpu(
    config: ModelConfig, itemsize: int, asked: Asked, free_bytes: int, share: float
) -> Needs:
    """In main memory, of whose free_bytes KV may take `share`; itemsize: bytes per number of
    weights and KV."""
    saved = _saved_bytes(config, itemsize, asked)
    weights = weight_bytes(config, itemsize) - saved
    work = activation_bytes(config, itemsize, CHUNK_TOKENS, 1)
    return _needs(config, itemsize, asked, weights, work, int(free_bytes * share))


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
    shapes, layouts = expected_shapes(config), asked.layouts
    for kind, layout in LAYOUTS.items():
        if kind == asked.weights:
            layouts = dict.fromkeys(filter(is_quantised, shapes), layout)
    return sum(
        itemsize * prod(shapes[name]) - layout.num_bytes(shapes[name])
        for name, layout in layouts.items()
    )
