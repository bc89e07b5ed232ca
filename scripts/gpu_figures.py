"""What `bench_gpu` measures on a device: each section gives values and baselines of its figures."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rig import Rig
from torch import Tensor

from chatkv.engine.runner import GRAPH_SIZES
from chatkv.engine.scheduler import Piece
from chatkv.engine.sequence import TokenSequence
from chatkv.restore.calibration import _forget
from chatkv_kernels.linear import linear
from chatkv_kernels.packed import pack_packed, unpack_packed
from chatkv_store.environment import DATA_FILE
from chatkv_store.loader import default_threads, load_blocks

# name → (value, baseline); a figure that is not there could not be measured.
Found = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Sizes:
    """Tokens of history, and bytes of plain copies."""

    decode: tuple[int, ...] = (512, 8192, 32768)
    prefill: tuple[int, ...] = (2048, 8192, 32768)
    restored: int = 8192
    stored: int = 4096
    saved: int = 128  # tokens decoded while their blocks are saved
    copied: int = 1 << 30
    prompt: int = 32

    @property
    def pool(self) -> int:
        """Tokens that the pool has to hold."""
        return 2 * max(*self.decode, *self.prefill, self.restored, self.stored) + 64 * 64


def copies(rig: Rig, sizes: Sizes) -> Found:
    """The roofs: plain copies within the device, and from the host's memory to it."""
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=rig.device).fill_(1)
    target = torch.empty_like(source)
    within_s = rig.seconds(lambda: target.copy_(source))
    pinned, pageable = rig.host(sizes.copied), rig.host(sizes.copied // 4, is_pinned=False)
    pinned_s = rig.seconds(lambda: target.copy_(pinned, non_blocking=True))
    pageable_s = rig.seconds(lambda: target[: pageable.numel()].copy_(pageable))
    pageable_rate = pageable.numel() / pageable_s / 1e9
    return {
        "HBM copy": (2 * sizes.copied / within_s / 1e9, None),
        "pinned host to device": (sizes.copied / pinned_s / 1e9, pageable_rate),
    }


def decode(rig: Rig, sizes: Sizes, copy_rate: float) -> Found:
    """Whole steps, the logits' way to the host included, as bytes read a second."""
    found: Found = {}
    config = rig.config
    embedding = config.vocab_size * config.hidden_size * rig.dtype.itemsize
    weights = rig.ledger.weights - (0 if config.tie_embeddings else embedding)
    for num_tokens in sizes.decode:
        with rig.sequence(num_tokens) as sequence:
            step_s = rig.seconds(lambda one=sequence: rig.step(one), 20)  # type: ignore[misc]
        num_bytes = weights + num_tokens * rig.layout.bytes_per_token
        found[f"decode at {num_tokens}"] = num_bytes / step_s / 1e9, copy_rate
    return found


class _Contiguous:
    """One sequence in memory of its own (a `Span`), for the library's attention."""

    is_draft = False

    def __init__(self, rig: Rig, length: int) -> None:
        layout = rig.layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, length, layout.head_dim)
        self.kv = torch.empty(shape, dtype=rig.dtype, device=rig.device)
        self.start, self.length = 0, length

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.kv[layer, 0].copy_(keys.transpose(0, 1))
        self.kv[layer, 1].copy_(values.transpose(0, 1))
        return self.kv[layer, 0], self.kv[layer, 1]


def prefill(rig: Rig, sizes: Sizes) -> Found:
    """One pass over a whole prompt: paged, and with the library's attention over plain memory."""
    found: Found = {}
    for num_tokens in sizes.prefill:
        with rig.sequence(num_tokens) as sequence:
            piece = Piece(sequence, 0, num_tokens)
            paged_s = rig.seconds(lambda one=piece: rig.runner.forward([one]), 3)  # type: ignore[misc]
        span = _Contiguous(rig, num_tokens)
        ids = torch.tensor(rig.ids(num_tokens), device=rig.device)
        plain_s = rig.seconds(
            lambda ids=ids, span=span: rig.engine.decoder.forward(ids, [span]),  # type: ignore[misc]
            3,
        )
        found[f"prefill of {num_tokens}"] = num_tokens / paged_s, num_tokens / plain_s
        del span
    return found


