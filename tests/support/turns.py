"""Turns of a conversation for the tests that prove promises, here or in a process of their own.

    python turns.py '{"session": null, "texts": ["hi"], "max_tokens": 8, ...}'

prints one JSON line per turn, with the exact ids and a digest of the last logits' bits.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from program import environment


def run_turns(
    texts: Sequence[str],
    *,
    session: str | None = None,
    model: str | None = None,
    dtype: str | None = None,
    temperature: float = 0.0,
    seed: int | None = 7,
    max_tokens: int = 16,
    restore: str = "auto",
    system: str | None = None,
) -> list[dict[str, Any]]:
    """Say `texts` one after the other in one runtime, opened for them and closed after them."""
    from chatkv.client import ChatRequest, open_chat
    from chatkv.engine.options import SamplingOptions
    from chatkv.paths import folders
    from chatkv.session.turn import TurnOptions

    request = ChatRequest(model=model, dtype=dtype, resume=session, seed=seed)  # type: ignore[arg-type]
    options = TurnOptions(
        SamplingOptions(temperature=temperature),
        max_tokens=max_tokens,
        restore=restore,  # type: ignore[arg-type]
    )
    results = []
    with open_chat(folders(), request) as chat:
        for text in texts:
            result = chat.conversation.send(text, options, system=system)
            system = None
            assert result.last_logits is not None
            bits = result.last_logits.numpy().tobytes()
            results.append(
                result.to_json()
                | {
                    "logits": hashlib.sha256(bits).hexdigest(),
                    "reply_ids": list(chat.conversation.turns[-1].reply_ids),
                    "log": chat.conversation.log,
                    "runtime_notices": list(chat.runtime.notices),
                }
            )
    return results


def run_turns_in_process(texts: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """`run_turns` in a new process, which inherits CHATKV_HOME."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps({"texts": list(texts), **options})],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    for turn in run_turns(arguments.pop("texts"), **arguments):
        print(json.dumps(turn))
