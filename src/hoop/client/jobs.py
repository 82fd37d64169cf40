"""A job, as a client sees it: started, followed, stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from hoop.client.calls import call
from hoop.errors import named
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.rpc import Stub, translate

START_S = 60.0


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

    def __init__(self, stub: Stub, job_id: int, timeout: float, whom: str) -> None:
        self.id = job_id
        self._stub, self._timeout, self._whom = stub, timeout, whom

    @classmethod
    def start(
        cls, stub: Stub, settings: str, device_ids: list[int], resume: str, timeout: float, whom: str
    ) -> JobHandle:
        """Starts a job on exactly these devices, in rank order."""
        request = pb.StartJobRequest(settings=settings, device_ids=device_ids, resume=resume)
        answer = call(stub.StartJob, request, max(timeout, START_S), whom)
        return cls(stub, answer.job_id, timeout, whom)

    def events(self, after: int = 0) -> Iterator[JobEvent]:
        """What it told since, and tells until it ends; raises what it failed with."""
        stream = self._stub.WatchJob(pb.WatchJobRequest(job_id=self.id, after=after))
        try:
            for event in stream:
                told = json.loads(event.json)
                if event.kind == "job_ended" and "error" in told:
                    raise named(told["error"], told["text"])
                yield JobEvent(event.sequence, event.time, event.rank, event.device_id, event.kind, told)
        except grpc.RpcError as error:
            raise translate(error, self._whom) from None
        finally:
            stream.cancel()

    def stop(self) -> None:
        """Asks all ranks to stop after a step they agree on."""
        call(self._stub.StopJob, pb.StopJobRequest(job_id=self.id), self._timeout, self._whom)
