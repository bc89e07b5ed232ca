"""Attention over paged KV in one pass: a softmax that is corrected as larger scores appear.

The scheme is FlashAttention's (arXiv 2205.14135), cut along the keys where queries alone would not
fill the device (Flash-Decoding: the parts are merged by `merge`). The rows of a tile are the heads
of one group of several queries, which read the same keys once: decode is the case of one query.

Powers are of two, since that is the instruction: `scale` carries log2(e). Numbers that change from
launch to launch are not specialised on, so that no turn waits for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def flash(
    query,  # [num_new, num_heads, head_dim]
    keys,  # [num_blocks, num_kv_heads, block_tokens, head_dim], the last two contiguous
    values,
    block_table,  # [num_seqs, max_blocks]
    starts,  # [num_seqs + 1], None where every sequence has one query
    lengths,  # [num_seqs]
    out,  # [num_new, num_heads, head_dim], contiguous
    parts,  # [num_new, num_heads, num_splits, head_dim] float32, None where there is one split
    weights,  # [num_new, num_heads, num_splits] float32, log2 of each part's sum of powers
    scale,
    window,
    num_splits,
    query_stride,
    query_head_stride,
    table_stride,
    block_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # head_dim, padded to a power of two
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # tokens per step
    WINDOWED: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    split = tl.program_id(0) % num_splits
    # The last queries see the most keys: they start first, so that none of them ends alone.
    tile = tl.num_programs(0) // num_splits - 1 - tl.program_id(0) // num_splits

    length = tl.load(lengths + sequence)
    first_row, num_new = sequence, 1
    if starts is not None:
        first_row = tl.load(starts + sequence)
        num_new = tl.load(starts + sequence + 1) - first_row
    if tile * QUERIES >= num_new:
        return

    row = tl.arange(0, ROWS)
    new = tile * QUERIES + row // GROUP
    position = length - num_new + new
    first = length - num_new + tile * QUERIES
    stop = tl.minimum(first + QUERIES, length)
    column = tl.arange(0, WIDTH)
    head = kv_head * GROUP + row % GROUP
    present = (row < QUERIES * GROUP) & (new < num_new)
    token = (first_row + new).to(tl.int64)
    q = tl.load(
        query + token[:, None] * query_stride + head[:, None] * query_head_stride + column[None, :],
        present[:, None] & (column < HEAD_DIM)[None, :],
        other=0.0,
    )

    # Steps [low, high) are this split's, and in [full, causal) of them no query masks anything.
    seen = 0
    if WINDOWED:
        seen = tl.maximum(first - window + 1, 0) // TILE
    steps = tl.cdiv(tl.cdiv(stop, TILE) - seen, num_splits)
    low = (seen + split * steps) * TILE
    high = tl.minimum(low + steps * TILE, stop)
    causal = tl.minimum((first + 1) // TILE * TILE, high)
    full = low
    if WINDOWED:
        full = tl.maximum(low, tl.cdiv(tl.maximum(stop - window, 0), TILE) * TILE)

    table = block_table + sequence.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    # Finite, so that a row of which nothing is seen yet makes no inf - inf.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    if WINDOWED:
        top, total, mixed = _scan(
            low, tl.minimum(full, high), high, q, keys, values, table, position, scale, window,
            block_stride, top, total, mixed,
            HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, True, True,
        )  # fmt: skip
    top, total, mixed = _scan(
        full, causal, high, q, keys, values, table, position, scale, window,
        block_stride, top, total, mixed,
        HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, False, False,
    )  # fmt: skip
    top, total, mixed = _scan(
        tl.maximum(full, causal), high, high, q, keys, values, table, position, scale, window,
        block_stride, top, total, mixed,
        HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, True, WINDOWED,
    )  # fmt: skip

    place = token * NUM_HEADS + head
    mixed /= tl.where(total > 0, total, 1.0)[:, None]
    inside = present[:, None] & (column < HEAD_DIM)[None, :]
    if parts is None:
        to = out + place[:, None] * HEAD_DIM + column[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), inside)
    else:
        place = place * num_splits + split
        if low < high:  # a part of nothing is not read either
            tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], mixed, inside)
        tl.store(weights + place, top + tl.log2(total), present)


@triton.jit
def _scan(
    begin, end, high, q, keys, values, table, position, scale, window,
    block_stride, top, total, mixed,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Steps [begin, end), of tokens below `high`, enter the softmax of each row: its largest score
    so far, its sum of powers relative to that, and the values mixed by these powers."""
    column = tl.arange(0, WIDTH)
    # Known a step ahead: to look a block up in the step that loads it would leave the pipeline
    # no room to have several loads under way.
    block = _blocks(table, begin, high, BLOCK_TOKENS, TILE)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        within = (token % BLOCK_TOKENS * HEAD_DIM)[:, None] + column[None, :]
        if BLOCK_TOKENS % TILE == 0:
            place = block.to(tl.int64) * block_stride + within
        else:
            place = (block.to(tl.int64) * block_stride)[:, None] + within
        if MASKED:
            inside = (token < high)[:, None] & (column < HEAD_DIM)[None, :]
            k = tl.load(keys + place, inside, other=0.0)
            v = tl.load(values + place, inside, other=0.0)
        elif WIDTH > HEAD_DIM:
            k = tl.load(keys + place, (column < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + place, (column < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys + place)
            v = tl.load(values + place)
        block = _blocks(table, start + TILE, high, BLOCK_TOKENS, TILE)

        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = (token[None, :] <= position[:, None]) & (token < high)[None, :]
            if WINDOWED:
                visible &= token[None, :] > position[:, None] - window
            score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        power = tl.exp2(score * scale - new_top[:, None])
        faded = tl.exp2(top - new_top)
        total = total * faded + tl.sum(power, 1)
        mixed = tl.dot(power.to(v.dtype), v, mixed * faded[:, None], input_precision="ieee")
        top = new_top
    return top, total, mixed


@triton.jit
def _blocks(table, start, high, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """The block of the tile at `start`, or that of each of its tokens where blocks are smaller."""
    if BLOCK_TOKENS % TILE == 0:
        return tl.load(table + start // BLOCK_TOKENS, start < high, other=0)
    else:
        token = start + tl.arange(0, TILE)
        return tl.load(table + token // BLOCK_TOKENS, token < high, other=0)


@triton.jit(do_not_specialize=["num_splits"])
def merge(
    parts,  # [rows, num_splits, head_dim] float32
    weights,  # [rows, num_splits] float32, log2; -inf where a split saw nothing
    out,  # [rows, head_dim]
    num_splits,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,  # splits per step
):
    """Each row's parts, mixed by their shares of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    top = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([WIDTH], tl.float32)
    for start in range(0, num_splits, TILE):
        split = start + tl.arange(0, TILE)
        weight = tl.load(weights + row * num_splits + split, split < num_splits, float("-inf"))
        used = weight > float("-inf")
        part = tl.load(
            parts + (row * num_splits + split)[:, None] * HEAD_DIM + column[None, :],
            used[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(weight, 0))
        power = tl.exp2(weight - new_top)
        faded = tl.exp2(top - new_top)
        total = total * faded + tl.sum(power, 0)
        mixed = mixed * faded + tl.sum(part * power[:, None], 0)
        top = new_top
    mixed /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + column, mixed.to(out.dtype.element_ty), column < HEAD_DIM)
