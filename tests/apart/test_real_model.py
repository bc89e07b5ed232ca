"""The model that users get, prefilled by a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatkv_store import layout as layouts
from prefillers import folders_in, prefiller

QUESTION = "Here is what I know of the sea: it is wide, salt and never still. " * 30


@pytest.mark.slow
def test_smollm2_answers_the_same(
    tmp_path: Path,
    home: Path,
    decoder: Any,
    smollm2_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a store that both have open, and over the wire; in values as users have them."""
    monkeypatch.setattr(layouts, "MIN_VALUE_BYTES", 256 << 10)
    place = folders_in(tmp_path / "decode")
    alone = decoder(None, place, of=str(smollm2_gguf)).say(QUESTION, max_tokens=24)
    with prefiller(home, str(smollm2_gguf)) as worker:
        apart = decoder(worker.at(), folders_in(home), of=str(smollm2_gguf))
        shared = apart.say(QUESTION, max_tokens=24)
        link = decoder(worker.at(), folders_in(tmp_path / "other"), of=str(smollm2_gguf))
        wire = link.say(QUESTION, max_tokens=24)
    for answer in (shared, wire):
        assert answer.text == alone.text
        assert answer.remote["failure"] is None and answer.tokens.computed == 1
    assert shared.remote["stored_tokens"] > 400
    assert wire.remote["stored_tokens"] == 0
