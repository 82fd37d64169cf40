"""``--dashboard [PORT]``: the port may be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoop.cli.commands import with_default_port
from hoop.cli.run_dashboard import RunDashboard
from hoop.errors import InvalidArgument


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train mnist --dashboard", "train mnist --dashboard 8787"),
        ("train --dashboard mnist", "train --dashboard 8787 mnist"),
        ("train mnist --dashboard --json", "train mnist --dashboard 8787 --json"),
        ("train mnist --dashboard 0 --json", "train mnist --dashboard 0 --json"),
        ("up --dashboard", "up --dashboard 8787"),
        ("up --dashboard=5", "up --dashboard=5"),
        ("up --dashboard -1", "up --dashboard -1"),
        ("run program --dashboard", "run program --dashboard"),
        ("dashboard", "dashboard"),
        ("", ""),
    ],
)
def test_a_missing_port_is_the_usual_one(given: str, expected: str) -> None:
    assert with_default_port(given.split()) == expected.split()


def test_a_wrong_port_is_refused_and_no_folder_is_left(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="70000 is no port"):
        RunDashboard(70000, None, ())


def test_nothing_starts_before_the_coordinator_is_up(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    page = RunDashboard(0, tmp_path / "address", ())
    page.start(lambda line: None)
    assert page._process is None
    page.close()
    own = RunDashboard(0, None, ())
    folder = own.address_file.parent
    assert folder.is_dir()
    own.close()
    assert not folder.exists()
