"""What holds for all kernels: a reference of the same signature, no need of Triton on a CPU, and
binaries for both targets without spilled registers."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch

import chatkv_kernels
from chatkv_kernels.dispatch import has_kernel
from chatkv_kernels.silu_mul import silu_mul

MODULES = [module.name for module in iter_modules(chatkv_kernels.__path__) if not module.ispkg]
FUNCTIONS: list[has_kernel[Any, Any]] = [
    value
    for name in MODULES
    for value in vars(import_module(f"chatkv_kernels.{name}")).values()
    if isinstance(value, has_kernel) and value.reference.__module__.endswith(f".{name}")
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.reference.__name__)
def test_kernel_stands_beside_its_reference(function: has_kernel[Any, Any]) -> None:
    assert inspect.signature(function.kernel) == inspect.signature(function.reference)
    assert function.reference.__doc__, "what it computes is said at the reference"
    assert sys.modules[function.kernel.__module__].SPECS, "compile_all does not see it"


def test_a_cpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(silu_mul), "kernel", None)
    assert silu_mul(torch.ones(1, 4)).shape == (1, 2)


def python(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that sees our packages, and compiles kernels instead of running them."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(chatkv_kernels.__path__[0]).parent)
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=900, check=False
    )


def test_references_need_no_triton(tmp_path: Path) -> None:
    imports = "; ".join(f"import chatkv_kernels.{name}" for name in MODULES)
    done = python(tmp_path, "-c", f"import sys; sys.modules['triton'] = None; {imports}")
    assert not done.returncode, done.stderr


def compiled(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = python(folder, "-m", "chatkv_kernels.gpu.compile_all", "--json", *words)
    assert not done.returncode, done.stderr or done.stdout
    report: list[dict[str, Any]] = json.loads(done.stdout)
    assert {entry["arch"] for entry in report} == {80, 90}
    return report


@pytest.mark.slow
def test_a_kernel_compiles_without_a_device(tmp_path: Path) -> None:
    for entry in compiled(tmp_path, "silu_mul SmolLM2"):
        assert entry["kernel"] == "_silu_mul"
        assert 0 < entry["registers"] < 255 and entry["stack"] == 0


@pytest.mark.slow
def test_every_kernel_compiles_without_spilling(pytestconfig: pytest.Config) -> None:
    """What has not changed since the last run is not compiled again."""
    for entry in compiled(pytestconfig.rootpath / ".pytest_cache" / "triton"):
        assert entry["stack"] <= entry["max_stack"], entry
        # What a program may have of a multiprocessor's shared memory: 163 and 227 KiB.
        assert entry["shared"] <= {80: 163 * 1024, 90: 227 * 1024}[entry["arch"]], entry


SPILLING = """
import sys, torch, triton
import triton.language as tl
from unittest import mock
from chatkv_kernels.gpu import compile_all
from chatkv_kernels.gpu.spec import Spec, meta

@triton.jit
def spills(x, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    a, b = tl.load(x + column), tl.load(x + 2 * SIZE + column)
    tl.debug_barrier()
    tl.store(x + column, tl.cumsum(a) * b + tl.sum(b) * a)

launch = lambda: spills[(1,)](meta(4096), SIZE=4096, num_warps=1, maxnreg=32)
with mock.patch.object(compile_all, "all_specs", lambda: [Spec("spills", launch)]):
    sys.exit(compile_all.main([]))
"""


@pytest.mark.slow
def test_a_spill_would_be_found(tmp_path: Path) -> None:
    script = tmp_path / "spilling.py"  # Triton reads a kernel's source from its file
    script.write_text(SPILLING, encoding="utf-8")
    done = python(tmp_path, str(script))
    assert done.returncode == 1, done.stderr
    assert "spills" in done.stdout and " 0 B stack" not in done.stdout
