"""How much memory conversations of a length would take with a model, and whether that is here.

Pure arithmetic over shapes: nothing is loaded. On a GPU the ledger's rules hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.engine.ledger import SPARE_SHARE, activation_bytes, block_bytes, ledger, weight_bytes
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.model.config import ModelConfig
from chatkv.model.quantise import GROUP, is_quantised
from chatkv.model.weights import expected_shapes
from chatkv_kernels.linear_quantised import RUN, RUN_WORDS


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
    weights: how projections are stored, "full" or as `quantise` makes them."""

    context: int
    sessions: int
    most_tokens: int
    weights: str = "full"


def needs_on_cpu(
    config: ModelConfig, itemsize: int, asked: Asked, free_bytes: int, share: float
) -> Needs:
    """In main memory, of whose free_bytes KV may take `share`; itemsize: bytes per number of
    weights and KV."""
    saved = _saved_bytes(config, itemsize, asked.weights)
    weights = weight_bytes(config, itemsize) - saved
    work = activation_bytes(config, itemsize, CHUNK_TOKENS, 1)
    return _needs(config, itemsize, asked, weights, work, int(free_bytes * share))


def needs_on_gpu(
    config: ModelConfig, itemsize: int, asked: Asked, free_bytes: int, staging: int
) -> Needs:
    """On a GPU with so much free memory; staging: bytes of slabs."""
    held = ledger(config, itemsize, 0, staging, _saved_bytes(config, itemsize, asked.weights))
    room = max(0, int(free_bytes * (1 - SPARE_SHARE)) - held.fixed)
    return _needs(config, itemsize, asked, held.weights, held.fixed - held.weights, room)


def _needs(
    config: ModelConfig, itemsize: int, asked: Asked, weights: int, work: int, room: int
) -> Needs:
    per_block = block_bytes(config, itemsize)
    room = min(room // per_block, -(-asked.most_tokens // BLOCK_TOKENS)) * per_block
    per_session = -(-asked.context // BLOCK_TOKENS) * per_block
    return Needs(weights, work, asked.sessions * per_session, room, room // per_session)


def _saved_bytes(config: ModelConfig, itemsize: int, weights: str) -> int:
    """By how much quantised projections are smaller: their codes, and scales (`quantise`)."""
    if weights not in ("int8", "fp8", "int4"):
        return 0
    saved = 0
    for name, shape in expected_shapes(config).items():
        if is_quantised(name):
            num_out, num_in = shape
            per_output = num_in + 4
            if weights == "int4":
                per_output = 2 * RUN_WORDS * -(-num_in // RUN) + 2 * 2 * -(-num_in // GROUP)
            saved += num_out * (itemsize * num_in - per_output)
    return saved
