"""What a decoder of the Llama family looks like, read from a checkpoint's own description.

Knows: shapes, norms, rotary scaling, windows. Knows nothing of files or tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `kind`: "linear" (position interpolation), "llama3" (Llama 3.1's frequency bands) or "yarn"
    (arXiv 2309.00071). Fields that a kind does not use keep their defaults.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_dim", "max_position"),
)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one decoder; equal configs make the same function of the weights."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens a position may look back on, itself included
    window_from_layer: int = 0  # layers before this one attend to everything

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer in tokens, None where it sees everything."""
        return self.sliding_window if layer >= self.window_from_layer else None

    def digest(self) -> bytes:
        """32 bytes that differ whenever any field does (part of every KV block's key)."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()

    def problem(self) -> str | None:
        """What makes these shapes impossible, None where nothing does."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                return f"{name} is {value!r}, a positive number is needed"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} heads cannot share {self.num_kv_heads} heads of KV evenly"
        if self.head_dim % 2:
            return f"a head size of {self.head_dim} cannot be rotated in pairs"
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelConfig:
        fields = dict(fields)
        scaling = fields.pop("rope_scaling", None)
        return cls(rope_scaling=RopeScaling(**scaling) if scaling else None, **fields)
