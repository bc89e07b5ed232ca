"""`why` and `calibrate`: what they say is what was recorded and measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv_store.blocks import BlockStore
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


def test_why_tells_what_the_choice_cost(ask: Program, program: Program) -> None:
    session = json.loads(ask("hello " * 60).out)["session"]
    told = json.loads(ask("more", "-c", "--restore", "re-prefill").out)["plan"]
    kept = json.loads(program("why", session, "--json").out)
    best = min(told["alternatives_ms"].values())
    assert kept["regret_ms"] == pytest.approx(told["actual_ms"] - best, abs=0.02)
    words = program("why", session).out
    assert "It was decided to compute everything again" in words
    assert "expected" in words and "taken; to " in words and "would have taken about" in words
    assert told["because"] == "asked"
    assert "but this was asked for" in " ".join(words.split())
    assert "of them once more" in words
    again = kept["recomputed"]
    assert again == [[kept["tokens"]["reused"], again[0][1]]]
    assert f"Computed once more were tokens 1 to {again[0][1]}." in words


def test_why_tells_which_tokens_both_ends_computed(ask: Program, program: Program) -> None:
    session = json.loads(ask("hello " * 60).out)["session"]
    told = json.loads(ask("more", "-c", "--restore", "both").out)
    kept = json.loads(program("why", session, "--json").out)
    again = sum(stop - start for start, stop in kept["recomputed"])
    words = " ".join(program("why", session).out.split())
    partly = kept["recomputed_layers"]
    if partly is not None:  # where both ends have met in front of a layer
        (start, stop), layers = partly["tokens"], partly["layers"]
        again -= round((1 - layers / partly["of"]) * (stop - start))
        assert f"in {layers} of {partly['of']} layers (the others came from disk)" in words
    new = told["tokens"]["computed"] - again
    assert told["tokens"]["prompt"] == told["tokens"]["loaded"] + again + new
    assert 0 < new < 64
    first, last = kept["recomputed"][0]
    assert f"Computed once more were tokens {first + 1} to {last}" in words


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (("--dtype", "bfloat16"), "it is stored for float32, and this turn computed in bfloat16"),
        (("--kv-codec", "int8"), "it is stored as lossless, and this turn uses int8"),
    ],
)
def test_why_names_whose_kv_is_stored_instead(
    ask: Program, program: Program, change: tuple[str, ...], cause: str
) -> None:
    session = json.loads(ask("hello " * 60).out)["session"]
    told = json.loads(ask("more", "-c", *change).out)
    assert any("are computed again" in notice and cause in notice for notice in told["notices"])
    assert cause in " ".join(program("why", session).out.split())


def test_why_names_other_weights(
    ask: Program, program: Program, tmp_path: Path, model: str
) -> None:
    mine = shutil.copytree(model, tmp_path / "mine")
    session = json.loads(ask("hello " * 60, "--model", str(mine)).out)["session"]
    weights = next(mine.glob("*.safetensors"))
    packed = bytearray(weights.read_bytes())
    packed[-2] ^= 1  # low bits of some weight
    weights.write_bytes(packed)
    told = json.loads(ask("more", "-c", "--model", str(mine)).out)
    cause = "stored for other weights or another configuration of this model"
    assert any(cause in notice for notice in told["notices"])
    assert program("why", session).code == 0


@pytest.mark.parametrize(
    ("counted", "cause"),
    [({}, "it was deleted"), ({"evicted_blocks": 3}, "3 evicted")],
)
def test_why_names_what_is_gone(
    ask: Program, program: Program, home: Path, counted: dict[str, int], cause: str
) -> None:
    ask("something else")
    session = json.loads(ask("hello " * 60).out)["session"]
    assert program("cache", "rm", session, "-y").code == 0
    with BlockStore(home / "cache" / "kv") as store:
        store.count(**counted)
    told = json.loads(ask("more", "-r", session).out)
    assert any("are computed again" in notice and cause in notice for notice in told["notices"])
    assert cause in " ".join(program("why", session).out.split())


def test_why_shows_the_first_other_token(ask: Program, program: Program) -> None:
    """Two branches of one conversation: the second finds the first one's KV up to its own word."""
    session = json.loads(ask("hello " * 60).out)["session"]
    fork = json.loads(program("sessions", "fork", session, "--json").out)["session"]
    ask("more apples", "-r", session)
    ask("more pears", "-r", fork)
    kept = json.loads(program("why", fork, "--json").out)
    departure = kept["departure"]
    assert departure["where"] == "disk"
    assert departure["token"] != departure["other"]
    assert departure["position"] >= kept["tokens"]["reused"] + kept["tokens"]["loaded"]
    words = " ".join(program("why", fork).out.split())
    assert f"Up to token {departure['position']} it agrees with what was kept on disk" in words
    assert repr(departure["other"]["text"])[1:-1] in words


