"""The metrics file of a run: one JSON object per line, each with its step.

{"step":20,"loss":0.41,"samples_per_second":51234.0}

Each line is written completely or not at all. A run that resumes from step 20 removes the lines after step 20, which
the interrupted run wrote, so that no step is in the file twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.files import Appender, atomic_write, write_bytes
from hoop.report import strict_json

MetricsRow = dict[str, Any]


class MetricsLog(Appender):
    """An open metrics file. Opening keeps the existing rows and removes an incomplete last line."""

    def __init__(self, path: Path | str) -> None:
        _filter_rows(Path(path), lambda row: True)
        super().__init__(path)

    @classmethod
    def create(cls, path: Path | str) -> MetricsLog:
        """Open an empty file for a run that starts at the beginning."""
        write_bytes(path, b"")
        return cls(path)

    @classmethod
    def resume(cls, path: Path | str, step: int) -> MetricsLog:
        """Open the file for a run that resumes after ``step``; removes the rows of later steps."""
        _filter_rows(Path(path), lambda row: bool(row["step"] <= step))
        return cls(path)

    def log(self, step: int, **values: Any) -> None:
        """Write one line. It survives the death of the process; after ``sync`` also that of the machine."""
        if step < 0:
            raise InvalidArgument(f"step: {step} is negative; count from 0")
        self.append(strict_json.dumps({"step": int(step), **values}).encode() + b"\n")


def read_metrics(path: Path | str) -> list[MetricsRow]:
    """Every complete row of a file that may still be growing."""
    return [row for row, _ in _lines(Path(path))]


def _lines(path: Path) -> list[tuple[MetricsRow, bytes]]:
    """Rows with their encoded lines. Bytes after the last newline are an incomplete line and are ignored."""
    found = []
    data = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = strict_json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("not an object with a step")
        except ValueError as error:
            raise FailedPrecondition(
                f"metrics {path}, line {number}: {error}; remove the line, or move the file away"
            ) from None
        found.append((row, line + b"\n"))
    return found


def _filter_rows(path: Path, keep: Callable[[MetricsRow], bool]) -> None:
    """Rewrite the file with the rows for which ``keep`` is true, if that changes it."""
    if not path.exists():
        return
    kept = [line for row, line in _lines(path) if keep(row)]
    if sum(map(len, kept)) != path.stat().st_size:
        with atomic_write(path) as file:
            file.writelines(kept)
