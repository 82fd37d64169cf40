"""The code and the docs use the field's words, not words that must be decoded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = (
    "whoever",
    "so many",
    "those who",
    "told",
    "seat",
    "seated",
    "lobby",
    "visitor",
    "reunion",
    "befall",
    "misfortune",
    "heritage",
    "keepsake",
    "cut anew",
)
"""Each has a word of the field: event, rank assignment, pending connection, restart grace, fault, reshard …"""
FOUND = re.compile(r"\b(" + "|".join(WORDS) + r")\b", re.IGNORECASE)


def riddles(root: Path) -> list[str]:
    """Every line of the package and the docs that has one of the words."""
    pages = [*root.glob("*.md"), *(root / "docs").glob("*.md")]
    code = [path for path in (root / "src" / "hoop").rglob("*.py") if "generated" not in path.parts]
    return [
        f"{path.relative_to(root)}:{number}: {found[0]!r}"
        for path in sorted([*pages, *code])
        if path.name != "CHANGELOG.md"  # it names what was renamed
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if (found := FOUND.search(line))
    ]


def test_nothing_must_be_decoded() -> None:
    found = riddles(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("text", ["Whoever waits", "the seat of a rank", "devices are told", "so many seconds"])
def test_a_riddle_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(f"fine\n{text}\n")
    (found,) = riddles(tmp_path)
    assert found.startswith("README.md:2: ")
