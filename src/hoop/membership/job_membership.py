"""The coordinator's side of one job: which devices take part, and when they get new ranks. Pure: no clock, no I/O.

    advance(job, event, cluster, now) -> job, instructions

``cluster`` is the state of ``membership.step``: it knows each device's health, and the job's communicator, whose
members are the job's ranks at the newest generation. A job adds what its devices said of their tasks:

    loading ──▶ ready ──▶ active            asked to load code and data; waits for a rank; has one
                            │  ▲
                            ▼  │            it left a generation, and waits for a rank of a newer one
                          waiting

The rules, in the order in which ``_decide`` looks at them:

    (1) every task has ended: the job is over
    (2) nobody has a rank any more: wait for devices that can come back, then give ranks to those that did
    (3) all wait, and together they lack a part of the state: wait for devices that may still have it
    (4) the generation is broken (a device died, a link failed, a task is gone): new ranks at once
    (5) ranks wait and nothing explains it: new ranks, each time after twice the pause
    (6) devices are ready to join, or want to leave: new ranks between two steps, or at once where state is partitioned

A job is declared lost only by (2) and (3), and only when no device is left that may still have its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hoop.membership.state import CommunicatorState, Health, State

MAX_BACKOFF_S = 30.0
"""The longest pause between two rebuilds that no new evidence asks for."""
SETTLE = 1 / 6
"""Of a lease: how long ranks that all wait are left alone, for a verdict on their links to come first."""


class TaskStage(StrEnum):
    """How far a device's task is."""

    LOADING = "loading"
    READY = "ready"
    ACTIVE = "active"


@dataclass(frozen=True)
class TaskView:
    """What the coordinator knows of the job's task on one device."""

    incarnation: str
    stage: TaskStage
    waiting: int = 0
    """The generation that it has left; it waits for a rank of a newer one. 0: it does not wait."""
    lacks: str = ""
    """What the ranks of that generation could not go on without, in words; empty: nothing, only links failed."""
    error: str = ""
    """The class of that error."""


@dataclass(frozen=True)
class JobView:
    """One job, as the coordinator sees it; replaced as a whole by every event."""

    id: int
    elastic: bool = True
    """Devices may come and go: every device has the whole state, or a replica of another's part."""
    planned: bool = True
    """New ranks are given between two steps where nobody was lost: no part of the state has to move first."""
    grace_s: float = 60.0
    """How long devices that can come back are waited for; 0: not at all."""
    tasks: Mapping[int, TaskView] = field(default_factory=dict)
    """By device. A task that has ended is not in it."""
    participants: frozenset[int] = frozenset()
    """Every device that ever had a rank."""
    leaving: frozenset[int] = frozenset()
    """Members that asked for others to take over."""
    finding: bool = True
    """Its tasks are being started, or asked for by a restarted coordinator: nothing is decided before ``Found``."""
    assigning: bool = False
    """New ranks were asked for and are not in the cluster's state yet."""
    undelivered: int = 0
    """The newest generation whose ranks could not be delivered to every member."""
    moving: int = 0
    """The generation that members move to between two steps; 0: none."""
    movers: tuple[int, ...] = ()
    """Those that had a rank when that was planned."""
    invite_again: Mapping[int, float] = field(default_factory=dict)
    """Devices that could not be reached to be asked to take part, and when they are asked again."""
    refused: frozenset[str] = frozenset()
    """Incarnations that cannot take part: they have other data, or no such job."""
    unsettled: int = 0
    """The newest generation, until its ranks are known to be at work together: nothing is planned before."""
    waits_since: float | None = None
    """When the first member of the newest generation said that it waits."""
    attempts: int = 0
    """Rebuilds since there was last any evidence or progress."""
    last_attempt: float = 0.0
    grace_until: float | None = None
    """When the wait for devices that can come back is over; None: nobody is waited for."""
    awaited: frozenset[int] = frozenset()
    """Whom it was last announced to wait for."""
    finished: bool = False
    """A task came to the end of the training."""
    failed: bool = False
    """A task failed by itself: a mistake, or a bug."""
    abandoned: bool = False
    """Somebody asked to stop while nobody has a rank, or all members want to leave."""
    over: bool = False


