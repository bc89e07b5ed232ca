"""Fixtures for the tests of model files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatkv.model.catalog import ModelFiles
from chatkv.model.prepared import PreparedModel, prepare


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """SmolLM2 prepared from its GGUF, once for all tests of all processes (about 5 seconds)."""
    files = ModelFiles("SmolLM2", "gguf", smollm2_gguf, (smollm2_gguf,))
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    folder.mkdir(mode=0o700, exist_ok=True)
    return prepare(files, "float32", folder)
