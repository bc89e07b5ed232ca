"""What kernels of the store's codecs share: where a slab lies in the pool, how sections end."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slab_of(pool, block, slab, heads, block_stride, layer_stride, kv_stride, head_stride):
    """Where the keys or values of one head of a block begin in the pool."""
    layer, kv, head = slab // (2 * heads), slab // heads % 2, slab % heads
    pool += block.to(tl.int64) * block_stride + layer.to(tl.int64) * layer_stride
    return pool + kv.to(tl.int64) * kv_stride + head.to(tl.int64) * head_stride


@triton.jit
def zero_padding(section, size):
    """The bytes behind a section up to a multiple of 8."""
    place = size + tl.arange(0, 8)
    tl.store(section + place, tl.zeros((8,), tl.uint8), place < (size + 7) // 8 * 8)
