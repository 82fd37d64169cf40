"""What the dashboard shows of a cluster: immutable values, and the pure functions that update them.

``ClusterFeed`` calls the functions with what the coordinator answers and reports; pages only read. Every sequence here
is bounded, because a cluster may run for months and names and texts come from other processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from hoop.dashboard.activity_view import ActivityView, after_heartbeat, refreshed_together
from hoop.dashboard.job_view import JobView
from hoop.dashboard.marks import LogLine, Mark, mark_of_event
from hoop.events import Event
from hoop.wire.generated import hoop_pb2 as pb

GONE_S = 15.0
"""How long the ring shows a device after its end."""
MAX_LINES = 2000
MAX_MARKS = 1000
MAX_JOBS = 8
"""Jobs that are shown: running ones, and the last that ended."""
MAX_BUFFERS = 64
"""Named buffers of one device; the rest is one line."""
MAX_NAME = 120
"""Characters of a name that is shown."""


class DeviceState(StrEnum):
    """State of a device as the page shows it. The first that applies, in this order, is shown."""

    DEAD = "dead"
    LEFT = "left"
    SUSPECT = "suspect"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    """Alive, but other devices cannot connect to it: jobs do not use it."""
    JOINING = "joining"
    """It loads a job that it is going to join."""
    TRAINING = "training"
    STANDBY = "standby"
    """Alive and without a job."""

    @property
    def is_gone(self) -> bool:
        return self in (DeviceState.DEAD, DeviceState.LEFT)


@dataclass(frozen=True)
class BufferView:
    """A named buffer in a device's arena, or on its GPU."""

    name: str
    bytes: int
    on_gpu: bool = False


@dataclass(frozen=True)
class DeviceView:
    """One device."""

    id: int
    host: str
    address: str
    pid: int
    incarnation: str
    state: DeviceState
    reason: str = ""
    silent_s: float = 0.0
    """Since its last heartbeat."""
    used: int = 0
    """Bytes of its arena."""
    capacity: int = 0
    gpu: str = ""
    gpu_used: int = 0
    gpu_capacity: int = 0
    buffers: tuple[BufferView, ...] = ()
    """Largest first, at most ``MAX_BUFFERS``."""
    job: int = 0
    """The running job that it has a rank in; 0: none."""
    rank: int = 0
    activity: ActivityView | None = None
    """What it does in that job; None before its first step there."""
    gone_at: float = 0.0
    """When the feed saw that it had ended, by the feed's monotonic clock; 0: it has not."""


@dataclass(frozen=True)
class CommunicatorView:
    """One communicator."""

    id: int
    generation: int
    devices: tuple[int, ...]
    """In rank order."""
    status: str
    reason: str


