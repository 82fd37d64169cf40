"""The client's handle of a training job: start it, follow its events, stop it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from hoop.client.handle import call
from hoop.errors import DeadlineExceeded, PeerLost, error_from_name
from hoop.job_events import CoordinatorBack, CoordinatorLost, JobEnded, Observed, from_fields
from hoop.signals import defer_signals
from hoop.texts import parse_printable_json
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.service import status_of, translate, unreachable

WaitReady = Callable[[float], object]
"""Waits up to the given number of seconds until the coordinator answers; raises DeadlineExceeded."""


class JobHandle:
    """A job on a cluster. It runs whether or not a client follows it."""

    def __init__(
        self, stub: pb_grpc.CoordinatorStub, job_id: int, timeout: float, peer: str, wait_ready: WaitReady
    ) -> None:
        self.id = job_id
        self.device_ids: list[int] = []
        """Ids of the devices on which this client has started the job; empty if another client started it."""
        self._stub, self._timeout, self._peer, self._wait_ready = stub, timeout, peer, wait_ready

    def events(
        self,
        after: int = 0,
        coordinator_timeout: float = 0.0,
        interval_s: float = 0.0,
        seen_origins: set[str] | None = None,
    ) -> Iterator[Observed]:
        """The job's events with a sequence number above ``after``, until the job ends; raises the job's error.

        ``interval_s``: new events come this often at most, together: a client that only shows them is woken up less.

        If the coordinator is unreachable, waits up to ``coordinator_timeout`` seconds for it, and yields
        ``CoordinatorLost`` and ``CoordinatorBack``. Every event is yielded once, although a restarted coordinator
        numbers the events from 1 again. ``seen_origins``: of the events that were yielded before, for a caller that
        follows them with several calls; new ones are added.
        """
        seen_origins = set() if seen_origins is None else seen_origins
        while True:
            try:
                for message in self._stream(after, interval_s):
                    if message.origin not in seen_origins:
                        seen_origins.add(message.origin)
                        yield _observed(message)
                return
            except grpc.RpcError as error:
                if not coordinator_timeout or not unreachable(error):
                    raise translate(error, self._peer) from None
                reason = status_of(error)
            yield Observed(
                CoordinatorLost(f"{self._peer} does not answer ({reason}); job {self.id} goes on without it")
            )
            try:
                self._wait_ready(coordinator_timeout)
            except DeadlineExceeded as error:
                raise PeerLost(
                    f"{error}; job {self.id} goes on: come back with: hoop attach {self.id} --coordinator HOST:PORT"
                ) from None
            yield Observed(CoordinatorBack(f"{self._peer} is back"))
            after = 0

    def _stream(self, after: int, interval_s: float) -> Iterator[pb.JobEvent]:
        with defer_signals():
            stream = self._stub.WatchJob(pb.WatchJobRequest(job_id=self.id, after=after, interval_s=interval_s))
        try:
            yield from stream
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leave it untyped

    def stop(self, coordinator_timeout: float = 0.0) -> None:
        """Ask all ranks to stop after a step that they agree on.

        Waits up to ``coordinator_timeout`` seconds for a coordinator that is unreachable.
        """
        if coordinator_timeout:
            self._wait_ready(coordinator_timeout)
        call(self._stub.StopJob, pb.StopJobRequest(job_id=self.id), self._timeout, self._peer)


def _observed(message: pb.JobEvent) -> Observed:
    """The event of a message; raises the error of a job that failed."""
    try:
        fields = parse_printable_json(message.json)
        if not isinstance(fields, dict):
            raise ValueError(f"{fields!r:.80} is not a JSON object")
        event = from_fields(message.kind, fields)
    except (ValueError, RecursionError) as error:
        raise PeerLost(
            f"job event {message.sequence} of kind {message.kind!r} cannot be read: {error}; do all processes run the "
            "same version of Hoop?"
        ) from None
    if isinstance(event, JobEnded) and event.error:
        raise error_from_name(event.error, event.text)
    return Observed(event, message.rank, message.device_id, message.time, message.sequence)
