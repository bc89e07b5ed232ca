"""What chatkv writes is for its owner alone, whatever the umask."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from program import command, environment


def test_every_file_and_folder_is_the_owners_alone(
    home: Path, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    home.chmod(0o700)
    exported = tmp_path / "export.chatkv"
    for arguments in (
        ("ask", "hi", "-m", str(tiny_checkpoint("llama3")), "--max-tokens", "3"),
        ("cache", "export", "hi", "-o", str(exported)),
        ("cache", "verify"),
    ):
        done = subprocess.run(
            command(*arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            preexec_fn=lambda: os.umask(0) and None,  # the worst that a user could have
        )
        assert done.returncode == 0, done.stderr
    found = [exported, *home.rglob("*")]
    names = {path.name for path in found}
    assert {"conversations.sqlite3", "data.mdb", "lock.mdb", "costs.json"} <= names
    wrong = {
        str(path): oct(path.stat().st_mode & 0o777)
        for path in found
        if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    }
    assert wrong == {}
