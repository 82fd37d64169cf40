"""A job, as a client sees it: started, followed, stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from hoop.client.handle import call
from hoop.errors import DeadlineExceeded, PeerLost, named
from hoop.signals import signals_held
from hoop.texts import cleaned, parse_json
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.job_settings import check_settings
from hoop.wire.service import Stub, status_of, translate, unreachable

START_S = 60.0
Knock = Callable[[float], None]


@dataclass(frozen=True)
class JobEvent:
    """One thing that a rank of a job told."""

    sequence: int
    time: float
    rank: int
    device: int
    kind: str
    told: dict[str, Any]


class JobHandle:
    """A job on a cluster. It goes on whether or not anybody follows it."""

    def __init__(self, stub: Stub, job_id: int, timeout: float, whom: str, knock: Knock) -> None:
        """``knock`` waits so many seconds for a coordinator that is away."""
        self.id = job_id
        self._stub, self._timeout, self._whom, self._knock = stub, timeout, whom, knock

    @classmethod
    def start(
        cls,
        stub: Stub,
        settings: str,
        device_ids: list[int],
        resume: str,
        timeout: float,
        whom: str,
        knock: Knock,
    ) -> JobHandle:
        """Starts a job on exactly these devices, in rank order."""
        check_settings(settings)
        request = pb.StartJobRequest(settings=settings, device_ids=device_ids, resume=resume)
        answer = call(stub.StartJob, request, max(timeout, START_S), whom)
        return cls(stub, answer.job_id, timeout, whom, knock)

    def events(self, after: int = 0, patience: float = 0.0) -> Iterator[JobEvent]:
        """What it told since, and tells until it ends; raises what it failed with.

        A coordinator that is away is waited for, up to ``patience`` seconds; ``away`` and ``back`` tell of it.
        What was told before is not told again, though a restarted coordinator numbers events anew.
        """
        heard: set[str] = set()
        while True:
            try:
                for event in self._stream(after):
                    if event.origin not in heard:
                        heard.add(event.origin)
                        yield _event(event)
                return
            except grpc.RpcError as error:
                if not patience or not unreachable(error):
                    raise translate(error, self._whom) from None
                reason = status_of(error)
            yield _own("away", f"{self._whom} is away ({reason}); job {self.id} goes on without it")
            try:
                self._knock(patience)
            except DeadlineExceeded as error:
                raise PeerLost(
                    f"{error}; job {self.id} goes on: come back with hoop attach {self.id}"
                ) from None
            yield _own("back", f"{self._whom} is back")
            after = 0

    def _stream(self, after: int) -> Iterator[pb.JobEvent]:
        with signals_held():
            stream = self._stub.WatchJob(pb.WatchJobRequest(job_id=self.id, after=after))
        try:
            yield from stream
        finally:
            stream.cancel()

    def stop(self, patience: float = 0.0) -> None:
        """Asks all ranks to stop after a step they agree on; waits for a coordinator that is away."""
        if patience:
            self._knock(patience)
        call(self._stub.StopJob, pb.StopJobRequest(job_id=self.id), self._timeout, self._whom)


def _event(event: pb.JobEvent) -> JobEvent:
    try:
        told = cleaned(parse_json(event.json))
    except (ValueError, RecursionError) as error:
        told = error
    if not isinstance(told, dict):
        raise PeerLost(f"job event {event.sequence} of kind {event.kind!r} is not a JSON object: {told}")
    if event.kind == "job_ended" and "error" in told:
        raise named(told["error"], told["text"])
    return JobEvent(event.sequence, event.time, event.rank, event.device_id, event.kind, told)


def _own(kind: str, text: str) -> JobEvent:
    """What no device told."""
    return JobEvent(0, time.time(), 0, 0, kind, {"kind": kind, "text": text})