# ---- in: what happened


@dataclass(frozen=True)
class TaskFound:
    """A device runs the job's task, at this generation; 0: it loads what the job needs."""

    device_id: int
    incarnation: str
    generation: int


@dataclass(frozen=True)
class TasksListed:
    """Every task was started, or asked for by a restarted coordinator."""


@dataclass(frozen=True)
class DeviceArrived:
    """A device joined the cluster, or may take part again."""

    device_id: int


@dataclass(frozen=True)
class InviteFailed:
    """A device could not be asked to take part; ``refused``: it cannot, and is not asked again."""

    device_id: int
    incarnation: str
    refused: bool = True


@dataclass(frozen=True)
class TaskReady:
    """A device has loaded what the job needs."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class TaskWaiting:
    """A member left this generation and waits for a new rank; ``lacks``: what the ranks could not go on without."""

    device_id: int
    incarnation: str
    generation: int
    lacks: str = ""
    error: str = ""


@dataclass(frozen=True)
class TaskResumed:
    """The ranks of a generation are at work."""

    generation: int


@dataclass(frozen=True)
class TaskFinished:
    """A task ended by itself: at the end of the training, by a failure, or because it was released."""

    device_id: int
    incarnation: str
    finished: bool = False
    failed: bool = False


@dataclass(frozen=True)
class TaskLost:
    """A device's task is gone: its process ended or was restarted, or the device is dead to the detector."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class Assigned:
    """The ranks of this generation are in the cluster's state, and on their way to the members."""

    generation: int
    planned: bool = False


@dataclass(frozen=True)
class AssignFailed:
    """New ranks could not be made: no device is alive."""


@dataclass(frozen=True)
class Delivered:
    """Every member has its rank of this generation; ``ok``: or some could not be given it."""

    generation: int
    ok: bool = True


@dataclass(frozen=True)
class LeaveRequested:
    """A member wants others to take over."""

    device_id: int


@dataclass(frozen=True)
class StopRequested:
    """A user wants the job to end; its tasks were told, this is for one that nobody has a rank in."""


@dataclass(frozen=True)
class JobTick:
    """Time passed, or the cluster's state changed."""


JobEvent = (
    TaskFound
    | TasksListed
    | DeviceArrived
    | InviteFailed
    | TaskReady
    | TaskWaiting
    | TaskResumed
    | TaskFinished
    | TaskLost
    | Assigned
    | AssignFailed
    | Delivered
    | LeaveRequested
    | StopRequested
    | JobTick
)


# ---- out: what is to be done


@dataclass(frozen=True)
class Assign:
    """Give out the ranks of a new generation; answered by ``Assigned`` and ``Delivered``, or ``AssignFailed``."""

    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    planned: bool = False


