"""No decision depends on the wall clock, which can jump: only modules that display it read it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hoop"
DISPLAY_ONLY = {"events.py", "job_events.py", "report/tensorboard.py"}
"""Modules that may read the wall clock: its values are displayed and never compared."""
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
CANDIDATE = re.compile(rf"\.\s*(?:{'|'.join(sorted({name for _, name in WALL_CLOCKS}))})\b")
"""In the text of each file that reads a wall clock; the others are not parsed, which takes seconds for all of them."""


def wall_clock_reads(package: Path) -> list[str]:
    """File and line of every read of a wall clock."""
    found = []
    texts = [(path, path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))]
    for path, text in texts:
        for node in ast.walk(ast.parse(text)) if CANDIDATE.search(text) else ():
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in WALL_CLOCKS:
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    return found


def test_the_wall_clock_is_only_displayed() -> None:
    wrong = [place for place in wall_clock_reads(PACKAGE) if place.split(":")[0] not in DISPLAY_ONLY]
    assert not wrong, f"use time.monotonic(), which does not jump: {wrong}"


def test_a_wall_clock_read_is_found(tmp_path: Path) -> None:
    (tmp_path / "lease.py").write_text("import time\ndeadline = time.time() + 2\nleft = time.monotonic()\n")
    assert wall_clock_reads(tmp_path) == ["lease.py:2"]
