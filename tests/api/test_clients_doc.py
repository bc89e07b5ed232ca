"""The examples of docs/clients.md do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(url: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    example = EXAMPLES[number].replace("http://127.0.0.1:11535", url)
    assert example != EXAMPLES[number]
    exec(compile(example, f"{DOCUMENT.name}, example {number}", "exec"), {})
    out = capsys.readouterr().out
    assert out.strip()
    if "were kept" in out:
        cached, total = map(int, re.findall(r"(\d+) of (\d+) were kept", out)[0])
        assert cached > total / 2


def test_every_client_has_an_example() -> None:
    for module in ("openai", "ollama", "anthropic"):
        assert any(f"import {module}" in one or f"from {module}" in one for one in EXAMPLES)
