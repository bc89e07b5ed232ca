"""Whether the file of conversations is what SQLite wrote, asked without writing to it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote


def conversations_damage(path: Path) -> str | None:
    """What SQLite's own quick check finds first, None where it finds nothing. Raises nothing."""
    found = "it cannot be opened"
    for how in ("mode=ro", "mode=ro&immutable=1"):  # the second also where nothing may be written
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True)) as conn:
                (found,) = conn.execute("PRAGMA quick_check(1)").fetchone()
                return None if found == "ok" else str(found)
        except sqlite3.Error as error:
            found = str(error)
    return found
