"""Jobs that a test has loaded by a file's path are found under the module's name by no other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hoop.engine.job import LOADED


@pytest.fixture(autouse=True)
def own_loaded_jobs() -> Iterator[None]:
    before = dict(LOADED)
    LOADED.clear()
    yield
    LOADED.clear()
    LOADED.update(before)
