"""Compile every kernel for GPUs that need not be there, and report what each one takes.

    python -m chatkv_kernels.gpu.compile_all [--json] [WORD ...]

A kernel is compiled as it is launched: each module's SPECS are run with tensors of no data, and
what they launch is compiled for the target instead. Registers, stack and shared memory are read
from the binary by the `cuobjdump` that comes with Triton. Registers that spill need stack, so a
kernel without stack has spilled none. WORDs select specs by name. Exits 1 where one spills.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import chatkv_kernels.gpu
from chatkv_kernels.gpu.spec import Spec
from chatkv_kernels.gpu.target import A100, H200, Target, assume

TARGETS = (A100, H200)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and the options of the launch (num_warps, ...)."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What one kernel of one spec takes on one target: per thread registers and bytes of stack,
    bytes of shared memory per program."""

    spec: str
    kernel: str
    arch: int
    warps: int
    registers: int
    stack: int
    max_stack: int
    shared: int


def compile_all(
    words: Sequence[str] = (), targets: Sequence[Target] = TARGETS
) -> Iterator[Compiled]:
    """Compile the specs whose names contain one of `words`, or all."""
    jobs = []
    for spec in all_specs():
        if words and not any(word in spec.name for word in words):
            continue
        for target in targets:
            with assume(target), _recorded() as launches:
                spec.call()
            jobs += [(spec, launch, target) for launch in launches]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler holds no interpreter lock
        yield from pool.map(_compile, *zip(*jobs, strict=True))


def all_specs() -> list[Spec]:
    """The SPECS of all modules beside this one."""
    names = [module.name for module in iter_modules(chatkv_kernels.gpu.__path__)]
    modules = [
        import_module(f"chatkv_kernels.gpu.{name}") for name in names if name != "compile_all"
    ]
    return [spec for module in modules for spec in getattr(module, "SPECS", ())]


@contextmanager
def _recorded() -> Iterator[list[Launch]]:
    """Launches within are noted instead of run."""
    launches = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        signature = inspect.signature(kernel.fn)
        options = {name: kwargs.pop(name) for name in set(kwargs) - set(signature.parameters)}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        launches.append(Launch(kernel, bound.arguments, options))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _compile(spec: Spec, launch: Launch, target: Target) -> Compiled:
    compiled = triton.compile(
        _source(launch), target=GPUTarget("cuda", target.arch, 32), options=launch.options
    )
    usage = _usage(compiled.asm["cubin"])
    return Compiled(
        spec=spec.name,
        kernel=launch.kernel.__name__,
        arch=target.arch,
        warps=compiled.metadata.num_warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        max_stack=spec.max_stack,
        shared=compiled.metadata.shared,
    )


def _source(launch: Launch) -> ASTSource:
    """The kernel for these arguments, specialised as Triton does at a launch: on integers that
    are 1, and on integers and addresses that are multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        whole = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (whole and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, torch.Tensor) or (whole and value % 16 == 0):
            attributes[(index,)] = ALIGNED
    return ASTSource(launch.kernel, signature, constants, attributes)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _usage(cubin: bytes) -> dict[str, int]:
    """The counters of `cuobjdump --dump-resource-usage`: REG, STACK, SHARED, LOCAL, ..."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", report)}


def main(arguments: Sequence[str]) -> int:
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: unset it to compile", file=sys.stderr)
        return 2
    words = [word for word in arguments if word != "--json"]
    report = []
    for done in compile_all(words):
        report.append(done)
        if "--json" not in arguments:
            print(
                f"{done.spec:36} {done.kernel:24} sm_{done.arch} {done.warps:2} warps "
                f"{done.registers:4} registers {done.stack:5} B stack {done.shared:7} B shared",
                flush=True,
            )
    if "--json" in arguments:
        print(json.dumps([asdict(done) for done in report]))
    return int(any(done.stack > done.max_stack for done in report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
