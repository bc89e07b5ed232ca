"""One matrix of a published checkpoint: its tensors, checked against its shape, as `Codes`.

Formats: AutoGPTQ's and AutoAWQ's qweight, qzeros and scales; DeepSeek's weight_scale_inv; the
tensors of compressed-tensors (github.com/vllm-project/compressed-tensors, compressors). Scales of
activations are not used: products are of the activations themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from chatkv.errors import ModelError
from chatkv.model.published.codes import Codes
from chatkv.model.published.scheme import Rule
from chatkv.model.published.unpack import along_columns, along_rows, awq

Shape = tuple[int, int]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WORDS = (torch.int32,)


class Tensors:
    """The tensors of one module, taken by name out of those of a checkpoint that nobody has taken
    yet; `where` begins each error."""

    def __init__(self, tensors: dict[str, Tensor], module: str, where: str) -> None:
        self._tensors, self._module, self._where = tensors, module, where

    def take(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = _FLOATS
    ) -> Tensor:
        """Raises ModelError where it is not there, or not of this shape and one of these dtypes."""
        tensor = self.maybe(name)
        if tensor is None:
            raise ModelError(f"{self._where} lacks the tensor {self._module}.{name}")
        if tensor.dtype not in dtypes:
            raise self.wrong(name, f"is stored as {str(tensor.dtype).removeprefix('torch.')}")
        if tuple(tensor.shape) != shape:
            raise self.wrong(name, f"has shape {list(tensor.shape)}, expected {list(shape)}")
        if dtypes == _FLOATS and not bool(tensor.isfinite().all()):
            raise self.wrong(name, "holds numbers that are not finite")
        return tensor

    def maybe(self, name: str) -> Tensor | None:
        return self._tensors.pop(f"{self._module}.{name}", None)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(f"{self._module}.{name}")
        return None if tensor is None else tuple(tensor.shape)

    def wrong(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self._where}: {self._module}.{name} {what}")


def read_codes(tensors: Tensors, shape: Shape, rule: Rule) -> Codes:
    """The matrix [out, in] whose tensors are there. Raises ModelError where they are not as the
    config says."""
    return _READERS[rule.packing](tensors, shape, rule)


def _gptq(tensors: Tensors, shape: Shape, rule: Rule) -> Codes:
    num_out, num_in = shape
    group_size, groups = _groups(rule, num_in)
    per_word = 32 // rule.bits
    qweight = tensors.take("qweight", (ceil(num_in / per_word), num_out), _WORDS)
    qzeros = tensors.take("qzeros", (groups, ceil(num_out / per_word)), _WORDS)
    scales = tensors.take("scales", (groups, num_out))
    zeros = along_columns(qzeros, rule.bits)[:, :num_out].int() + rule.zero_offset
    group_of = None
    if tensors.shape_of("g_idx") is not None:
        group_of = _group_of(tensors, "g_idx", num_in, groups)
    return Codes(
        lambda: along_rows(qweight, rule.bits)[:num_in].T,
        shape,
        _bits(rule),
        scales,
        zeros,
        group_size,
        group_of,
    )


def _awq(tensors: Tensors, shape: Shape, rule: Rule) -> Codes:
    num_out, num_in = shape
    group_size, groups = _groups(rule, num_in)
    qweight = tensors.take("qweight", (num_in, ceil(num_out / 8)), _WORDS)
    zeros = awq(tensors.take("qzeros", (groups, ceil(num_out / 8)), _WORDS))
    scales = tensors.take("scales", (groups, num_out))
    return Codes(
        lambda: awq(qweight)[:, :num_out].T, shape, 4, scales, zeros[:, :num_out], group_size
    )


def _float8(tensors: Tensors, shape: Shape, rule: Rule) -> Codes:
    weight = tensors.take("weight", shape, (torch.float8_e4m3fn,))
    scales, group_size = _scales(tensors, shape, rule)
    return Codes(lambda: weight, shape, None, scales, None, group_size)


def _plain(tensors: Tensors, shape: Shape, rule: Rule) -> Codes:
    """A code of 8 bits is a byte with a sign."""
    weight = tensors.take("weight", shape, (torch.int8,))
    scales, group_size = _scales(tensors, shape, rule)
    zeros = torch.full(scales.shape, 128, dtype=torch.int32)
    if tensors.shape_of("weight_zero_point") is not None:
        stored = tensors.maybe("weight_zero_point")
        assert stored is not None
        if stored.numel() not in (1, scales.numel()):
            raise tensors.wrong("weight_zero_point", f"has shape {list(stored.shape)}")
        stored = stored.reshape(-1, len(zeros)).T if stored.numel() > 1 else stored
        zeros = zeros + stored.to(torch.int32)
    return Codes(lambda: weight.view(torch.uint8) ^ 128, shape, 8, scales, zeros, group_size)


def _packed(tensors: Tensors, shape: Shape, rule: Rule) -> Codes:
    """A code, and a zero point, is stored with half of its range added."""
    num_out, num_in = shape
    per_word = 32 // rule.bits
    words = tensors.take("weight_packed", (num_out, ceil(num_in / per_word)), _WORDS)
    told = tensors.maybe("weight_shape")
    if told is not None and told.tolist() != list(shape):
        raise tensors.wrong("weight_shape", f"says {told.tolist()}, expected {list(shape)}")
    scales, group_size = _scales(tensors, shape, rule)
    zeros = torch.full(scales.shape, 1 << rule.bits - 1, dtype=torch.int32)
    if not rule.is_symmetric:
        rows = ceil(num_out / per_word)
        stored = tensors.take("weight_zero_point", (rows, len(scales)), _WORDS)
        zeros = along_rows(stored, rule.bits)[:num_out].T.expand(scales.shape)
    group_of = None
    if tensors.shape_of("weight_g_idx") is not None:
        group_of = _group_of(tensors, "weight_g_idx", num_in, len(scales))
    return Codes(
        lambda: along_columns(words, rule.bits)[:, :num_in],
        shape,
        _bits(rule),
        scales,
        zeros,
        group_size,
        group_of,
    )


def _scales(tensors: Tensors, shape: Shape, rule: Rule) -> tuple[Tensor, int]:
    """[groups, out] and how many inputs share one; stored for the whole matrix, for each output,
    for groups of each, or, mostly under another name, for blocks of several outputs."""
    num_out, num_in = shape
    inverse = tensors.shape_of("weight_scale_inv") is not None
    name = "weight_scale_inv" if inverse else "weight_scale"  # multiplied with, either one
    if rule.block is not None:
        high, wide = rule.block
        blocks = tensors.take(name, (ceil(num_out / high), ceil(num_in / wide)))
        return blocks.repeat_interleave(high, 0)[:num_out].T.contiguous(), wide
    if rule.group_size != -1:
        group_size, groups = _groups(rule, num_in)
        return tensors.take(name, (num_out, groups)).T.contiguous(), group_size
    found = tensors.shape_of(name)
    if found in ((), (1,), (1, 1)):
        return tensors.take(name, found).reshape(1, 1).expand(1, num_out), num_in
    one_each = (num_out,) if found == (num_out,) else (num_out, 1)
    return tensors.take(name, one_each).reshape(1, num_out), num_in


def _groups(rule: Rule, num_in: int) -> tuple[int, int]:
    """Inputs of a group, and how many groups there are."""
    group_size = num_in if rule.group_size == -1 else rule.group_size
    return group_size, ceil(num_in / group_size)


def _group_of(tensors: Tensors, name: str, num_in: int, groups: int) -> Tensor | None:
    group_of = tensors.take(name, (num_in,), (torch.int32, torch.int64))
    if bool((group_of == -1).all()):  # so some say that inputs are in their order
        return None
    if bool(((group_of < 0) | (group_of >= groups)).any()):
        raise tensors.wrong(name, f"names a group that is not among {groups}")
    return group_of


def _bits(rule: Rule) -> Literal[4, 8]:
    return 4 if rule.bits == 4 else 8


_READERS: dict[str, Callable[[Tensors, Shape, Rule], Codes]] = {
    "gptq": _gptq,
    "awq": _awq,
    "float8": _float8,
    "plain": _plain,
    "packed": _packed,
}
