"""The metrics of a run: one JSON object a line, each with the step it belongs to.

{"step":20,"loss":0.41,"samples_per_second":51234.0}

A line is there completely or not at all. A run that resumes from step 20 has never seen step 21: lines after 20,
written by the run that died, are taken away, so that no step is in the file twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.files import Appender, replacing, write_bytes
from hoop.report import strict_json

MetricsRow = dict[str, Any]


class MetricsLog(Appender):
    """An open file of metrics; what is in it already stays."""

    def __init__(self, path: Path | str) -> None:
        _keep(Path(path), lambda row: True)
        super().__init__(path)

    @classmethod
    def anew(cls, path: Path | str) -> MetricsLog:
        """For a run that starts at the beginning: nothing of an earlier one stays."""
        write_bytes(path, b"")
        return cls(path)

    @classmethod
    def resume(cls, path: Path | str, step: int) -> MetricsLog:
        """For a run that goes on after this step: what was noted of later ones goes."""
        _keep(Path(path), lambda row: bool(row["step"] <= step))
        return cls(path)

    def log(self, step: int, **values: Any) -> None:
        """One line, with the kernel when this returns: it survives the process, and ``sync`` the machine."""
        if step < 0:
            raise InvalidArgument(f"step: {step} is negative; count from 0")
        self.append(strict_json.dumps({"step": int(step), **values}).encode() + b"\n")


def read_metrics(path: Path | str) -> list[MetricsRow]:
    """Every line of a file that may still be growing; one that is being written is left out."""
    return [row for row, _ in _lines(Path(path))]


def _lines(path: Path) -> list[tuple[MetricsRow, bytes]]:
    """Rows with the bytes they were read from. What follows the last newline is torn."""
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


def _keep(path: Path, wanted: Callable[[MetricsRow], bool]) -> None:
    """Rewrites the file with only the rows that are wanted, if there are others or a torn one."""
    if not path.exists():
        return
    kept = [line for row, line in _lines(path) if wanted(row)]
    if sum(map(len, kept)) != path.stat().st_size:
        with replacing(path) as file:
            file.writelines(kept)
