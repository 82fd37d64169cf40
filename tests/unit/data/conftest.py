"""Datasets in a temporary directory; nobody's own HOOP_DATA or cache is looked at unless a test says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hoop.data import cifar, mnist

GIVEN = os.environ.get("HOOP_DATA", "")
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks where the person who runs the tests keeps datasets, and beside the repository."""
    monkeypatch.setenv("HOOP_DATA", os.pathsep.join(filter(None, [GIVEN, str(SHARED)])))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place with datasets, empty so far."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HOOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mnist, "DEBIAN", tmp_path / "debian")
    for reader in (mnist._mnist_in, mnist._fashion_in, cifar._arrays):
        reader.cache_clear()
    return tmp_path / "data"
