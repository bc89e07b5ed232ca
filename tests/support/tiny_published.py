"""Tiny checkpoints as others publish quantised ones, from random codes, in numpy alone.

    wanted = write_published(folder, checkpoint, GPTQ(bits=4, group_size=32))

Each matrix of `checkpoint` that a decoder multiplies with is replaced by random codes, laid out as
the format's own documentation and packing code describe; `wanted` holds what they stand for.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
Made = tuple[dict[str, torch.Tensor], Array]  # tensors of a module, and its weight [out, in]


@dataclass(frozen=True)
class GPTQ:
    """AutoGPTQ: qweight packs inputs, qzeros outputs; version 1 stores zero points less one."""

    bits: int = 4
    group_size: int = 32
    act_order: bool = False
    version: int = 1
    symmetric: bool = False

    def config(self) -> dict[str, Any]:
        form = {"checkpoint_format": "gptq_v2"} if self.version == 2 else {}
        shape = {"bits": self.bits, "group_size": self.group_size, "desc_act": self.act_order}
        return {"quant_method": "gptq", **shape, "sym": self.symmetric, **form}

    def matrix(self, rng: np.random.Generator, num_out: int, num_in: int) -> Made:
        size = num_in if self.group_size == -1 else self.group_size
        groups = ceil(num_in / size)
        codes = rng.integers(0, 2**self.bits, (num_in, num_out))
        zeros = rng.integers(1, 2**self.bits, (groups, num_out))
        if self.symmetric:
            zeros[:] = 2 ** (self.bits - 1)
        scales = _scales(rng, (groups, num_out), self.bits).astype(np.float16)
        group_of = np.arange(num_in) // size
        if self.act_order:
            group_of[rng.permutation(num_in)] = np.arange(num_in) // size
        weight = scales.astype(np.float64)[group_of] * (codes - zeros[group_of])
        tensors = {
            "qweight": pack(codes.T, self.bits).T,
            "qzeros": pack(zeros - (self.version == 1), self.bits),
            "scales": scales,
            "g_idx": group_of.astype(np.int32),
        }
        return _tensors(tensors), weight.T


@dataclass(frozen=True)
class AWQ:
    """AutoAWQ's gemm layout: words pack outputs, in an order of their own."""

    group_size: int = 32

    def config(self) -> dict[str, Any]:
        return {"quant_method": "awq", "bits": 4, "group_size": self.group_size} | {
            "zero_point": True,
            "version": "gemm",
        }

    def matrix(self, rng: np.random.Generator, num_out: int, num_in: int) -> Made:
        groups = num_in // self.group_size
        codes = rng.integers(0, 16, (num_in, num_out))
        zeros = rng.integers(0, 16, (groups, num_out))
        scales = _scales(rng, (groups, num_out), 4).astype(np.float16)
        group_of = np.arange(num_in) // self.group_size
        weight = scales.astype(np.float64)[group_of] * (codes - zeros[group_of])
        tensors = {"qweight": self._pack(codes), "qzeros": self._pack(zeros), "scales": scales}
        return _tensors(tensors), weight.T

    def _pack(self, codes: Array) -> Array:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        eights = codes.reshape(len(codes), -1, 8)[:, :, order]
        return pack(eights.reshape(codes.shape), 4)