def from_host(rig: Rig, sizes: Sizes, pinned_rate: float) -> Found:
    """KV that lies in slabs, to blocks anywhere in the pool: by the loader's threads, as it is."""
    layout, kv = rig.layout, rig.kv
    group_bytes = layout.bytes_per_layer_block * layout.layers_per_value
    per_slab = kv.way.ring.slab_bytes // group_bytes
    with rig.sequence(sizes.restored) as sequence, ThreadPoolExecutor(default_threads()) as threads:
        blocks = sequence.run.blocks

        def send(task: tuple[int, int]) -> None:
            group, start = task
            layers, table = layout.value_layers(group), blocks[start : start + per_slab]
            shape = (len(table), len(layers), *rig.pool.kv.shape[2:])
            with kv.way.ring.slab() as slab:
                values = slab.view(rig.dtype)[: torch.Size(shape).numel()]
                kv.send(values.view(shape), layers, table)

        tasks = [
            (group, start)
            for group in range(layout.num_values)
            for start in range(0, len(blocks), per_slab)
        ]
        seconds = rig.seconds(lambda: list(threads.map(send, tasks)))
    num_bytes = len(blocks) * layout.bytes_per_token * layout.block_tokens
    return {"restore from host memory": (num_bytes / seconds / 1e9, pinned_rate)}


def from_disk(rig: Rig, sizes: Sizes, codec: str) -> Found:
    """Stored KV to the pool, the file in the page cache and not."""
    found: Found = {}
    num_tokens = sizes.stored
    num_bytes = num_tokens * rig.layout.bytes_per_token
    with rig.stored(num_tokens, codec) as (restorer, ids), rig.sequence(num_tokens) as sequence:
        assert restorer.disk is not None
        store = restorer.disk.store
        blocks = store.match(restorer.disk.namespace, ids, rig.layout).blocks
        into = rig.kv.destination(sequence.run)

        def load() -> None:
            done = load_blocks(store, blocks, rig.layout, into, default_threads())
            assert done.num_tokens_ok == num_tokens

        shape = (rig.layout.num_layers, 2, rig.layout.num_kv_heads, num_tokens, rig.layout.head_dim)
        array = torch.empty(shape, dtype=torch.int16).numpy().view("<u2")
        if rig.layout.bytes_per_element == 4:
            array = torch.empty(shape, dtype=torch.int32).numpy().view("<u4")
        alone_s = rig.seconds(lambda: load_blocks(store, blocks, rig.layout, array, 1), 1)
        found[f"restore from disk, {codec}, warm"] = (
            num_bytes / rig.seconds(load) / 1e9,
            num_bytes / alone_s / 1e9,
        )
        file = store.path / DATA_FILE
        if _forget(file):
            began = time.perf_counter()
            load()
            cold_s = time.perf_counter() - began
            _forget(file)
            payload_bytes = load_blocks(store, blocks, rig.layout, array, 1).bytes_read
            _forget(file)
            disk_rate = _read_rate(str(file))
            best_rate = disk_rate * num_bytes / payload_bytes
            found[f"restore from disk, {codec}, cold"] = num_bytes / cold_s / 1e9, best_rate / 1e9
    return found


