"""The tensors of a GGUF file under the names and in the row order of a Hugging Face checkpoint."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig
from chatkv.model.gguf_file import GGUFFile
from chatkv.model.gguf_packed import GGUF_LAYOUTS, packed_weight
from chatkv.model.one_line import one_line
from chatkv.model.quantise import CodedSource, QuantisedWeight
from chatkv.model.weights import expected_shapes

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary constants: the config says what they are.
_IGNORED = {"rope_freqs.weight"}


def tensor_sources(file: GGUFFile, config: ModelConfig) -> list[CodedSource]:
    """Every tensor that `config` asks for, to be dequantised to float32 when its turn comes.

    Raises ModelError for a missing, misshaped or unknown tensor.
    """
    packed = {
        _hf_name(file, name): tensor
        for name, tensor in file.tensors.items()
        if name not in _IGNORED
    }
    sources = []
    for name, shape in expected_shapes(config).items():
        tensor = packed.pop(name, None)
        if tensor is None:
            raise ModelError(f"{file.path} lacks the tensor for {name}")
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise ModelError(
                f"{file.path}: {tensor.name} has shape {list(found)}, expected {list(shape)}"
            )
        sources.append(_source(file, config, name, shape, tensor))
    if packed:
        extra = next(iter(packed.values()))
        raise ModelError(
            f"{file.path}: {one_line(extra.name)} is no tensor of a {config.architecture} model"
        )
    return sources


def _hf_name(file: GGUFFile, name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{suffix}"
    raise ModelError(f"{file.path}: the tensor {one_line(name)} is not known")


def _source(
    file: GGUFFile, config: ModelConfig, name: str, shape: tuple[int, ...], tensor: Any
) -> CodedSource:
    num_heads = 0
    if config.architecture == "llama":  # llama.cpp permutes this architecture's q and k alone
        if ".q_proj." in name:
            num_heads = config.num_heads
        elif ".k_proj." in name:
            num_heads = config.num_kv_heads

    kind = str(tensor.tensor_type.name)

    def packed() -> QuantisedWeight:
        rows = tensor.data.reshape(shape[0], -1).view(numpy.uint8)
        return packed_weight(kind, unpermute(rows, num_heads) if num_heads else rows)

    def load() -> torch.Tensor:
        import gguf

        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelError(
                f"{file.path}: {tensor.name} is stored as {kind}, which cannot be read"
            ) from error
        values = values.reshape(shape)
        if num_heads:
            values = unpermute(values, num_heads)
        return torch.from_numpy(numpy.ascontiguousarray(values))

    layout = GGUF_LAYOUTS.get(kind) if len(shape) == 2 else None
    return CodedSource(name, shape, load, None, layout, packed, kind)


def unpermute(rows: numpy.ndarray[Any, Any], num_heads: int) -> numpy.ndarray[Any, Any]:
    """Undo llama.cpp's row order of a q or k projection; [num_heads * head_dim, ...] both ways.

    llama.cpp rotates neighbouring rows (0,1), (2,3), ... of a head; Hugging Face rotates row i with
    row i + head_dim / 2. Within a head, its row 2i is our i, and 2i + 1 our i + head_dim / 2.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