@dataclass(frozen=True)
class FP8:
    """float8_e4m3 with a scale for the tensor, each output, or blocks as DeepSeek has them."""

    scales: str = "tensor"  # "channel", "block"
    method: str = "fp8"

    def config(self) -> dict[str, Any]:
        block = {"weight_block_size": [32, 64]} if self.scales == "block" else {}
        return {"quant_method": self.method, "activation_scheme": "dynamic", **block}

    def matrix(self, rng: np.random.Generator, num_out: int, num_in: int) -> Made:
        codes = rng.integers(0, 256, (num_out, num_in)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # those two stand for no number
        numbers = from_e4m3(codes)
        name, shape = {
            "tensor": ("weight_scale", (1,)),
            "channel": ("weight_scale", (num_out, 1)),
            "block": ("weight_scale_inv", (ceil(num_out / 32), ceil(num_in / 64))),
        }[self.scales]
        scales = (rng.random(shape) + 0.5).astype(np.float32) * np.float32(0.001)
        each = scales
        if self.scales == "block":
            each = scales.repeat(32, 0)[:num_out].repeat(64, 1)[:, :num_in]
        weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        made = {"weight": weight, name: torch.from_numpy(scales)}
        if self.scales == "tensor":
            made["input_scale"] = torch.ones(1)
        return made, numbers * each.astype(np.float64)


@dataclass(frozen=True)
class Compressed:
    """compressed-tensors: pack-quantized, int-quantized or float-quantized."""

    form: str = "pack-quantized"
    bits: int = 4
    group_size: int | None = 32  # None: a scale per output
    symmetric: bool = True
    act_order: bool = False

    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "float" if self.form == "float-quantized" else "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "actorder": "group" if self.act_order else None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }

    def matrix(self, rng: np.random.Generator, num_out: int, num_in: int) -> Made:
        if self.form == "float-quantized":
            made, weight = FP8("channel").matrix(rng, num_out, num_in)
            made["weight_scale"] = made["weight_scale"].bfloat16()
            exact = made["weight"].double() * made["weight_scale"].double()
            assert np.allclose(exact.numpy(), weight, rtol=2**-8)
            return made, exact.numpy()
        size = self.group_size or num_in
        groups, half = num_in // size, 2 ** (self.bits - 1)
        codes = rng.integers(-half, half, (num_out, num_in))
        zeros = np.zeros((num_out, groups), np.int64)
        if not self.symmetric:
            zeros = rng.integers(-half, half, (num_out, groups))
        scales = torch.from_numpy(_scales(rng, (num_out, groups), self.bits)).bfloat16()
        group_of = np.arange(num_in) // size
        if self.act_order:
            group_of[rng.permutation(num_in)] = np.arange(num_in) // size
        weight = scales.double().numpy()[:, group_of] * (codes - zeros[:, group_of])
        if self.form == "int-quantized":
            made = {"weight": torch.from_numpy(codes.astype(np.int8))}
            if not self.symmetric:
                made["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
            return made | {"weight_scale": scales}, weight
        packed: dict[str, Array] = {"weight_packed": pack(codes + half, self.bits)}
        packed["weight_shape"] = np.array([num_out, num_in])
        if not self.symmetric:
            packed["weight_zero_point"] = pack((zeros + half).T, self.bits).T
        if self.act_order:
            packed["weight_g_idx"] = group_of.astype(np.int32)
        return _tensors(packed) | {"weight_scale": scales}, weight


Form = GPTQ | AWQ | FP8 | Compressed


def write_published(folder: Path, checkpoint: Path, form: Form) -> dict[str, torch.Tensor]:
    """Write `checkpoint` into `folder`, its projections as random codes of `form`; returns all its
    tensors, projections as the float64 numbers that the codes stand for."""
    shutil.copytree(checkpoint, folder)
    rng = np.random.default_rng(0)
    stored, wanted = {}, {}
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items()):
        stored[name] = wanted[name] = tensor
        if name.endswith("_proj.weight"):
            del stored[name]
            made, weight = form.matrix(rng, *tensor.shape)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": value.contiguous() for part, value in made.items()}
            wanted[name] = torch.from_numpy(np.ascontiguousarray(weight))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, form.config())
    return wanted


def change_config(folder: Path, quantization: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(fields))


def pack(codes: Array, bits: int) -> Array:
    """[rows, n] -> [rows, ceil(n * bits / 32)] int32, the first code in the lowest bits."""
    per_word = 32 // bits
    rows, count = codes.shape
    words = np.zeros((rows, ceil(count / per_word)), np.uint32)
    for place in range(count):
        words[:, place // per_word] |= codes[:, place].astype(np.uint32) << np.uint32(
            bits * (place % per_word)
        )
    return words.view(np.int32)


def from_e4m3(codes: Array) -> Array:
    """A sign, four bits of exponent with a bias of 7, three of mantissa (arXiv 2209.05433)."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7) / 8
    numbers = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    return np.where(codes & 0x80, -numbers, numbers)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> Array:
    return ((rng.random(shape) + 0.5) * 0.4 / 2**bits).astype(np.float32)


def _tensors(arrays: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
