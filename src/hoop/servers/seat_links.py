"""The links of one seat of a job: those of all its ranks, and of groups of some of them, made when first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hoop.collectives.communicator import Communicator
from hoop.errors import HoopError
from hoop.servers.runner import Runner, Seat
from hoop.transport.watch import LinkWatch
from hoop.wire.generated import hoop_pb2 as pb


class SeatLinks:
    """Communicators by the ranks they are of, and what can be seen of their links."""

    def __init__(self, runner: Runner, communicator_id: int, seat: Seat, whole: Communicator) -> None:
        self._runner, self._id, self._seat = runner, communicator_id, seat
        everyone = tuple(range(len(seat.members)))
        self._made: dict[tuple[int, ...], tuple[int, Communicator]] = {everyone: (communicator_id, whole)}
        self._error: HoopError | None = None

    def __call__(self, ranks: Sequence[int]) -> Communicator:
        key = tuple(ranks)
        if key not in self._made:
            # Ranks of one job that form a group begin with different ranks or are equally many: that names it.
            number = self._id | (1 + key[0] + (len(key) << 12)) << 32
            self._made[key] = number, self._runner.group(number, self._seat, key)
            if self._error is not None:  # aborted while this one was being made
                self._made[key][1].endpoint.abort(self._error)
        return self._made[key][1]

    def abort(self, error: HoopError) -> None:
        """Fails what is under way on every one of them, and whatever is tried later; called by another thread."""
        self._error = error
        for _, one in list(self._made.values()):
            one.endpoint.abort(error)

    def close(self) -> None:
        for _, one in self._made.values():
            one.close()

    # ---- seen from outside, by another thread

    def _watches(self) -> Iterator[tuple[int, list[int], LinkWatch]]:
        """Each communicator: its number, its devices by rank, its links."""
        for ranks, (number, one) in list(self._made.items()):
            yield number, [self._seat.members[rank].device_id for rank in ranks], one.endpoint.watch

    def failed(self) -> int:
        """The device to which a link failed, or 0."""
        found = (devices[watch.failed] for _, devices, watch in self._watches() if watch.failed is not None)
        return next(found, 0)

    def stalls(self, now: float, patience: float) -> list[pb.Stall]:
        """Where it waits in vain."""
        return [
            pb.Stall(
                job_id=self._id,
                communicator_id=number,
                generation=self._seat.generation,
                device_ids=[devices[peer] for peer in peers],
                connecting=watch.connecting,
            )
            for number, devices, watch in self._watches()
            if (peers := watch.stalled(now, patience))
        ]

    def describe(self) -> list[pb.LinkDescription]:
        """What has moved between this device and each other one."""
        found = []
        for number, devices, watch in self._watches():
            for peer, device_id in enumerate(devices):
                sent, received = watch.moved(peer)
                found.append(
                    pb.LinkDescription(
                        communicator_id=number,
                        generation=self._seat.generation,
                        device_id=device_id,
                        sent=max(0, sent),
                        received=received,
                    )
                )
        return found
