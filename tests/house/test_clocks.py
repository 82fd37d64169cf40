"""Nothing is decided by a clock that can jump: the wall clock is for people, and is read nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hoop"
FOR_PEOPLE = {"events.py", "job_events.py", "report/tensorboard.py"}
"""Who may read it: what they make of it is shown, never compared."""
JUMP = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


def readings(package: Path) -> list[str]:
    """Every place that reads a wall clock."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in JUMP:
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    return found


def test_the_wall_clock_is_for_people() -> None:
    wrong = [place for place in readings(PACKAGE) if place.split(":")[0] not in FOR_PEOPLE]
    assert not wrong, f"use time.monotonic(), which does not jump: {wrong}"


def test_a_reading_is_seen(tmp_path: Path) -> None:
    (tmp_path / "lease.py").write_text("import time\ndeadline = time.time() + 2\nleft = time.monotonic()\n")
    assert readings(tmp_path) == ["lease.py:2"]
