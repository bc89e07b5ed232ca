#!/usr/bin/env python
"""What weights of fewer bits save: decode and prefill with projections in 16, 8 and 4 bits, beside
our own bfloat16 and, where it is to be had, llama.cpp on the same file and threads.

llama.cpp is asked where CHATKV_LLAMA_PYTHON names a Python that has llama-cpp-python: it is no
dependency of anything here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import chatkv  # noqa: F401  before torch: it says how OpenMP's threads wait

# isort: split
import torch
from bench_common import Figure, Options, run

from chatkv.engine.engine import Engine
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.model.catalog import find_model
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.dtype import choose_dtype
from chatkv.model.few_rows import MeasuredRows
from chatkv.model.prepared import Quantised, prepare
from chatkv.model.quantise import is_quantised, quantise
from chatkv.model.weights import TORCH_DTYPES, Weight, expected_shapes, load_weights
from chatkv.process import prepare_to_compute

ROUNDS = 3
KINDS: tuple[Quantised | None, ...] = (None, "int8", "int4")
# The shape of Llama 3.2 1B, with a small vocabulary: its head is not quantised.
ONE_B = ModelConfig("llama", 32_000, 2048, 8192, 16, 32, 8, 64, 1e-5, 5e5, 4096)
LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, threads, context, steps = sys.argv[1], *map(int, sys.argv[2:])
model = Llama(path, n_ctx=context + steps + 8, n_threads=threads, n_threads_batch=threads,
              verbose=False)
ids = [1 + 7 * i % 40000 for i in range(context)]
began = time.perf_counter()
model.eval(ids)
prefill_s = time.perf_counter() - began
times = []
for step in range(steps):
    began = time.perf_counter()
    model.eval([5 + step])
    times.append(time.perf_counter() - began)
print(json.dumps({"prefill_s": prefill_s, "times": times}))
"""


class Talk:
    """A decoder with one conversation of so many tokens."""

    def __init__(self, decoder: Decoder, context: int, steps: int) -> None:
        blocks = -(-(context + steps + 8) // BLOCK_TOKENS) + 1
        pool = BlockPool(decoder.config, blocks, decoder.dtype, decoder.device)
        self.engine = Engine(decoder, pool)
        self.sequence = TokenSequence([1 + 7 * i % 30_000 for i in range(context)])
        self.prefill_s = 0.0
        self.times: list[float] = []

    def opened(self) -> AbstractContextManager[object]:
        return self.engine.memory.use(self.sequence)

    def read(self) -> None:
        began = time.perf_counter()
        self.engine.prefill(self.sequence)
        self.prefill_s = time.perf_counter() - began

    def step(self) -> None:
        self.sequence.ids.append(5 + len(self.times))
        began = time.perf_counter()
        self.engine.prefill(self.sequence)
        self.times.append(time.perf_counter() - began)


def smollm2(kind: Quantised | None, folder: Path, context: int) -> Decoder:
    prepared = prepare(find_model(None, folder), "bfloat16", folder, None, kind)
    few_rows = MeasuredRows(folder, TORCH_DTYPES["bfloat16"])
    return Decoder(prepared.config, load_weights(prepared), context, few_rows=few_rows)


def one_b(kind: Quantised | None, folder: Path, context: int) -> Decoder:
    """Random weights; every layer has the same ones, each in memory of its own."""
    layer: dict[str, Weight] = {}
    weights: dict[str, Weight] = {}
    for name, shape in expected_shapes(ONE_B).items():
        part = name.partition("layers.")[2].partition(".")[2] or name
        if part not in layer:
            made = torch.empty(shape).uniform_(-0.02, 0.02)
            quantised = kind is not None and is_quantised(name)
            layer[part] = quantise(made, kind) if quantised and kind else made.bfloat16()
        weights[name] = layer[part]
    few_rows = MeasuredRows(folder, TORCH_DTYPES["bfloat16"])
    return Decoder(ONE_B, weights, context, few_rows=few_rows)


def talks(
    decoders: Mapping[str, Decoder], context: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Of each kind of weights: tokens of prefill a second, and milliseconds of a decode step.

    One engine at a time, in rounds: the threads of several would wait for each other's.
    """
    prefill: dict[str, list[float]] = {name: [] for name in decoders}
    decode: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            talk = Talk(decoder, context, steps)
            with talk.opened():
                talk.read()
                for _ in range(steps):
                    talk.step()
            talk.engine.close()
            prefill[name].append(talk.prefill_s)
            decode[name] += talk.times
    return {
        name: (context / statistics.median(prefill[name]), 1e3 * statistics.median(decode[name]))
        for name in decoders
    }


def llama(path: Path, context: int, steps: int) -> float | None:
    """Milliseconds of a decode step of llama.cpp; None where there is none."""
    python = os.environ.get("CHATKV_LLAMA_PYTHON")
    if python is None:
        return None
    words = [path, torch.get_num_threads(), context, steps]
    done = subprocess.run(
        [python, "-c", LLAMA, *map(str, words)], capture_output=True, text=True, check=True
    )
    return float(1e3 * statistics.median(json.loads(done.stdout)["times"]))


def figures_of(
    model: str, context: int, measured: Mapping[str, tuple[float, float]]
) -> list[Figure]:
    base_prefill, base_decode = measured["full"]
    made = [
        Figure(f"{model}, {context} tokens: prefill, full", base_prefill, "token/s"),
        Figure(f"{model}, {context} tokens: decode, full", base_decode, "ms", less_is_better=True),
    ]
    for kind, (prefill, decode) in measured.items():
        if kind == "full":
            continue
        made.append(
            Figure(
                f"{model}, {context} tokens: decode, {kind}",
                decode,
                "ms",
                base_decode,
                "our bfloat16",
                goal=2.0 if kind == "int4" else None,
                less_is_better=True,
            )
        )
        made.append(
            Figure(
                f"{model}, {context} tokens: prefill, {kind}",
                prefill,
                "token/s",
                base_prefill,
                "our bfloat16",
            )
        )
    return made


def measure(options: Options) -> list[Figure]:
    prepare_to_compute()
    steps = 16 if options.quick else 40
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if choose_dtype(folder, torch.device("cpu")) != "bfloat16":
            print("bfloat16 is slow on this CPU: what is measured here is not what it would use")
        contexts = (512,) if options.quick else (512, 4096)
        decoders = {kind or "full": smollm2(kind, folder, 8192) for kind in KINDS}
        for context in contexts:
            measured = talks(decoders, context, steps)
            figures += figures_of("SmolLM2", context, measured)
            theirs = llama(find_model(None, folder).path, context, steps)
            figures.append(
                Figure(
                    f"SmolLM2, {context} tokens: decode, int4, to llama.cpp",
                    measured["int4"][1] if theirs is not None else None,
                    "ms",
                    theirs,
                    "llama.cpp, Q4_1",
                    goal=0.8,
                    less_is_better=True,
                    note=None if theirs is not None else "CHATKV_LLAMA_PYTHON names no Python",
                )
            )
        del decoders
        big = {kind or "full": one_b(kind, folder, 1024) for kind in (None, "int4")}
        figures += figures_of("1B", 256, talks(big, 256, steps // 2))
    return figures


if __name__ == "__main__":
    run("decode and prefill with weights of fewer bits", measure)
