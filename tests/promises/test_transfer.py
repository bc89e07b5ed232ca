"""A conversation taken to another home goes on there as if it had never moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.cli.main import run
from turns import run_turns


def test_imported_kv_is_reloaded_and_gives_the_same_bits(
    home: Path,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, file = str(tiny_checkpoint("llama3")), str(tmp_path / "one.chatkv")
    options = {"model": model, "dtype": "bfloat16", "max_tokens": 80}
    first = run_turns(["Hello there, how are you today?"], **options)
    session = first[0]["session"]
    assert run(["cache", "export", session, "-o", file]) == 0
    stayed = run_turns(["And now?"], session=session, restore="reload", **options)

    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "elsewhere"))
    capsys.readouterr()
    assert run(["cache", "import", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session"] == session
    moved = run_turns(["And now?"], session=session, restore="reload", **options)
    assert moved[0]["tokens"]["loaded"] == len(first[0]["log"]) - 1
    assert moved[0]["plan"]["chosen"] == "reload"
    for name in ("reply_ids", "logits", "text", "log"):
        assert moved[0][name] == stayed[0][name]

    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "text-only"))
    assert run(["cache", "import", "--text-only", file]) == 0
    text = run_turns(["And now?"], session=session, **options)
    assert text[0]["tokens"]["loaded"] == 0
    assert text[0]["log"][: len(first[0]["log"])] == first[0]["log"]
