"""What a KV block is called: a hash chain over everything its KV depends on.

    namespace = H(codec family, layout, digest of the config, digest of the weights)
    block     = H(parent's key, the block's token ids)        the first parent is the namespace

Equal keys mean equal model, equal layout and equal tokens from the very first one, so blocks are
shared by content among sessions and branches, and never among models. A namespace and a block are
hashed under different personalisations, so one can never be taken for the other.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from chatkv_store.layout import KVLayout

KEY_BYTES = 32
ID_BYTES = 4


def namespace(weights: bytes, config: bytes, layout: KVLayout, codec_family: str) -> bytes:
    """The key under which all KV of one model in one layout hangs.

    `weights` and `config` are digests; `codec_family` tells apart codecs whose decoded KV differs
    (all lossless ones are one family).
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"chatkv-space-1")
    for part in (weights, config, layout.to_json().encode(), codec_family.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int] | bytes) -> bytes:
    """The key of the block that holds `token_ids` after the chain that ends in `parent`.

    `token_ids` may be packed already. Fewer than a block's worth of ids name a partial block.
    """
    packed = token_ids if isinstance(token_ids, bytes) else pack_ids(token_ids)
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"chatkv-block-1")
    digest.update(parent)
    digest.update(packed)
    return digest.digest()


def chain_keys(namespace: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """The keys of the blocks that `token_ids` make; the last one may be partial."""
    packed = pack_ids(token_ids)
    keys, parent = [], namespace
    for start in range(0, len(packed), block_tokens * ID_BYTES):
        parent = block_key(parent, packed[start : start + block_tokens * ID_BYTES])
        keys.append(parent)
    return keys


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array("I", token_ids)
    assert packed.itemsize == ID_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """The ids that `pack_ids` packed."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
