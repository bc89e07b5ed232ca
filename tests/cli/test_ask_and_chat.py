"""`ask` and `chat` as real programs: streams, exit codes, JSON, Ctrl-C, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked, chatkv
from program import Ran, environment

QUICK = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "12"]

Program = Callable[..., Ran]


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture
def ask(program: Program, model: str) -> Program:
    return lambda *words, stdin="": program("ask", "--model", model, *QUICK, *words, stdin=stdin)


def test_the_answer_is_all_there_is_on_stdout(process: Program, ask: Program, model: str) -> None:
    """Whatever bytes are asked: undecodable ones of a command line, and every control character
    but the null."""
    question = os.fsdecode(b"\xff\xfe caf\xc3\xa9 \xf0\x9f\x99\x82 ") + "".join(
        map(chr, range(1, 32))
    )
    spoken = process("ask", "--model", model, *QUICK, question)
    assert spoken.code == 0, spoken.err
    told = json.loads(ask(question, "--json").out)
    assert spoken.out == told["text"] + "\n"
    assert "\x1b" not in spoken.out + spoken.err


def test_json_has_the_fields_that_scripts_rely_on(ask: Program) -> None:
    first = json.loads(ask("hello", "--json").out)
    second = json.loads(ask("more", "-c", "--restore", "reload", "--json").out)
    assert second["session"] == first["session"]
    assert (first["turn"], second["turn"]) == (1, 2)
    for result in first, second:
        tokens = result["tokens"]
        assert tokens["prompt"] == tokens["reused"] + tokens["loaded"] + tokens["computed"]
        assert set(result["plan"]) >= {"chosen", "predicted_ms", "actual_ms"}
        assert set(result["timing"]) == {
            "load_model_ms",
            "restore_ms",
            "prefill_ms",
            "ttft_ms",
            "decode_tokens_per_s",
        }
        assert result["finish_reason"] in ("stop", "length", "interrupted")
        assert result["model"]
    assert first["plan"]["chosen"] == "none"
    assert second["plan"]["chosen"] == "reload"
    assert (
        second["tokens"]["loaded"] == sum(first["tokens"][k] for k in ("prompt", "generated")) - 1
    )


def test_a_session_is_found_by_id_prefix_and_title(ask: Program) -> None:
    session = json.loads(ask("a question of mine", "--json").out)["session"]
    for name in (session, session[:12], session.upper(), "a question of mine"):
        result = ask("more", "-r", name, "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["session"] == session


def test_a_resumed_session_brings_its_model(ask: Program, program: Program) -> None:
    ask("hello")
    result = program("ask", *QUICK, "-c", "more", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["turn"] == 2


def test_piped_text_is_the_question_or_follows_it(ask: Program, program: Program) -> None:
    ask(stdin="piped\n")
    ask("about this:", "-c", stdin="piped\n")
    shown = program("sessions", "show", "piped").out
    assert "piped" in shown
    assert "about this:\n\npiped" in shown


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["ask"], 2, "nothing to ask"),
        (["ask", "hi", "--model", "no/such/model/here"], 1, "no model at"),
        (["ask", "hi", "-r", "01zzzzzz"], 1, "01zzzzzz"),
        (["ask", "hi", "-c"], 2, "no session to continue"),
        (["ask", "hi", "-c", "-r", "abcd"], 2, "not both"),
        (["ask", "hi", "--temperature", "-3"], 2, "makes no sense"),
        (["ask", "hi", "--max-tokens", "0"], 2, "--max-tokens"),
        (["ask", "hi", "--dtype", "int3"], 2, "int3"),
    ],
)
def test_a_mistake_is_one_line_and_a_code(
    words: list[str], code: int, says: str, program: Program
) -> None:
    result = program(*words)
    assert result.code == code, result.err
    assert says in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_file_that_is_no_model(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no such thing")
    result = program("ask", "hi", "--model", str(path))
    assert result.code == 1
    assert result.err.count("\n") == 1 and "no GGUF" in result.err


def test_ctrl_c_keeps_the_answer_so_far(program: Program, model: str) -> None:
    words = ["--dtype", "float32", "--temperature", "1", "--seed", "1", "--max-tokens", "100000"]
    asking = Forked(chatkv, "ask", "--model", model, *words, "tell me everything")
    begun = asking.stdout.read(1)
    asking.send_signal(signal.SIGINT)
    rest, errors = asking.communicate()
    assert asking.returncode in (130, 0)  # 0: a fast machine was done before the signal came
    assert "Traceback" not in errors
    turn = json.loads(program("sessions", "show", "tell me everything", "--json").out)["turns"][0]
    if asking.returncode == 130:
        assert turn["finish_reason"] == "interrupted"
    assert (begun + rest).rstrip("\n") == turn["reply"].rstrip("\n")


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.file, theirs = pty.openpty()
        self.program = Forked(chatkv, *words, env=environment(TERM="dumb"), terminal=theirs)
        os.close(theirs)
        self.text, self._seen = "", 0

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Read until `pattern` appears behind what was seen before; all up to its end."""
        deadline = time.monotonic() + timeout_s
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.text[self._seen :]!r}"
            if select.select([self.file], [], [], left)[0]:
                self.text += os.read(self.file, 65536).decode("utf-8", "replace")
        before, self._seen = self._seen, found.end()
        return self.text[before : self._seen]

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def exit_code(self, key: str = "", timeout_s: float = 30.0) -> int:
        """Wait for the end, pressing `key` until it comes: a Ctrl-C that arrives just while the
        line editor begins to wait is noticed with the next key only."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if key:
                self.type(key)
            for _ in range(20):
                if (code := self.program.returncode) is not None:
                    os.close(self.file)
                    return code
                time.sleep(0.05)
        self.program.send_signal(signal.SIGKILL)
        raise AssertionError(f"still running: {self.text[-500:]!r}")


def test_a_chat_in_a_terminal(program: Program, model: str) -> None:
    chat = Terminal("chat", "--model", model, *QUICK)
    chat.wait_for("new session")
    chat.wait_for("> ")
    chat.type("hello there\n")
    chat.wait_for(r"turn 1.*\n")
    chat.wait_for("> ")
    chat.type("two\\\nlines\n")
    chat.wait_for(r"turn 2.*\n")
    chat.wait_for("> ")
    assert chat.exit_code("\x04") == 0  # Ctrl-D
    assert "Traceback" not in chat.text
    shown = program("sessions", "show", "hello there").out
    assert "two\nlines" in shown

    resumed = Terminal("chat", "-c", *QUICK)
    assert "2 turns" in resumed.wait_for("2 turns.*\n")
    assert "two" in resumed.wait_for(r"\n> $")
    resumed.type("third\n")
    assert "computed" in resumed.wait_for(r"turn 3.*\n")
    resumed.wait_for("> ")
    assert resumed.exit_code("\x03") == 0  # Ctrl-C at the prompt


def test_ctrl_c_in_a_chat_stops_the_answer_and_the_chat_goes_on(
    program: Program, model: str
) -> None:
    words = ["--dtype", "float32", "--temperature", "1", "--seed", "1", "--max-tokens", "900"]
    chat = Terminal("chat", "--model", model, *words)
    chat.wait_for("> ")
    chat.type("tell me everything\n")
    chat.wait_for(r"\r\n.")
    chat.type("\x03")
    chat.wait_for(r"turn 1.*\n")
    chat.wait_for("> ")
    chat.type("still there?\n")
    chat.wait_for(r"turn 2.*\n")
    assert chat.exit_code("\x04") == 0
    assert "Traceback" not in chat.text
    turns = json.loads(program("sessions", "show", "tell me everything", "--json").out)["turns"]
    assert [turn["user"] for turn in turns] == ["tell me everything", "still there?"]


def test_a_terminal_gets_no_control_characters_of_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from chatkv.cli.answer import shown

    hostile = "red \x1b[31m bell \x07 title \x1b]0;gone\x07 line\n"
    assert shown(hostile) == hostile  # a pipe gets every byte
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" not in shown(hostile) and "\x07" not in shown(hostile)
    assert shown(hostile).endswith("line\n")
