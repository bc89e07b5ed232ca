"""What a model takes of a GPU's memory, said before any of it is allocated.

Pure arithmetic over shapes. Memory that runs out midway fails a turn; so what is needed is added up
first, the KV pool gets what is left, and a model that does not fit is refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.engine.device_draws import BYTES_PER_LOGIT, ROWS
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.runner import GRAPH_SIZES
from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig
from chatkv.model.quantise import tensors_of
from chatkv.model.weights import LoadedWeights, Weight, expected_shapes
from chatkv.words import size

# What cuBLAS takes on large GPUs (32 MiB), and attention's partial results where it is cut along
# the keys: at most a tile of 128 queries in float32 for each of 264 programs.
WORKSPACE_BYTES = (32 + 17) << 20
# Of what is free, so much is left alone: the allocator's rounding, and what others may take.
SPARE_SHARE = 0.05
# What a number of a projection takes while it is made dense: as it comes, and the steps to it.
DENSE_BYTES = 8
# The longest step: a chunk of prefill beside as many answers as a graph may have.
STEP_TOKENS = CHUNK_TOKENS + GRAPH_SIZES[-1]


@dataclass(frozen=True)
class Ledger:
    """Bytes of GPU memory, by what they are for."""

    weights: int  # rotary tables included
    activations: int  # of the longest step
    graphs: int  # results and intermediates that recorded steps keep, and drawing from them
    staging: int  # slabs on their way to the pool
    workspace: int
    kv_pool: int

    @property
    def total(self) -> int:
        return self.fixed + self.kv_pool

    @property
    def fixed(self) -> int:
        """All but the KV pool."""
        return self.weights + self.activations + self.graphs + self.staging + self.workspace


def ledger(
    config: ModelConfig, itemsize: int, num_blocks: int, staging: int, saved: int = 0
) -> Ledger:
    """What a decoder of this config takes beside a pool of num_blocks blocks; itemsize: bytes per
    number of weights and KV; staging: bytes of slabs; saved: what quantised weights take less."""
    most = GRAPH_SIZES[-1]
    dense = dense_bytes(config) if saved else 0
    return Ledger(
        weights=weight_bytes(config, itemsize) - saved,
        activations=activation_bytes(config, itemsize, STEP_TOKENS, most) + dense,
        graphs=sum(GRAPH_SIZES) * config.vocab_size * 4
        + activation_bytes(config, itemsize, most, most)
        + drawing_bytes(config, most),
        staging=staging,
        workspace=WORKSPACE_BYTES,
        kv_pool=num_blocks * block_bytes(config, itemsize),
    )


def fit(
    config: ModelConfig,
    itemsize: int,
    free_bytes: int,
    most_blocks: int,
    staging: int,
    saved: int = 0,
) -> tuple[int, Ledger]:
    """How many blocks of KV free_bytes hold beside the rest, at most most_blocks; and the ledger.

    Raises ModelError, with the numbers, where not even one block fits.
    """
    room = int(free_bytes * (1 - SPARE_SHARE))
    fixed = ledger(config, itemsize, 0, staging, saved)
    num_blocks = min(most_blocks, (room - fixed.fixed) // block_bytes(config, itemsize))
    if num_blocks < 1:
        raise ModelError(
            f"the model needs {size(fixed.fixed)} of GPU memory before any conversation "
            f"({size(fixed.weights)} of weights), and {size(room)} are free: take a smaller "
            "model, or compute on the CPU (--device cpu)"
        )
    return num_blocks, ledger(config, itemsize, num_blocks, staging, saved)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of the weights and the rotary tables of a decoder on a GPU."""
    rotary = 2 * config.max_position * config.head_dim
    return itemsize * (sum(map(prod, expected_shapes(config).values())) + rotary)


def saved_bytes(config: ModelConfig, weights: Mapping[str, Weight], itemsize: int) -> int:
    """What quantised projections take less than they would with itemsize bytes for each number."""
    saved = 0
    stored = weights.as_stored if isinstance(weights, LoadedWeights) else weights
    for name, shape in expected_shapes(config).items():
        weight = stored[name]
        if not isinstance(weight, Tensor):
            held = sum(part.nbytes for part in tensors_of(weight))
            saved += prod(shape) * itemsize - held
    return saved


def dense_bytes(config: ModelConfig) -> int:
    """What it takes to make the largest projection of a layer dense for the moment: prefill wants
    it whole."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return DENSE_BYTES * config.hidden_size * max(2 * config.intermediate_size, heads)


def drawing_bytes(config: ModelConfig, num_seqs: int) -> int:
    """Copies of the logits of two steps, and what drawing from a few rows of them takes."""
    return config.vocab_size * (2 * 4 * num_seqs + ROWS * BYTES_PER_LOGIT)


def block_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of one block of KV in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * BLOCK_TOKENS * config.head_dim * itemsize


def activation_bytes(config: ModelConfig, itemsize: int, rows: int, num_seqs: int) -> int:
    """The most that is alive at a time in a pass of so many new tokens of so many sequences.

    In the MLP, that is what attention left (the residual stream before and after it, and its norm,
    the heads and what they have seen), the gates and what comes of them; at the end, the logits as
    they are and in float32.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    heads = queries + 2 * config.num_kv_heads * config.head_dim
    per_row = 3 * hidden + heads + queries + 3 * inner
    logits = num_seqs * config.vocab_size
    at_the_end = itemsize * (rows * hidden + 2 * num_seqs * hidden + logits) + 4 * logits
    return max(itemsize * rows * per_row, at_the_end)
