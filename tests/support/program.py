"""Running the program as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import chatkv
import chatkv_kernels
import chatkv_store

PYTHONPATH = os.pathsep.join(
    str(Path(module.__file__ or "").parents[1]) for module in (chatkv, chatkv_kernels, chatkv_store)
)


@dataclass
class Ran:
    """How one command ended."""

    code: int
    out: str
    err: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chatkv", *arguments]


def environment(**more: str) -> dict[str, str]:
    """What a child process needs to find the packages under test and the test's home.

    Its output is buffered as a user's is, also where the tests' own is not.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "PYTHONPATH": PYTHONPATH, **more}


def run(*arguments: str, **variables: str) -> Ran:
    """The program in a process of its own, to its end, with nothing to read."""
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=environment(**variables),
    )
    return Ran(done.returncode, done.stdout, done.stderr)