def both_ends(rig: Rig, sizes: Sizes) -> Found:
    """A stored history to the logits behind it, by each plan. Both at once are compared with the
    two rates added up where neither is so slow that it could not help."""
    found: Found = {}
    num_tokens, times = sizes.stored, {}
    with rig.stored(num_tokens) as (restorer, ids):
        restorer.calibrate(rig.scratch)
        for plan in ("reload", "re-prefill", "both"):
            times[plan] = rig.seconds(lambda p=plan: first_logits(rig, restorer, ids, p), 3)  # type: ignore[misc]
        if max(times["reload"], times["re-prefill"]) <= 4 * min(
            times["reload"], times["re-prefill"]
        ):
            rates = num_tokens / times["reload"] + num_tokens / times["re-prefill"]
            found["both ends"] = num_tokens / times["both"], rates
    return found


def first_logits(rig: Rig, restorer: Any, ids: list[int], wanted: str) -> None:
    """From a conversation that is only on disk to the logits behind it."""
    sequence = TokenSequence()
    planned = restorer.plan(sequence, ids, len(ids) - 1, wanted)
    restored = restorer.restore(sequence, planned)
    try:
        rig.engine.prefill(sequence, arriving=restored.arriving)
    finally:
        if restored.arriving is not None:
            restored.arriving.close()
        rig.pool.release(sequence.run)


def _read_rate(path: str) -> float:
    """Bytes a second that the loader's threads read of a file, whatever is in it."""
    size, piece = os.path.getsize(path), 1 << 24

    def read(start: int) -> int:
        file = os.open(path, os.O_RDONLY)
        try:
            return len(os.pread(file, piece, start))
        finally:
            os.close(file)

    began = time.perf_counter()
    with ThreadPoolExecutor(default_threads()) as threads:
        num_bytes = sum(threads.map(read, range(0, size, piece)))
    return num_bytes / (time.perf_counter() - began)


def saving(rig: Rig, sizes: Sizes) -> Found:
    """Milliseconds a token, and while each block goes to the host as it fills."""
    with rig.sequence(sizes.restored) as sequence:

        def answer(saves: bool) -> None:
            for token in range(sizes.saved):
                rig.step(sequence)
                if saves and token % rig.layout.block_tokens == 0:
                    rig.kv.copy(sequence.run, 0, rig.layout.block_tokens)

        plain_s = rig.seconds(lambda: answer(False), 3)
        saving_s = rig.seconds(lambda: answer(True), 3)
    return {"decode while saving": (saving_s / sizes.saved * 1e3, plain_s / sizes.saved * 1e3)}


def codec(rig: Rig, sizes: Sizes) -> Found:
    """Lossless packing on the device, bytes of KV a second."""
    if rig.dtype == torch.float32:
        return {}
    blocks = min(64, rig.pool.num_blocks)
    table = torch.arange(blocks, dtype=torch.int32, device=rig.device)
    num_bytes = blocks * rig.layout.bytes_per_token * rig.layout.block_tokens
    payloads, ends = pack_packed(rig.pool.kv, table)
    pack_s = rig.seconds(lambda: pack_packed(rig.pool.kv, table))
    unpack_s = rig.seconds(lambda: unpack_packed(payloads, ends[:-1], rig.pool.kv, table))
    return {
        "packing": (num_bytes / pack_s / 1e9, None),
        "unpacking": (num_bytes / unpack_s / 1e9, None),
    }


def linears(rig: Rig, sizes: Sizes) -> Found:
    """One row through the model's matrices: the kernel, and the library."""
    layer = rig.engine.decoder.layers[0]
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
    weights = [
        matrix.weight.to_dense() if matrix.weight.is_mkldnn else matrix.weight
        for matrix in matrices
    ]
    rows = [torch.randn(1, weight.shape[1], device=rig.device).to(rig.dtype) for weight in weights]

    def all_of(function: Callable[[Tensor, Tensor], Tensor]) -> float:
        def work() -> None:
            for row, weight in zip(rows, weights, strict=True):
                function(row, weight)

        return sum(weight.nbytes for weight in weights) / rig.seconds(work, 20) / 1e9

    return {"linears of one row": (all_of(linear), all_of(F.linear))}


