"""What a model takes of main memory, as said beforehand, against the peak of a process that holds
a conversation with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatkv.client import ChatRequest, open_chat
from chatkv.engine import admission
from chatkv.errors import ModelError
from chatkv.model.catalog import find_model
from chatkv.model.linear import packs_on_cpu
from chatkv.model.prepared import prepare
from chatkv.paths import folders
from program import environment

WORK = """
import json, sys
from chatkv.client import ChatRequest, open_chat
from chatkv.engine.admission import needed
from chatkv.engine.options import SamplingOptions
from chatkv.model.catalog import find_model
from chatkv.model.own_codes import own_layouts
from chatkv.paths import folders
from chatkv.session.turn import TurnOptions

model, dtype, weights = sys.argv[1:]
files = find_model(model, folders().cache)
with open_chat(folders(), ChatRequest(model, dtype, weights=weights)) as chat:
    chat.conversation.send("word and " * 400, TurnOptions(SamplingOptions(), max_tokens=4))
    config, held = chat.runtime.prepared.config, len(chat.conversation.log)
    own, before = own_layouts(files, config), chat.runtime.needs.resident
    said = needed(files, config, dtype, weights, own, held, resident=before)
    peak = dict(line.split(":", 1) for line in open("/proc/self/status"))["VmHWM"]
    peak = int(peak.split()[0]) * 1024
    print(json.dumps({"said": said.total, "peak": peak, "parts": vars(said)}))
"""


def run(model: Path, dtype: Any, weights: Any) -> dict[str, Any]:
    """Of a start that finds the model prepared."""
    place, quantised = folders().make(), None if weights == "full" else weights
    prepare(find_model(str(model), place.cache), dtype, place.models, quantised=quantised)
    arguments = [sys.executable, "-c", WORK, str(model), dtype, weights]
    done = subprocess.run(
        arguments, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_larger_checkpoint(
    home: Path, tiny_checkpoint: Callable[..., Path], dtype: str, weights: str
) -> None:
    """Of 200 million parameters in bfloat16: computed in float32, they are converted."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    model = tiny_checkpoint(
        "llama3", dtype="bfloat16", max_position_embeddings=4096, **shape, **heads
    )
    found = run(model, dtype, weights)
    # Within 5 % in all of 21 runs on a CPU that multiplies in bfloat16. Where weights are converted
    # on the way, what malloc keeps between varies by some percent; layouts and buffers of the
    # library differ between kinds of CPU.
    is_plain = dtype == "bfloat16" and weights == "full"
    allowed = 0.1 if not packs_on_cpu(torch.bfloat16) else 0.05 if is_plain else 0.07
    assert found["peak"] == pytest.approx(found["said"], rel=allowed), found


def test_what_is_not_free_is_refused_with_the_numbers(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is allocated; what would fit is named."""
    monkeypatch.setattr(admission, "available_bytes", lambda: 40 << 20)
    model = str(tiny_checkpoint("llama3"))
    with (
        pytest.raises(ModelError, match=r"full weights needs .* of weights\), and .* are free"),
        open_chat(folders(), ChatRequest(model, "float32")),
    ):
        pass