def test_why_names_a_miss(ask: Program, program: Program) -> None:
    session = json.loads(ask("hello " * 60).out)["session"]
    assert program("cache", "clear", "-y").code == 0
    ask("more", "-c")
    words = " ".join(program("why", session).out.split())
    assert "have no stored KV and are computed again" in words
    assert "the KV cache is empty" in words


def test_why_tells_what_was_assumed_of_pages(ask: Program, program: Program, model: str) -> None:
    session = json.loads(ask("hello " * 60).out)["session"]
    assert program("calibrate", "--model", model, "--dtype", "float32").code == 0
    ask("more", "-c", "--restore", "reload")
    kept = json.loads(program("why", session, "--json").out)
    words = " ".join(program("why", session).out.split())
    if kept["cold"] is None:
        pytest.skip("this system does not tell which pages it has in memory")
    assert kept["cold"] == 0, "they were just written"
    assert "Loading was expected to find all of it in memory already (warm)." in words


def test_why_repeats_where_the_template_would_write_it_differently(
    ask: Program, program: Program, tmp_path: Path, model: str
) -> None:
    """One that says how long the conversation is writes its beginning anew with each turn."""
    mine = shutil.copytree(model, tmp_path / "mine")
    path = mine / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert settings["chat_template"]
    settings["chat_template"] = "[{{ messages|length }}]" + settings["chat_template"]
    path.write_text(json.dumps(settings))
    session = json.loads(ask("hello " * 60, "--model", str(mine)).out)["session"]
    told = json.loads(ask("more", "-c", "--model", str(mine)).out)
    said = "the chat template would write this conversation differently"
    assert any(said in line for line in told["notices"])
    assert said in json.loads(program("why", session, "--json").out)["template"]
    words = " ".join(program("why", session).out.split())
    assert said in words and "the log stands, so KV is found" in words
    assert said not in program("why", session, "--turn", "1").out
    assert told["tokens"]["computed"] < 60, "its KV is found"


def test_why_of_a_turn_that_is_not_there(ask: Program, program: Program) -> None:
    session = json.loads(ask("hello").out)["session"]
    result = program("why", session, "--turn", "7")
    assert result.code == 1
    assert "no turn 7" in result.err


def test_calibrate_measures_fits_and_remembers(program: Program, model: str) -> None:
    assert "nothing is measured yet" in program("calibrate", "--show").err
    found = json.loads(program("calibrate", "--model", model, "--dtype", "float32", "--json").out)
    kinds = [row["what"] for row in found["measured"]]
    assert kinds.count("prefill") >= 2 and "load, lossless" in kinds
    assert kinds.count("decode, answers") == 2
    assert [row["fitted_s"] for row in found["measured"] if "cold" in row["what"]]
    sizes = {
        row["what"]: row["bytes_per_token"] for row in found["measured"] if "load" in row["what"]
    }
    assert sizes["load, int4"] < sizes["load, int8"] < sizes["load, lossless"]
    assert all(row["seconds"] > 0 for row in found["measured"])
    shown = json.loads(program("calibrate", "--show", "--json").out)
    assert {row["model"].rpartition(", ")[2] for row in shown} == {"cpu", "int8", "fp8", "int4"}
    for name in ("load_s_per_token", "prefill_s_per_token", "prefill_fixed_s", "step_fixed_s"):
        assert shown[0][name] == found[name]
    assert shown[0]["prefill_beside"] > 0
    human = program("calibrate", "--show")
    assert "LOAD" in human.out and "llama3" in human.out
    assert "tokens a second" in human.err


def test_what_is_known_fits_a_terminal(terminal: Program, home: Path) -> None:
    from chatkv.restore.cost import CostFile, CostModel

    path = home / "cache" / "costs.json"
    path.parent.mkdir()
    cost = CostModel(
        cold_s_per_token=32e-6,
        load_error=0.04,
        prefill_error=1.5,
        step_fixed_s=0.1,
        step_s_per_answer=0.02,
        num_observations=12_345,
    )
    CostFile(path).save("key", "A-Model-With-A-Long-Name-135M-Instruct.Q4_1, bfloat16, cpu", cost)
    shown = terminal("calibrate", "--show", NO_COLOR="1").out
    (row,) = [line for line in shown.splitlines() if "A-Model" in line]
    assert len(row) <= 80
    for part in ("±4%", "±150%", "180.0 ms", "12,345", "15,818"):
        assert part in row


def test_a_model_is_measured_when_it_is_first_used(
    ask: Program, program: Program, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("CHATKV_CALIBRATE", "1")
    ask("hello")
    costs = json.loads((home / "cache" / "costs.json").read_text())
    (entry,) = costs.values()
    assert entry["num_observations"] >= 1
    assert not list((home / "cache").glob("calibration-*"))
