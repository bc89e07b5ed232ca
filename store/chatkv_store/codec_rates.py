"""How many bytes a codec makes of each token's KV, where that does not depend on the KV."""

from __future__ import annotations

import numpy as np

from chatkv_store.codec import Context, by_name
from chatkv_store.codec_quantised import SINK_TOKENS
from chatkv_store.layout import KVLayout

FIXED = ("raw", "int8", "fp8", "int4")
OPEN = ("lossless", "packed")  # these depend on how exponents are spread


def bytes_per_token(layout: KVLayout) -> dict[str, float | None]:
    """Codec -> bytes for each token of a full block; None where it depends on the KV."""
    found: dict[str, float | None] = dict.fromkeys(OPEN)
    context = Context(layout.dtype, SINK_TOKENS, np.zeros(layout.head_dim // 2, np.float32))
    for name in FIXED:
        codec, num_bytes = by_name(name), 0
        for group in range(layout.num_values):
            shape = layout.value_shape(group, layout.block_tokens)
            num_bytes += len(codec.encode(np.zeros(shape, layout.bits_dtype), context))
        found[name] = num_bytes / layout.block_tokens
    return found
