"""Matrices of 8 or 4 bits: making them, joining them, and their parts in a prepared model's file.

Projections are quantised; embeddings, the head and norms stay as they are. int8 and fp8 have a
scale per output; int4 has a scale and a zero point per group of 32 inputs, as GGUF's Q4 types do,
whose codes are taken over as they are: nothing is quantised twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from chatkv.model.tensor_file import TensorSource
from chatkv_kernels.linear_quantised import (
    RUN,
    RUN_WORDS,
    Weight4,
    Weight8,
    quantise_weight_fp8,
    quantise_weight_int4,
    quantise_weight_int8,
)

QuantisedWeight: TypeAlias = Weight8 | Weight4
Kind: TypeAlias = Literal["int8", "fp8", "int4"]

GROUP = 32  # inputs of one output that share a scale
_PARTS = ("codes", "scales", "zeros")


def is_quantised(name: str) -> bool:
    """Whether a tensor of this checkpoint name is one of those that are quantised."""
    return name.endswith("_proj.weight")


def quantise(weight: Tensor, kind: Kind) -> QuantisedWeight:
    """Of [out, in] floats."""
    if kind == "int4":
        made = quantise_weight_int4(weight, GROUP, symmetric=False)
        assert made.zeros is not None
        return made._replace(zeros=made.zeros.half())
    return quantise_weight_int8(weight) if kind == "int8" else quantise_weight_fp8(weight)


def join(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Matrices that read the same input, as one: outputs behind each other."""
    if isinstance(first := weights[0], Weight8):
        parts = zip(*[one[:2] for one in weights if isinstance(one, Weight8)], strict=True)
        codes, scales = (torch.cat(part) for part in parts)
        return Weight8(codes, scales)
    fours = [one for one in weights if isinstance(one, Weight4)]
    zeros = [one.zeros for one in fours if one.zeros is not None]
    return first._replace(
        codes=torch.cat([one.codes for one in fours], 1),
        scales=torch.cat([one.scales for one in fours], 1),
        zeros=torch.cat(zeros, 1) if zeros else None,
    )


def to_device(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    if isinstance(weight, Weight8):
        return Weight8(weight.codes.to(device), weight.scales.to(device))
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return weight._replace(
        codes=weight.codes.to(device), scales=weight.scales.to(device), zeros=zeros
    )


def quantised_sources(sources: Sequence[TensorSource], kind: Kind) -> list[TensorSource]:
    """The same tensors, projections quantised; int4 takes over codes that a file has already."""
    made: list[TensorSource] = []
    for source in sources:
        if is_quantised(source.name):
            make = partial(_made, source, kind)
            made += _part_sources(source.name, source.shape, kind, make)
        else:
            made.append(source)
    return made


def _made(source: TensorSource, kind: Kind) -> QuantisedWeight:
    packed = getattr(source, "packed", None) if kind == "int4" else None
    found = packed() if packed is not None else None
    return quantise(source.load(), kind) if found is None else found


def _part_sources(
    name: str, shape: tuple[int, ...], kind: Kind, make: Callable[[], QuantisedWeight]
) -> list[TensorSource]:
    """The parts of a matrix [out, in] to be written; `make` is called when the first one is."""
    num_out, num_in = shape
    groups = -(-num_in // GROUP), num_out
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = {
        "int8": [(shape, torch.int8), ((num_out,), torch.float32)],
        "fp8": [(shape, torch.float8_e4m3fn), ((num_out,), torch.float32)],
        "int4": [
            ((-(-num_in // RUN), num_out, RUN_WORDS), torch.int16),
            (groups, torch.float16),
            (groups, torch.float16),
        ],
    }[kind]
    made: list[QuantisedWeight] = []

    def part(index: int) -> Tensor:
        if not made:
            made.append(make())
        tensor = made[0][index]
        if index == len(shapes) - 1:
            made.clear()
        assert isinstance(tensor, Tensor)
        return tensor

    return [
        TensorSource(f"{name}.{_PARTS[index]}", shape, partial(part, index), dtype)
        for index, (shape, dtype) in enumerate(shapes)
    ]


def from_parts(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]
) -> QuantisedWeight | None:
    """What `sources` wrote, [out, in] of `shape`; None where that is not all there, or another
    matrix's."""
    codes, scales, zeros = (tensors.get(f"{name}.{part}") for part in _PARTS)
    if codes is None or scales is None:
        return None
    num_out, num_in = shape
    if zeros is None:
        fits = codes.shape == shape and scales.shape == (num_out,)
        return Weight8(codes, scales) if fits else None
    groups = (-(-num_in // GROUP), num_out)
    fits = codes.shape == (-(-num_in // RUN), num_out, RUN_WORDS)
    fits = fits and scales.shape == zeros.shape == groups
    return Weight4(codes, scales, zeros, num_in, GROUP) if fits else None


def part_names(name: str) -> list[str]:
    return [f"{name}.{part}" for part in _PARTS]
