"""Python, torch, GPU, Triton and memory: whether this machine can compute."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chatkv.cli.checks.finding import Finding, note, ok, problem
from chatkv.process import available_bytes
from chatkv.words import size

TORCH_S = 60.0
TORCH_VERSIONS, PYTHON = "torch>=2.9,<2.14", (3, 11)
# Module -> what to install. torch is asked in a process of its own.
NEEDED = {
    "gguf": "gguf",
    "jinja2": "jinja2",
    "lmdb": "lmdb",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "textual": "textual",
    "tokenizers": "tokenizers",
    "uvicorn": "uvicorn",
    "xxhash": "xxhash",
    "zstandard": "zstandard",
}
EXTRAS = {"huggingface_hub": "hub", "cryptography": "crypto"}
# Below this a model and its KV have hardly any room.
LEAST_FREE_BYTES = 1 << 30
PINNED_BYTES = 256 << 20  # of slabs through which KV gets to a GPU


def python() -> Iterator[Finding]:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        yield problem("python", text, "chatkv needs Python 3.11 or newer")
    else:
        yield ok("python", text)
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        yield problem("packages", f"missing: {names}", f"pip install {names}")
    lacking = [extra for module, extra in EXTRAS.items() if find_spec(module) is None]
    if lacking:
        yield note(
            "packages",
            f"without the extras {', '.join(lacking)} (downloads, encryption)",
            f'pip install "chatkv[{",".join(lacking)}]" adds them',
        )
    elif not missing:
        yield ok("packages", "all that is needed, and the extras")


class Torch:
    """torch's own report, asked for when this is made and waited for when it is needed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chatkv.cli.checks.torch_report"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._found: dict[str, Any] = {}

    def checks(self) -> Iterator[Finding]:
        why = self._wait()
        if why is not None:
            advice = f'pip install "{TORCH_VERSIONS}", or look at what it says'
            yield problem("torch", f"cannot be used: {why}", advice)
            return
        found = self._found
        cores = len(os.sched_getaffinity(0))
        yield from _torch(found, cores)
        yield from _gpu(found)

    def _wait(self) -> str | None:
        """What is wrong; None: the report is there."""
        try:
            out, said = self._process.communicate(timeout=TORCH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"importing it took more than {TORCH_S:.0f} s"
        with suppress(ValueError):
            self._found = json.loads(out)
            return None
        lines = [line for line in said.splitlines() if line.strip()]
        code = self._process.returncode
        return lines[-1].strip() if lines else f"it ended with {code}"


def _torch(found: dict[str, Any], cores: int) -> Iterator[Finding]:
    bfloat16 = "bfloat16 by instructions" if found["bfloat16"] else "no bfloat16 of its own"
    text = (
        f"{found['version']}, {found['threads']} threads on {cores} cores, "
        f"{found['capability']}, {bfloat16}"
    )
    number = tuple(int(part) for part in found["version"].split(".")[:2] if part.isdigit())
    if not (2, 9) <= number < (2, 14):
        yield problem("torch", text, f'chatkv is made for "{TORCH_VERSIONS}"')
    elif found["threads"] < cores:
        yield note("torch", text, "OMP_NUM_THREADS or a limit keeps it from the other cores")
    else:
        yield ok("torch", text)


def _gpu(found: dict[str, Any]) -> Iterator[Finding]:
    gpu, wanted = found["gpu"], os.environ.get("CHATKV_DEVICE")
    if gpu is None:
        is_there = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
        if is_there and found["cuda_build"] is None:
            yield note(
                "gpu",
                "there is one, and this torch is built without CUDA",
                "install a torch with CUDA (pytorch.org says how) to compute on it",
            )
        elif is_there:
            yield problem("gpu", "there is one, and torch cannot use it", "see `nvidia-smi`")
        elif wanted == "cuda":
            yield problem("gpu", "none, and the setting device is cuda", "set it to auto or cpu")
        else:
            yield ok("gpu", "none: models compute on the CPU, and no memory is pinned")
        return
    major, minor = gpu["capability"]
    text = (
        f"{gpu['name']}, compute capability {major}.{minor}, {size(gpu['free_bytes'])} of "
        f"{size(gpu['total_bytes'])} free"
    )
    if major < 8:
        yield note("gpu", text, "8.0 is needed: models compute on the CPU")
        return
    yield ok("gpu", text)
    if not found["triton"]:
        yield problem("triton", "not installed: models compute on the CPU", "pip install triton")
    else:
        with suppress(PackageNotFoundError):
            yield ok("triton", version("triton"))
    yield from _pinned()


def _pinned() -> Iterator[Finding]:
    """Memory through which KV gets from the disk to a GPU."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    may_lock = "as much as it likes" if limit == resource.RLIM_INFINITY else size(limit)
    text = f"{size(PINNED_BYTES)} for loading KV; a process may lock {may_lock}"
    if available_bytes() < 4 * PINNED_BYTES:
        yield problem("pinned memory", text, "close other programs: too little memory is free")
    else:
        yield ok("pinned memory", text)


def memory() -> Iterator[Finding]:
    free = available_bytes()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{size(free)} of {size(total)} to be had"
    if free < LEAST_FREE_BYTES:
        yield problem("memory", text, "close other programs, or take a smaller model")
    else:
        yield ok("memory", f"{text}; KV in memory takes a quarter of that at most")
