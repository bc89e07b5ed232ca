"""The tensors of a published quantised checkpoint, under the names that a decoder asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig
from chatkv.model.one_line import one_line
from chatkv.model.published.read import Tensors, read_codes
from chatkv.model.published.scheme import Rule, Scheme
from chatkv.model.quantise import CodedSource
from chatkv.model.tensor_file import TensorSource
from chatkv.model.weights import TORCH_DTYPES, checked, expected_shapes, is_harmless, map_file

# Of activations and of KV, which are computed with as they are.
_UNUSED = (
    *("input_scale", "input_scale_ub", "input_zero_point", "activation_scale"),
    *("output_scale", "q_scale", "k_scale", "v_scale"),
)


def published_sources(
    files: Sequence[Path], config: ModelConfig, scheme: Scheme
) -> list[TensorSource]:
    """Every tensor that `config` asks for, quantised ones as `CodedSource`; nothing is read but
    scales and the like. Raises ModelError for a missing, misshaped or unknown tensor."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= map_file(file)
    where = str(files[0] if len(files) == 1 else files[0].parent)
    sources = []
    for name, shape in expected_shapes(config).items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype in TORCH_DTYPES.values():
            del tensors[name]
            sources.append(_dense(name, checked(where, name, tensor, shape)))
        else:
            sources.append(_coded(tensors, name, shape, scheme, where))
    for name, tensor in tensors.items():
        if not _means_nothing(name, tensor, config):
            raise ModelError(
                f"{where}: {one_line(name)} is no tensor of a {config.architecture} model "
                f"quantised with {scheme.method}"
            )
    return sources


def _dense(name: str, tensor: torch.Tensor) -> TensorSource:
    return TensorSource(name, tuple(tensor.shape), lambda: tensor)


def _coded(
    tensors: dict[str, torch.Tensor],
    name: str,
    shape: tuple[int, ...],
    scheme: Scheme,
    where: str,
) -> TensorSource:
    module, _, suffix = name.rpartition(".")
    rule = scheme.rule(module) if suffix == "weight" and len(shape) == 2 else None
    if rule is None:
        raise ModelError(f"{where} lacks the tensor {name}")
    codes = read_codes(Tensors(tensors, module, where), (shape[0], shape[1]), rule)
    layout = codes.layout()
    told = f"{scheme.method}, {_told(rule)}"
    return CodedSource(name, shape, codes.dense, None, layout, codes.packed, told)


def _told(rule: Rule) -> str:
    if rule.packing == "float8":
        return (
            "e4m3" if rule.block is None else f"e4m3 in blocks of {rule.block[0]}x{rule.block[1]}"
        )
    groups = "outputs" if rule.group_size == -1 else f"groups of {rule.group_size}"
    return f"{rule.bits} bits in {groups}"


def _means_nothing(name: str, tensor: torch.Tensor, config: ModelConfig) -> bool:
    """Whether nothing would be computed with it: also a bias of zeros, which some tools add."""
    stem, _, suffix = name.rpartition(".")
    if suffix in _UNUSED:
        return True
    is_bias = suffix == "bias" and f"{stem}.weight" in expected_shapes(config)
    return is_harmless(name, config) or (is_bias and not bool(tensor.any()))
