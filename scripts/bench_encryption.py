#!/usr/bin/env python
"""What encryption at rest costs: storing, loading and opening, beside the same store unencrypted.

KV of SmolLM2's shape with exponents spread as in real KV; both stores hold the same blocks.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_common import Figure, Options, median_seconds, run, say

from chatkv_store.blocks import BlockStore, NewBlock
from chatkv_store.encryption import KEY_FILE_VARIABLE, start_empty
from chatkv_store.keys import block_key, namespace
from chatkv_store.layout import KVLayout
from chatkv_store.loader import default_threads, load_blocks

Bits = npt.NDArray[Any]

LAYOUT = KVLayout(30, 3, 64, "bfloat16")
SPACE = namespace(b"bench_encryption", b"", LAYOUT, "lossless")
PASSPHRASE = b"a passphrase of the benchmark's own"
REPEATS = 5


def measure(options: Options) -> list[Figure]:
    ids = range(1024 if options.quick else 4096)
    bits = kv(len(ids))
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHATKV_BENCH_DIR")) as name:
        folder = Path(name)
        key = folder / "key"
        key.write_bytes(PASSPHRASE)
        os.environ[KEY_FILE_VARIABLE] = str(key)
        start_empty(folder / "sealed", PASSPHRASE)
        say("storing")
        write_s = {kind: stored(folder / kind, ids, bits) for kind in ("plain", "sealed")}
        say("loading, page cache warm")
        load_s = {kind: loaded(folder / kind, ids, bits) for kind in ("plain", "sealed")}
        open_s = {
            kind: median_seconds(lambda kind=kind: BlockStore(folder / kind).close(), REPEATS)
            for kind in ("plain", "sealed")
        }
        size = {kind: (folder / kind / "data.mdb").stat().st_size for kind in write_s}
    gigabytes = bits.nbytes / 1e9
    return [
        Figure("store, encrypted", gigabytes / write_s["sealed"], "GB/s",
               gigabytes / write_s["plain"], "unencrypted"),
        Figure("warm load, encrypted", gigabytes / load_s["sealed"], "GB/s",
               gigabytes / load_s["plain"], "unencrypted",
               note=f"{default_threads()} threads, {len(ids)} tokens"),
        Figure("open, encrypted", open_s["sealed"] * 1e3, "ms", open_s["plain"] * 1e3,
               "unencrypted", less_is_better=True, note="scrypt makes guessing slow"),
        Figure("file, encrypted", size["sealed"] / 1e6, "MB", size["plain"] / 1e6,
               "unencrypted", less_is_better=True),
    ]  # fmt: skip


def kv(num_tokens: int) -> Bits:
    """[layers, 2, heads, tokens, head_dim] of bf16 bits, every channel with its own scale."""
    random = np.random.default_rng(0)
    shape = (LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, num_tokens, LAYOUT.head_dim)
    scale = np.exp2(random.integers(-6, 5, (*shape[:3], 1, shape[4]))).astype(np.float32)
    values = random.standard_normal(shape, dtype=np.float32) * scale
    return (values.view("<u4") >> 16).astype("<u2")


def stored(path: Path, ids: range, bits: Bits) -> float:
    """Seconds to store everything."""
    blocks, parent = [], SPACE
    for start in range(0, len(ids), LAYOUT.block_tokens):
        some = ids[start : start + LAYOUT.block_tokens]
        part = bits[:, :, :, start : start + LAYOUT.block_tokens]
        values = [
            np.ascontiguousarray(part[layers.start : layers.stop])
            for layers in map(LAYOUT.value_layers, range(LAYOUT.num_values))
        ]
        blocks.append(NewBlock(parent, some, values))
        parent = block_key(parent, some)
    with BlockStore(path) as store:
        began = time.perf_counter()
        store.put(SPACE, LAYOUT, blocks)
        return time.perf_counter() - began


def loaded(path: Path, ids: range, bits: Bits) -> float:
    """Median seconds to load everything; what is loaded is compared with what was stored."""
    out = np.zeros_like(bits)
    with BlockStore(path, read_only=True) as store:
        blocks = store.match(SPACE, ids, LAYOUT).blocks

        def load() -> None:
            load_blocks(store, blocks, LAYOUT, out, default_threads())

        load()
        assert np.array_equal(out, bits)
        return median_seconds(load, REPEATS)


if __name__ == "__main__":
    run("what encryption at rest costs", measure)
