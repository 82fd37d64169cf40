"""A trace of a run for chrome://tracing and https://ui.perfetto.dev, with one track per device.

Events are spooled to an unnamed temporary file, so a long run holds few of them in memory and a killed run leaves no
file. ``write`` writes a complete trace of the events so far; it may be called repeatedly. Above a limit, or when the
disk is full, events are dropped and counted: a run must not fail because of its trace, and no viewer opens a larger
trace.

In the trace format a track is a process and a lane is a thread. Spans of one lane must nest; lanes may overlap.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.files import atomic_write
from hoop.report import strict_json
from hoop.report.spans import Span

MAX_EVENTS = 1_000_000
"""Maximum number of events, about 120 MB of JSON: the most that a viewer in a browser opens."""

_SPILL_BYTES = 1 << 16


class Trace:
    """Collects events and writes trace files."""

    def __init__(self, spool: Path | str | None = None, *, max_events: int = MAX_EVENTS) -> None:
        """``spool``: folder of the temporary file; by default the system's temporary directory."""
        if max_events < 1:
            raise InvalidArgument(f"max_events: {max_events} keeps nothing; give 1 or more")
        if spool is not None:
            Path(spool).mkdir(parents=True, exist_ok=True)
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=spool, buffering=0))  # noqa: SIM115 - closed by close()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._max_events, self._num_events, self._flows = max_events, 0, 0
        self._tracks: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        self.dropped = 0
        """Number of events dropped because of the limit or a full disk."""

    def track(self, name: str) -> int:
        """The id of a track. Viewers show tracks in the order of their first use."""
        return self._tracks.setdefault(name, len(self._tracks) + 1)

    def span(self, span: Span) -> None:
        times = {"ts": span.start_us, "dur": max(span.duration_us, 0)}
        place = self._ids(span.track, span.lane)
        self._append({"ph": "X", "name": span.name, "cat": span.category, **times, **place}, span.args)

    def spans(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.span(span)

    def counter(self, track: str, name: str, at_us: float, values: Mapping[str, float]) -> None:
        """Add a point of a counter, which viewers draw as an area; several values are stacked."""
        self._append({"ph": "C", "name": name, "ts": at_us, "pid": self.track(track)}, values)

    def mark(self, name: str, at_us: float, track: str | None = None, args: Mapping[str, Any] | None = None) -> None:
        """Add an instant event, such as the death of a device. Without a track it spans all tracks."""
        place = {"s": "g", "pid": 0, "tid": 0} if track is None else {"s": "p", **self._ids(track, "")}
        self._append({"ph": "i", "name": name, "ts": at_us, **place}, args)

    def flow(self, name: str, sent: Span, received: Span) -> None:
        """Add an arrow between two spans: from a send to the receive that waited for it."""
        self._flows += 1
        event = {"name": name, "cat": "flow", "id": self._flows}
        begin, end = self._ids(sent.track, sent.lane), self._ids(received.track, received.lane)
        self._append({"ph": "s", "ts": sent.start_us, **event, **begin})
        self._append({"ph": "f", "bp": "e", "ts": received.end_us, **event, **end})

    def write(self, path: Path | str, about: Mapping[str, Any] | None = None) -> None:
        """Write all events so far to ``path``, atomically; ``.gz`` is compressed. ``about`` becomes its metadata."""
        self._spill()
        facts = {**(about or {}), **({"dropped_events": self.dropped} if self.dropped else {})}
        with atomic_write(path) as file:
            if str(path).endswith(".gz"):
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    self._copy(cast(BinaryIO, packed), facts)
            else:
                self._copy(file, facts)

    def close(self) -> None:
        """Discard the spooled events. May be called again."""
        self._file.close()

    def _append(self, event: dict[str, Any], args: Mapping[str, Any] | None = None) -> None:
        if self._num_events >= self._max_events:
            self.dropped += 1
            return
        self._num_events += 1
        line = b",\n" + strict_json.dumps({**event, "args": args} if args else event).encode()
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= _SPILL_BYTES:
            self._spill()

    def _spill(self) -> None:
        """Move the pending events to the file: all of them, or none if the disk is full."""
        lines, self._pending, self._pending_bytes = self._pending, [], 0
        old_size = self._file.seek(0, 2)
        data = b"".join(lines)
        try:
            written = self._file.write(data)
        except OSError:
            written = -1
        if written != len(data):
            self._file.truncate(old_size)
            self.dropped += len(lines)

    def _copy(self, to: BinaryIO, facts: Mapping[str, Any]) -> None:
        head = f'{{"displayTimeUnit":"ms","otherData":{strict_json.dumps(facts)},"traceEvents":[\n'
        to.write(head.encode() + ",\n".join(map(strict_json.dumps, self._names())).encode())
        self._file.seek(0)
        shutil.copyfileobj(self._file, to, 1 << 20)
        to.write(b"\n]}\n")

    def _names(self) -> Iterator[dict[str, Any]]:
        """Metadata events with the names of tracks and lanes. There is always one, so events can begin with a comma."""
        yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "the run"}}
        for track, pid in self._tracks.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for (track, lane), tid in self._lanes.items():
            name = {"name": lane or "main"}
            yield {"ph": "M", "name": "thread_name", "pid": self._tracks[track], "tid": tid, "args": name}

    def _ids(self, track: str, lane: str) -> dict[str, int]:
        pid = self.track(track)
        return {"pid": pid, "tid": self._lanes.setdefault((track, lane), len(self._lanes) + 1)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_spans(path: Path) -> list[Span]:
    """The spans of a trace file that ``Trace.write`` wrote; FailedPrecondition if it is none."""
    try:
        data = path.read_bytes()
        events = strict_json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
        tracks = {one["pid"]: str(one["args"]["name"]) for one in events if one.get("name") == "process_name"}
        return [
            Span(tracks[one["pid"]], str(one["name"]), str(one["cat"]), float(one["ts"]), float(one["dur"]))
            for one in events
            if one.get("ph") == "X"
        ]
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FailedPrecondition(f"{path}: not a trace of Hoop ({type(error).__name__}: {error})") from None
