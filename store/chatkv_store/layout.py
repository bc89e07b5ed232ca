"""The shape of KV on disk: how many layers share one value, and how many bytes it has.

A block's KV is cut along the layers into values, so that the first layers of a long history can
arrive before the last ones. A small model's layer is small (48 KiB for SmolLM2), and values that
small cost more in calls than in copying, so neighbouring layers share a value.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

DType = Literal["bfloat16", "float16", "float32"]

BLOCK_TOKENS = 64
MIN_VALUE_BYTES = 256 * 1024


@dataclass(frozen=True)
class KVLayout:
    """How one model's KV is laid out.

    The array of value `g` of a block is [layers, 2 (K, V), num_kv_heads, tokens, head_dim], where
    `layers` are those of `value_layers(g)`. It holds bits: uint16 for bfloat16 and float16,
    uint32 for float32.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise ValueError(f"KV dtype must be one of {get_args(DType)}, not {self.dtype!r}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= 0xFFFF:  # headers keep them in 16 bits
                raise ValueError(f"KVLayout.{name} must be in 1..65535, not {value}")
        if self.head_dim % 2:
            raise ValueError(f"KVLayout.head_dim must be even, not {self.head_dim}")

    @property
    def bytes_per_element(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def bits_dtype(self) -> str:
        """The numpy dtype (little-endian) of the bits: "<u2" or "<u4"."""
        return f"<u{self.bytes_per_element}"

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element

    @property
    def bytes_per_layer_block(self) -> int:
        """K and V of one layer of one full block."""
        return self.bytes_per_token // self.num_layers * self.block_tokens

    @property
    def layers_per_value(self) -> int:
        """The fewest layers whose KV of a full block reaches MIN_VALUE_BYTES."""
        return min(self.num_layers, -(-MIN_VALUE_BYTES // self.bytes_per_layer_block))

    @property
    def num_values(self) -> int:
        return -(-self.num_layers // self.layers_per_value)

    def value_layers(self, group: int) -> range:
        """The layers in value `group`, 0 <= group < num_values."""
        if not 0 <= group < self.num_values:
            raise IndexError(f"value {group} of {self.num_values}")
        first = group * self.layers_per_value
        return range(first, min(first + self.layers_per_value, self.num_layers))

    def value_shape(self, group: int, num_tokens: int) -> tuple[int, int, int, int, int]:
        """[layers, 2, num_kv_heads, num_tokens, head_dim] of value `group`."""
        layers = len(self.value_layers(group))
        return (layers, 2, self.num_kv_heads, num_tokens, self.head_dim)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KVLayout:
        return cls(**json.loads(text))
