"""The store's `packed` codec: the bytes that chatkv_store/codec_packed.py describes and writes.

Payloads lie in one tensor of bytes, at offsets that are multiples of 8. For 16-bit KV of heads
whose size is a multiple of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel

FORMAT_VERSION = 1
CODEC_ID = 2
HEAD_BYTES = 8
ESCAPE = 7
LOWER_BASES = 3  # how far below the largest exponent a base is looked for


@has_kernel
def unpack_packed(payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor) -> None:
    """pool[table[i]] = the KV of the payload at offsets[i].

    payloads: uint8 [num_bytes]; offsets: int64 [n]; pool: bfloat16 or float16 [num_blocks,
    num_layers, 2, num_kv_heads, tokens, head_dim], a view of what the payloads hold: their layers
    and as many tokens as theirs, rows of a head contiguous; table: int32 [n]. Payloads are taken
    to be sound and of the pool's dtype: whoever read them has verified their digest.
    """
    check_pool(pool)
    for offset, block in zip(offsets.tolist(), table.tolist(), strict=True):
        out = pool[block]
        bits = _unpacked(payloads[offset:], out.shape, pool.dtype == torch.float16)
        out.copy_(bits.view(pool.dtype))


@has_kernel
def pack_packed(pool: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The payloads of pool[table[i]], one behind the other, as the store would encode them.

    pool, table: as in `unpack_packed`. Returns uint8 payloads and int64 offsets [n + 1]: payload i
    is payloads[offsets[i] : offsets[i + 1]]. What is behind the last one means nothing: how much
    was needed is known on the device only.
    """
    check_pool(pool)
    packed = [_packed(block, pool.dtype == torch.float16) for block in pool[table.long()]]
    sizes = torch.tensor([0] + [payload.numel() for payload in packed], device=pool.device)
    empty = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return torch.cat([empty, *packed]), sizes.cumsum(0)


def check_pool(pool: Tensor) -> None:
    if pool.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"KV to pack must be bfloat16 or float16, not {pool.dtype}")
    if pool.shape[-1] % 8:
        raise ValueError(f"head_dim must be a multiple of 8 to pack KV, not {pool.shape[-1]}")
    if pool.shape[-2] > 255:
        raise ValueError(f"blocks to pack must have at most 255 tokens, not {pool.shape[-2]}")
    if pool.stride()[-2:] != (pool.shape[-1], 1):
        raise ValueError("the rows of a head must be contiguous in the pool")


def _packed(block: Tensor, is_half: bool) -> Tensor:
    """The payload of one block [layers, 2, heads, tokens, head_dim]."""
    bits = block.contiguous().view(torch.int16).int() & 0xFFFF
    slabs = bits.shape[0] * bits.shape[1] * bits.shape[2]
    if is_half:
        exponents, low = bits >> 10 & 31, bits & 0xFF
        rest = _pack3(bits >> 13 & 4 | bits >> 8 & 3)
    else:
        exponents, low = bits >> 7 & 0xFF, bits >> 8 & 0x80 | bits & 0x7F
        rest = []
    base = _bases(exponents)
    codes = ((base.unsqueeze(3) - exponents) & 0xFF).clamp(max=ESCAPE)
    escapes = codes == ESCAPE
    counts = escapes.reshape(slabs, -1).sum(1)
    head = torch.tensor([FORMAT_VERSION, CODEC_ID, 2, int(is_half)], dtype=torch.uint8)
    sections = [
        (counts.cumsum(0) - counts).int().view(torch.uint8),
        base,
        low,
        *_pack3(codes),
        *rest,
        exponents[escapes],
    ]
    num_escapes = counts.sum().int().view(1).view(torch.uint8)
    return torch.cat([head.to(bits.device), num_escapes, *map(_padded, sections)])


def _unpacked(payload: Tensor, shape: torch.Size, is_half: bool) -> Tensor:
    """The bits of one payload, int16 of `shape`; more may follow behind it."""
    size, slabs = shape.numel(), shape[:3].numel()
    at = HEAD_BYTES + 4 * slabs

    def section(num_bytes: int) -> Tensor:
        nonlocal at
        taken = payload[at : at + num_bytes].long()
        at += -(-num_bytes // 8) * 8
        return taken

    base = section(slabs * shape[4]).view(*shape[:3], 1, shape[4])
    low = section(size).view(shape)
    codes = _unpack3(section(size // 4), section(size // 8)).view(shape)
    exponents = (base - codes) & 0xFF
    if is_half:
        rest = _unpack3(section(size // 4), section(size // 8)).view(shape)
    escapes = codes == ESCAPE
    exponents[escapes] = section(int(escapes.sum()))
    if is_half:
        bits = (rest & 4) << 13 | (exponents & 31) << 10 | (rest & 3) << 8 | low
    else:
        bits = (low & 0x80) << 8 | exponents << 7 | low & 0x7F
    return bits.to(torch.int16)


def _bases(exponents: Tensor) -> Tensor:
    """Of the largest exponent of a channel and the few below it, the one that leaves the fewest
    escapes, the largest of equals: [layers, 2, heads, head_dim]."""
    top = exponents.amax(3)
    bases = torch.stack([top - top.clamp(max=lower) for lower in range(LOWER_BASES + 1)])
    distances = (bases.unsqueeze(4) - exponents) & 0xFF
    fewest = (distances >= ESCAPE).sum(4).argmin(0, keepdim=True)
    return bases.gather(0, fewest)[0]


def _pack3(codes: Tensor) -> list[Tensor]:
    codes = codes.flatten()
    places = torch.arange(8, device=codes.device)
    low = ((codes.view(-1, 4) & 3) << 2 * places[:4]).sum(1)
    return [low, (codes.view(-1, 8) >> 2 << places).sum(1)]


def _unpack3(low: Tensor, high: Tensor) -> Tensor:
    places = torch.arange(8, device=low.device)
    lower = low.unsqueeze(1) >> 2 * places[:4] & 3
    return lower.flatten() | (high.unsqueeze(1) >> places & 1).flatten() << 2


def _padded(section: Tensor) -> Tensor:
    section = section.flatten().to(torch.uint8)
    return torch.nn.functional.pad(section, (0, -section.numel() % 8))