@dataclass(frozen=True)
class Move:
    """Tell these members to move to their planned ranks after a step that they agree on."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class Invite:
    """Ask a device to load what the job needs."""

    device_id: int


@dataclass(frozen=True)
class Release:
    """A device has no rank any more; ``final``: and nobody needs what it has, it can go at once."""

    device_id: int
    final: bool


@dataclass(frozen=True)
class Readmit:
    """Let a device take part again that was evicted because of its links: the others lack state that it may have."""

    device_id: int


@dataclass(frozen=True)
class Await:
    """Announce which devices the job waits for, and for how many seconds at most."""

    device_ids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class End:
    """The job is over; ``error`` and ``text``: because this was lost."""

    error: str = ""
    text: str = ""


JobInstruction = Assign | Move | Invite | Release | Readmit | Await | End
Result = tuple[JobView, tuple[JobInstruction, ...]]


def advance(job: JobView, event: JobEvent, cluster: State, now: float) -> Result:
    """The job after an event, and what is to be done about it."""
    if job.over or job.id not in cluster.communicators:
        return job, ()
    job, first = _noted(job, event, cluster, now)
    job, then = _decide(job, cluster, now)
    for device_id in [key for key, when in job.invite_again.items() if when <= now and not job.over]:
        job = replace(job, invite_again={key: at for key, at in job.invite_again.items() if key != device_id})
        job, more = _invited(job, cluster, device_id)
        then += more
    return job, (*first, *then)


# ---- what an event says


def _noted(job: JobView, event: JobEvent, cluster: State, now: float) -> Result:
    match event:
        case TaskFound(device_id, incarnation, generation):
            return _found(
                job, cluster, device_id, TaskView(incarnation, TaskStage.LOADING), generation, now
            ), ()
        case TasksListed():
            return replace(job, finding=False), ()
        case DeviceArrived(device_id):
            member = cluster.members.get(device_id)
            again = {member.info.incarnation} if member is not None else set()
            return _invited(replace(job, refused=job.refused - again), cluster, device_id)
        case InviteFailed(device_id, incarnation, refused):
            job = _without(job, device_id, incarnation)
            if refused:
                return replace(job, refused=job.refused | {incarnation}), ()
            return replace(
                job, invite_again={**job.invite_again, device_id: now + cluster.config.lease_s}
            ), ()
        case TaskLost(device_id, incarnation):
            return _without(job, device_id, incarnation), ()
        case TaskReady(device_id, incarnation):
            if _task(job, device_id, incarnation) is None:
                return job, ()
            task = TaskView(incarnation, TaskStage.READY)
            return _evident(_with(replace(job, leaving=job.leaving - {device_id}), device_id, task)), ()
        case TaskWaiting():
            return _left(job, event, cluster, now), ()
        case TaskResumed(generation):
            return _resumed(job, cluster, generation)
        case TaskFinished(device_id, incarnation, finished, failed):
            ranked = _stage(job, device_id, incarnation) == TaskStage.ACTIVE
            job = _without(job, device_id, incarnation)
            return (
                replace(
                    job,
                    finished=job.finished or finished,
                    failed=job.failed or (failed and ranked),
                ),
                (),
            )
        case Assigned(generation, planned):
            return _assigned(job, cluster, generation, planned)
        case AssignFailed():
            return _tried(replace(job, assigning=False), now), ()
        case Delivered(generation, ok):
            return _delivered(job, cluster, generation, ok, now)
        case LeaveRequested(device_id):
            leaving = job.leaving | {device_id}
            members = set(cluster.communicator(job.id).members)
            return replace(job, leaving=leaving, abandoned=job.abandoned or leaving >= members), ()
        case StopRequested():
            return replace(job, abandoned=job.abandoned or not active(job, cluster)), ()
        case JobTick():
            return job, ()


def _found(
    job: JobView, cluster: State, device_id: int, task: TaskView, generation: int, now: float
) -> JobView:
    one = cluster.communicator(job.id)
    if not generation:
        return job if _task(job, device_id, task.incarnation) else _with(job, device_id, task)
    participants = job.participants | {device_id}
    task = replace(task, stage=TaskStage.ACTIVE)
    if generation != one.generation:  # it was not reached by the newest ranks
        task = replace(task, waiting=one.generation)
        job = replace(job, waits_since=now if job.waits_since is None else job.waits_since)
    return _with(replace(job, participants=participants), device_id, task)


def _invited(job: JobView, cluster: State, device_id: int) -> Result:
    """Asks a device to get ready, unless it has been asked, or was only doubted and has its rank."""
    member = cluster.members.get(device_id)
    if member is None or not member.usable or not job.elastic or device_id in cluster.trouble(job.id).out:
        return job, ()
    stage = _stage(job, device_id, member.info.incarnation)
    left_out = stage == TaskStage.ACTIVE and device_id not in cluster.communicator(job.id).members
    if member.info.incarnation in job.refused or (stage is not None and not left_out):
        return job, ()
    task = TaskView(member.info.incarnation, TaskStage.LOADING)
    return _with(job, device_id, task), (Invite(device_id),)


def _left(job: JobView, event: TaskWaiting, cluster: State, now: float) -> JobView:
    """A member waits. One that left an older generation will find the newer rank by itself."""
    one = cluster.communicator(job.id)
    task = _task(job, event.device_id, event.incarnation)
    if task is None or task.stage != TaskStage.ACTIVE or event.generation != one.generation:
        return job
    task = replace(task, waiting=event.generation, lacks=event.lacks, error=event.error)
    since = now if job.waits_since is None else job.waits_since
    return _with(replace(job, waits_since=since), event.device_id, task)


def _resumed(job: JobView, cluster: State, generation: int) -> Result:
    one = cluster.communicator(job.id)
    if generation != one.generation:
        return job, ()
    job = replace(_evident(job), unsettled=0, moving=0, grace_until=None, awaited=frozenset())
    instructions: tuple[JobInstruction, ...] = ()
    for key in _without_rank(job, one):  # the others have its state
        if key in job.leaving or key in cluster.trouble(job.id).out:
            instructions += (Release(key, True),)
        else:
            job, more = _invited(job, cluster, key)
            instructions += more
    return replace(job, leaving=job.leaving & set(one.members)), instructions


def _assigned(job: JobView, cluster: State, generation: int, planned: bool) -> Result:
    one = cluster.communicator(job.id)
    job = replace(job, assigning=False)
    if one.generation != generation:
        return job, ()
    tasks = dict(job.tasks)
    for key in one.members:
        if key in tasks:
            tasks[key] = TaskView(tasks[key].incarnation, TaskStage.ACTIVE)
    movers = tuple(key for key in sorted(job.tasks) if _had_rank(job, key))
    participants = job.participants | set(one.members)
    job = replace(job, tasks=tasks, participants=participants, waits_since=None)
    job = replace(job, unsettled=generation, moving=generation if planned else 0, movers=movers)
    # They stay until the others are at work: what they have may be needed after all.
    gone = job.leaving | set(cluster.trouble(job.id).out)
    return job, tuple(Release(key, False) for key in _without_rank(job, one) if key in gone)


def _delivered(job: JobView, cluster: State, generation: int, ok: bool, now: float) -> Result:
    if generation != cluster.communicator(job.id).generation:
        return job, ()
    if not ok:
        return _tried(replace(job, undelivered=generation), now), ()
    return job, (Move(job.movers),) if job.moving == generation else ()


# ---- what follows from all of it


def _decide(job: JobView, cluster: State, now: float) -> Result:
    one = cluster.communicator(job.id)
    if job.assigning or job.finding:
        return job, ()
    working = active(job, cluster)
    waiting = [key for key in working if job.tasks[key].waiting == one.generation]
    stuck = bool(working) and len(waiting) == len(working)
    if job.failed:  # (1)
        return _end(job)
    if job.finished and not _finishing(job, one, working, waiting):
        return _end(job)
    if not working:
        return _end(job) if job.abandoned else _scattered(job, cluster, now)  # (2)
    if stuck and any(job.tasks[key].lacks for key in waiting):
        return _lacking(job, cluster, waiting, now)  # (3)
    if _broken(job, cluster, one, working):  # (4)
        return _rebuild(job, cluster) if _rested(job, cluster, now) else (job, ())
    if waiting and job.waits_since is not None:  # (5)
        pause = cluster.config.lease_s * (SETTLE if stuck else 1.0) * 2**job.attempts
        if now - job.waits_since < min(pause, MAX_BACKOFF_S):
            return job, ()
        return _rebuild(_tried(job, now), cluster)
    ready = _ready(job, cluster)
    leaving = [key for key in one.members if key in job.leaving]
    if (
        not job.unsettled and not job.finished and (ready or (leaving and len(leaving) < len(one.members)))
    ):  # (6)
        if job.planned:
            assign = Assign(tuple(ready), tuple(leaving), planned=True)
            return replace(job, assigning=True), (assign,)
        return _rebuild(job, cluster)
    return job, ()


def _finishing(job: JobView, one: CommunicatorState, working: list[int], waiting: list[int]) -> bool:
    """A task came to the end of the training: whether another is still on its way there.

    One that waits, and lacks a part of the state, is not: the state went with the tasks that ended. Nor is one that
    was to join at a generation that the others will not come to any more.
    """
    left = [key for key in working if not (key in waiting and job.tasks[key].lacks)]
    return any(key in job.movers for key in left) if job.moving == one.generation else bool(left)


def _broken(job: JobView, cluster: State, one: CommunicatorState, working: list[int]) -> bool:
    """Whether something is known that the members' ranks cannot work with."""
    if one.broken_by or cluster.trouble(job.id).closed >= one.generation:
        return True
    if job.undelivered == one.generation:
        return True
    if job.finished:
        return False
    # Members that have not moved yet still run collectives of the generation before, and need all of its ranks there.
    stranded = job.moving == one.generation and any(not _had_rank(job, key) for key in job.movers)
    return stranded or len(working) < len(one.members)


