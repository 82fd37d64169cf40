"""The package and the docs use standard technical terms, not the words listed here."""

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
"""Each has a standard technical term: event, rank assignment, pending connection, restart grace, fault, reshard …"""
PATTERN = re.compile(r"\b(" + "|".join(WORDS) + r")\b", re.IGNORECASE)


def violations(root: Path) -> list[str]:
    """Every line of the package and the docs that contains one of the words."""
    pages = [*root.glob("*.md"), *(root / "docs").glob("*.md")]
    pages += (root / "benchmarks").rglob("*.md")
    folders = ("src/hoop", "tests", "benchmarks", "examples")
    code = [path for folder in folders for path in (root / folder).rglob("*.py") if "generated" not in path.parts]
    return [
        f"{path.relative_to(root)}:{number}: {found[0]!r}"
        for path in sorted([*pages, *code])
        if path.name not in ("CHANGELOG.md", "test_words.py")  # they name the old words
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if (found := PATTERN.search(line))
    ]


def test_only_standard_terms_are_used() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("text", ["Whoever waits", "the seat of a rank", "devices are told", "so many seconds"])
def test_a_violation_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(f"fine\n{text}\n")
    (found,) = violations(tmp_path)
    assert found.startswith("README.md:2: ")
