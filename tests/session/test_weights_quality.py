"""What quantised weights cost is measured against full ones, told, and remembered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from chatkv.cli.main import cli
from chatkv.errors import UsageError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.weights import load_weights
from chatkv.paths import folders
from chatkv.session.weights_quality import differences, known_qualities
from tiny_gguf import write_gguf

IDS = [5, 9, 20, 3, 11, 40, 7] * 30


def decoder(checkpoint: Path, models: Path, kind: str | None = None) -> Decoder:
    prepared = prepare(find_model(str(checkpoint), models), "float32", models, None, kind)  # type: ignore[arg-type]
    return Decoder(prepared.config, load_weights(prepared))


def test_the_same_weights_differ_in_nothing_and_coarser_ones_more(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama3")
    full = decoder(checkpoint, tmp_path)
    others = [decoder(checkpoint, tmp_path, kind) for kind in (None, "fp16", "int8", "fp8", "int4")]
    same, fp16, int8, fp8, int4 = differences(full, others, IDS)
    scored = len(IDS) - 1
    assert same.kl == 0 and same.agreed == scored
    assert same.perplexity(scored) == same.exact_perplexity(scored)
    assert 0 < fp16.kl < int8.kl < fp8.kl < int4.kl
    assert int8.agreed > int4.agreed


def test_texts_of_a_wrong_length_are_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    full = decoder(tiny_checkpoint("llama3"), tmp_path)
    with pytest.raises(UsageError, match="too short"):
        differences(full, [full], [1])
    with pytest.raises(UsageError, match="the model reads"):
        differences(full, [full], [1] * (full.max_position + 1))


def test_the_command_tells_and_remembers(home: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    arguments = ["models", "measure", str(tiny_checkpoint("llama3")), "--dtype", "float32"]
    done = CliRunner().invoke(cli, [*arguments, "--tokens", "100", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["weights"] for row in found["weights"]] == ["fp16", "int8", "fp8", "int4"]
    assert found["tokens"] == 100 and found["weights"][0]["num_tokens"] == 99
    known = known_qualities(folders().models)
    assert {entry["weights"] for entry in known.values()} == {"fp16", "int8", "fp8", "int4"}
    shown = CliRunner().invoke(cli, [*arguments, "--tokens", "50"])
    assert shown.exit_code == 0 and "PERPLEXITY" in shown.stdout and "int4" in shown.stdout


def test_codes_of_a_files_own_are_measured_too(
    home: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    model = write_gguf(home / "four.gguf", tiny_checkpoint("llama2"), quantised="Q4_0")
    arguments = ["models", "measure", str(model), "--dtype", "float32", "--tokens", "30", "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = {row["weights"]: row for row in json.loads(done.stdout)["weights"]}
    assert [*found] == ["own", "fp16", "int8", "fp8", "int4"]
    assert found["own"]["kl"] < found["int8"]["kl"], "nothing is quantised that was not before"
