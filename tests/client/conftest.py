"""Models, and the program in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.cli.main import run
from program import Ran


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture(scope="module")
def slow_model(tiny_checkpoint: Callable[..., Path]) -> str:
    """One whose answers take long enough to be met in the middle."""
    return str(tiny_checkpoint("llama3", num_hidden_layers=24, max_position_embeddings=4096))


@pytest.fixture
def program(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """`program("sessions", "ls")` runs that in this process; stdin is no terminal."""

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        capsys.readouterr()
        try:
            code = run(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        return Ran(code, *capsys.readouterr())

    return call
