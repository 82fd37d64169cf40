"""Each test gets an empty dataset directory of its own; the user's HOOP_DATA and cache are not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hoop.data import cifar, mnist

USER_HOOP_DATA = os.environ.get("HOOP_DATA", "")
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture
def real_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the datasets of the user's HOOP_DATA and of ``shared/data`` next to the repository."""
    monkeypatch.setenv("HOOP_DATA", os.pathsep.join(filter(None, [USER_HOOP_DATA, str(SHARED)])))


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only dataset directory, empty at first."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HOOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mnist, "DEBIAN", tmp_path / "debian")
    for reader in (mnist._mnist_in, mnist._fashion_in, cifar._arrays):
        reader.cache_clear()
    return tmp_path / "data"
