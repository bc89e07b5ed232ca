"""`why` and `calibrate`: what they say is what was recorded and measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from program import Ran

Program = Callable[..., Ran]


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture
def ask(program: Program, model: str) -> Program:
    options = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "9", "--json"]
    return lambda *words: program("ask", "--model", model, *options, *words)


def test_why_tells_what_ask_told(ask: Program, program: Program) -> None:
    first = json.loads(ask("hello " * 60).out)
    second = json.loads(ask("more", "-c", "--restore", "reload").out)
    for told in first, second:
        kept = json.loads(
            program("why", told["session"], "--turn", str(told["turn"]), "--json").out
        )
        for key in ("tokens", "plan", "timing"):
            assert kept[key] == told[key]
    words = program("why", second["session"]).out
    assert f"{second['tokens']['loaded']} came from disk" in words
    assert f"{second['tokens']['computed']} were computed" in words
    assert "reload from disk (chosen)" in words
    assert "compute everything again" in words
    assert "Nothing had to be restored" in program("why", first["session"], "--turn", "1").out


def test_why_names_a_miss(ask: Program, program: Program) -> None:
    session = json.loads(ask("hello " * 60).out)["session"]
    assert program("cache", "clear", "-y").code == 0
    ask("more", "-c")
    assert "have no stored KV and are computed again" in program("why", session).out


def test_why_of_a_turn_that_is_not_there(ask: Program, program: Program) -> None:
    session = json.loads(ask("hello").out)["session"]
    result = program("why", session, "--turn", "7")
    assert result.code == 1
    assert "no turn 7" in result.err


def test_calibrate_measures_fits_and_remembers(program: Program, model: str) -> None:
    assert "nothing is measured yet" in program("calibrate", "--show").err
    found = json.loads(program("calibrate", "--model", model, "--dtype", "float32", "--json").out)
    kinds = [row["what"] for row in found["measured"]]
    assert kinds.count("prefill") >= 2 and "load, warm" in kinds
    assert all(row["seconds"] > 0 for row in found["measured"])
    shown = json.loads(program("calibrate", "--show", "--json").out)
    assert len(shown) == 1
    for name in ("load_s_per_token", "prefill_s_per_token", "prefill_fixed_s"):
        assert shown[0][name] == found[name]
    human = program("calibrate", "--show").out
    assert "LOAD" in human and "llama3" in human


def test_a_model_is_measured_when_it_is_first_used(
    ask: Program, program: Program, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("CHATKV_CALIBRATE", "1")
    ask("hello")
    costs = json.loads((home / "cache" / "costs.json").read_text())
    (entry,) = costs.values()
    assert entry["num_observations"] >= 1
    assert not list((home / "cache").glob("calibration-*"))
