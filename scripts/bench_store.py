#!/usr/bin/env python
"""The disk tier: how fast stored KV comes back, and how small it is.

Warm: from the page cache into a pool, decoded and verified, beside one thread that copies the same
KV uncompressed out of the map through memoryviews. Cold: after dropping the file from the page
cache, beside what `dd` reads from the same file. The KV is that of SmolLM2-135M over English text.

What no program could do better here is measured too: as many threads as a load has, which only copy
the same bytes in the same pieces, or only decode them. A goal beyond that is not judged.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from bench_common import Figure, Options, median_seconds, run, say, seconds

from chatkv_store import BlockStore, KVLayout, NewBlock, block_key, load_blocks, namespace
from chatkv_store import codec as codecs
from chatkv_store.loader import default_threads
from chatkv_store.tables import value_key

HISTORY_TOKENS = 4096
REPEATS = 5
Bits = npt.NDArray[Any]


@dataclass(frozen=True)
class History:
    """KV of a history and its name in a store."""

    layout: KVLayout
    bits: Bits  # [layers, 2, heads, HISTORY_TOKENS, head_dim]
    space: bytes
    ids: range

    def blocks(self) -> list[NewBlock]:
        blocks, parent = [], self.space
        for start in self.ids[:: self.layout.block_tokens]:
            ids = self.ids[start : start + self.layout.block_tokens]
            blocks.append(NewBlock(parent, ids, self._value_of(start)))
            parent = block_key(parent, ids)
        return blocks

    def _value_of(self, start: int) -> Callable[[int], Bits]:
        tokens = slice(start, start + self.layout.block_tokens)

        def value(group: int) -> Bits:
            layers = self.layout.value_layers(group)
            return self.bits[layers.start : layers.stop, :, :, tokens]

        return value


def measure(options: Options) -> Iterator[Figure]:
    history = smollm2_history(256 if options.quick else HISTORY_TOKENS)
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHATKV_BENCH_DIR")) as folder:
        say("storing it, raw and lossless")
        for name in ("raw", "lossless"):
            with BlockStore(Path(folder) / name) as store:
                store.put(history.space, history.layout, history.blocks(), name)
        yield from warm_figures(Path(folder), history)
        codec = codec_figures(history)
        yield from codec
        decode_rates = [figure.value or 0.0 for figure in codec if "decode" in figure.name]
        yield cold_figure(Path(folder) / "lossless", history, *decode_rates)


def smollm2_history(computed_tokens: int) -> History:
    """HISTORY_TOKENS of real KV; fewer are computed, and repeated, where time is short."""
    from real_kv import smollm2_kv

    say(f"computing the KV of {computed_tokens} tokens")
    layout, bits = smollm2_kv(computed_tokens)
    bits = np.tile(bits, (1, 1, 1, HISTORY_TOKENS // computed_tokens, 1))
    space = namespace(b"bench_store", b"", layout, "lossless")
    return History(layout, bits, space, range(HISTORY_TOKENS))


def warm_figures(folder: Path, history: History) -> list[Figure]:
    say("warm reads")
    threads = default_threads()
    size = history.bits.nbytes
    pool = np.zeros_like(history.bits)
    with BlockStore(folder / "raw", read_only=True) as store:
        copying = median_seconds(memoryview_copies(store, history, pool), REPEATS)
        raw = median_seconds(lambda: load(store, history, pool, threads), REPEATS)
    with BlockStore(folder / "lossless", read_only=True) as store:
        load(store, history, pool, threads)
        assert np.array_equal(pool, history.bits)
        lossless = median_seconds(lambda: load(store, history, pool, threads), REPEATS)
    copies = median_seconds(block_copies(history, pool, threads), REPEATS)
    baseline, bound = size / copying / 1e9, size / copies / 1e9
    name = "memoryview copies of raw values, 1 thread"

    def figure(what: str, rate: float) -> Figure:
        of_bound = f"{rate / bound:.0%} of what {threads} threads reach that only copy"
        return Figure(what, rate, "GB/s", baseline, name, goal=3, bound=bound, note=of_bound)

    return [
        figure("warm load, lossless", size / lossless / 1e9),
        figure("warm load, raw", size / raw / 1e9),
        Figure(f"copies alone, {threads} threads", bound, "GB/s", baseline, name),
        Figure(
            f"warm load of {HISTORY_TOKENS} tokens, lossless",
            lossless * 1e3,
            "ms",
            goal=60,
            goal_of="value",
            goal_is="<=",
            note=f"{threads} threads, as for all loads here",
        ),
    ]


def memoryview_copies(store: BlockStore, history: History, pool: Bits) -> Callable[[], None]:
    """The plain way to fetch raw values: one after the other into the pool's memory, undecoded."""
    keys = [block.key for block in found(store, history)]
    target = pool.data.cast("B", [pool.nbytes])

    def copy() -> None:
        at = 0
        for group in range(history.layout.num_values):
            for key in keys:
                with store.env.read() as txn:
                    value = txn.get(value_key(key, group), db=store.db["values"])
                    end = min(at + len(value), len(target))  # payloads have a head of 4 bytes
                    target[at:end] = value[: end - at]
                    at = end

    copy()
    return copy


