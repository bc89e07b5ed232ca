"""The decoder of the Llama family: embeddings, layers of attention and MLP, the head.

Knows the arithmetic; does not know where KV lives (a `Span` gives and takes it), what a
conversation is, or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.model.config import ModelConfig
from chatkv.model.linear import Linear
from chatkv.model.norm import RmsNorm
from chatkv.model.rope import RopeTable
from chatkv_kernels.attention import decode_attention, prefill_attention
from chatkv_kernels.rope import rope


class Span(Protocol):
    """The new tokens of one sequence in a forward pass, and the KV of all its tokens."""

    @property
    def start(self) -> int:
        """Tokens whose KV is already there: the position of the first new token."""

    @property
    def length(self) -> int:
        """New tokens of this pass."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' KV ([length, num_kv_heads, head_dim] each) and return views of
        everything up to them ([num_kv_heads, start + length, head_dim] each)."""


class Decoder:
    """One model on one device, ready to compute.

    weights: tensors under their HF checkpoint names, all of one dtype; max_position: how many
    positions the rotary tables cover.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        max_position: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        embedding = weights["model.embed_tokens.weight"]
        self.dtype = embedding.dtype
        self.embedding = embedding.to(self.device)
        self.norm = RmsNorm(weights["model.norm.weight"].to(self.device), config.norm_eps)
        head = embedding if config.tie_embeddings else weights["lm_head.weight"]
        self.head = Linear(head.to(self.device))
        self.max_position = max_position or config.max_position
        self.rope = RopeTable(config, self.max_position, self.dtype, self.device)
        self.layers = [
            _Layer(config, weights, index, self.device) for index in range(config.num_layers)
        ]

    @torch.inference_mode()
    def forward(self, ids: Tensor, spans: Sequence[Span], every_position: bool = False) -> Tensor:
        """Logits after each span's last new token: [len(spans), vocab_size] float32.

        ids: [num_new] int64, the spans' new tokens one after the other. With every_position, the
        logits after every new token instead: [num_new, vocab_size].
        """
        cos, sin = self._angles(spans)
        hidden = F.embedding(ids, self.embedding)
        for layer in self.layers:
            hidden = layer.forward(hidden, spans, cos, sin)
        if not every_position and len(spans) != hidden.shape[0]:
            ends = torch.tensor([span.length for span in spans]).cumsum(0) - 1
            hidden = hidden[ends.to(hidden.device)]
        return self.head(self.norm(hidden)).float()

    def _angles(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every new token, [num_new, 1, head_dim] each."""
        ranges = [slice(span.start, span.start + span.length) for span in spans]
        if len(ranges) == 1:
            return self.rope.cos[ranges[0]], self.rope.signed_sin[ranges[0]]
        return (
            torch.cat([self.rope.cos[r] for r in ranges]),
            torch.cat([self.rope.signed_sin[r] for r in ranges]),
        )


class _Layer:
    """Attention and MLP of one layer, each behind its norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], index: int, device: torch.device
    ) -> None:
        prefix = f"model.layers.{index}."

        def get(name: str) -> Tensor:
            return weights[prefix + name].to(device)

        def fused(names: Sequence[str], bias: bool) -> Linear:
            """Matrices that read the same input, as one."""
            return Linear(
                torch.cat([get(f"{name}.weight") for name in names]),
                torch.cat([get(f"{name}.bias") for name in names]) if bias else None,
            )

        def norm(name: str) -> RmsNorm:
            return RmsNorm(get(f"{name}.weight"), config.norm_eps)

        self.config, self.index, self.window = config, index, config.window(index)
        self.attention_norm = norm("input_layernorm")
        self.mlp_norm = norm("post_attention_layernorm")
        self.qkv = fused([f"self_attn.{part}_proj" for part in "qkv"], config.qkv_bias)
        self.output = fused(["self_attn.o_proj"], config.o_bias)
        self.gate_up = fused(["mlp.gate_proj", "mlp.up_proj"], config.mlp_bias)
        self.down = fused(["mlp.down_proj"], config.mlp_bias)
        self.query_norm = norm("self_attn.q_norm") if config.qk_norm else None
        self.key_norm = norm("self_attn.k_norm") if config.qk_norm else None

    def forward(self, hidden: Tensor, spans: Sequence[Span], cos: Tensor, sin: Tensor) -> Tensor:
        """hidden: [num_new, hidden_size] → the same shape."""
        attended = self._attend(self.qkv(self.attention_norm(hidden)), spans, cos, sin)
        hidden = self.output.add(attended, hidden)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        return self.down.add(F.silu(gate).mul_(up), hidden)

    def _attend(self, qkv: Tensor, spans: Sequence[Span], cos: Tensor, sin: Tensor) -> Tensor:
        """qkv: [num_new, (num_heads + 2 num_kv_heads) head_dim] → [num_new, num_heads head_dim]."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, config.head_dim)
        rotated = heads[:, : num_heads + num_kv_heads]
        if self.query_norm is not None and self.key_norm is not None:
            rotated = torch.cat(
                [
                    self.query_norm(rotated[:, :num_heads]),
                    self.key_norm(rotated[:, num_heads:]),
                ],
                1,
            )
        rotated = rope(rotated, cos, sin)
        queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
        values = heads[:, num_heads + num_kv_heads :]
        if len(spans) == 1:
            return self._attend_span(spans[0], queries, keys, values)
        out, start = [], 0
        for span in spans:
            part = slice(start, start + span.length)
            out.append(self._attend_span(span, queries[part], keys[part], values[part]))
            start += span.length
        return torch.cat(out)

    def _attend_span(self, span: Span, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scale = self.config.head_dim**-0.5
        all_keys, all_values = span.extend(self.index, keys, values)
        if span.length == 1:
            out = decode_attention(queries[0], all_keys, all_values, scale, self.window)
        else:
            out = prefill_attention(queries, all_keys, all_values, scale, self.window)
        return out.reshape(span.length, -1)
