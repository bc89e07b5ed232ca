"""What kernels are compiled for ahead of time: named calls of a launch with tensors of no data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """`call` runs a launch on `meta` tensors; every kernel that it launches is compiled.

    max_stack: bytes of stack that a thread may use. Registers spill there, so it is 0; say why
    where it is not.
    """

    name: str
    call: Callable[[], object]
    max_stack: int = 0


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (
    Shape("8B", 4096, 14336, 32, 8, 128),  # Llama 3.1 8B
    Shape("SmolLM2", 576, 1536, 9, 3, 64),  # SmolLM2 135M
)


def per_shape(name: str, example: Callable[[Shape], object], max_stack: int = 0) -> list[Spec]:
    """One spec per model: `example` launches what that model does."""
    return [Spec(f"{name} {shape.name}", partial(example, shape), max_stack) for shape in SHAPES]


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of this size and dtype without memory."""
    return torch.empty(size, dtype=dtype, device="meta")


def meta_pool(shape: Shape, block_tokens: int = 64) -> tuple[Tensor, Tensor]:
    """Keys and values of one of two layers in a pool of 512 blocks."""
    pool = meta(512, 2, 2, shape.num_kv_heads, block_tokens, shape.head_dim)
    return pool[:, 1, 0], pool[:, 1, 1]
