"""An engine that the tests of a file share, and the process switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chatkv.client.link import Link
from engines import running_engine


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture(scope="module")
def slow_model(tiny_checkpoint: Callable[..., Path]) -> str:
    """One whose answers take long enough to be met in the middle."""
    return str(tiny_checkpoint("llama3", num_hidden_layers=24, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    """An engine for all tests of a file, in a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATKV_HOME", str(tmp_path_factory.mktemp("engine-home")))
        patch.delenv("CHATKV_ENGINE")
        with running_engine() as link:
            yield link
