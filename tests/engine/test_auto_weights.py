"""What `--weights auto` chooses, remembers, and says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatkv.client import ChatRequest, open_chat
from chatkv.engine import auto_weights
from chatkv.engine.auto_weights import ChosenWeights, choose_weights, remembered_weights
from chatkv.model import timing
from chatkv.model.catalog import find_model
from chatkv.model.quantise import LAYOUTS, is_quantised
from chatkv.model.weights import expected_shapes
from chatkv.model.weights_speed import Speed, Speeds, matrices, measure
from chatkv.paths import folders
from chatkv.session.turn import TurnOptions
from small_engine import CONFIG
from tiny_gguf import write_gguf

CPU = torch.device("cpu")
FULL = Speed(0.03, 0.001)
SOONER, LATER = Speed(0.015, 0.0011), Speed(0.04, 0.0005)


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> list[Speeds]:
    """What is measured next; whoever measures takes the last one away."""
    found: list[Speeds] = []
    monkeypatch.setattr(auto_weights, "measure", lambda *_: found.pop())
    return found


@pytest.fixture
def four_bits(home: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    return write_gguf(home / "four.gguf", tiny_checkpoint("llama2"), quantised="Q4_1")


def chosen(model: Path, **options: Any) -> ChosenWeights:
    place = folders().make()
    return choose_weights(find_model(str(model), place.cache), "float32", CPU, place, **options)


def test_a_files_own_are_kept_where_they_are_faster_and_so_from_then_on(
    four_bits: Path, speeds: list[Speeds]
) -> None:
    speeds.append(Speeds(FULL, SOONER, True))
    first = chosen(four_bits)
    assert first.weights == "own" and not first.is_lossy
    assert "2.0 times as fast" in first.why and first.decode_ratio == 2
    assert chosen(four_bits) == first and speeds == []
    place = folders()
    files = find_model(str(four_bits), place.cache)
    assert remembered_weights(files, "float32", CPU, place) == first
    assert remembered_weights(files, "bfloat16", CPU, place) is None


def test_where_they_are_not_weights_stay_full(four_bits: Path, speeds: list[Speeds]) -> None:
    speeds.append(Speeds(FULL, LATER, True))
    found = chosen(four_bits)
    assert found.weights == "full" and "gain nothing" in found.why
    assert chosen(four_bits) == found


def test_what_was_measured_beside_others_is_not_believed(
    four_bits: Path, speeds: list[Speeds]
) -> None:
    speeds += [Speeds(FULL, SOONER, True), Speeds(FULL, SOONER, False)]
    assert chosen(four_bits).weights == "full"
    assert chosen(four_bits).weights != "full"


def test_a_checkpoint_loses_nothing_unless_it_would_not_fit(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint("llama2")
    assert chosen(model).weights == "full"
    config = auto_weights._config(find_model(str(model), home))
    full = auto_weights._takes(config, "float32", CPU, "full", {})
    monkeypatch.setattr(auto_weights, "physical_bytes", lambda: full)
    (folders().models / auto_weights.FILE_NAME).unlink()
    found = chosen(model)
    assert found.weights in ("int8", "int4") and found.is_lossy
    assert "full ones take" in found.why and "chatkv models measure" in found.why
    with open_chat(folders(), ChatRequest(str(model), "float32")) as chat:
        assert any(found.why in notice for notice in chat.runtime.notices)
        assert chat.runtime.status()["weights_why"] == found.why


@pytest.mark.slow
def test_a_session_keeps_the_weights_that_it_was_begun_with(
    four_bits: Path, speeds: list[Speeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_chat(folders(), ChatRequest(str(four_bits), "float32")) as chat:
        assert chat.runtime.prepared.stored == "full", "what is not measured is not chosen"
        session = chat.conversation.send("Hello", TurnOptions(max_tokens=2)).session
    monkeypatch.setenv("CHATKV_CALIBRATE", "1")
    speeds.append(Speeds(FULL, SOONER, True))
    with open_chat(folders(), ChatRequest(str(four_bits), "float32")) as chat:
        assert chat.runtime.prepared.stored != "full"
    with open_chat(folders(), ChatRequest(resume=session)) as chat:
        assert chat.runtime.prepared.stored == "full"


def test_measuring_takes_the_shapes_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dict.fromkeys(filter(is_quantised, expected_shapes(CONFIG)), LAYOUTS["int4"])
    assert sum(matrices(CONFIG, own).values()) == 4 * CONFIG.num_layers
    del own["model.layers.0.self_attn.v_proj.weight"]
    assert sum(matrices(CONFIG, own).values()) == 4 * CONFIG.num_layers + 1
    monkeypatch.setattr(timing, "_CACHE_BYTES", 1 << 10)
    found = measure(CONFIG, own, "float32", tmp_path)
    assert found.full.decode_s > 0 and found.few.prefill_s > 0


def test_ways_take_turns_and_the_best_time_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    durations = {"a": [5.0, 1.0, 1.0, 9.0, 1.0, 1.1], "b": [2.0, 2.0, 2.1, 2.2, 2.0, 2.0]}
    order: list[str] = []

    def way(name: str) -> Callable[[], None]:
        def work() -> None:
            order.append(name)
            clock[0] += durations[name].pop(0)

        return work

    found = timing.compare([way("a"), way("b")], rounds=6)
    assert found.seconds == (1.0, 2.0) and found.is_steady
    assert order == 6 * ["a", "b"]


def test_times_that_do_not_agree_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def busier_and_busier() -> None:
        calls.append(1)
        clock[0] += len(calls) % 2 + 1  # every other round takes twice as long

    assert not timing.compare([busier_and_busier], rounds=2).is_steady
    assert len(calls) == 8
