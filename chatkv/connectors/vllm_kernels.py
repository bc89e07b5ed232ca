"""How vLLM's attention lays KV out within a block, as far as it can be told apart from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatkv.connectors.vllm_tensors import KVTensors


def kernels_of(config: Any, layer_names: Sequence[str], tensors: KVTensors) -> dict[str, Any]:
    """The attention backend, what it compiles for, and how its tensors lie in memory.

    A CPU's kernels pack keys as their instruction set wants them, so that belongs to it.
    """
    layer = config.compilation_config.static_forward_context[layer_names[0]]
    backend = layer.get_attn_backend()
    first = tensors.layers[0]
    found: dict[str, Any] = {
        "backend": backend.get_name(),
        "device": first.device.type,
        "block": [*first.shape[1:]],
        "strides": [*first.stride()[1:]],
        "layers": list(layer_names),
    }
    if first.device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        tokens, width = first.shape[2], first.shape[3]
        found["instructions"] = _get_attn_isa(
            config.model_config.dtype, tokens, width // 2, config.cache_config.cache_dtype
        )
    return found
