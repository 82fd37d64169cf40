"""A trace of a run for chrome://tracing and https://ui.perfetto.dev: one track a device.

Events go to an unnamed file as they come, so a long run holds few of them in memory and a killed one
leaves nothing behind; ``write`` makes a whole trace of what there is so far, as often as one likes.
Above a limit, or when that disk is full, events are counted instead of kept: a run does not fail for its trace, and
one that no viewer opens helps nobody.

In the format's words a track is a process and a lane a thread: spans of one lane must nest, lanes overlap.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from hoop.errors import InvalidArgument
from hoop.files import replacing
from hoop.report import strict_json
from hoop.report.spans import Span

MOST_EVENTS = 1_000_000
"""About 120 MB of JSON: what a viewer in a browser still opens."""

_SPILL_BYTES = 1 << 16


class Trace:
    """Events on their way into a trace file."""

    def __init__(self, spool: Path | str | None = None, *, most_events: int = MOST_EVENTS) -> None:
        """``spool``: the folder whose disk holds the events meanwhile; by default the system's."""
        if most_events < 1:
            raise InvalidArgument(f"most_events: {most_events} keeps nothing; give 1 or more")
        if spool is not None:
            Path(spool).mkdir(parents=True, exist_ok=True)
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=spool, buffering=0))  # noqa: SIM115 - closed by close()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._most, self._kept, self._flows = most_events, 0, 0
        self._tracks: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        self.dropped = 0
        """Events that came after the limit, or found the disk full."""

    def track(self, name: str) -> int:
        """Gives a track its place: tracks are shown in the order in which they were first named."""
        return self._tracks.setdefault(name, len(self._tracks) + 1)

    def span(self, span: Span) -> None:
        times = {"ts": span.start_us, "dur": max(span.duration_us, 0)}
        place = self._place(span.track, span.lane)
        self._put({"ph": "X", "name": span.name, "cat": span.category, **times, **place}, span.args)

    def spans(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.span(span)

    def counter(self, track: str, name: str, at_us: float, values: Mapping[str, float]) -> None:
        """A value over time, drawn as an area; several values are stacked."""
        self._put({"ph": "C", "name": name, "ts": at_us, "pid": self.track(track)}, values)

    def mark(
        self, name: str, at_us: float, track: str | None = None, args: Mapping[str, Any] | None = None
    ) -> None:
        """A moment: a device that died. Without a track, a line across all of them."""
        place = {"s": "g", "pid": 0, "tid": 0} if track is None else {"s": "p", **self._place(track, "")}
        self._put({"ph": "i", "name": name, "ts": at_us, **place}, args)

    def flow(self, name: str, sent: Span, received: Span) -> None:
        """An arrow from one span to another: a message, and who waited for it."""
        self._flows += 1
        event = {"name": name, "cat": "flow", "id": self._flows}
        begin, end = self._place(sent.track, sent.lane), self._place(received.track, received.lane)
        self._put({"ph": "s", "ts": sent.start_us, **event, **begin})
        self._put({"ph": "f", "bp": "e", "ts": received.end_us, **event, **end})

    def write(self, path: Path | str, about: Mapping[str, Any] | None = None) -> None:
        """Everything so far as one file, there completely or not at all; ``.gz`` is compressed."""
        self._spill()
        facts = {**(about or {}), **({"dropped_events": self.dropped} if self.dropped else {})}
        with replacing(path) as file:
            if str(path).endswith(".gz"):
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    self._copy(cast(BinaryIO, packed), facts)
            else:
                self._copy(file, facts)

    def close(self) -> None:
        """Lets go of what was not written; again is no harm."""
        self._file.close()

    def _put(self, event: dict[str, Any], args: Mapping[str, Any] | None = None) -> None:
        if self._kept >= self._most:
            self.dropped += 1
            return
        self._kept += 1
        line = b",\n" + strict_json.dumps({**event, "args": args} if args else event).encode()
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= _SPILL_BYTES:
            self._spill()

    def _spill(self) -> None:
        """Moves the pending events to the file; all of them, or none where the disk is full."""
        lines, self._pending, self._pending_bytes = self._pending, [], 0
        good = self._file.seek(0, 2)
        data = b"".join(lines)
        try:
            written = self._file.write(data)
        except OSError:
            written = -1
        if written != len(data):
            self._file.truncate(good)
            self.dropped += len(lines)

    def _copy(self, to: BinaryIO, facts: Mapping[str, Any]) -> None:
        head = f'{{"displayTimeUnit":"ms","otherData":{strict_json.dumps(facts)},"traceEvents":[\n'
        to.write(head.encode() + ",\n".join(map(strict_json.dumps, self._names())).encode())
        self._file.seek(0)
        shutil.copyfileobj(self._file, to, 1 << 20)
        to.write(b"\n]}\n")

    def _names(self) -> Iterator[dict[str, Any]]:
        """What tracks and lanes are called. There is always one, so every event can begin with a comma."""
        yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "the run"}}
        for track, pid in self._tracks.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for (track, lane), tid in self._lanes.items():
            name = {"name": lane or "main"}
            yield {"ph": "M", "name": "thread_name", "pid": self._tracks[track], "tid": tid, "args": name}

    def _place(self, track: str, lane: str) -> dict[str, int]:
        pid = self.track(track)
        return {"pid": pid, "tid": self._lanes.setdefault((track, lane), len(self._lanes) + 1)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
