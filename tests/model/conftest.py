"""Fixtures for the tests of model files."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatkv.model.catalog import ModelFiles
from chatkv.model.prepared import PreparedModel, prepare


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """SmolLM2 prepared from its GGUF, once for all tests (about 5 seconds)."""
    files = ModelFiles("SmolLM2", "gguf", smollm2_gguf, (smollm2_gguf,))
    return prepare(files, "float32", tmp_path_factory.mktemp("smollm2"))