def _rebuild(job: JobView, cluster: State) -> Result:
    """New ranks at once, without members whose tasks are gone, that leave, or that were evicted."""
    one = cluster.communicator(job.id)
    ready, working = _ready(job, cluster), active(job, cluster)
    gone = tuple(key for key in one.members if key in job.leaving or key not in (*working, *ready))
    if set(gone) >= {*one.members, *ready}:  # all that are left want to leave: nobody can take over
        gone = tuple(key for key in gone if key not in working)
    return replace(job, assigning=True, moving=0), (Assign(tuple(ready), gone),)


def _scattered(job: JobView, cluster: State, now: float) -> Result:
    """(2): nobody has a rank. Devices that can come back are waited for; then those that did get ranks."""
    ready, missing = _ready(job, cluster), _may_return(job, cluster)
    if not job.elastic or not job.grace_s or not (ready or missing):
        return _end(job)
    job = _with_grace(job, now)
    waited = not missing or _grace_over(job, cluster, missing, now)
    if ready and waited:
        return _rebuild(job, cluster) if _rested(job, cluster, now) else (job, ())
    if waited:
        return _end(job)
    return _awaiting(job, cluster, missing, now)


def _lacking(job: JobView, cluster: State, waiting: list[int], now: float) -> Result:
    """(3): the ranks together lack something. One more device may bring it."""
    ready, missing = _ready(job, cluster), _may_return(job, cluster)
    if any(key in job.tasks for key in job.leaving):  # what a device that leaves has is needed
        return _rebuild(replace(job, leaving=frozenset()), cluster)
    if ready:
        return _rebuild(job, cluster)
    job = _with_grace(job, now)
    if missing and job.elastic and not _grace_over(job, cluster, missing, now):
        evicted = sorted(missing & set(cluster.trouble(job.id).out))
        job, instructions = _awaiting(job, cluster, missing, now)
        return job, (*(Readmit(key) for key in evicted), *instructions)
    worst = next(job.tasks[key] for key in waiting if job.tasks[key].lacks)
    return _end(job, worst.error, worst.lacks)


