#!/usr/bin/env python3
"""A prompt that vLLM has computed before it was restarted: loaded against computed again.

Needs CHATKV_VLLM_PYTHON, a Python that has vLLM (`scripts/test_vllm` makes one). Three vLLMs, one
after the other: without the connector, with it and an empty store, and with what that one has left.
The model is SmolLM2-135M-Instruct, made into a checkpoint of its own numbers. --quick takes a
shorter prompt and leaves the first one out; that a vLLM takes 20 s and more to start, it cannot
change.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]
sys.path[:0] = [*PATHS, str(ROOT / "tests" / "support")]

from bench_common import Figure, Options, run, say  # noqa: E402

MOST_S = 900.0  # that one vLLM may take
LOADED = re.compile(r"chatkv: loaded (\d+) tokens of \S+, ([\d.]+) MB in (\d+) ms")


def measure(options: Options) -> list[Figure]:
    python = os.environ.get("CHATKV_VLLM_PYTHON")
    num_tokens = 1500 if options.quick else 6000
    names = [
        f"first token of a prompt of {num_tokens}, after a restart",
        f"loading its KV, {num_tokens} tokens",
        "first token, with the connector, nothing stored",
    ]
    if not python:
        why = "CHATKV_VLLM_PYTHON names no Python with vLLM"
        return [Figure(name, None, "s", note=why) for name in names[: 2 if options.quick else 3]]
    from chatkv.model.catalog import find_model
    from checkpoints import checkpoint_of

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        say("making a checkpoint ...")
        gguf = find_model(None, place).path
        model = checkpoint_of(gguf, place / "smollm2", dtype())
        prompt = [5 + (index * index + 7 * index) % 40000 for index in range(num_tokens)]
        say("vLLM with an empty store ...")
        cold = vllm(python, model, place / "home", prompt)
        alone = cold
        if not options.quick:
            say("vLLM alone ...")
            alone = vllm(python, model, None, prompt)
        say("vLLM after a restart ...")
        warm = vllm(python, model, place / "home", prompt)
    assert warm["replies"] == cold["replies"] == alone["replies"], "an answer has changed"
    note = f"{warm['cached']} of {num_tokens} tokens were not computed; vLLM starts in "
    note += ", ".join(f"{one['started_s']:.0f}" for one in (cold, alone, warm)) + " s"
    figures = [
        Figure(
            *(names[0], warm["seconds"], "s", alone["seconds"], "vLLM computes it"),
            note=note,
            less_is_better=True,
        ),
        Figure(
            *(names[1], warm["load_ms"] / 1e3, "s"),
            goal=None if options.quick else 0.16,
            goal_of="value",
            goal_is="<=",
            note=f"{warm['load_mb']:.0f} MB as stored, {dtype()}",
        ),
    ]
    if not options.quick:
        baseline = alone["seconds"], "without it"
        figures.append(Figure(names[2], cold["seconds"], "s", *baseline, less_is_better=True))
    return figures


def dtype() -> Any:
    """What this machine computes in by itself."""
    import torch

    from chatkv.model.linear import packs_on_cpu

    return "bfloat16" if packs_on_cpu(torch.bfloat16) else "float32"


def vllm(python: str, model: Path, home: Path | None, prompt: list[int]) -> dict[str, Any]:
    """The second of two equally long prompts, one token each: the first one warms vLLM up."""
    other = [(token + 1) % 40000 + 5 for token in prompt]
    task = {
        "model": str(model),
        "home": None if home is None else str(home),
        "batches": [[other[: len(prompt) // 4]], [prompt]],
        "max_tokens": 1,
        "pause_s": 1.0,  # so that the writer is not in the way of the next one
        "options": {"max_model_len": len(prompt) + 64, "dtype": dtype()},
    }
    done = subprocess.run(
        [python, str(ROOT / "scripts" / "vllm_process.py"), json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        timeout=MOST_S,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(PATHS),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        },
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
    report = json.loads(done.stdout.splitlines()[-1])
    last = report["batches"][-1]
    loads = LOADED.findall(done.stdout + done.stderr)
    return {
        "started_s": report["started_s"],
        "seconds": last["seconds"],
        "replies": last["replies"],
        "cached": last["cached"][0],
        "load_mb": float(loads[-1][1]) if loads else 0.0,
        "load_ms": float(loads[-1][2]) if loads else 0.0,
    }


if __name__ == "__main__":
    run(__doc__.splitlines()[0], measure)
