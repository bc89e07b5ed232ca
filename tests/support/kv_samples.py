"""Small KV for the block store's tests: random, but with exponents spread as in real KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chatkv_store import BlockStore, KVLayout, NewBlock, block_key, namespace

# One value per block, 16 tokens per block: small enough for hundreds of blocks per test.
SMALL = KVLayout(3, 2, 8, "bfloat16", block_tokens=16)
# Two values of two layers each per block of 64 tokens.
GROUPED = KVLayout(4, 8, 64, "bfloat16")
SPACE = namespace(b"weights", b"config", SMALL, "lossless")

Bits = npt.NDArray[Any]


def kv_bits(layout: KVLayout, num_tokens: int, seed: int = 0) -> Bits:
    """The bits of [layers, 2, heads, num_tokens, head_dim], every channel with its own scale."""
    random = np.random.default_rng(seed)
    shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
    scale = np.exp2(random.integers(-6, 5, (*shape[:3], 1, shape[4])))
    values = (random.standard_normal(shape) * scale).astype(np.float32)
    if layout.dtype == "float16":
        return values.astype(np.float16).view("<u2")
    bits = values.view("<u4")
    return bits if layout.dtype == "float32" else (bits >> 16).astype("<u2")


def kv_of(layout: KVLayout, token_ids: Sequence[int]) -> Bits:
    """KV that depends on the ids as real KV does: a token's on all ids up to it."""
    state, columns = 0, [kv_bits(layout, 0)]
    for token in token_ids:
        state = hash((state, token)) & 0xFFFFFFFF  # of integers: the same in every process
        columns.append(kv_bits(layout, 1, state))
    return np.concatenate(columns, axis=3)


def values_of(layout: KVLayout, bits: Bits) -> list[Bits]:
    """`bits` of all layers cut into values."""
    return [
        bits[layout.value_layers(g).start : layout.value_layers(g).stop]
        for g in range(layout.num_values)
    ]


def chain(
    layout: KVLayout, token_ids: Sequence[int], bits: Bits, space: bytes = SPACE
) -> list[NewBlock]:
    """`token_ids` and their KV as blocks, the last one partial where they do not fill it."""
    blocks, parent = [], space
    for start in range(0, len(token_ids), layout.block_tokens):
        ids = list(token_ids[start : start + layout.block_tokens])
        part = bits[:, :, :, start : start + len(ids)]
        blocks.append(NewBlock(parent, ids, values_of(layout, part)))
        parent = block_key(parent, ids)
    return blocks


def save(store: BlockStore, layout: KVLayout, token_ids: Sequence[int], bits: Bits) -> None:
    store.put(SPACE, layout, chain(layout, token_ids, bits))


def restore(store: BlockStore, layout: KVLayout, token_ids: Sequence[int]) -> Bits:
    """The KV of the stored prefix of `token_ids`, read block by block."""
    match = store.match(SPACE, token_ids, layout)
    out = np.zeros_like(kv_bits(layout, match.num_tokens))
    for block in match.blocks:
        for group in range(layout.num_values):
            layers = layout.value_layers(group)
            tokens = slice(block.start, block.start + block.num_tokens)
            store.read(block, group, out[layers.start : layers.stop, :, :, tokens])
    return out


def data_file(folder: Path) -> Path:
    return folder / "data.mdb"
