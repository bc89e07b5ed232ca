"""Which of the two runs: the plain torch of a function, or the kernel of the same name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


class has_kernel(Generic[P, R]):
    """Decorates a reference whose kernel is `chatkv_kernels.gpu.<its module>.<its name>`.

    Calling it runs the kernel where the first argument, a tensor, is on a GPU. `reference` and
    `kernel` name one of the two; `kernel` raises ImportError where Triton is not installed.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        update_wrapper(self, reference)

    @cached_property
    def kernel(self) -> Callable[P, R]:
        stem = self.reference.__module__.rpartition(".")[2]
        module = import_module(f"chatkv_kernels.gpu.{stem}")
        return cast("Callable[P, R]", getattr(module, self.reference.__name__))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        run = self.kernel if cast("torch.Tensor", args[0]).is_cuda else self.reference
        return run(*args, **kwargs)
