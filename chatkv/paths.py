"""Where chatkv keeps things: four folders, under `CHATKV_HOME` or the system's own places.

Conversations are data (backed up, never deleted by us); KV blocks, prepared weights and
calibrations are cache (may vanish at any time); sockets and locks are runtime.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Folders:
    data: Path
    cache: Path
    config: Path
    runtime: Path

    @property
    def conversations(self) -> Path:
        """The SQLite file of all conversations."""
        return self.data / "conversations.sqlite3"

    @property
    def kv(self) -> Path:
        """The LMDB environment of KV blocks."""
        return self.cache / "kv"

    @property
    def costs(self) -> Path:
        """What loading and prefill cost on this machine, per model."""
        return self.cache / "costs.json"

    @property
    def models(self) -> Path:
        """Prepared models: one folder per weights digest."""
        return self.cache / "models"

    @property
    def socket(self) -> Path:
        """Where the engine's process listens."""
        return self.runtime / "engine.sock"

    @property
    def engine_lock(self) -> Path:
        """Held by the engine's process, whose id it contains."""
        return self.runtime / "engine.lock"

    @property
    def engine_log(self) -> Path:
        """What the engine's process has to say."""
        return self.runtime / "engine.log"

    @property
    def prefill_notes(self) -> Path:
        """Which prefill workers are running: a note of each."""
        return self.runtime / "prefill"

    @property
    def settings(self) -> Path:
        """The user's own settings."""
        return self.config / "config.toml"

    def make(self) -> Folders:
        """Create the folders, readable by their owner alone; returns self."""
        for folder in (self.data, self.cache, self.config, self.runtime):
            # One by one: `parents=True` would leave the folder above readable by everybody.
            for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
                missing.mkdir(mode=0o700, exist_ok=True)
        return self


def folders() -> Folders:
    """The folders in force: below `CHATKV_HOME` when it is set, else the platform's."""
    home = os.environ.get("CHATKV_HOME")
    if home:
        return folders_below(Path(home))
    import platformdirs

    dirs = platformdirs.PlatformDirs("chatkv", appauthor=False)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Folders(
        Path(dirs.user_data_dir),
        Path(dirs.user_cache_dir),
        Path(dirs.user_config_dir),
        # The library's own answer without the variable is a folder in /tmp that others can see.
        Path(session) / "chatkv" if session else Path(dirs.user_cache_dir) / "run",
    )


def folders_below(home: Path) -> Folders:
    """All of them in one place."""
    root = home.expanduser().absolute()
    return Folders(root / "data", root / "cache", root / "config", root / "run")


def write_note(path: Path, text: str) -> None:
    """Write a small file of the cache whole, or not at all where it cannot be written: what a note
    holds can always be found out again.
    """
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
