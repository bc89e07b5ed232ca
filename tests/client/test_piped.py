"""`ask` with a pipe that takes its time: what has arrived is prefilled before the rest comes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatkv.cli.piped import Piped
from chatkv.client.link import Link
from engines import eventually, running_engine
from program import command, environment

TEXT = "A fisherman lived by the sea with his wife and their old grey cat. " * 8


@contextmanager
def pipe() -> Iterator[tuple[Piped, int]]:
    read, write = os.pipe()
    piped = Piped(read)
    try:
        yield piped, write
    finally:
        os.close(write)
        assert piped.has_ended(60)
        os.close(read)


def test_text_grows_and_half_a_character_waits() -> None:
    with pipe() as (piped, write):
        assert not piped.has_ended()
        growing = piped.growing()
        assert next(growing) == ""
        os.write(write, "caf\u00e9 \u2713".encode()[:-1])
        assert next(growing) == "caf\u00e9 "
        os.write(write, "\u2713\r".encode()[-2:])
        os.write(write, b"\nmore\xff")
        eventually(lambda: piped.text.endswith("more\ufffd"))
        assert piped.text == "caf\u00e9 \u2713\nmore\ufffd"
    assert list(growing) in ([], [piped.text])


def used_tokens(link: Link) -> int:
    models = link.call("GET", "/status")["models"]
    return sum(one["kv_tokens"]["total"] - one["kv_tokens"]["free"] for one in models)


def test_a_slow_pipe_is_prefilled_while_it_is_read(
    home: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHATKV_ENGINE")
    ask = command("ask", "-m", model, "--dtype", "float32", "--max-tokens", "2", "--json")
    with running_engine() as link:
        child = subprocess.Popen(
            [*ask, "What of this?"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        assert child.stdin is not None
        child.stdin.write(TEXT)
        child.stdin.flush()
        eventually(lambda: used_tokens(link) > 128)
        out, _ = child.communicate("And that was that.\n", timeout=120)
        whole = subprocess.run(
            [*ask, "What of this?\n\n" + TEXT + "And that was that."],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            text=True,
            check=True,
        )
    tokens = json.loads(out)["tokens"]
    assert tokens["reused"] > 128 and tokens["computed"] < tokens["prompt"] / 3
    assert tokens["prompt"] == json.loads(whole.stdout)["tokens"]["prompt"]
    assert child.returncode == 0
