"""The real program in a real terminal, on the real model: type, stop, quit, resume."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chatkv.client import engine
from chatkv.paths import folders
from chatkv_store.conversations import Conversations
from program import command, environment

WAIT_S = 240.0  # a model is prepared in it, on a machine that may be busy
WIDTH, HEIGHT = 100, 30


class Terminal:
    """tmux, which is to a program what a person's terminal is."""

    def __init__(self, folder: Path) -> None:
        self._tmux = ["tmux", "-f", "/dev/null", "-S", str(folder / "tmux.sock")]

    def start(self, *arguments: str, **variables: str) -> None:
        """Run the program; what it prints last stays to be seen: a pane that ends with it may
        lose that."""
        words = environment(TERM="xterm-256color", CHATKV_ENGINE="on", **variables)
        given = [word for name, value in words.items() for word in ("-e", f"{name}={value}")]
        size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
        self._run("new-session", "-d", *size, *given, *_AND_STAY, *command(*arguments))

    def keys(self, *names: str) -> None:
        self._run("send-keys", *names)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    @property
    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def wait_for(self, *wanted: str, without: str = "") -> str:
        """The screen, once it shows all of `wanted` and no longer `without`."""
        deadline = time.monotonic() + WAIT_S
        while True:
            shown = self.text
            if all(one in shown for one in wanted) and not (without and without in shown):
                return shown
            assert time.monotonic() < deadline, f"no {wanted} in:\n{shown}"
            time.sleep(0.1)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)

    def _run(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True)
        return done.stdout


_AND_STAY = ("sh", "-c", '"$@"; exec sleep 1000000', "sh")


@pytest.fixture
def terminal(tmp_path: Path, home: Path) -> Iterator[Callable[[], Terminal]]:
    """`terminal()` is a new, empty one; the engine that programs start in it ends with the test."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made: list[Terminal] = []

    def new() -> Terminal:
        folder = tmp_path / f"terminal-{len(made)}"
        folder.mkdir()
        made.append(Terminal(folder))
        return made[-1]

    yield new
    for one in made:
        one.close()
    engine.stop(folders())


@pytest.mark.slow
def test_type_stop_quit_resume(
    terminal: Callable[[], Terminal], smollm2_gguf: Path, home: Path
) -> None:
    first = terminal()
    first.start("chat", "--model", str(smollm2_gguf), "--seed", "1", "--temperature", "0")
    first.wait_for("Message, or /")  # before the model is there
    first.type("Tell me a very long story about the sea.")
    first.keys("Enter")  # and is taken all the same
    first.wait_for("> Tell me a very long story", "answering")
    time.sleep(1)  # some words
    first.keys("Escape")
    shown = first.wait_for("[interrupted] /continue goes on from here", "stopped")
    assert "tokens/s" in shown

    first.keys("C-c")
    first.keys("C-c")
    shown = first.wait_for("To go on: chatkv resume")
    session = shown.split("chatkv resume ")[1].split()[0]
    with Conversations(folders().conversations) as store:
        (turn,) = store.chain(session)
    assert turn.state == "interrupted" and len(turn.reply_text.split()) > 1

    engine.stop(folders())  # nothing of it is in memory any more
    second = terminal()
    second.start("resume", session[:12])
    words = " ".join(turn.reply_text.split()[:3])
    second.wait_for("> Tell me a very long story", words)
    second.wait_for("restored", "from disk")
    second.type("/continue")
    second.keys("Enter")
    second.wait_for("answering")
    second.keys("Escape")
    second.wait_for("stopped")
    second.type("/quit")
    second.keys("Enter")
    second.wait_for("To go on: chatkv resume")
    with Conversations(folders().conversations) as store:
        (longer,) = store.chain(session)
    assert longer.reply_text.startswith(turn.reply_text)


def test_the_full_screen_chat_imports_nothing_heavy() -> None:
    """What it paints with must be there at once: no model, no server, no arrays."""
    code = (
        "import sys; from chatkv.cli import chat, full_screen; import chatkv.tui.app; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment(),
    )
    loaded = set(done.stdout.split())
    assert "textual" in loaded
    heavy = {"torch", "numpy", "starlette", "uvicorn", "tokenizers", "jinja2", "lmdb"}
    assert loaded.isdisjoint(heavy | {"sqlite3", "markdown_it", "pygments"})
