"""What a model's KV is called in the store, and how it is laid out there. Needs no torch."""

from __future__ import annotations

import hashlib

from chatkv.errors import UsageError
from chatkv.model.prepared import PreparedModel
from chatkv_store.codec import by_name as codec_by_name
from chatkv_store.keys import namespace
from chatkv_store.layout import BLOCK_TOKENS, KVLayout


def layout_of(model: PreparedModel) -> KVLayout:
    """How the store has the KV of a model."""
    config = model.config
    return KVLayout(
        config.num_layers, config.num_kv_heads, config.head_dim, model.dtype, BLOCK_TOKENS
    )


def namespace_of(model: PreparedModel, kv_codec: str, owner: str = "") -> bytes:
    """Under which a model's KV is stored with a codec: codecs that give back the same bits share
    one, and KV that a lossy codec has changed meets no other. An owner's is its own."""
    try:
        family = codec_by_name(kv_codec).family
    except ValueError as error:
        raise UsageError(f"--kv-codec: {error}") from None
    shared = namespace(model.weights_digest, model.config.digest(), layout_of(model), family)
    if not owner:
        return shared
    return hashlib.sha256(shared + owner.encode()).digest()[: len(shared)]
