"""The record of one block: what it claims to hold and how to check it.

    prefix      format version, codec, value count, layout, token count, created, namespace, parent
    token ids   u32 each; compared on every hit, so that not even a hash collision serves wrong KV
    values      length and digest of each value's payload
    digest      xxh3-128 of all the bytes above

Digests are xxh3-128: they catch what disks and crashes do (a flipped or torn value differs with
probability 1 - 2^-128) at the speed of memory. They are no defence against somebody who writes
into the user's own cache folder, and need not be: who can do that can replace the program. Keys,
which separate models and conversations, are cryptographic (keys.py).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from chatkv_store.keys import ID_BYTES, block_key
from chatkv_store.layout import DType, KVLayout

FORMAT_VERSION: Final = 1
DIGEST_BYTES: Final = 16

_PREFIX = struct.Struct("<HBBHHHHHHd32s32s")
_VALUE = struct.Struct("<I16s")
_DTYPES: Final[tuple[DType, ...]] = ("bfloat16", "float16", "float32")


class HeaderDamaged(ValueError):
    """The bytes are no sound header of this version."""


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """One value's payload as it must be on disk."""

    num_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BlockHeader:
    codec: int
    layout: KVLayout
    created: float  # seconds since the epoch
    namespace: bytes
    parent: bytes
    ids: bytes  # packed, see keys.pack_ids
    values: tuple[ValueEntry, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def key(self) -> bytes:
        return block_key(self.parent, self.ids)

    @property
    def num_payload_bytes(self) -> int:
        return sum(value.num_bytes for value in self.values)

    @property
    def num_raw_bytes(self) -> int:
        """The bytes of its KV before the codec."""
        return self.num_tokens * self.layout.bytes_per_token

    def pack(self) -> bytes:
        layout = self.layout
        parts = [
            _PREFIX.pack(
                FORMAT_VERSION,
                self.codec,
                _DTYPES.index(layout.dtype),
                len(self.values),
                layout.num_layers,
                layout.num_kv_heads,
                layout.head_dim,
                layout.block_tokens,
                self.num_tokens,
                self.created,
                self.namespace,
                self.parent,
            ),
            self.ids,
            *(_VALUE.pack(value.num_bytes, value.digest) for value in self.values),
        ]
        packed = b"".join(parts)
        return packed + digest(packed)


def unpack(packed: bytes) -> BlockHeader:
    """The header in `packed`; raises HeaderDamaged where a byte is not as it was written."""
    if len(packed) < _PREFIX.size + DIGEST_BYTES:
        raise HeaderDamaged("header cut short")
    (version,) = struct.unpack_from("<H", packed)
    if version != FORMAT_VERSION:
        raise HeaderDamaged(f"block format {version}, this program knows {FORMAT_VERSION}")
    if digest(packed[:-DIGEST_BYTES]) != packed[-DIGEST_BYTES:]:
        raise HeaderDamaged("header digest differs")
    (
        _,
        codec,
        dtype,
        num_values,
        layers,
        heads,
        head_dim,
        block_tokens,
        num_tokens,
        created,
        space,
        parent,
    ) = _PREFIX.unpack_from(packed)
    ids_end = _PREFIX.size + num_tokens * ID_BYTES
    values_end = ids_end + num_values * _VALUE.size
    if values_end + DIGEST_BYTES != len(packed):
        raise HeaderDamaged("header length differs")
    return BlockHeader(
        codec,
        _layout(layers, heads, head_dim, _DTYPES[dtype], block_tokens),
        created,
        space,
        parent,
        packed[_PREFIX.size : ids_end],
        tuple(ValueEntry(*entry) for entry in _VALUE.iter_unpack(packed[ids_end:values_end])),
    )


_layout = lru_cache(maxsize=64)(KVLayout)  # a store knows few, and has a header for every block


def stands_under(packed: bytes | memoryview, parent: bytes, first_id: bytes) -> bool:
    """Whether a packed header says that its parent and its first token are these; no digest is
    looked at."""
    ends = _PREFIX.size - len(parent), _PREFIX.size, _PREFIX.size + len(first_id)
    return packed[ends[0] : ends[1]] == parent and packed[ends[1] : ends[2]] == first_id


def digest(data: bytes | memoryview) -> bytes:
    """xxh3-128 of any contiguous bytes."""
    import xxhash

    result: bytes = xxhash.xxh3_128_digest(data)
    return result
