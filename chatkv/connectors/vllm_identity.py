"""What one worker's KV is called: everything that it depends on beside the tokens.

Weights by a digest of their files, so that a model of the same name with other weights never meets
this one's KV. The configuration as vLLM has resolved it (overrides and rotary scaling included),
dtype and quantisation. And the layout: vLLM's version, its attention kernels, on a CPU their
instruction set too, the size of blocks, and which part of how many this worker computes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatkv.errors import ModelError, UsageError
from chatkv.model.catalog import find_model
from chatkv.model.identity import weights_digest
from chatkv_store import codec as codecs
from chatkv_store.keys import namespace as kv_namespace
from chatkv_store.layout import KVLayout

# What a configuration says of where it came from, not of what it computes.
_NO_MATTER = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
_SPECULATION = ("ngram", "suffix")  # kinds of drafts that keep no KV of their own


@dataclass(frozen=True)
class Kept:
    """One worker's KV in the store."""

    namespace: bytes
    about: dict[str, Any]  # for listings, see `BlockStore.register`
    engine: str
    codec: str


def refuse_unknown(config: Any, kv_config: Any) -> None:
    """Raise UsageError for a vLLM whose KV depends on more than this module knows."""
    model, parallel = config.model_config, config.parallel_config
    speculation = config.speculative_config
    groups = kv_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise UsageError(f"only models with full attention in all layers, not {', '.join(kinds)}")
    if model.use_mla:
        raise UsageError("not for models with latent attention (MLA)")
    if config.load_config.load_format == "dummy":
        raise UsageError("not with --load-format dummy: such weights are in no file")
    if config.cache_config.cache_dtype != "auto":
        raise UsageError("only with --kv-cache-dtype auto")
    if speculation is not None and speculation.method not in _SPECULATION:
        raise UsageError(f"not with drafts by {speculation.method}, whose KV is not kept")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UsageError("not with context parallelism")


def keep(
    config: Any,
    layout: KVLayout,
    rank: tuple[int, int],
    kernels: dict[str, Any],
    codec: str,
    cache: Path,
    version: str,
) -> Kept:
    """The name of the KV of the worker with this (pipeline, tensor) rank.

    `kernels` say how KV lies within a block. Raises ModelError where the weights are in no file
    here, UsageError for a codec that would change them.
    """
    model, parallel = config.model_config, config.parallel_config
    codec = layout_codec(layout) if codec == "auto" else codec
    chosen = _lossless(codec)
    files = find_model(str(model.model), cache, may_download=False)
    if files.kind != "hf":
        raise ModelError(f"{files.path}: only checkpoints in safetensors can be told apart here")
    digest = hashlib.sha256(weights_digest(files.files, cache))
    digest.update(f"vllm/{model.dtype}/{model.quantization}".encode())
    of = (parallel.pipeline_parallel_size, parallel.tensor_parallel_size)
    depends_on = {
        "config": _plain(model.hf_text_config.to_dict(), _NO_MATTER),
        "context": model.max_model_len if _is_scaled_by_length(model.hf_text_config) else None,
        "vllm": version,
        "kernels": kernels,
        "rank": [*rank, *of],
    }
    text = json.dumps(depends_on, sort_keys=True, default=str)
    space = kv_namespace(
        digest.digest(), hashlib.sha256(text.encode()).digest(), layout, chosen.family
    )
    name = model.served_model_name or files.name
    name = name[0] if isinstance(name, list) else str(name)
    part = f", part {rank[0] * of[1] + rank[1] + 1} of {of[0] * of[1]}" if of != (1, 1) else ""
    about = {
        "model": f"{name} (vLLM{part})",
        "layout": layout.to_json(),
        "codec": chosen.family,
    }
    return Kept(space, about, "vLLM", codec)


def layout_codec(layout: KVLayout) -> str:
    """The codec by itself. Of numbers of 32 bits `lossless` saves a sixth, and takes more than
    twice as long to load."""
    return "raw" if layout.bytes_per_element == 4 else "lossless"


def _lossless(codec: str) -> codecs.Codec:
    try:
        chosen = codecs.by_name(codec)
    except ValueError as error:
        raise UsageError(f"kv_codec: {error}") from None
    if codecs.is_lossy(chosen):
        raise UsageError(f"kv_codec: {codec} needs KV as chatkv lays it out; take a lossless one")
    return chosen


def _is_scaled_by_length(config: Any) -> bool:
    """Whether rotary frequencies follow from the longest context that is set."""
    text = json.dumps(config.to_dict(), default=str)
    return "longrope" in text or "dynamic" in text


def _plain(value: Any, without: tuple[str, ...] = ()) -> Any:
    """Values that JSON knows, whatever a configuration holds."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items() if key not in without}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
