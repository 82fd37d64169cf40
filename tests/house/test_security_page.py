"""Every guarantee in SECURITY.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text("utf-8")
TEST_REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def guarantees() -> list[str]:
    section = PAGE.partition("## What Hoop guarantees")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_every_guarantee_names_a_test() -> None:
    assert len(guarantees()) > 10
    assert [line for line in guarantees() if not TEST_REFERENCE.search(line)] == []


def test_every_named_test_exists() -> None:
    missing = [
        f"{file}::{name}"
        for file, name in TEST_REFERENCE.findall(PAGE)
        if not (ROOT / file).is_file() or (name and f"def {name}(" not in (ROOT / file).read_text("utf-8"))
    ]
    assert missing == []
