"""A file holds one thing, whole, and is named after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hoop"
MOST_LINES = 900
"""A file above this is not one thing any more. A class is never cut into two files to stay below it."""
DRAWERS = {"util", "utils", "helper", "helpers", "common", "misc"}
"""Names that say nothing: what is in such a file has a better one."""


def modules(package: Path) -> Iterator[Path]:
    """Every file that a person wrote."""
    return (path for path in sorted(package.rglob("*.py")) if "generated" not in path.relative_to(package).parts)


def long_files(package: Path) -> list[str]:
    lengths = ((path, len(path.read_text("utf-8").splitlines())) for path in modules(package))
    return [f"{path}: {lines} lines, at most {MOST_LINES}" for path, lines in lengths if lines > MOST_LINES]


def drawers(package: Path) -> list[str]:
    """Files and folders named ``utils`` and the like."""
    return [
        f"{path}: named after nothing; name it after what it holds"
        for path in modules(package)
        if DRAWERS & {part.strip("_") for part in path.relative_to(package).with_suffix("").parts}
    ]


def test_files_are_short() -> None:
    long = long_files(PACKAGE)
    assert not long, "\n" + "\n".join(long)


def test_files_are_named_after_what_they_hold() -> None:
    found = drawers(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_a_long_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 901)
    (tmp_path / "short.py").write_text("x = 1\n" * 900)
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "long_pb2.py").write_text("x = 1\n" * 901)
    assert long_files(tmp_path) == [f"{tmp_path / 'long.py'}: 901 lines, at most 900"]


def test_a_drawer_is_named(tmp_path: Path) -> None:
    (tmp_path / "helpers").mkdir()
    for name in ("utils.py", "_common.py", "arena.py", "helpers/ring.py"):
        (tmp_path / name).touch()
    assert [Path(found.split(":")[0]).name for found in drawers(tmp_path)] == [
        "_common.py",
        "ring.py",
        "utils.py",
    ]