def _with_grace(job: JobView, now: float) -> JobView:
    """The same job; the wait for devices that can come back has begun."""
    return job if job.grace_until is not None else replace(job, grace_until=now + job.grace_s)


def _grace_over(job: JobView, cluster: State, missing: frozenset[int], now: float) -> bool:
    """Whether the wait is over. A device that has come back and loads what the job needs gets one more grace."""
    loads = any(_has(job, cluster, key, TaskStage.LOADING) for key in missing)
    return job.grace_until is not None and now >= job.grace_until + (job.grace_s if loads else 0.0)


def _awaiting(job: JobView, cluster: State, missing: frozenset[int], now: float) -> Result:
    instructions: tuple[JobInstruction, ...] = ()
    for key in sorted(missing):  # it may have come back before its loss was known
        job, more = _invited(job, cluster, key)
        instructions += more
    if missing == job.awaited or job.grace_until is None:
        return job, instructions
    announcement = Await(tuple(sorted(missing)), job.grace_until - now)
    return replace(job, awaited=missing), (*instructions, announcement)


def _end(job: JobView, error: str = "", text: str = "") -> Result:
    """Every task that is left is released: none of them would come to the end by itself."""
    releases = tuple(Release(key, True) for key in sorted(job.tasks))
    return replace(job, over=True), (*releases, End(error, text))