def block_copies(history: History, pool: Bits, threads: int) -> Callable[[], None]:
    """What the memory allows a load: the same bytes in the same pieces, and nothing but copied."""
    layout, pieces = history.layout, []
    for group in range(layout.num_values):
        layers = layout.value_layers(group)
        for start in range(0, HISTORY_TOKENS, layout.block_tokens):
            tokens = slice(start, start + layout.block_tokens)
            place = (slice(layers.start, layers.stop), slice(None), slice(None), tokens)
            pieces.append((pool[place], np.ascontiguousarray(history.bits[place])))
    return lambda: in_threads(threads, lambda piece: np.copyto(*piece), pieces)


def in_threads(threads: int, work: Callable[[Any], object], items: Sequence[Any]) -> None:
    """`work` on every item, each thread on its share."""

    def share(first: int) -> None:
        for item in items[first::threads]:
            work(item)

    running = [threading.Thread(target=share, args=(first,)) for first in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def cold_figure(folder: Path, history: History, decode_1: float, decode_all: float) -> Figure:
    """Cold loads and dd take turns, so that both meet the same disk.

    A load cannot be faster than the disk, nor than all cores are at decoding (GB/s, of one thread
    and of all) and at moving what was read out of the kernel, which dd's own CPU time tells.
    """
    say("cold reads")
    name = "cold load, lossless"
    data = folder / "data.mdb"
    if (why := cannot_drop(data)) is not None:
        return Figure(name, None, "GB/s", goal=0.9, note=why)
    pool = np.zeros_like(history.bits)

    def load_cold() -> float:
        drop(data)
        with BlockStore(folder, read_only=True) as store:
            return seconds(lambda: load(store, history, pool, default_threads()))

    def dd_cold() -> tuple[float, float]:
        drop(data)
        command = ["dd", f"if={data}", "of=/dev/null", "bs=4M", "status=none"]
        before_s = children_cpu_s()
        return seconds(lambda: subprocess.run(command, check=True)), children_cpu_s() - before_s

    turns = [(load_cold(), *dd_cold()) for _ in range(REPEATS)]
    load_s, dd_s, dd_cpu_s = (float(np.median(times)) for times in zip(*turns, strict=True))
    size, cores = history.bits.nbytes, len(os.sched_getaffinity(0))
    decode_s, decode_cpu_s = size / decode_all / 1e9, size / decode_1 / 1e9
    bound_s = max(dd_s, decode_s, (decode_cpu_s + dd_cpu_s) / cores)
    return Figure(
        name,
        size / load_s / 1e9,
        "GB/s",
        size / dd_s / 1e9,
        "dd of the file x the codec's ratio",
        goal=0.9,
        bound=size / bound_s / 1e9,
        note=f"dd reads {data.stat().st_size / dd_s / 1e9:.2f} GB/s and is on a core for "
        f"{dd_cpu_s / dd_s:.0%} of that time; decoding alone reaches {decode_1:.2f} GB/s on one "
        f"thread and {decode_all:.2f} on {default_threads()}",
    )


def codec_figures(history: History) -> list[Figure]:
    """Every value of the history through the codec and through plain zstd, on one thread."""
    say("codecs")
    values = [
        np.ascontiguousarray(block.values(group))  # type: ignore[operator]
        for block in history.blocks()[::4]
        for group in range(history.layout.num_values)
    ]
    size = sum(value.nbytes for value in values)
    lossless, compressor = codecs.by_name("lossless"), zstandard.ZstdCompressor(level=3)
    decompressor = zstandard.ZstdDecompressor()
    ours = [lossless.encode(value) for value in values]
    plain = [compressor.compress(value.data) for value in values]
    threads = default_threads()
    # Each where a load would put it: where values go is half of the work.
    pool = np.zeros_like(history.bits)
    places = []
    for start in range(0, HISTORY_TOKENS, 4 * history.layout.block_tokens):
        for group in range(history.layout.num_values):
            layers = history.layout.value_layers(group)
            tokens = slice(start, start + history.layout.block_tokens)
            places.append(pool[layers.start : layers.stop, :, :, tokens])
    coded = [(codecs.staged([one]), place) for one, place in zip(ours, places, strict=True)]

    def decode(threads: int) -> None:
        in_threads(threads, lambda one: lossless.decode(*one), coded)

    works: dict[str, Callable[[], object]] = {
        "encode": lambda: [lossless.encode(value) for value in values],
        "decode": lambda: decode(1),
        "decode, all": lambda: decode(threads),
        "zstd encode": lambda: [compressor.compress(value.data) for value in values],
        "zstd decode": lambda: [decompressor.decompress(payload) for payload in plain],
    }
    rates = {name: size / median_seconds(work, REPEATS) / 1e9 for name, work in works.items()}
    name = "plain zstd, level 3"
    ratio, plain_ratio = (size / sum(map(len, payloads)) for payloads in (ours, plain))
    return [
        Figure("lossless size", ratio, "x smaller", plain_ratio, name, goal=1.45, goal_of="value"),
        Figure("lossless encode, 1 thread", rates["encode"], "GB/s", rates["zstd encode"], name),
        Figure(
            "lossless decode, 1 thread",
            rates["decode"],
            "GB/s",
            rates["zstd decode"],
            name,
            goal=1.5,
            goal_of="value",
        ),
        Figure(f"lossless decode, {threads} threads", rates["decode, all"], "GB/s"),
    ]


def found(store: BlockStore, history: History) -> list[Any]:
    match = store.match(history.space, history.ids, history.layout)
    assert match.num_tokens == HISTORY_TOKENS, match.miss
    return match.blocks


def load(store: BlockStore, history: History, pool: Bits, threads: int) -> None:
    """What a restore does: find the blocks, then read them all."""
    result = load_blocks(store, found(store, history), history.layout, pool, threads)
    assert result.num_tokens_ok == HISTORY_TOKENS, result.misses


def drop(file: Path) -> None:
    """Forget the file's pages; nobody may have them mapped."""
    with opened(file) as descriptor:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cannot_drop(file: Path) -> str | None:
    """Why the file stays in memory whatever we ask, or None where it leaves."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return "this system cannot drop a file from its page cache"
    if shutil.which("dd") is None:
        return "there is no dd to compare with"
    drop(file)
    with opened(file) as descriptor:
        try:
            os.preadv(descriptor, [bytearray(4096)], file.stat().st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"cannot tell whether the page cache was dropped: {error}"
    return f"{file.parent} lies on a file system that keeps everything in memory"


@contextmanager
def opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    assert __doc__ is not None
    run(__doc__.splitlines()[0], measure)
