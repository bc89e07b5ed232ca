"""Blocks of random KV in a pool as a GPU has it, and the same as bits for the store's codecs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from chatkv_store import KVLayout
from kv_samples import Bits, kv_bits


@dataclass(frozen=True)
class Shape:
    num_blocks: int
    layers: int
    heads: int
    tokens: int
    head_dim: int


@st.composite
def shapes(draw: st.DrawFn, max_tokens: int = 40) -> Shape:
    layers, heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    return Shape(
        draw(st.integers(1, 2)),
        layers,
        heads,
        draw(st.integers(1, max_tokens)),
        draw(st.sampled_from([8, 16, 40, 64])),
    )


def pool_of(
    shape: Shape, dtype: Any, seed: int, device: torch.device, noise: bool = False
) -> tuple[Tensor, list[Bits], Tensor]:
    """A view of some layers and tokens of a larger pool, the bits of some of its blocks (in random
    order), and the table that names these."""
    layout = KVLayout(shape.layers, shape.heads, shape.head_dim, dtype)
    random = np.random.default_rng(seed)
    bits = [kv_bits(layout, shape.tokens, seed + i) for i in range(shape.num_blocks)]
    if noise:
        bits = [random.integers(0, 1 << 16, block.shape).astype("<u2") for block in bits]
    size = (shape.num_blocks + 2, shape.layers + 1, 2, shape.heads, shape.tokens + 3)
    whole = torch.full((*size, shape.head_dim), float("nan"), dtype=getattr(torch, dtype))
    pool = whole.to(device)[:, 1:, :, :, : shape.tokens]
    table = torch.from_numpy(random.permutation(shape.num_blocks + 2)[: shape.num_blocks])
    blocks = torch.from_numpy(np.stack(bits).view(f"<i{bits[0].itemsize}"))
    pool[table.to(device)] = blocks.to(device).view(pool.dtype)
    return pool, bits, table.to(device, torch.int32)


def on_device(payloads: list[bytes], device: torch.device) -> tuple[Tensor, Tensor]:
    """Payloads as one tensor, as far apart as a reader may leave them, and their offsets."""
    offsets, data = [], bytearray()
    for payload in payloads:
        data += bytes([0xAA] * 8 * (1 + len(offsets)))
        offsets.append(len(data))
        data += payload
    return torch.frombuffer(data, dtype=torch.uint8).to(device), torch.tensor(offsets).to(device)


def encoded(payloads: Tensor, offsets: Tensor) -> list[bytes]:
    """The payloads that a kernel wrote."""
    data, ends = payloads.cpu().numpy().tobytes(), offsets.tolist()
    return [data[start:end] for start, end in pairwise(ends)]
