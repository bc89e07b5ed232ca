"""scripts/train_mtp.py, on a tiny model: generate, train in two goes, draft by what came out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from chatkv.model.mtp_file import read_about
from drafted import held

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_mtp.py"


@pytest.mark.slow
def test_what_was_trained_drafts_for_its_model(
    home: Path,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data, out = str(tiny_checkpoint("smollm")), tmp_path / "data", tmp_path / "mtp.st"

    def run(*arguments: object, code: int = 0) -> str:
        command = [sys.executable, str(SCRIPT), "--model", model, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stderr + done.stdout

    run("generate", "--out", data, "--tokens", 1500)
    assert len(list(data.iterdir())) == 1
    assert "of 2,500 tokens" in run("generate", "--out", data, "--tokens", 2500)
    assert len(list(data.iterdir())) == 2
    first, second = (load_file(file)["ids"][:500] for file in sorted(data.iterdir()))
    assert not first.equal(second)
    train = ("train", "--data", data, "-o", out)
    assert "update 10 of 10" in run(*train, "--updates", 10)
    out.unlink()
    said = run(*train, "--updates", 20)
    assert "update 20 of 20" in said
    assert "update 10 of" not in said  # it went on
    about = read_about(out)
    assert about.kind == "modules"
    assert all(0 <= rate <= 1 for rates in about.acceptance.values() for rate in rates)
    monkeypatch.setenv("CHATKV_MTP", str(out))
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
    plain = held(model, speculate="off")
    drafted = held(model, speculate="mtp")
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert all(result.speculation.drafted for result, _ in drafted)
    more = tmp_path / "more.st"
    said = run("train", "--data", data, "-o", more, "--updates", 10, "--go-on-from", out)
    assert "right before training" in said and "update 10 of 10" in said
    assert read_about(more).trained_on.startswith(f"{about.trained_on}; then ")
    assert load_file(more)["vocabulary"].equal(load_file(out)["vocabulary"])
    heads = tmp_path / "heads.st"
    run("train", "--data", data, "-o", heads, "--kind", "heads", "--updates", 5)
    assert read_about(heads).kind == "heads"
    said = run(*train, "--go-on-from", heads, code=1)
    assert said.splitlines()[-1].startswith("--go-on-from ")
    monkeypatch.setenv("CHATKV_MTP", str(heads))
    drafted = held(model, speculate="mtp")
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert all(result.speculation.drafted for result, _ in drafted)
