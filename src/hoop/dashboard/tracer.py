"""A short trace of a job's next steps, on request: one at a time for all pages, of a bounded number of devices.

page ── ask(job, devices) ──▶ Tracer ── a thread ──▶ TraceTask of every device, at the same time
     ◀── trace ───────────────┘
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from hoop.client.cluster import Cluster
from hoop.errors import HoopError
from hoop.wire.generated import hoop_pb2 as pb

log = logging.getLogger(__name__)
STEPS = 3
WAIT_S = 10.0
"""For the steps of one trace."""
MAX_DEVICES = 64
MAX_SPANS = 20_000
MAX_TEXT = 40
JOIN_S = 15.0


class TraceSpan(NamedTuple):
    """One instruction on one device."""

    device: int
    rank: int
    instruction: str
    category: str
    start: float
    """Seconds since the trace's first instruction."""
    seconds: float


@dataclass(frozen=True)
class TraceView:
    """A trace that has ended."""

    job: int = 0
    first_step: int = 0
    """Steps that the first device had done."""
    devices: int = 0
    """That have answered."""
    spans: tuple[TraceSpan, ...] = ()
    problem: str = ""
    """Why it has no spans, or not those of all devices."""
    number: int = 0
    """Which trace it is; 0: there was none."""


class Tracer:
    """Makes traces when a page asks for one."""

    def __init__(self, connect: Callable[[], Cluster]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.trace = TraceView()
        """The newest one; any thread may read it."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def ask(self, job: int, devices: Sequence[int]) -> None:
        """Begins a trace, unless one is under way. Does not wait."""
        with self._lock:
            if self.busy:
                return
            work = (job, tuple(devices[:MAX_DEVICES]))
            self._thread = threading.Thread(target=self._work, args=work, name="hoop-dashboard-trace", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _work(self, job: int, devices: tuple[int, ...]) -> None:
        try:
            with self._connect() as cluster, ThreadPoolExecutor(max(1, len(devices))) as pool:
                found = list(pool.map(lambda device: _ask_device(cluster, device, job), devices))
            self.trace = trace_of(job, dict(zip(devices, found, strict=True)), self.trace.number + 1)
        except HoopError as error:
            self.trace = TraceView(job, problem=str(error), number=self.trace.number + 1)


def _ask_device(cluster: Cluster, device: int, job: int) -> pb.TraceTaskResponse | HoopError:
    try:
        handle = cluster.device(device)
        try:
            return handle.trace(job, STEPS, WAIT_S)
        finally:
            handle.close()
    except HoopError as error:
        log.info("dashboard: trace of device %d: %s", device, error)
        return error


def trace_of(job: int, answers: Mapping[int, pb.TraceTaskResponse | HoopError], number: int) -> TraceView:
    """The trace from what the devices have answered, on one axis of time: that of their clocks."""
    failed = [f"device {device}: {one}" for device, one in answers.items() if isinstance(one, HoopError)]
    good = {device: one for device, one in answers.items() if isinstance(one, pb.TraceTaskResponse) and one.spans}
    if not good:
        text = "; ".join(failed) or f"no step ended within {WAIT_S:g} s"
        return TraceView(job, problem=text, number=number)
    room = MAX_SPANS // len(good)
    zero = min(span.start for one in good.values() for span in one.spans)
    spans = [
        TraceSpan(
            device,
            one.rank,
            span.instruction[:MAX_TEXT],
            span.category[:MAX_TEXT],
            span.start - zero,
            max(0.0, span.seconds),
        )
        for device, one in good.items()
        for span in one.spans[:room]
        if span.start == span.start and span.seconds == span.seconds  # not NaN
    ]
    first = min(one.first_step for one in good.values())
    return TraceView(job, first, len(good), tuple(spans), "; ".join(failed[:3]), number)
