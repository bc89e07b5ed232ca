"""The way that a conversation takes on a GPU, on tensors of a CPU: the engine with a ledger over
blocks that lie anywhere, recorded steps, KV through slabs. And which device is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from chatkv.cli.device import device_option
from chatkv.client import ChatRequest, open_chat
from chatkv.engine import device as devices
from chatkv.engine.device import choose_device
from chatkv.engine.engine import Engine
from chatkv.engine.on_device import engine_on
from chatkv.engine.options import SamplingOptions
from chatkv.engine.paged import PagedPool
from chatkv.engine.runner import PagedRunner
from chatkv.errors import UsageError
from chatkv.model.weights import load_weights
from chatkv.paths import folders
from chatkv.runtime import Runtime
from chatkv.session.turn import TurnOptions
from turns import run_turns

TEXT = "A long first message, so that several blocks fill. " * 8


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path], home: Path) -> str:
    return str(tiny_checkpoint("qwen3"))


@dataclass
class OnDevice:
    engines: list[Engine]
    end: Callable[[], None]


@pytest.fixture
def on_device() -> Iterator[OnDevice]:
    """Until its end, runtimes are as on a GPU whose memory holds 40 blocks; their engines."""
    made: list[Engine] = []

    def record(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        result = step()

        def again() -> None:
            result.copy_(step())

        return result, again

    def engine(runtime: Runtime, device: torch.device, on_progress: Any) -> Engine:
        weights = load_weights(runtime.prepared)
        config = runtime.prepared.config
        found, runtime.ledger = engine_on(device, config, weights, 1 << 30, 40 * 64, 1 << 20)
        assert isinstance(found.pool, PagedPool)
        found.pool.kv.fill_(float("nan"))
        found.runner = PagedRunner(found.decoder, found.pool, record)
        made.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "_engine_on", engine)
        yield OnDevice(made, patch.undo)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_equals_uninterrupted(
    dtype: str, model: str, on_device: OnDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT, "And then?", "Why?"]
    options: dict[str, Any] = {"model": model, "dtype": dtype, "temperature": 0.8, "max_tokens": 9}
    whole = run_turns(texts, **options)
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "interrupted"))  # with a store of its own
    first = run_turns(texts[:2], **options)[-1]
    resumed = run_turns(texts[2:], session=first["session"], restore="reload", **options)[0]
    assert resumed["tokens"]["loaded"] > 250
    assert resumed["logits"] == whole[-1]["logits"]
    assert resumed["reply_ids"] == whole[-1]["reply_ids"] and resumed["log"] == whole[-1]["log"]
    assert len(on_device.engines) == 3
    assert all(engine.pool.free_blocks < 40 for engine in on_device.engines), "idle KV stays"


def test_it_says_what_a_cpu_says(model: str, on_device: OnDevice) -> None:
    options: dict[str, Any] = {"model": model, "dtype": "float32", "max_tokens": 12}
    there = run_turns([TEXT, "And then?"], **options)
    on_device.end()
    session = there[0]["session"]
    here = run_turns(["Why?"], session=session, restore="reload", **options)[0]
    assert here["tokens"]["loaded"] > 250, "a block is the same on every device"
    plain = run_turns([TEXT, "And then?", "Why?"], **options)
    assert [turn["reply_ids"] for turn in plain] == [
        *(turn["reply_ids"] for turn in there),
        here["reply_ids"],
    ]


def test_a_context_that_overflows(model: str, on_device: OnDevice) -> None:
    options = TurnOptions(SamplingOptions(temperature=0), max_tokens=8, overflow="shift")
    with open_chat(folders(), ChatRequest(model, "float32", seed=7)) as chat:
        for number in range(5):
            assert chat.conversation.send(f"{number}: {TEXT}", options).turn == number + 1
        status = chat.runtime.status()
    assert status["gpu_bytes"]["kv_pool"] == on_device.engines[0].pool.blocks.nbytes


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="--device cuda: torch finds no GPU here; leave it out"):
        choose_device("cuda")
    monkeypatch.setenv("CHATKV_DEVICE", "tpu")
    with pytest.raises(UsageError, match="'tpu' is unknown: give auto, cpu or cuda"):
        choose_device()


def test_a_gpu_is_taken_where_there_is_one_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"capability 7\.5, 8\.0 is needed"):
        choose_device("cuda")
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Triton is not installed"):
        choose_device("cuda")


def test_the_option_says_so_for_all_that_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CHATKV_DEVICE", "auto")

    @click.command()
    @device_option
    def command() -> None:
        click.echo(os.environ["CHATKV_DEVICE"])

    assert CliRunner().invoke(command, ["--device", "cpu"]).output == "cpu\n"
    refused = CliRunner().invoke(command, ["--device", "cuda"])
    assert isinstance(refused.exception, UsageError) and os.environ["CHATKV_DEVICE"] == "cpu"
