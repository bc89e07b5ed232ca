"""A server that the tests of a file share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from served import served

# What the official clients would otherwise take from whoever runs the tests.
CLIENT_VARIABLES = ("OPENAI_", "ANTHROPIC_", "OLLAMA_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


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


@pytest.fixture(scope="module")
def with_template(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], str]:
    """(name, template) -> the model, called so, with a chat template of its own."""

    def made(name: str, template: str) -> str:
        folder = tmp_path_factory.mktemp("template") / name
        shutil.copytree(model, folder)
        settings = folder / "tokenizer_config.json"
        fields = json.loads(settings.read_text())
        settings.write_text(json.dumps(fields | {"chat_template": template}))
        return str(folder)

    return made
