"""An engine that the tests of a file share, and the process switched on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatkv.client.link import Link
from engines import running_engine


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    """An engine for all tests of a file, in a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATKV_HOME", str(tmp_path_factory.mktemp("engine-home")))
        patch.delenv("CHATKV_ENGINE")
        with running_engine() as link:
            yield link
