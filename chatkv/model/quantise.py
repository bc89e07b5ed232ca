"""Matrices of 8 or 4 bits: making them, joining them, and their parts in a prepared model's file.

Projections are quantised; embeddings, the head and norms are written as they are. int8 and fp8 have
a scale per output; int4 has a scale and a zero point per group of 32 inputs. Codes that a file has
already are taken over as they are, in the file's own groups: nothing is quantised twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from chatkv.model.tensor_file import TensorSource
from chatkv_kernels.linear_quantised import (
    GROUP_SIZES,
    GROUP_SIZES_8,
    RUN,
    RUN_WORDS,
    Weight4,
    Weight8,
    quantise_weight_fp8,
    quantise_weight_int4,
    quantise_weight_int8,
)

KernelWeight: TypeAlias = Weight8 | Weight4


class Reordered(NamedTuple):
    """A matrix whose input i is input order[i] of what it multiplies; order: [in] of int32."""

    weight: KernelWeight
    order: Tensor


QuantisedWeight: TypeAlias = KernelWeight | Reordered
Kind: TypeAlias = Literal["int8", "fp8", "int4"]

GROUP = 32  # inputs of one output that share a scale
_PARTS = ("codes", "scales", "zeros", "order")
_CODES: dict[Kind, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.int16,
}


@dataclass(frozen=True)
class Layout:
    """How a quantised matrix is stored; group_size is 0 where an output has one scale."""

    kind: Kind
    group_size: int = 0
    scales: torch.dtype = torch.float32
    zeros: torch.dtype | None = None
    is_reordered: bool = False

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name of each part of a matrix [out, in] -> its shape and dtype."""
        num_out, num_in = shape
        groups = (-(-num_in // self.group_size), num_out) if self.group_size else (num_out,)
        codes = (-(-num_in // RUN), num_out, RUN_WORDS) if self.kind == "int4" else shape
        found = {"codes": (codes, _CODES[self.kind]), "scales": (groups, self.scales)}
        if self.zeros is not None:
            found["zeros"] = (groups, self.zeros)
        if self.is_reordered:
            found["order"] = ((num_in,), torch.int32)
        return found

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return sum(prod(size) * dtype.itemsize for size, dtype in self.parts(shape).values())

    @property
    def has_cpu_kernel(self) -> bool:
        """Whether a CPU multiplies a row without making the matrix dense, for most shapes."""
        return self.kind == "int4" or (self.kind == "int8" and self.group_size != 16)

    def __str__(self) -> str:
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return f"{self.kind}{groups}{', its inputs reordered' if self.is_reordered else ''}"


# As `quantise` makes them.
LAYOUTS: dict[Kind, Layout] = {
    "int8": Layout("int8"),
    "fp8": Layout("fp8"),
    "int4": Layout("int4", GROUP, torch.float16, torch.float16),
}


@dataclass(frozen=True)
class CodedSource(TensorSource):
    """A matrix that its file stores in codes: `packed` takes these over, in `layout`, and `load`
    gives the numbers that they stand for. `layout` is None where no kernel takes such codes.
    `told` says what they are, as the file's format calls them."""

    layout: Layout | None = None
    packed: Callable[[], QuantisedWeight] | None = None
    told: str = ""


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


def can_join(weights: Sequence[QuantisedWeight]) -> bool:
    """Whether `join` can: all have one layout, and one order of inputs."""
    first = weights[0]
    if isinstance(first, Reordered):
        others = [one for one in weights if isinstance(one, Reordered)]
        return (
            len(others) == len(weights)
            and all(torch.equal(one.order, first.order) for one in others)
            and can_join([one.weight for one in others])
        )
    return len({_shape_of_parts(one) for one in weights}) == 1


def _shape_of_parts(weight: QuantisedWeight) -> object:
    if isinstance(weight, Reordered):
        return None
    zeros = weight.zeros if isinstance(weight, Weight4) else None
    dtypes = (weight.codes.dtype, weight.scales.dtype, None if zeros is None else zeros.dtype)
    return type(weight), weight.group_size, dtypes


def join(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Matrices that read the same input, as one: outputs behind each other."""
    first = weights[0]
    if isinstance(first, Reordered):
        plain = join([one.weight for one in weights if isinstance(one, Reordered)])
        assert not isinstance(plain, Reordered)
        return Reordered(plain, first.order)
    if isinstance(first, Weight8):
        eights = [one for one in weights if isinstance(one, Weight8)]
        return first._replace(
            codes=torch.cat([one.codes for one in eights]),
            scales=torch.cat([one.scales for one in eights], 1 if first.group_size else 0),
        )
    fours = [one for one in weights if isinstance(one, Weight4)]
    zeros = [one.zeros for one in fours if one.zeros is not None]
    return first._replace(
        codes=torch.cat([one.codes for one in fours], 1),
        scales=torch.cat([one.scales for one in fours], 1),
        zeros=torch.cat(zeros, 1) if zeros else None,
    )


def tensors_of(weight: QuantisedWeight) -> list[Tensor]:
    """All that it is stored in: codes, scales, zeros, order, as far as it has them."""
    if isinstance(weight, Reordered):
        return [*tensors_of(weight.weight), weight.order]
    return [part for part in weight if isinstance(part, Tensor)]


def layout_of(weight: QuantisedWeight) -> Layout:
    """How it is stored."""
    if isinstance(weight, Reordered):
        return replace(layout_of(weight.weight), is_reordered=True)
    kind = next(kind for kind, dtype in _CODES.items() if dtype == weight.codes.dtype)
    zeros = weight.zeros if isinstance(weight, Weight4) else None
    zeros_dtype = None if zeros is None else zeros.dtype
    return Layout(kind, weight.group_size, weight.scales.dtype, zeros_dtype)


def to_device(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    if isinstance(weight, Reordered):
        plain = to_device(weight.weight, device)
        assert not isinstance(plain, Reordered)
        return Reordered(plain, weight.order.to(device))
    if isinstance(weight, Weight8):
        return weight._replace(codes=weight.codes.to(device), scales=weight.scales.to(device))
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return weight._replace(
        codes=weight.codes.to(device), scales=weight.scales.to(device), zeros=zeros
    )


def quantised_sources(
    sources: Sequence[TensorSource], kind: Kind | Literal["own", "fp16"]
) -> list[TensorSource]:
    """The same tensors, projections quantised; "fp16": as float16. Codes that a file has already
    are taken over: by "own" all, with nothing quantised beside them, else those of that kind. Of 8
    bits only where an output has one scale: with groups a CPU has no fast kernel for them.
    """
    made: list[TensorSource] = []
    for source in sources:
        if kind == "fp16":
            half = torch.float16 if is_quantised(source.name) else source.dtype
            made.append(TensorSource(source.name, source.shape, source.load, half))
            continue
        layout = layout_as(source, kind)
        if layout is None:
            made.append(source)
        else:
            made += _part_sources(source, layout, partial(_made, source, layout))
    return made


def layout_as(source: TensorSource, kind: Kind | Literal["own"]) -> Layout | None:
    """How `quantised_sources` stores a tensor; None where it stays dense."""
    if not is_quantised(source.name):
        return None
    own = source.layout if isinstance(source, CodedSource) else None
    if kind == "own":
        return own
    if own is not None and own.kind == kind and (kind == "int4" or not own.group_size):
        return own
    return LAYOUTS[kind]


def _made(source: TensorSource, layout: Layout) -> QuantisedWeight:
    if isinstance(source, CodedSource) and source.packed is not None and source.layout == layout:
        return source.packed()
    return quantise(source.load(), layout.kind)


def _part_sources(
    source: TensorSource, layout: Layout, make: Callable[[], QuantisedWeight]
) -> list[TensorSource]:
    """The parts of a matrix [out, in] to be written; `make` is called when the first one is."""
    parts = layout.parts(source.shape)
    made: list[Tensor] = []

    def part(index: int) -> Tensor:
        if not made:
            made.extend(tensors_of(make()))
        tensor = made[index]
        if index == len(parts) - 1:
            made.clear()
        return tensor

    return [
        TensorSource(f"{source.name}.{name}", shape, partial(part, index), dtype)
        for index, (name, (shape, dtype)) in enumerate(parts.items())
    ]


def from_parts(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]
) -> QuantisedWeight | None:
    """What `quantised_sources` wrote, [out, in] of `shape`; None where that is not all there, or
    another matrix's."""
    codes, scales, zeros, order = (tensors.get(f"{name}.{part}") for part in _PARTS)
    if codes is None or scales is None:
        return None
    layout = _layout_of(codes, scales, zeros, order, shape[1])
    if layout is None:
        return None
    given = [part for part in (codes, scales, zeros, order) if part is not None]
    if [(tuple(part.shape), part.dtype) for part in given] != [*layout.parts(shape).values()]:
        return None
    weight: KernelWeight
    if layout.kind == "int4":
        weight = Weight4(codes, scales, zeros, shape[1], layout.group_size)
    else:
        weight = Weight8(codes, scales, layout.group_size)
    return weight if order is None else Reordered(weight, order)


def _layout_of(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, num_in: int
) -> Layout | None:
    kind = next((kind for kind, dtype in _CODES.items() if dtype == codes.dtype), None)
    if kind is None:
        return None
    group = 0
    if scales.dim() == 2:  # groups of two sizes are as many only where there is one of either
        sizes = GROUP_SIZES if kind == "int4" else GROUP_SIZES_8
        group = next((size for size in sizes if -(-num_in // size) == len(scales)), -1)
    if group < 0 or (kind == "int4" and not group):
        return None
    zeros_dtype = None if zeros is None else zeros.dtype
    return Layout(kind, group, scales.dtype, zeros_dtype, order is not None)


def part_names(name: str) -> list[str]:
    return [f"{name}.{part}" for part in _PARTS]