@dataclass(frozen=True)
class ClusterView:
    """Everything that the page shows."""

    coordinator: str = ""
    """Its address."""
    pid: int = 0
    version: str = ""
    problem: str = ""
    """Why the coordinator does not answer; empty: it does."""
    answered: bool = False
    """Whether it has ever answered."""
    devices: tuple[DeviceView, ...] = ()
    """By host and id. One that has ended stays until the coordinator forgets it, and ``GONE_S`` at least."""
    communicators: tuple[CommunicatorView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    """By id."""
    marks: tuple[Mark, ...] = ()
    lines: tuple[LogLine, ...] = ()
    now: float = 0.0
    """Of the last poll, by the feed's monotonic clock."""

    @property
    def on_ring(self) -> tuple[DeviceView, ...]:
        """The devices that are drawn: a device that has ended is drawn for ``GONE_S``, then the others close up."""
        return tuple(one for one in self.devices if not one.state.is_gone or self.now - one.gone_at < GONE_S)

    def job(self, job_id: int) -> JobView | None:
        return next((one for one in self.jobs if one.id == job_id), None)

    def workers(self, job_id: int) -> tuple[DeviceView, ...]:
        """The devices that do steps of a job, by rank."""
        found = [one for one in self.devices if one.activity is not None and one.activity.job == job_id]
        return tuple(sorted(found, key=lambda one: one.rank))

    @property
    def current_job(self) -> JobView | None:
        """The newest running job, else the newest."""
        running = [one for one in self.jobs if one.status == "running"]
        return next(reversed(running or list(self.jobs)), None)


def shown_name(text: str) -> str:
    """A name from another process, of bounded length. It is not escaped: that is the page's work."""
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"


def with_status(view: ClusterView, status: pb.GetStatusResponse, now: float) -> ClusterView:
    """After an answer of the coordinator at ``now``."""
    jobs = _jobs(view.jobs, status.jobs)
    ranks = {
        device: (job.id, rank) for job in jobs if job.status == "running" for rank, device in enumerate(job.devices)
    }
    loading = {device for job in jobs if job.status == "running" for device in job.loading}
    before = {one.incarnation: one for one in view.devices}
    listed = [_device(one, before.get(one.device.incarnation), ranks, loading, now) for one in status.devices]
    listed = _refreshed(listed)
    known = {one.incarnation for one in listed}
    forgotten = [_gone(one, now) for one in view.devices if one.incarnation not in known]
    devices = listed + [one for one in forgotten if now - one.gone_at < GONE_S]
    return replace(
        view,
        coordinator=shown_name(status.address),
        pid=status.pid,
        version=shown_name(status.hoop_version),
        problem="",
        answered=True,
        devices=tuple(sorted(devices, key=lambda one: (one.host, one.id))),
        communicators=tuple(
            CommunicatorView(
                one.id,
                one.generation,
                tuple(member.device_id for member in one.members),
                shown_name(one.status),
                shown_name(one.reason),
            )
            for one in status.communicators
        ),
        jobs=jobs,
        now=now,
    )


def without_answer(view: ClusterView, problem: str, now: float) -> ClusterView:
    """The coordinator did not answer. What was known stays on the page."""
    return replace(view, problem=problem, now=now)


def with_buffers(view: ClusterView, incarnation: str, buffers: dict[str, tuple[int, int]]) -> ClusterView:
    """With the named buffers (address and bytes) of one device's arena."""
    found = tuple(BufferView(shown_name(name), size) for name, (_, size) in buffers.items())
    return replace(
        view,
        devices=tuple(
            replace(one, buffers=_largest((*found, *(other for other in one.buffers if other.on_gpu))))
            if one.incarnation == incarnation
            else one
            for one in view.devices
        ),
    )


def with_event(view: ClusterView, event: Event) -> ClusterView:
    """After an event of the coordinator."""
    line = LogLine(event.time, "coordinator", shown_name(event.kind), event.text)
    mark = mark_of_event(event)
    return with_lines(view, [line], [mark] if mark is not None else [])


def with_job(view: ClusterView, job: JobView) -> ClusterView:
    """With a changed job; a job that is no longer listed is not added again."""
    return replace(view, jobs=tuple(job if one.id == job.id else one for one in view.jobs))


def with_lines(view: ClusterView, lines: Iterable[LogLine], marks: Iterable[Mark]) -> ClusterView:
    """With further lines of the log and marks of the timeline; the oldest are dropped."""
    lines, marks = tuple(lines), tuple(marks)
    if not lines and not marks:  # most events of a job: reports of steps
        return view
    return replace(
        view,
        lines=(*view.lines, *lines)[-MAX_LINES:],
        marks=(*view.marks, *marks)[-MAX_MARKS:],
    )


def _jobs(before: tuple[JobView, ...], listed: Iterable[pb.Job]) -> tuple[JobView, ...]:
    """The jobs of the status with what was known of them: the running ones, then the last that ended."""
    newest = sorted(listed, key=lambda one: (one.status == "running", one.id))[-MAX_JOBS:]
    known = {one.id: one for one in before}
    return tuple(
        replace(
            known.get(one.id, JobView(one.id)),
            name=shown_name(one.name),
            devices=tuple(one.device_ids),
            status=shown_name(one.status),
            reason=shown_name(one.reason),
            min_devices=one.min_devices,
            max_devices=one.max_devices,
        )
        for one in sorted(newest, key=lambda one: one.id)
    )


def _device(
    member: pb.Member,
    before: DeviceView | None,
    ranks: dict[int, tuple[int, int]],
    loading: set[int],
    now: float,
) -> DeviceView:
    device, memory = member.device, member.memory
    has_gpu = memory.HasField("gpu")
    job, rank = ranks.get(device.device_id, (0, 0))
    state = _state(member, device.device_id in loading, bool(job))
    gone_at = 0.0
    if state.is_gone:
        gone_at = before.gone_at if before is not None and before.gone_at else now
    gpu = [BufferView(shown_name(one.name), one.bytes, True) for one in memory.gpu.buffers] if has_gpu else []
    in_arena = [one for one in before.buffers if not one.on_gpu] if before is not None else []
    return DeviceView(
        id=device.device_id,
        host=shown_name(device.host),
        address=shown_name(device.address),
        pid=device.pid,
        incarnation=device.incarnation,
        state=state,
        reason=shown_name("; ".join(filter(None, (member.reason, member.unreachable)))),
        silent_s=member.silent_s,
        used=memory.used,
        capacity=memory.capacity,
        gpu=shown_name(memory.gpu.name) if has_gpu else "",
        gpu_used=memory.gpu.used if has_gpu else 0,
        gpu_capacity=memory.gpu.capacity if has_gpu else 0,
        buffers=_largest((*in_arena, *gpu)),
        job=job,
        rank=rank,
        activity=None if gone_at else _activity(member, before.activity if before is not None else None, job),
        gone_at=gone_at,
    )


def _activity(member: pb.Member, before: ActivityView | None, job: int) -> ActivityView | None:
    found = next((one for one in member.activities if one.job_id == job), None) if job else None
    return after_heartbeat(before, found) if found is not None else None


def _refreshed(devices: list[DeviceView]) -> list[DeviceView]:
    """With figures that change together (``activity_view``)."""
    found = iter(refreshed_together([one.activity for one in devices if one.activity is not None]))
    return [one if one.activity is None else replace(one, activity=next(found)) for one in devices]


def _gone(device: DeviceView, now: float) -> DeviceView:
    """A device that the coordinator lists no more."""
    if device.state.is_gone:
        return device
    return replace(device, state=DeviceState.LEFT, reason="no longer listed", gone_at=now, job=0, rank=0, activity=None)


_STATES = {"dead": DeviceState.DEAD, "left": DeviceState.LEFT, "suspect": DeviceState.SUSPECT}


def _state(member: pb.Member, is_loading: bool, has_rank: bool) -> DeviceState:
    if member.state in _STATES:
        return _STATES[member.state]
    if member.state == "draining":
        return DeviceState.DRAINING
    if member.left_out:
        return DeviceState.UNREACHABLE
    if is_loading:
        return DeviceState.JOINING
    return DeviceState.TRAINING if has_rank else DeviceState.STANDBY


def _largest(buffers: tuple[BufferView, ...]) -> tuple[BufferView, ...]:
    """The largest first; those beyond ``MAX_BUFFERS`` are summed up in the last one."""
    ordered = sorted(buffers, key=lambda one: (-one.bytes, one.name))
    if len(ordered) <= MAX_BUFFERS:
        return tuple(ordered)
    rest = ordered[MAX_BUFFERS - 1 :]
    return (*ordered[: MAX_BUFFERS - 1], BufferView(f"{len(rest)} more", sum(one.bytes for one in rest)))
