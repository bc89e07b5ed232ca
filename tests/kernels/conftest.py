"""Where kernels are tested: in Triton's interpreter always, on a CUDA device with `-m gpu`."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test's tensors lie; `kernel` of a function of `chatkv_kernels` takes them there."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device and -m gpu")
    return torch.device(request.param)
