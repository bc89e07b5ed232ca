"""KV of the default model over English text, for benchmarks that depend on what KV looks like."""

from __future__ import annotations

import pydoc_data.topics
import tempfile
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import load_weights
from chatkv_store import KVLayout

CHUNK_TOKENS = 512


def smollm2_kv(num_tokens: int, threads: int = 2) -> tuple[KVLayout, npt.NDArray[Any]]:
    """The layout and the bfloat16 bits [layers, 2, heads, num_tokens, head_dim] of SmolLM2.

    Computed on the CPU, about 10 s for 2000 tokens on two cores. Raises ModelError where the
    default model is not installed.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(find_model(None, Path(folder)), "bfloat16", Path(folder))
        decoder = Decoder(prepared.config, load_weights(prepared))
        text = "\n".join(pydoc_data.topics.topics.values())
        ids = torch.tensor(Tokenizer.from_prepared(prepared).encode(text[: 8 * num_tokens]))
        config = prepared.config
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")
        span = _Span(layout, num_tokens)
        for start in range(0, num_tokens, CHUNK_TOKENS):
            chunk = ids[start : min(start + CHUNK_TOKENS, num_tokens)]
            span.start, span.length = start, len(chunk)
            decoder.forward(chunk, [span])
    return layout, span.kv.view(torch.uint16).numpy()


class _Span:
    """One sequence whose KV lies in one array, as the decoder wants it."""

    draft = place = None

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
        self.kv = torch.empty(shape, dtype=torch.bfloat16)
        self.start = self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.start + self.length
        self.kv[layer, 0, :, self.start : end] = keys.transpose(0, 1)
        self.kv[layer, 1, :, self.start : end] = values.transpose(0, 1)
        return self.kv[layer, 0, :, :end], self.kv[layer, 1, :, :end]
