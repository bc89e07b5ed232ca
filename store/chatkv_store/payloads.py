"""What all codecs share: the interface, payloads of neighbouring blocks, and how damage is said."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from chatkv_store.layout import DType

FORMAT_VERSION: Final = 1

Bits = npt.NDArray[Any]  # uint16 or uint32, [layers, 2, heads, tokens, head_dim]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Payloads = Sequence[Bytes]  # of neighbouring blocks, wherever they lie; nobody writes to them

HEAD = struct.Struct("<BBBB")  # format version, codec id, bytes per element, and see the codec
DTYPES: Final[tuple[DType, ...]] = ("bfloat16", "float16", "float32")  # by their number in payloads


class PayloadDamaged(ValueError):
    """Payload `index` of a run does not decode to the shape that was asked for."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(frozen=True, slots=True)
class Context:
    """What a codec may know of a value beyond its bits. Lossless codecs need none of it.

    `start` is the position of the first token. `inverse_frequencies`, float32 [head_dim / 2], are
    those of the rotary embedding that the keys carry (half-split layout); None where they carry
    none. Its magnitude (YaRN) is not needed: a rotation is undone and done again by the same
    angles, and a factor on all keys passes through both.
    """

    dtype: DType = "bfloat16"
    start: int = 0
    inverse_frequencies: Floats | None = None


class Codec(Protocol):
    """Turns the bits of one value into bytes and back. Safe to use from several threads.

    `family` names what the decoded KV is: equal for codecs that give back the same bits. It is
    part of a namespace, so that KV of two families never meets.
    """

    id: int
    name: str
    family: str

    def encode(self, bits: Bits, context: Context | None = None) -> bytes:
        """The payload of `bits`, [layers, 2, heads, tokens, head_dim], any strides."""

    def decode(self, payloads: Payloads, out: Bits) -> None:
        """Write the values of n blocks side by side into `out`, any strides.

        `out` is [layers, 2, heads, n * tokens, head_dim]. Raises PayloadDamaged before anything
        is written.
        """


def per_block(out: Bits, num_blocks: int) -> Bits:
    """[layers, 2, heads, blocks * tokens, head_dim] as [blocks, layers, 2, heads, tokens, ...]."""
    layers, _, heads, tokens, head_dim = out.shape
    split = out.reshape(layers, 2, heads, num_blocks, tokens // num_blocks, head_dim)
    return split.transpose(3, 0, 1, 2, 4, 5)


def check_head(payloads: Payloads, index: int, wanted: bytes) -> None:
    """Raise PayloadDamaged unless payload `index` starts with `wanted`."""
    found = payloads[index][: len(wanted)].tobytes()
    if found != wanted:
        raise PayloadDamaged(index, f"it starts with {found.hex()}, not {wanted.hex()}")