# ---- what can be derived


def _task(job: JobView, device_id: int, incarnation: str) -> TaskView | None:
    found = job.tasks.get(device_id)
    return found if found is not None and found.incarnation == incarnation else None


def _stage(job: JobView, device_id: int, incarnation: str) -> TaskStage | None:
    found = _task(job, device_id, incarnation)
    return found.stage if found is not None else None


def active(job: JobView, cluster: State) -> list[int]:
    """The members of the newest generation whose tasks are under way."""
    return [key for key in cluster.communicator(job.id).members if _has(job, cluster, key, TaskStage.ACTIVE)]


def _ready(job: JobView, cluster: State) -> list[int]:
    """Devices that wait for their first rank and can be given one."""
    out = cluster.trouble(job.id).out
    found = (key for key in job.tasks if _has(job, cluster, key, TaskStage.READY))
    return sorted(key for key in found if cluster.members[key].usable and key not in out)


def _had_rank(job: JobView, device_id: int) -> bool:
    """Whether the device's task has been assigned a rank, in the newest generation or in an older one."""
    return device_id in job.tasks and job.tasks[device_id].stage == TaskStage.ACTIVE


def _without_rank(job: JobView, one: CommunicatorState) -> list[int]:
    """Devices whose tasks had a rank and have none in the newest generation."""
    return [key for key in sorted(job.tasks) if _had_rank(job, key) and key not in one.members]


def _has(job: JobView, cluster: State, device_id: int, stage: TaskStage) -> bool:
    member = cluster.members.get(device_id)
    return member is not None and _stage(job, device_id, member.info.incarnation) == stage


def _may_return(job: JobView, cluster: State) -> frozenset[int]:
    """Devices that had a rank, have none now, and may still have what they held: in memory, or in an arena file."""
    away = job.participants - set(active(job, cluster)) - set(_ready(job, cluster))
    found = (cluster.members[key] for key in away if key in cluster.members)
    return frozenset(
        one.info.device_id
        for one in found
        if one.health != Health.LEFT and (one.usable or not one.ended or one.info.keeps_memory)
    )


def _with(job: JobView, device_id: int, task: TaskView) -> JobView:
    return replace(job, tasks={**job.tasks, device_id: task})


def _without(job: JobView, device_id: int, incarnation: str) -> JobView:
    """The same job, without this task."""
    task = _task(job, device_id, incarnation)
    if task is None:
        return job
    tasks = {key: one for key, one in job.tasks.items() if key != device_id}
    return _evident(replace(job, tasks=tasks, leaving=job.leaving - {device_id}))


def _evident(job: JobView) -> JobView:
    """There is evidence or progress: the next rebuild does not have to wait."""
    return replace(job, attempts=0)


def _tried(job: JobView, now: float) -> JobView:
    return replace(job, attempts=job.attempts + 1, last_attempt=now)


def _rested(job: JobView, cluster: State, now: float) -> bool:
    """Whether the pause since the last attempt that came to nothing is over."""
    pause = min(cluster.config.lease_s * SETTLE * 2**job.attempts, MAX_BACKOFF_S)
    return not job.attempts or now - job.last_attempt >= pause
