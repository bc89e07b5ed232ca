#!/usr/bin/env python
"""The GPU path beside the machine's own rates: copies, attention, matrices, restoring, saving.

For a model shaped like Llama 3.1 8B and one like SmolLM2, with random weights, in under four
minutes. Without a GPU, every kernel is compiled for sm_80 and sm_90 and what each takes is said;
all other figures are named as not measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from bench_common import Figure, Options, run, say
from gpu_figures import (
    DEVICE_CODECS,
    STORED_CODECS,
    Found,
    Sizes,
    answers,
    codec,
    copies,
    decode,
    linears,
    memory,
    prefill,
)
from gpu_rig import LLAMA_8B, SMOLLM2, Rig
from gpu_storage import from_disk, from_host, naive, plans, saving

QUICK = Sizes(decode=(512,), prefill=(2048,), stored=1024, copied=1 << 28)
BUDGET_S = 210  # no section begins after that
NO_GPU = "not measured: no GPU here"


@dataclass(frozen=True)
class Wanted:
    """A figure before it is measured."""

    name: str
    unit: str
    baseline_name: str | None = None
    goal: float | None = None
    goal_of: Literal["value", "ratio"] = "ratio"
    goal_is: Literal[">=", "<="] = ">="
    less_is_better: bool = False

    def figure(self, found: Found, why_not: str) -> Figure:
        value, baseline = found.get(self.name, (None, None))
        return Figure(
            self.name,
            value,
            self.unit,
            baseline,
            self.baseline_name,
            self.goal,
            self.goal_of,
            self.goal_is,
            note=why_not if value is None else None,
            less_is_better=self.less_is_better,
        )


def wanted(sizes: Sizes) -> Iterator[Wanted]:
    """All figures of a run."""
    yield Wanted("HBM copy", "GB/s")
    yield Wanted("pinned host to device", "GB/s", "pageable")
    yield Wanted("ledger", "% off the peak", goal=5, goal_of="value", goal_is="<=")
    for num_tokens in sizes.decode:
        yield Wanted(f"decode at {num_tokens}", "GB/s", "HBM copy", 0.85)
    for name in ("greedy", "sampled"):
        yield Wanted(f"answer, {name}", "ms a token", "steps alone", 1.03, goal_is="<=")
    for num_tokens in sizes.prefill:
        yield Wanted(f"prefill of {num_tokens}", "tokens/s", "SDPA, plain memory", 0.95)
    yield Wanted("restore from host memory", "GB/s", "pinned copy", 0.9)
    for name in STORED_CODECS:
        yield Wanted(f"restore from disk, {name}, warm", "GB/s", "one thread", 3)
        yield Wanted(f"restore from disk, {name}, cold", "GB/s", "the disk's rate x ratio", 0.9)
    yield Wanted("both ends", "tokens/s", "load rate + prefill rate", 0.85)
    yield Wanted("planner", "ms", "the best plan", 1.05, goal_is="<=")
    yield Wanted("decode while saving", "ms a token", "not saving", 1.03, goal_is="<=")
    for name in DEVICE_CODECS:
        goal = 500 if name == "packed" else None
        yield Wanted(f"packing, {name}", "GB/s", goal=goal, goal_of="value")
        yield Wanted(f"unpacking, {name}", "GB/s", goal=goal, goal_of="value")
    for weights in ("", ", int8", ", fp8", ", int4"):
        yield Wanted(f"linears of one row{weights}", "GB/s", "cuBLAS, 16 bits")
    yield Wanted("resume, small model", "ms", "transformers, torch.load", less_is_better=True)
    yield Wanted("token, small model", "ms", "transformers", less_is_better=True)


def measure(options: Options) -> list[Figure]:
    sizes = QUICK if options.quick else Sizes()
    if not torch.cuda.is_available():
        say("no GPU here: compiling every kernel for sm_80 and sm_90 instead of measuring")
        return [*compiled(options.quick), *(figure.figure({}, NO_GPU) for figure in wanted(sizes))]
    device = torch.device("cuda")
    began, found = time.perf_counter(), Found()
    rig = Rig(LLAMA_8B, sizes.pool, device)
    for section in sections(rig, sizes):
        found |= section
        say(f"{time.perf_counter() - began:6.1f} s  " + ", ".join(section))
        if time.perf_counter() - began > BUDGET_S:
            break
    rig.close()
    if time.perf_counter() - began < BUDGET_S:
        found |= naive(Rig(SMOLLM2, 2 * sizes.stored + 4096, device), sizes)
    return [figure.figure(found, "not measured on this machine") for figure in wanted(sizes)]


def sections(rig: Rig, sizes: Sizes) -> Iterator[Found]:
    """All of one model but `naive`, the roofs first."""
    roofs = copies(rig, sizes)
    yield roofs
    yield memory(rig, sizes)
    yield decode(rig, sizes, roofs["HBM copy"][0])
    yield answers(rig, sizes)
    yield prefill(rig, sizes)
    yield from_host(rig, sizes, roofs["pinned host to device"][0])
    for name in STORED_CODECS:
        yield from_disk(rig, sizes, name)
    yield plans(rig, sizes)
    yield saving(rig, sizes)
    yield codec(rig, sizes)
    yield linears(rig, sizes)


def compiled(quick: bool) -> list[Figure]:
    """What each kernel takes on each target, and how many spill registers; quick: for one model."""
    try:
        from chatkv_kernels.gpu.compile_all import compile_all
    except ImportError:
        say("Triton is not installed: nothing can be compiled")
        return []
    done = list(compile_all(["8B"] if quick else []))
    figures = [
        Figure(
            f"{one.spec} {one.kernel} sm_{one.arch}",
            one.registers,
            "registers",
            note=f"{one.warps} warps, {one.stack} B stack, {one.shared} B shared",
        )
        for one in done
    ]
    for arch in sorted({one.arch for one in done}):
        spilled = sum(one.stack > one.max_stack for one in done if one.arch == arch)
        figures.append(
            Figure(
                f"kernels that spill, sm_{arch}",
                spilled,
                "kernels",
                goal=0,
                goal_of="value",
                goal_is="<=",
            )
        )
    return figures


if __name__ == "__main__":
    # Triton asks when it is imported, which no import above does: kernels are not interpreted here.
    os.environ.pop("TRITON_INTERPRET", None)
    run(__doc__.splitlines()[0], measure)
