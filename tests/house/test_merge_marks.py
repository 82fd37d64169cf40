"""No text file has the marks of an unresolved merge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", "scripts")
MARK = re.compile(rb"^(<{7} |>{7} |={7}\r?$)", re.MULTILINE)


def text_files(root: Path) -> Iterator[Path]:
    """The files of these folders, the pages at the root and the Makefile; not what Python has compiled."""
    yield from (path for path in (*root.glob("*.md"), root / "Makefile") if path.is_file())
    for folder in FOLDERS:
        yield from (path for path in (root / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(text_files(root)):
        content = path.read_bytes()
        if b"\0" in content:  # a picture, or other data
            continue
        for mark in MARK.finditer(content):
            line = content.count(b"\n", 0, mark.start()) + 1
            found.append(f"{path.relative_to(root)}:{line}: the mark of an unresolved merge")
    return found


def test_no_merge_is_left_unresolved() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("mark", ["<" * 7 + " HEAD", "=" * 7, ">" * 7 + " branch", "=" * 7 + "\r"])
@pytest.mark.parametrize("name", ["README.md", "Makefile", "docs/deep/page.md", "scripts/golden"])
def test_a_mark_is_reported(tmp_path: Path, name: str, mark: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"fine\n{mark}\n", newline="")
    assert violations(tmp_path) == [f"{name}:2: the mark of an unresolved merge"]


@pytest.mark.parametrize("line", ["=" * 8, "=" * 7 + " a title", "<" * 7, " " + ">" * 7 + " quoted"])
def test_lines_that_are_no_marks(tmp_path: Path, line: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"{line}\n")
    (tmp_path / "docs" / "picture.png").write_bytes(b"\0\n" + b"=" * 7 + b"\n")
    assert violations(tmp_path) == []
