#!/usr/bin/env python
"""What weights of fewer bits save: decode and prefill with projections of 8 and 4 bits, beside our
own full ones in bfloat16, in the dtype that this machine would use, and, where it is to be had,
llama.cpp on the same file and threads.

llama.cpp is asked where CHATKV_LLAMA_PYTHON names a Python that has llama-cpp-python: it is no
dependency of anything here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

import chatkv  # noqa: E402, F401  before torch: it says how OpenMP's threads wait

# isort: split
import torch  # noqa: E402
from bench_common import Figure, Options, run  # noqa: E402

from chatkv.engine.engine import Engine  # noqa: E402
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool  # noqa: E402
from chatkv.engine.sequence import TokenSequence  # noqa: E402
from chatkv.model.catalog import find_model  # noqa: E402
from chatkv.model.config import ModelConfig  # noqa: E402
from chatkv.model.decoder import Decoder  # noqa: E402
from chatkv.model.dtype import choose_dtype  # noqa: E402
from chatkv.model.few_rows import MeasuredRows  # noqa: E402
from chatkv.model.prepared import Dtype, Quantised, prepare  # noqa: E402
from chatkv.model.quantise import is_quantised, quantise  # noqa: E402
from chatkv.model.weights import TORCH_DTYPES, Weight, expected_shapes, load_weights  # noqa: E402
from chatkv.process import prepare_to_compute  # noqa: E402

KINDS: tuple[Quantised, ...] = ("fp16", "int8", "int4")
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


def smollm2(kind: Quantised | None, dtype: Dtype, folder: Path, context: int) -> Decoder:
    prepared = prepare(find_model(None, folder), dtype, folder, None, kind)
    few_rows = MeasuredRows(folder, TORCH_DTYPES[dtype])
    return Decoder(prepared.config, load_weights(prepared), context, few_rows=few_rows)


def one_b(
    kind: Quantised | None, dtype: Dtype, config: ModelConfig, folder: Path, context: int
) -> Decoder:
    """Random weights; every layer has the same ones, each in memory of its own."""
    layer: dict[str, Weight] = {}
    weights: dict[str, Weight] = {}
    for name, shape in expected_shapes(config).items():
        part = name.partition("layers.")[2].partition(".")[2] or name
        if part not in layer:
            made = torch.empty(shape).uniform_(-0.02, 0.02)
            layer[part] = made.to(TORCH_DTYPES[dtype])
            if kind is not None and is_quantised(name):
                layer[part] = made.half() if kind == "fp16" else quantise(made, kind)
        weights[name] = layer[part]
    few_rows = MeasuredRows(folder, TORCH_DTYPES[dtype])
    return Decoder(config, weights, context, few_rows=few_rows)


def forms(native: Dtype) -> dict[str, tuple[Quantised | None, Dtype]]:
    """Name -> kind of weights and dtype: full ones in bfloat16 and in this machine's own dtype,
    fewer bits in that."""
    full: dict[str, tuple[Quantised | None, Dtype]] = {"bfloat16": (None, "bfloat16")}
    full[native] = (None, native)
    return full | {kind: (kind, native) for kind in KINDS}


def talks(
    decoders: Mapping[str, Decoder], context: int, steps: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Of each form: tokens of prefill a second, and milliseconds of a decode step.

    One engine at a time, in rounds: the threads of several would wait for each other's.
    """
    prefill: dict[str, list[float]] = {name: [] for name in decoders}
    decode: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds):
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
    model: str, context: int, native: Dtype, measured: Mapping[str, tuple[float, float]]
) -> list[Figure]:
    about = f"{model}, {context} tokens"
    full = [name for name in measured if name not in KINDS]
    made = []
    for name in full:
        prefill, decode = measured[name]
        made.append(Figure(f"{about}: prefill, full in {name}", prefill, "token/s"))
        made.append(Figure(f"{about}: decode, full in {name}", decode, "ms", less_is_better=True))
    for kind in KINDS:
        prefill, decode = measured[kind]
        for base in full:
            made.append(
                Figure(
                    f"{about}: decode, {kind}",
                    decode,
                    "ms",
                    measured[base][1],
                    f"our {base}",
                    goal=2.0 if kind == "int4" and base == "bfloat16" else None,
                    less_is_better=True,
                )
            )
        base_prefill = measured[native][0]
        made.append(
            Figure(f"{about}: prefill, {kind}", prefill, "token/s", base_prefill, f"our {native}")
        )
    return made


def to_llama(context: int, decode_ms: float, folder: Path, steps: int) -> Figure:
    theirs = llama(find_model(None, folder).path, context, steps)
    return Figure(
        f"SmolLM2, {context} tokens: decode, int4, to llama.cpp",
        decode_ms if theirs is not None else None,
        "ms",
        theirs,
        "llama.cpp, Q4_1",
        goal=0.8,
        less_is_better=True,
        note=None if theirs is not None else "CHATKV_LLAMA_PYTHON names no Python",
    )


def measure(options: Options) -> Iterator[Figure]:
    prepare_to_compute()
    steps, rounds = (12, 1) if options.quick else (40, 3)
    # In bfloat16 a machine without units for it takes ten milliseconds for each token of a prompt.
    contexts = (128,) if options.quick else (512, 4096)
    short = 32 if options.quick else 128
    config = replace(ONE_B, num_layers=1, vocab_size=4000) if options.quick else ONE_B
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        native = choose_dtype(folder, torch.device("cpu"))
        asked = forms(native)
        decoders = {name: smollm2(*form, folder, 8192) for name, form in asked.items()}
        for context in contexts:
            measured = talks(decoders, context, steps, rounds)
            yield from figures_of("SmolLM2", context, native, measured)
            yield to_llama(context, measured["int4"][1], folder, steps)
        del decoders
        big = {name: one_b(*form, config, folder, 1024) for name, form in asked.items()}
        name = "1B, one layer" if options.quick else f"1B, {config.num_layers} layers"
        yield from figures_of(name, short, native, talks(big, short, steps // 2, rounds))


if __name__ == "__main__":
    run("decode and prefill with weights of fewer bits", measure)
