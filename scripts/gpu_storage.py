"""What `bench_gpu` measures of restoring and saving (see `gpu_figures`)."""

from __future__ import annotations

import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from typing import Any

import torch
from gpu_figures import Found, Sizes, answered
from gpu_rig import Rig

from chatkv.engine.sequence import TokenSequence
from chatkv_store.environment import DATA_FILE
from chatkv_store.loader import default_threads, load_blocks
from chatkv_store.page_cache import forget


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
        if forget(file):
            began = time.perf_counter()
            load()
            cold_s = time.perf_counter() - began
            forget(file)
            payload_bytes = load_blocks(store, blocks, rig.layout, array, 1).bytes_read
            forget(file)
            disk_rate = _read_rate(str(file))
            best_rate = disk_rate * num_bytes / payload_bytes
            found[f"restore from disk, {codec}, cold"] = num_bytes / cold_s / 1e9, best_rate / 1e9
    return found


def plans(rig: Rig, sizes: Sizes) -> Found:
    """A stored history to the logits behind it, by each plan and by the one that is chosen. Both
    ends at once are compared with the two rates added up where neither is so slow that it could
    not help."""
    found: Found = {}
    num_tokens = sizes.stored
    with rig.stored(num_tokens) as (restorer, ids):
        restorer.calibrate(rig.scratch)

        def taken(plan: str) -> float:
            return rig.seconds(lambda: first_logits(rig, restorer, ids, plan), 3)

        load_s, prefill_s, both_s = (taken(plan) for plan in ("reload", "re-prefill", "both"))
        best_s = min(load_s, prefill_s, both_s)
        found["planner"] = taken("auto") * 1e3, best_s * 1e3
        if max(load_s, prefill_s) <= 4 * min(load_s, prefill_s):
            found["both ends"] = num_tokens / both_s, num_tokens / load_s + num_tokens / prefill_s
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
    """Milliseconds a token, and while each block is encoded on the device and written as it
    fills. Every answer is another one, so that none is stored already."""
    seeds = count()
    num_tokens = 8 * rig.layout.block_tokens
    with rig.stored(num_tokens, "packed") as (restorer, ids):

        def answer(saves: bool) -> None:
            for sequence, _ in answered(rig, ids, sizes.saved, next(seeds), 1.0):
                if saves:
                    restorer.save(sequence)

        plain_s = rig.seconds(lambda: answer(False), 3)
        saving_s = rig.seconds(lambda: answer(True), 3)
    return {"decode while saving": (saving_s / sizes.saved * 1e3, plain_s / sizes.saved * 1e3)}


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