def memory(rig: Rig, sizes: Sizes) -> Found:
    """How far off the ledger is, once the largest steps have run. A GPU alone can tell."""
    if not rig.is_gpu:
        return {}
    sequences = [TokenSequence(rig.ids(2)) for _ in range(GRAPH_SIZES[-1])]
    prompt = TokenSequence(rig.ids(512))
    for one in (*sequences, prompt):
        rig.pool.reserve(one.run, len(one.ids))
    for size in GRAPH_SIZES:
        rig.step(*sequences[:size])
    decodes = [Piece(one, 1, 2, is_decode=True) for one in sequences]
    rig.runner.forward([*decodes, Piece(prompt, 0, 512)])
    rig.sync()
    for one in (*sequences, prompt):
        rig.pool.release(one.run)
    peak = torch.cuda.max_memory_allocated(rig.device)
    return {"ledger": (abs(rig.ledger.total / peak - 1) * 100, None)}


def naive(rig: Rig, sizes: Sizes) -> Found:
    """A resume and a token, beside transformers with its cache in a file."""
    try:
        theirs_all: Any = import_module("transformers")
    except ImportError:
        return {}
    new_cache = theirs_all.DynamicCache
    config, num_tokens = rig.config, sizes.stored
    ids = rig.ids(num_tokens)
    theirs = theirs_all.LlamaForCausalLM(
        theirs_all.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    ).to(rig.device, rig.dtype)
    history = torch.tensor([ids[: -sizes.prompt]], device=rig.device)
    prompt = torch.tensor([ids[-sizes.prompt :]], device=rig.device)
    with torch.inference_mode():
        cache = theirs(history, past_key_values=new_cache(), logits_to_keep=1).past_key_values
        saved = io.BytesIO()
        torch.save([(layer.keys, layer.values) for layer in cache.layers], saved)

        def resume() -> Any:
            saved.seek(0)
            again = new_cache()
            for layer, (keys, values) in enumerate(torch.load(saved, map_location=rig.device)):
                again.update(keys, values, layer)
            theirs(prompt, past_key_values=again, logits_to_keep=1)
            return again

        resume_s, again = rig.seconds(resume, 3), resume()
        token = prompt[:, -1:]
        token_s = rig.seconds(lambda: theirs(token, past_key_values=again), 20)
    with rig.stored(num_tokens) as (restorer, _):
        ours_s = rig.seconds(lambda: _resumed(rig, restorer, ids, sizes.prompt), 3)
    with rig.sequence(num_tokens) as sequence:
        our_token_s = rig.seconds(lambda: rig.step(sequence), 20)
    return {
        "resume, small model": (ours_s * 1e3, resume_s * 1e3),
        "token, small model": (our_token_s * 1e3, token_s * 1e3),
    }


def _resumed(rig: Rig, restorer: Any, ids: list[int], num_prompt: int) -> None:
    """The history from the disk, the prompt behind it computed."""
    sequence = TokenSequence()
    history = ids[:-num_prompt]
    planned = restorer.plan(sequence, [*history, *[0] * num_prompt], len(history), "reload")
    restored = restorer.restore(sequence, planned)
    try:
        rig.engine.prefill(sequence, arriving=restored.arriving)
    finally:
        if restored.arriving is not None:
            restored.arriving.close()
        rig.pool.release(sequence.run)


def sections(rig: Rig, sizes: Sizes) -> Iterator[Found]:
    """All of one model but `naive`, the roofs first."""
    roofs = copies(rig, sizes)
    yield roofs
    yield memory(rig, sizes)
    yield decode(rig, sizes, roofs["HBM copy"][0])
    yield prefill(rig, sizes)
    yield from_host(rig, sizes, roofs["pinned host to device"][0])
    for name in ("lossless", "packed"):
        yield from_disk(rig, sizes, name)
    yield both_ends(rig, sizes)
    yield saving(rig, sizes)
    yield codec(rig, sizes)
    yield linears(rig, sizes)
