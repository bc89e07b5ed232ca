"""A server that the tests of a file share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from served import served

# What the official clients would otherwise take from whoever runs the tests.
CLIENT_VARIABLES = ("OPENAI_", "ANTHROPIC_", "OLLAMA_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture(scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for all tests of a file, and no settings of a client."""
    import os

    with pytest.MonkeyPatch.context() as patch:
        for name in tuple(os.environ):
            if name.upper().startswith(CLIENT_VARIABLES):
                patch.delenv(name)
        home = tmp_path_factory.mktemp("api-home")
        patch.setenv("CHATKV_HOME", str(home))
        patch.delenv("CHATKV_ENGINE")
        yield home


@pytest.fixture(scope="module")
def url(own_home: Path, model: str) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture(scope="module")
def name(model: str) -> str:
    """What the model is called."""
    return Path(model).name
