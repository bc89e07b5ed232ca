"""Codes as their file has them, and the layout of a kernel that takes them over unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from chatkv.model.quantise import Kind, Layout, QuantisedWeight, Reordered
from chatkv_kernels.linear_quantised import (
    GROUP_SIZES,
    GROUP_SIZES_8,
    Weight4,
    Weight8,
    pack_int4,
)


@dataclass(frozen=True)
class Codes:
    """weight [out, in] = scale * (code - zero), with scale and zero of the input's group.

    codes: makes [out, in], integers below 2^bits in uint8 or numbers of float8; scales: [groups,
    out], of any float dtype; zeros: [groups, out] integers; group_of: [in], which group an input
    is in, None where each has group_size neighbours.
    """

    codes: Callable[[], Tensor]
    shape: tuple[int, int]
    bits: Literal[4, 8] | None  # None: float8
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    group_of: Tensor | None = None

    def dense(self) -> Tensor:
        """[out, in] float32, the numbers that the codes stand for."""
        numbers = self.codes().float()
        groups = self._group_of()
        if self.zeros is not None:
            numbers -= self.zeros.T.float()[:, groups]
        return numbers.mul_(self.scales.T.float()[:, groups])

    def layout(self) -> Layout | None:
        """That of the weight which `packed` makes; None where no kernel takes these codes."""
        if (kind := self._kind()) is None or (group := self._stored_group(kind)) is None:
            return None
        if kind != "int4":
            return Layout(kind, group, self.scales.dtype if group else torch.float32, None)
        zeros = None if self._zeros_are(8) else torch.float16
        return Layout(kind, group, self.scales.dtype, zeros, self._order() is not None)

    def packed(self) -> QuantisedWeight:
        """The same codes, as kernels want them. Only where there is a layout."""
        layout = self.layout()
        assert layout is not None
        order = self._order()
        codes = self.codes() if order is None else self.codes()[:, order.long()]
        weight: Weight4 | Weight8
        if layout.kind == "int4":
            zeros = None if layout.zeros is None else self._in_groups(self.zeros, layout.group_size)
            zeros = None if zeros is None else zeros.half()
            scales = self._in_groups(self.scales, layout.group_size)
            weight = Weight4(pack_int4(codes), scales, zeros, self.shape[1], layout.group_size)
        else:
            codes = codes if self.bits is None else (codes ^ 128).view(torch.int8)
            if layout.group_size:
                scales = self._in_groups(self.scales, layout.group_size)
            else:
                scales = self.scales[0].float()
            weight = Weight8(codes.contiguous(), scales.contiguous(), layout.group_size)
        return weight if order is None else Reordered(weight, order)

    def _kind(self) -> Kind | None:
        if self.bits is None:
            return "fp8"
        if self.bits == 4:
            return "int4"
        return "int8" if self._zeros_are(128) else None  # those of kernels have no zero points

    def _stored_group(self, kind: Kind) -> int | None:
        """The largest group of a kernel that never holds two of ours, 0 for a scale per output;
        None where there is none."""
        num_in = self.shape[1]
        if len(self.scales) == 1 and kind != "int4":
            return 0
        if self.group_of is not None and not self._is_regular():
            return None
        whole = self.group_size if len(self.scales) > 1 else -(-num_in // 32) * 32
        sizes = GROUP_SIZES if kind == "int4" else GROUP_SIZES_8
        return next((size for size in reversed(sizes) if whole % size == 0), None)

    def _in_groups(self, of_groups: Tensor | None, size: int) -> Tensor:
        """For groups of `size`, of which one or more make one of ours."""
        assert of_groups is not None
        count = -(-self.shape[1] // size)
        ours = self.group_size if len(self.scales) > 1 else count * size
        return of_groups.repeat_interleave(ours // size, 0)[:count].contiguous()

    def _group_of(self) -> Tensor:
        if self.group_of is not None:
            return self.group_of.long()
        return torch.arange(self.shape[1]) // self.group_size

    def _is_regular(self) -> bool:
        """Whether each group has group_size inputs, but for the last one where none are left."""
        counts = torch.bincount(self._group_of(), minlength=len(self.scales))
        return bool((counts[:-1] == self.group_size).all())

    def _order(self) -> Tensor | None:
        """[in] int32, the inputs group by group; None where they are."""
        groups = self._group_of()
        if len(self.scales) == 1 or bool((groups.diff() >= 0).all()):
            return None
        return groups.argsort(stable=True).to(torch.int32)

    def _zeros_are(self, number: int) -> bool:
        return self.zeros is not None and bool((self.zeros == number).all())
