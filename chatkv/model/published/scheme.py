"""What a config.json says of quantised weights, as far as it is understood.

Knows the fields, not the tensors. What is not understood is refused by name: a checkpoint read by
the wrong rule answers nonsense without an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from chatkv.errors import ModelError
from chatkv.model.one_line import one_line

Packing = Literal["gptq", "awq", "float8", "packed", "plain"]
"""How codes lie in tensors: `gptq` and `awq` have qweight, qzeros and scales; `float8` a weight of
that dtype with its scales; `packed` and `plain` are compressed-tensors with weight_packed, and with
a weight of one byte each."""

_METHODS = "gptq, awq, fp8, fbgemm_fp8, compressed-tensors"
_INSTEAD = "take the model's full checkpoint, and --weights int4 for less memory"


@dataclass(frozen=True)
class Rule:
    """How one group of matrices is stored. bits: of a code; group_size: inputs that share a scale,
    -1 for all of an output; zero_offset: what is added to a stored zero point; block: [outputs,
    inputs] that share a scale, or none; targets: of which modules, as compressed-tensors does it.
    """

    packing: Packing
    bits: int
    group_size: int = -1
    zero_offset: int = 0
    is_symmetric: bool = False
    block: tuple[int, int] | None = None
    targets: tuple[str, ...] = ("Linear",)

    def applies(self, module: str) -> bool:
        """To a projection of this name."""
        return any(
            target == "Linear"
            or (re.match(target[3:], module) if target.startswith("re:") else target == module)
            for target in self.targets
        )


@dataclass(frozen=True)
class Scheme:
    """`method` as the config calls it; the first rule that applies counts."""

    method: str
    rules: tuple[Rule, ...]

    def rule(self, module: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.applies(module)), None)

    def digest(self) -> bytes:
        """32 bytes that differ whenever the same tensors mean other weights."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


def scheme_of(fields: dict[str, Any], where: str) -> Scheme | None:
    """By the `quantization_config` or `compression_config` of a config.json, None where it has
    none; `where` begins each error. Raises ModelError."""
    config = fields.get("quantization_config") or fields.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{where}: quantization_config should be an object")
    method = str(config.get("quant_method", "unknown"))
    read = _READERS.get(method)
    if read is None:
        raise ModelError(
            f"{where}: weights quantised with {method!r} are not supported (supported: "
            f"{_METHODS}); {_INSTEAD}"
        )
    try:
        return Scheme(method, read(_Fields(config, f"{where}: {method}")))
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: {method}: a field makes no sense: {one_line(error)}") from error


class _Fields:
    """A config whose values are asked for by name; `where` begins each error."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def refuse(self, name: str, allowed: str) -> ModelError:
        value = self.values.get(name)
        return ModelError(
            f"{self.where}: {name} {value!r} is not supported (supported: {allowed}); {_INSTEAD}"
        )

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = self.values.get(name, default)
        value = default if value is None else value
        if isinstance(value, str):
            value = value.lower()
        if value not in allowed or isinstance(value, bool) != isinstance(default, bool):
            raise self.refuse(name, ", ".join(map(str, allowed)))
        return value

    def group_size(self, default: int | None = None) -> int:
        value = self.values.get("group_size", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < -1 or value == 0:
            raise self.refuse("group_size", "-1 for all inputs of an output, or a number of them")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not (
            isinstance(value, list)
            and len(value) == 2
            and all(isinstance(size, int) and size > 0 for size in value)
        ):
            raise self.refuse(name, "two sizes, [outputs, inputs]")
        return value[0], value[1]

    def object(self, name: str) -> _Fields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise ModelError(f"{self.where}: {name} is missing or no object")
        return _Fields(value, f"{self.where}, {name}")


def _gptq(config: _Fields) -> tuple[Rule, ...]:
    bits = config.one_of("bits", (4, 8), 0)
    form = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if any(not str(name).startswith("-:") for name in config.values.get("dynamic") or ()):
        raise ModelError(
            f"{config.where}: matrices with rules of their own (dynamic) are not supported; "
            f"{_INSTEAD}"
        )
    # v1 stores each zero point less one (github.com/AutoGPTQ, QuantLinear.pack); v2 as it is.
    return (Rule("gptq", bits, config.group_size(-1), zero_offset=1 if form == "gptq" else 0),)


def _awq(config: _Fields) -> tuple[Rule, ...]:
    bits = config.one_of("bits", (4,), config.values.get("w_bit", 4))
    config.one_of("version", ("gemm",), "gemm")
    config.one_of("backend", ("autoawq",), "autoawq")
    default = config.values.get("q_group_size", 128)
    return (Rule("awq", bits, config.group_size(default)),)


def _fp8(config: _Fields) -> tuple[Rule, ...]:
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return (Rule("float8", 8, block=config.block("weight_block_size")),)


def _fbgemm_fp8(config: _Fields) -> tuple[Rule, ...]:
    return (Rule("float8", 8),)


def _compressed(config: _Fields) -> tuple[Rule, ...]:
    sparsity = config.values.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ModelError(
            f"{config.where}: sparse weights ({sparsity['format']!r}) are not supported; {_INSTEAD}"
        )
    groups = config.object("config_groups")
    if not groups.values:
        raise ModelError(f"{config.where}: config_groups names no group")
    return tuple(_compressed_group(config, groups.object(name)) for name in groups.values)


def _compressed_group(config: _Fields, group: _Fields) -> Rule:
    given = group if group.values.get("format") else config
    form = given.one_of(
        "format", ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized"), ""
    )
    weights = group.object("weights")
    kind = weights.one_of("type", ("int", "float"), "int")
    bits = weights.one_of("num_bits", (8,) if kind == "float" else (4, 8), 8)
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "channel")
    if form == "pack-quantized" and kind == "float":
        raise weights.refuse("type", "int, where format is pack-quantized")
    if form == "float-quantized" and kind == "int":
        raise weights.refuse("type", "float, where format is float-quantized")
    if form != "pack-quantized" and bits != 8:
        raise weights.refuse("num_bits", f"8, where format is {form}")
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not all(map(_is_target, targets)):
        raise ModelError(f"{group.where}: targets should be a list of names")
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.refuse("block_structure", "two sizes, [outputs, inputs]")
    packing: Packing = "packed" if form == "pack-quantized" else "plain"
    return Rule(
        "float8" if kind == "float" else packing,
        bits,
        weights.group_size() if strategy == "group" else -1,
        is_symmetric=weights.one_of("symmetric", (True, False), True),
        block=block,
        targets=tuple(targets),
    )


def _is_target(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        return not name.startswith("re:") or bool(re.compile(name[3:]))
    except re.error:
        return False


_READERS: dict[str, Callable[[_Fields], tuple[Rule, ...]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed,
}
