"""The coordinator's record of one job: its events, its watches of devices, and its failures.

``membership.job_membership`` holds which devices take part. ``follow_events`` turns an event log into an async stream,
by which the services of coordinator and device send job events.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from hoop.environment import mismatch, rounding_text, rounds_differently
from hoop.errors import HoopError, InvalidArgument, PeerCause, PeerLost, TrainingStateLost, UserError
from hoop.events import Event, EventLog
from hoop.job_events import JobEnded, JobEvent, Ready, RoundingDiffers
from hoop.membership.state import CommunicatorState
from hoop.servers.job_progress import JobProgress
from hoop.servers.tasks import PINNED_EVENTS
from hoop.strategies.catalog import min_devices, parse
from hoop.strategies.data_parallel import DataParallel
from hoop.texts import parse_json
from hoop.topology import MAX_DEVICES, DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb

MAX_HANG_S = 86400.0
MAX_LOG_BYTES = 256 << 20
"""Maximum bytes of the events of one job."""


@dataclass
class JobRecord:
    """The events and the outcome of one job."""

    communicator: CommunicatorState
    settings: str
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """Unique name of this run; arenas carry it (see ``JobState.run``)."""
    log: EventLog = field(default_factory=lambda: EventLog(100_000, PINNED_EVENTS, max_log_bytes=MAX_LOG_BYTES))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Prefix of the origins of the coordinator's own events."""
    seen_origins: set[str] = field(default_factory=set)
    """Origins of events received from devices. A device that is watched again sends all of its events again."""
    failures: list[HoopError] = field(default_factory=list)
    losses: list[HoopError] = field(default_factory=list)
    """Errors of the devices that were lost, one for each."""
    ended: bool = False
    """Whether a device reached the end of the training."""
    watches: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Asyncio tasks that receive the events of the devices' tasks, by incarnation."""
    progress: JobProgress = field(default_factory=JobProgress)
    """Newest steps and evaluation of the job, for metrics."""
    resumed_generation: int = 0
    """Newest generation whose ranks reported that they went on."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and arithmetic that the job's devices must have; empty: unknown yet, or all may differ."""
    data: str = ""
    """Fingerprint of the dataset that all devices must have; empty until the first device reports it."""
    sharded_update: bool = False
    """Data parallel: its ranks have reported that they shard the update."""
    _own_events: int = 0

    @property
    def id(self) -> int:
        return self.communicator.id

    @property
    def generation(self) -> int:
        """Newest generation of the job's ranks. Messages about ranks have it, so that a late one is void."""
        return self.communicator.generation

    def release(self, final: bool) -> pb.ReassignTaskRequest:
        """The message to a device that has no rank in the newest generation. ``final``: nobody needs its state."""
        return pb.ReassignTaskRequest(job_id=self.id, final=final, generation=self.generation)

    @property
    def elastic(self) -> bool:
        """Whether devices may join and leave while it runs: each has the whole model, or its part is replicated."""
        return self.moves or bool(self._settings.get("replicate", True))

    @property
    def moves(self) -> bool:
        """Whether ranks can change between two steps: data parallel ranks can, if no rank has the only copy of a state.

        With a sharded update and without replicas a rank has.
        """
        sharded = self._settings.get("sharded_update") == "on" and not self._settings.get("replicate", True)
        try:
            return not sharded and parse(str(self._settings.get("strategy", DataParallel.name))).replicated
        except InvalidArgument:
            return False

    @property
    def join_settings(self) -> str:
        """The settings for a device that joins: with ``sharded_update=auto``, what the ranks have chosen.

        The device checks its memory by them: it may have room for a slice of the optimizer state only.
        """
        settings = self._settings
        chosen = self.sharded_update and settings.get("sharded_update", "auto") == "auto"
        if not chosen or not parse(str(settings.get("strategy", DataParallel.name))).replicated:
            return self.settings
        return json.dumps(settings | {"strategy": DataParallel(sharded=True).spec, "sharded_update": "on"})

    @property
    def min_devices(self) -> int:
        """Minimum number of devices that its strategy can use."""
        try:
            return min_devices(parse(str(self._settings.get("strategy", DataParallel.name))))
        except InvalidArgument:
            return 1

    @property
    def user_min_devices(self) -> int:
        """Minimum number of devices that the user allows (``--min``)."""
        return max(1, self._whole("min_devices"))

    @property
    def max_devices(self) -> int:
        """The most devices that it takes (``--devices 4:16``); 0: no limit is stated."""
        return self._whole("max_devices")

    @property
    def hang_s(self) -> float:
        """Seconds without progress after which a device is replaced; 0: never."""
        hang_s = self._settings.get("hang_s", 0.0)
        return float(hang_s) if isinstance(hang_s, int | float) and 0 <= hang_s <= MAX_HANG_S else 0.0

    def _whole(self, name: str) -> int:
        """A whole number of the settings; 0 if it is none."""
        found = self._settings.get(name, 0)
        return min(max(0, found), MAX_DEVICES) if isinstance(found, int) else 0

    @property
    def _settings(self) -> dict[str, Any]:
        try:
            found = parse_json(self.settings)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"strategy": "", "replicate": False}

    def rank(self, device_id: int) -> int:
        """A device's current rank; 0 if it is not a member, and events are then identified by its device id."""
        members = self.communicator.members
        return members.index(device_id) if device_id in members else 0

    def watched(self, incarnation: str) -> bool:
        """Whether a watch of this incarnation runs. A watch that has ended may still be in ``watches``."""
        watch = self.watches.get(incarnation)
        return watch is not None and not watch.done()

    def refusal(self, info: DeviceInfo, event: Ready) -> str:
        """Why a device with this event cannot take part; empty if it can."""
        found = event.data  # None if the device took part before and was only unreachable
        self.data = self.data or found or ""
        strict = self._settings.get("require_same_bits") is True
        if found is not None and (differs := mismatch(event.environment, self.environment, strict)):
            return f"{info} on {info.host} has {differs}"
        if found in (None, self.data):
            return ""
        return (
            f"{info} has other data than job {self.id}: {event.about} with fingerprint {found}, where the "
            f"others have {self.data}; put the same dataset on {info.host}, and start the device again"
        )

    def rounding(self, info: DeviceInfo, event: Ready) -> RoundingDiffers | None:
        """An event if a device that takes part computes other bits than the others."""
        if not rounds_differently(event.environment, self.environment):
            return None
        name = f"device {info.device_id} on {info.host}"
        return RoundingDiffers(rounding_text([name], event.environment, self.environment))

    def emit(self, event: JobEvent, rank: int = 0, device: int = 0) -> None:
        """Adds an event of the coordinator's own to the job's log."""
        self._own_events += 1
        self.append(event.kind, event.to_json(), rank, device, f"{self.token}:{self._own_events}")

    def append(self, kind: str, text: str, rank: int, device: int, origin: str) -> None:
        """Adds an event to the job's log, as JSON. ``origin`` is its unique name."""
        self.progress.add(kind, text)
        self.log.publish(kind, text, rank=rank, device=device, origin=origin)

    def outcome(self) -> HoopError | None:
        """The failure that explains the rest, or None if the job succeeded."""
        if self.ended and not self.failures:
            return None
        # The newest loss first: the job went on after the losses before it.
        return min([*self.failures, *reversed(self.losses)], key=_weight, default=None)


def is_over(event: Event) -> bool:
    """Whether this is the last event of a job."""
    return event.kind == JobEnded.kind


def _weight(error: HoopError) -> int:
    """Sort key, most telling first: a user error, a bug, lost state, a lost device, then links of its neighbours."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, TrainingStateLost):
        return 2
    if isinstance(error, PeerLost):
        return 3 if error.cause is PeerCause.DEVICE_LOST else 4
    return 1


async def follow_events(
    log: EventLog, after: int, ends: Callable[[Event], bool] = lambda event: False, interval_s: float = 0.0
) -> AsyncIterator[Event]:
    """Yields events with a higher sequence number than ``after``, then new ones as they come, in order without a gap.

    Stops after an event for which ``ends`` is true. Any thread may publish to the log. ``interval_s``: shortest time
    between two looks for new events, for a reader that wants to be woken up less often.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def wake(_: Event) -> None:
        loop.call_soon_threadsafe(changed.set)

    unsubscribe = log.subscribe(wake)
    try:
        while True:
            changed.clear()
            for event in log.after(after):
                after = event.sequence
                yield event
                if ends(event):
                    return
            if interval_s:
                await asyncio.sleep(interval_s)
            await changed.wait()
    finally:
        unsubscribe()
