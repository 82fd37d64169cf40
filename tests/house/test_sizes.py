"""Files of the package are short and have specific names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hoop"
MAX_LINES = 900
"""A longer file should be split by topic. A class is never split over two files to stay below the limit."""
REPORTED_LINES = 500
"""A longer file appears in the summary of warnings, as a reminder to ask whether it is still about one topic."""
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
"""Names that do not say what the file contains."""


def modules(package: Path) -> Iterator[Path]:
    """Every file that is not generated."""
    return (path for path in sorted(package.rglob("*.py")) if "generated" not in path.relative_to(package).parts)


def long_files(package: Path, most: int) -> list[str]:
    lengths = ((path, len(path.read_text("utf-8").splitlines())) for path in modules(package))
    return [f"{path}: {lines} lines, above {most}" for path, lines in lengths if lines > most]


def vaguely_named_files(package: Path) -> list[str]:
    """Files with a vague name, such as ``utils``, or in a folder with one."""
    return [
        f"{path}: named after nothing; name it after what it holds"
        for path in modules(package)
        if VAGUE_NAMES & {part.strip("_") for part in path.relative_to(package).with_suffix("").parts}
    ]


@pytest.mark.filterwarnings("default")
def test_files_are_short() -> None:
    for reported in long_files(PACKAGE, REPORTED_LINES):
        warnings.warn(reported, stacklevel=1)
    long = long_files(PACKAGE, MAX_LINES)
    assert not long, "\n" + "\n".join(long)


def test_files_have_specific_names() -> None:
    found = vaguely_named_files(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_a_long_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 901)
    (tmp_path / "short.py").write_text("x = 1\n" * 900)
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "long_pb2.py").write_text("x = 1\n" * 901)
    assert long_files(tmp_path, 900) == [f"{tmp_path / 'long.py'}: 901 lines, above 900"]


def test_a_vague_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "helpers").mkdir()
    for name in ("utils.py", "_common.py", "arena.py", "helpers/ring.py"):
        (tmp_path / name).touch()
    assert [Path(found.split(":")[0]).name for found in vaguely_named_files(tmp_path)] == [
        "_common.py",
        "ring.py",
        "utils.py",
    ]
