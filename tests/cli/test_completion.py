"""Shell completion: by the shells' own protocol, in processes of their own, and never an error."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from program import Ran, command, environment

Program = Callable[..., Ran]


def _offered(process: Program, words: str, shell: str = "bash") -> list[str]:
    """What is offered for the last word of a line that ends in it; "" where it ends in a blank."""
    count = str(len(words.split()) - (not words.endswith(" ")))
    number = words.split()[-1] if shell == "fish" and not words.endswith(" ") else ""
    done = process(
        _CHATKV_COMPLETE=f"{shell}_complete",
        COMP_WORDS=words,
        COMP_CWORD=number if shell == "fish" else count,
    )
    assert (done.code, done.err) == (0, "")
    return [line for line in done.out.splitlines() if line]


def test_commands_verbs_options_and_values(process: Program) -> None:
    assert _offered(process, "chatkv mod") == ["plain,models"]
    assert _offered(process, "chatkv models p") == ["plain,pull"]
    assert "plain,--temperature" in _offered(process, "chatkv ask --temp")
    assert _offered(process, "chatkv ask --kv-codec i") == ["plain,int8", "plain,int4"]
    assert _offered(process, "chatkv config show serve.po") == ["plain,serve.port"]


def test_sessions_by_id_and_by_title(process: Program, talk: Callable[..., object]) -> None:
    session = talk("A hobby\nfor \x1b[31mAda")
    short = _offered(process, "chatkv resume ")[0].removeprefix("plain,")
    assert session.id.startswith(short) and len(short) >= 4
    assert _offered(process, "chatkv ask -r HOB") == [f"plain,{short}"]
    assert _offered(process, "chatkv sessions show nothing") == []
    zsh = _offered(process, "chatkv resume hobby", "zsh")
    assert zsh == ["plain", short, "A hobby for [31mAda"]
    (fish,) = _offered(process, "chatkv resume hobby", "fish")
    assert fish == f"plain,A hobby for [31mAda\t{short}"


def test_models_by_name_and_files_by_path(process: Program, home: Path) -> None:
    for place, name in (("cache/hub", "org--one"), ("hf", "org--two")):
        (home / place / f"models--{name}" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (home / "hf" / "models--org--two" / "snapshots" / ("0" * 40) / "x.gguf").touch()

    def offered(words: str) -> list[str]:
        moved = {"HF_HUB_CACHE": str(home / "hf")}
        return _offered(lambda **given: process(**given, **moved), words)

    assert offered("chatkv ask -m ") == ["plain,org/two/x.gguf", "plain,org/one"]
    assert offered("chatkv models show org/o") == ["plain,org/one"]
    assert offered("chatkv chat --model ./mod") == ["file,./mod"]
    assert offered("chatkv serve -m two") == ["plain,org/two/x.gguf"]


def test_what_is_broken_completes_nothing_and_says_nothing(process: Program, home: Path) -> None:
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text("nonsense = [")
    assert _offered(process, "chatkv resume ") == []
    assert not (home / "data").exists(), "completing made a file"
    (home / "data").mkdir()
    (home / "data" / "conversations.sqlite3").write_bytes(b"no database" * 1000)
    (home / "cache").write_text("no folder")
    assert _offered(process, "chatkv resume ") == []
    assert _offered(process, "chatkv ask -m /") == ["file,/"]
    assert _offered(process, 'chatkv ask "unbalanced ') == []


def test_it_imports_no_torch(home: Path) -> None:
    code = (
        "import sys\n"
        "from chatkv.cli import main\n"
        "try:\n    main.main()\n"
        "except SystemExit:\n    pass\n"
        "sys.exit(len({'torch', 'numpy', 'textual', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    for words in ("chatkv ask -m x", "chatkv chat -r x", "chatkv models show x", "chatkv "):
        variables = environment(
            _CHATKV_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
        )
        subprocess.run([command()[0], "-c", code], env=variables, check=True, timeout=60)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_the_shells_own(process: Program, shell: str, tmp_path: Path) -> None:
    done = process("completion", shell)
    assert (done.code, done.err) == (0, "") and f"{shell}_complete" in done.out
    assert process("completion", "csh").code == 2
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script is written, and not tried")
    script = tmp_path / "script"
    script.write_text(done.out)
    checked = subprocess.run([shell, "-n", script], capture_output=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_bash_completes(home: Path, process: Program, tmp_path: Path) -> None:
    """The script in a real bash, as pressing Tab calls it."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "chatkv"
    program.write_text(f'#!/bin/sh\nexec {" ".join(command())} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(process("completion", "bash").out)
    lines = (
        f"source {tmp_path}/script; COMP_WORDS=(chatkv cache ver); COMP_CWORD=2; "
        "_chatkv_completion chatkv; echo ${COMPREPLY[@]}"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", lines],
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("verify\n", "")
