"""Processes for tests, forked from a server that has torch and chatkv loaded: one is there in a
tenth of a second, where one that starts from nothing spends seconds on imports. It is as real: it
has its own memory, descriptors, locks and signals.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import termios
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")

# Importing is all that may happen before the fork: no compute, hence no threads. One process of
# pytest has one such server, so what anybody needs is named here.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "tokenizers", "jinja2", "uvicorn", "chatkv.cli.main", "chatkv.server.own"]
)


class Forked:
    """`main(*arguments)` in a process of its own, as much like subprocess.Popen as tests need:
    nothing to read on stdin, text from stdout and stderr; or all three are a terminal."""

    def __init__(
        self,
        main: Callable[..., object],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        terminal: int | None = None,
    ) -> None:
        if terminal is None:
            (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
            theirs = [os.open(os.devnull, os.O_RDONLY), theirs_out, theirs_err]
            self.stdout = os.fdopen(out, encoding="utf-8", newline="\n")
            self.stderr = os.fdopen(err, encoding="utf-8", newline="\n")
        else:
            theirs = [os.dup(terminal) for _ in range(3)]
        streams = [Connection(theirs[0], writable=False)]
        streams += [Connection(one, readable=False) for one in theirs[1:]]
        about = (dict(os.environ if env is None else env), os.getcwd(), streams)
        self._process = CONTEXT.Process(target=_be, args=(main, arguments, *about), daemon=True)
        self._process.start()
        for one in streams:
            one.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, -9 where it was killed."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            raise TimeoutError(f"it was still running after {timeout:g} s")
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """All that it still says, up to its end. What it says on stderr is taken to be short."""
        said = self.stdout.read(), self.stderr.read()
        self.wait()
        return said


def chatkv(*arguments: str) -> None:
    """For `Forked`: what `python -m chatkv` does."""
    from chatkv.cli.main import main

    main(list(arguments))


def call(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """What `function` returns in a process of its own, which then ends."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    about = (theirs, dict(os.environ), function, arguments, named)
    process = CONTEXT.Process(target=_answer, args=about)
    process.start()
    theirs.close()
    try:
        result: Result = ours.recv()
    except EOFError:
        raise AssertionError("the process ended without an answer: see its stderr") from None
    process.join(60)
    assert process.exitcode == 0
    return result


def _answer(
    to: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    to.send(function(*arguments, **named))


def _be(
    main: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    folder: str,
    streams: list[Connection],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    is_terminal = os.isatty(0)
    if is_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1 if is_terminal else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    main(*arguments)
