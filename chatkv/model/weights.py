"""The weights of a prepared model, mapped into memory under their Hugging Face names.

Mapped tensors cost no reading at start: pages come from the page cache as the first forward pass
touches them, and several processes share them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig
from chatkv.model.mapped import drop_pages
from chatkv.model.one_line import one_line
from chatkv.model.quantise import (
    Layout,
    QuantisedWeight,
    from_parts,
    is_quantised,
    layout_of,
    part_names,
)

if TYPE_CHECKING:
    from chatkv.model.prepared import PreparedModel

Weight: TypeAlias = torch.Tensor | QuantisedWeight

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a decoder of this config computes with.

    Projections are [out, in]. A tied head is the embedding and has no entry of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        projections = {
            "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, config.o_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class LoadedWeights(Mapping[str, Weight]):
    """Tensors by name, in one dtype or quantised; those named `halves` are of float16.

    Those stored in that dtype are mapped (do not write to them); others are converted whenever they
    are asked for, so that a model never lies in memory in both.
    """

    def __init__(
        self, as_stored: Mapping[str, Weight], dtype: torch.dtype, halves: Container[str] = ()
    ) -> None:
        self.as_stored, self._dtype, self._halves = as_stored, dtype, halves

    def __getitem__(self, name: str) -> Weight:
        weight = self.as_stored[name]
        if not isinstance(weight, torch.Tensor) or name in self._halves:
            return weight
        return weight.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_stored)

    def __len__(self) -> int:
        return len(self.as_stored)

    def drop(self, name: str) -> None:
        """Let its pages of the file go: it was copied."""
        drop_pages(self.as_stored[name])


def load_weights(prepared: PreparedModel) -> LoadedWeights:
    """Every tensor of `expected_shapes(prepared.config)`, in the dtype it was prepared for or
    quantised.

    Raises ModelError for a damaged file and for a missing, misshaped or unknown tensor.
    """
    dtype = TORCH_DTYPES[prepared.dtype]
    shapes = expected_shapes(prepared.config)
    tensors: dict[str, Weight] = {}
    mapped = {file: map_file(file) for file in prepared.weights}
    modules = tuple(_module_prefixes(mapped.values(), prepared.config))
    for file, found in mapped.items():
        if prepared.quantised not in (None, "fp16"):
            tensors |= _take_quantised(file, found, shapes, prepared.quantised == "own")
        for name, tensor in found.items():
            if name in shapes:
                tensors[name] = checked(file, name, tensor, shapes[name])
            elif not is_harmless(name, prepared.config) and not name.startswith(modules):
                architecture = prepared.config.architecture
                raise ModelError(
                    f"{file}: {one_line(name)} is no tensor of a {architecture} model with this "
                    "config.json"
                )
    if missing := [name for name in shapes if name not in tensors]:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{prepared.folder} lacks the tensor {missing[0]}{others}")
    halves = [*filter(is_quantised, shapes)] if prepared.quantised == "fp16" else []
    return LoadedWeights(tensors, dtype, frozenset(halves))


def stored_layouts(prepared: PreparedModel) -> dict[str, Layout]:
    """Of the matrices that are codes, by name. Nothing is read but the file's header."""
    stored = load_weights(prepared).as_stored.items()
    return {name: layout_of(one) for name, one in stored if not isinstance(one, torch.Tensor)}


def dense_weight(weight: Weight) -> torch.Tensor:
    """One that is not quantised."""
    assert isinstance(weight, torch.Tensor)
    return weight


def _take_quantised(
    file: Path,
    found: dict[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    may_be_dense: bool,
) -> dict[str, QuantisedWeight]:
    """The quantised matrices among `found`, whose parts are taken out of it."""
    taken = {}
    for name in filter(is_quantised, shapes):
        if may_be_dense and name in found:
            continue
        weight = from_parts(found, name, shapes[name])
        if weight is None:
            raise ModelError(f"{file}: {name} is not there as it was quantised")
        taken[name] = weight
        for part in part_names(name):
            found.pop(part, None)
    return taken


def map_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped: nothing is read. Raises ModelError."""
    import safetensors

    try:
        with safetensors.safe_open(str(file), framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, ValueError, RuntimeError) as error:
        raise ModelError(f"{file} is no sound safetensors file: {one_line(error)}") from error


def checked(
    file: Path | str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """The same tensor. Raises ModelError where it is not of this shape, or of no dtype to compute
    in."""
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{file}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in TORCH_DTYPES.values():
        stored = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{file}: {name} is stored as {stored}, which is not supported")
    return tensor


def _module_prefixes(
    mapped: Iterable[Mapping[str, torch.Tensor]], config: ModelConfig
) -> Iterator[str]:
    """Of the modules that a checkpoint has behind its layers (see `mtp_file`)."""
    for names in mapped:
        for name in names:
            prefix = name.removesuffix("eh_proj.weight")
            number = prefix.removeprefix("model.layers.").rstrip(".")
            if prefix != name and number.isdigit() and int(number) >= config.num_layers:
                yield prefix


def is_harmless(name: str, config: ModelConfig) -> bool:
    """Tensors some checkpoints carry although nothing computes with them."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_embeddings
    )
