"""The coordinator's view of one job: which devices take part, and when they get new ranks. Pure: no clock, no I/O.

    advance(job, event, cluster, now) -> job, instructions

``servers.rank_assignment`` calls it and carries out the instructions. ``cluster`` is the state of
``state_machine.step``: it holds each device's health, and the job's communicator, whose members are the job's ranks at
the newest generation. ``JobView`` adds the stage of the job's task on each device:

    loading ──▶ ready ──▶ active            loads code and data; waits for a rank; has one
                            │  ▲
                            ▼  │            it left a generation, and waits for a rank of a newer one
                          waiting

The rules, in the order in which ``_decide`` applies them:

    (1) a task failed, or all tasks have reached the end of the training: the job is over
    (2) no device has a rank any more: wait for devices that can come back, then assign ranks to those that did
    (3) all ranks wait, and together they lack a part of the state: wait for devices that may still have it
    (4) the generation is broken (a device died, a link failed, a task is gone): assign new ranks at once
    (5) ranks wait for an unknown reason: assign new ranks, each time after twice the pause
    (6) devices are ready to join, or want to leave: assign ranks between two steps, or at once if state is partitioned

Only (2) and (3) declare a job lost, and only when no device is left that may still have its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hoop.membership.reachability import cut_off
from hoop.membership.state import CommunicatorState, Health, State

MAX_BACKOFF_S = 30.0
"""The longest pause between two rebuilds without new evidence in between."""
SETTLE = 1 / 6
"""Fraction of a lease: the pause before ranks that all wait are rebuilt. A decision on their links may come first."""


class TaskStage(StrEnum):
    """The stage of a device's task."""

    LOADING = "loading"
    READY = "ready"
    ACTIVE = "active"


@dataclass(frozen=True)
class TaskView:
    """The job's task on one device, as the coordinator sees it."""

    incarnation: str
    stage: TaskStage
    waiting: int = 0
    """The generation that the task has left; it waits for a rank of a newer one. 0: it does not wait."""
    lacks: str = ""
    """The text of the error by which the ranks of that generation lack state; empty: only links failed."""
    error: str = ""
    """The class of that error, by name."""


@dataclass(frozen=True)
class JobView:
    """One job, as the coordinator sees it. Immutable."""

    id: int
    elastic: bool = True
    """Devices may join and leave: every device has the whole state, or other devices hold replicas of its part."""
    planned: bool = True
    """If no device was lost, ranks change between two steps: no part of the state has to move first."""
    restart_grace_s: float = 60.0
    """How long the job waits for devices that can come back, in seconds; 0: not at all."""
    tasks: Mapping[int, TaskView] = field(default_factory=dict)
    """By device id; without tasks that have ended."""
    participants: frozenset[int] = frozenset()
    """Every device that ever had a rank."""
    leaving: frozenset[int] = frozenset()
    """Members that asked to leave."""
    finding: bool = True
    """The coordinator starts the tasks, or looks for them after a restart: no rule applies before ``TasksListed``."""
    assigning: bool = False
    """An ``Assign`` is under way: its ranks are not in the cluster's state yet."""
    undelivered: int = 0
    """The newest generation whose ranks did not reach every member."""
    moving: int = 0
    """The generation that members move to between two steps; 0: none."""
    movers: tuple[int, ...] = ()
    """The devices that had a rank when the newest generation was assigned."""
    invite_again: Mapping[int, float] = field(default_factory=dict)
    """By device that an invitation did not reach: the time of the next invitation."""
    refused: frozenset[str] = frozenset()
    """Incarnations that cannot take part: their data differs, or they do not have the job's code."""
    unsettled: int = 0
    """The newest generation, until its ranks run steps together; 0 after that. No join or leave is planned before."""
    waits_since: float | None = None
    """When the first member of the newest generation began to wait."""
    attempts: int = 0
    """Rebuilds since the last evidence or progress."""
    last_attempt: float = 0.0
    grace_until: float | None = None
    """The end of the wait for devices that can come back; None: the job does not wait."""
    awaited: frozenset[int] = frozenset()
    """The devices of the last announced wait."""
    finished: bool = False
    """A task reached the end of the training."""
    failed: bool = False
    """A task failed by its own code: a user error or a bug."""
    abandoned: bool = False
    """A user asked to stop while no device has a rank, or all members want to leave."""
    over: bool = False


# ---- events


@dataclass(frozen=True)
class TaskFound:
    """A device runs the job's task, at this generation; 0: it still loads code and data."""

    device_id: int
    incarnation: str
    generation: int


@dataclass(frozen=True)
class TasksListed:
    """All tasks were started, or a restarted coordinator has asked all devices for theirs."""


@dataclass(frozen=True)
class DeviceArrived:
    """A device joined the cluster, or its eviction ended."""

    device_id: int


@dataclass(frozen=True)
class InviteFailed:
    """An invitation failed. ``refused``: the device cannot take part, and is not invited again."""

    device_id: int
    incarnation: str
    refused: bool = True


@dataclass(frozen=True)
class TaskReady:
    """A device has loaded the job's code and data."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class TaskWaiting:
    """A member left this generation and waits for a new rank. ``lacks``, ``error``: see ``TaskView``."""

    device_id: int
    incarnation: str
    generation: int
    lacks: str = ""
    error: str = ""


@dataclass(frozen=True)
class TaskResumed:
    """The ranks of a generation run steps together."""

    generation: int


@dataclass(frozen=True)
class TaskFinished:
    """A task ended: at the end of the training, by a failure, or because the coordinator released it."""

    device_id: int
    incarnation: str
    finished: bool = False
    failed: bool = False


@dataclass(frozen=True)
class TaskLost:
    """A device's task is gone: its process ended or restarted, or the failure detector declared the device dead."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class Assigned:
    """The ranks of this generation are in the cluster's state, and are being sent to the members."""

    generation: int
    planned: bool = False


@dataclass(frozen=True)
class AssignFailed:
    """No ranks could be assigned: no device is alive, or the journal failed."""


@dataclass(frozen=True)
class Delivered:
    """All members received their rank of this generation; ``ok`` False: some did not."""

    generation: int
    ok: bool = True


@dataclass(frozen=True)
class LeaveRequested:
    """A member wants to leave."""

    device_id: int


@dataclass(frozen=True)
class StopRequested:
    """A user wants the job to end. The tasks get ``StopTask``; this ends a job in which no device has a rank."""


@dataclass(frozen=True)
class JobTick:
    """Time passed, or the cluster's state changed."""


JobMembershipEvent = (
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


# ---- instructions


@dataclass(frozen=True)
class Assign:
    """Assign the ranks of a new generation. Answered by ``Assigned`` and ``Delivered``, or by ``AssignFailed``."""

    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    planned: bool = False


@dataclass(frozen=True)
class Move:
    """Ask these members to move to their planned ranks, after a step that they agree on."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class Invite:
    """Ask a device to load the job's code and data."""

    device_id: int


@dataclass(frozen=True)
class Release:
    """A device has no rank any more. ``final``: no other device needs its state, and it may end at once."""

    device_id: int
    final: bool


@dataclass(frozen=True)
class Readmit:
    """End the eviction of a device: the other ranks lack state that it may have."""

    device_id: int


@dataclass(frozen=True)
class Await:
    """Announce which devices the job waits for, and for how many seconds at most."""

    device_ids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class End:
    """The job is over. ``error`` (class) and ``text``: the lost state that ended it; empty if none."""

    error: str = ""
    text: str = ""


JobInstruction = Assign | Move | Invite | Release | Readmit | Await | End
Result = tuple[JobView, tuple[JobInstruction, ...]]


def advance(job: JobView, event: JobMembershipEvent, cluster: State, now: float) -> Result:
    """The job after an event, and the instructions that follow."""
    if job.over or job.id not in cluster.communicators:
        return job, ()
    job, first = _record(job, event, cluster, now)
    job, then = _decide(job, cluster, now)
    for device_id in [key for key, when in job.invite_again.items() if when <= now and not job.over]:
        job = replace(job, invite_again={key: at for key, at in job.invite_again.items() if key != device_id})
        job, more = _invite(job, cluster, device_id)
        then += more
    return job, (*first, *then)


# ---- recording an event


def _record(job: JobView, event: JobMembershipEvent, cluster: State, now: float) -> Result:
    match event:
        case TaskFound(device_id, incarnation, generation):
            return _on_task_found(
                job, cluster, device_id, TaskView(incarnation, TaskStage.LOADING), generation, now
            ), ()
        case TasksListed():
            return replace(job, finding=False), ()
        case DeviceArrived(device_id):
            member = cluster.members.get(device_id)
            arrived = {member.info.incarnation} if member is not None else set()
            return _invite(replace(job, refused=job.refused - arrived), cluster, device_id)
        case InviteFailed(device_id, incarnation, refused):
            job = _without_task(job, device_id, incarnation)
            if refused:
                return replace(job, refused=job.refused | {incarnation}), ()
            return replace(job, invite_again={**job.invite_again, device_id: now + cluster.config.lease_s}), ()
        case TaskLost(device_id, incarnation):
            return _without_task(job, device_id, incarnation), ()
        case TaskReady(device_id, incarnation):
            if _task(job, device_id, incarnation) is None:
                return job, ()
            task = TaskView(incarnation, TaskStage.READY)
            return _reset_backoff(_with_task(replace(job, leaving=job.leaving - {device_id}), device_id, task)), ()
        case TaskWaiting():
            return _on_waiting(job, event, cluster, now), ()
        case TaskResumed(generation):
            return _on_resumed(job, cluster, generation)
        case TaskFinished(device_id, incarnation, finished, failed):
            had_rank = _stage(job, device_id, incarnation) == TaskStage.ACTIVE
            job = _without_task(job, device_id, incarnation)
            return (replace(job, finished=job.finished or finished, failed=job.failed or (failed and had_rank)), ())
        case Assigned(generation, planned):
            return _on_assigned(job, cluster, generation, planned)
        case AssignFailed():
            return _count_attempt(replace(job, assigning=False), now), ()
        case Delivered(generation, ok):
            return _on_delivered(job, cluster, generation, ok, now)
        case LeaveRequested(device_id):
            leaving = job.leaving | {device_id}
            members = set(cluster.communicator(job.id).members)
            return replace(job, leaving=leaving, abandoned=job.abandoned or leaving >= members), ()
        case StopRequested():
            return replace(job, abandoned=job.abandoned or not active(job, cluster)), ()
        case JobTick():
            return job, ()


def _on_task_found(
    job: JobView, cluster: State, device_id: int, task: TaskView, generation: int, now: float
) -> JobView:
    one = cluster.communicator(job.id)
    if not generation:
        return job if _task(job, device_id, task.incarnation) else _with_task(job, device_id, task)
    participants = job.participants | {device_id}
    task = replace(task, stage=TaskStage.ACTIVE)
    if generation != one.generation:  # its newest rank did not reach it
        task = replace(task, waiting=one.generation)
        job = replace(job, waits_since=now if job.waits_since is None else job.waits_since)
    return _with_task(replace(job, participants=participants), device_id, task)


def _invite(job: JobView, cluster: State, device_id: int) -> Result:
    """Invites a device that can take part, unless it was invited already or still has its rank."""
    member = cluster.members.get(device_id)
    if (
        member is None
        or not member.usable
        or not job.elastic
        or device_id in cluster.link_faults_of(job.id).evicted_until
        or _cut_off(job, cluster, device_id)
    ):
        return job, ()
    stage = _stage(job, device_id, member.info.incarnation)
    left_out = stage == TaskStage.ACTIVE and device_id not in cluster.communicator(job.id).members
    if member.info.incarnation in job.refused or (stage is not None and not left_out):
        return job, ()
    task = TaskView(member.info.incarnation, TaskStage.LOADING)
    return _with_task(job, device_id, task), (Invite(device_id),)


def _on_waiting(job: JobView, event: TaskWaiting, cluster: State, now: float) -> JobView:
    """A member waits. A member that left an older generation takes its newer rank by itself."""
    one = cluster.communicator(job.id)
    task = _task(job, event.device_id, event.incarnation)
    if task is None or task.stage != TaskStage.ACTIVE or event.generation != one.generation:
        return job
    task = replace(task, waiting=event.generation, lacks=event.lacks, error=event.error)
    since = now if job.waits_since is None else job.waits_since
    return _with_task(replace(job, waits_since=since), event.device_id, task)


def _on_resumed(job: JobView, cluster: State, generation: int) -> Result:
    one = cluster.communicator(job.id)
    if generation != one.generation:
        return job, ()
    job = replace(_reset_backoff(job), unsettled=0, moving=0, grace_until=None, awaited=frozenset())
    instructions: tuple[JobInstruction, ...] = ()
    for key in _without_rank(job, one):  # the running ranks have its state
        if key in job.leaving or key in cluster.link_faults_of(job.id).evicted_until:
            instructions += (Release(key, True),)
        else:
            job, more = _invite(job, cluster, key)
            instructions += more
    return replace(job, leaving=job.leaving & set(one.members)), instructions


def _on_assigned(job: JobView, cluster: State, generation: int, planned: bool) -> Result:
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
    # Not final until the new ranks run: the state of the released devices may still be needed.
    gone = job.leaving | set(cluster.link_faults_of(job.id).evicted_until)
    return job, tuple(Release(key, False) for key in _without_rank(job, one) if key in gone)


def _on_delivered(job: JobView, cluster: State, generation: int, ok: bool, now: float) -> Result:
    if generation != cluster.communicator(job.id).generation:
        return job, ()
    if not ok:
        return _count_attempt(replace(job, undelivered=generation), now), ()
    return job, (Move(job.movers),) if job.moving == generation else ()


# ---- rules


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
        return _end(job) if job.abandoned else _await_devices(job, cluster, now)  # (2)
    if stuck and any(job.tasks[key].lacks for key in waiting):
        return _await_state(job, cluster, waiting, now)  # (3)
    if _broken(job, cluster, one, working):  # (4)
        return _rebuild(job, cluster) if _backoff_over(job, cluster, now) else (job, ())
    if waiting and job.waits_since is not None:  # (5)
        pause = cluster.config.lease_s * (SETTLE if stuck else 1.0) * 2**job.attempts
        if now - job.waits_since < min(pause, MAX_BACKOFF_S):
            return job, ()
        return _rebuild(_count_attempt(job, now), cluster)
    ready = _ready(job, cluster)
    leaving = [key for key in one.members if key in job.leaving]
    if not job.unsettled and not job.finished and (ready or (leaving and len(leaving) < len(one.members))):  # (6)
        if job.planned:
            assign = Assign(tuple(ready), tuple(leaving), planned=True)
            return replace(job, assigning=True), (assign,)
        return _rebuild(job, cluster)
    return job, ()


def _finishing(job: JobView, one: CommunicatorState, working: list[int], waiting: list[int]) -> bool:
    """After a task reached the end of the training: whether another task will still reach it.

    A task that waits and lacks state will not: the state went with the tasks that ended. Nor will a task that was to
    join at a planned generation to which the other ranks do not move any more.
    """
    left = [key for key in working if not (key in waiting and job.tasks[key].lacks)]
    return any(key in job.movers for key in left) if job.moving == one.generation else bool(left)


def _broken(job: JobView, cluster: State, one: CommunicatorState, working: list[int]) -> bool:
    """Whether the ranks of the newest generation are known to be unable to run."""
    if one.broken_by or cluster.link_faults_of(job.id).decided_generation >= one.generation:
        return True
    if job.undelivered == one.generation:
        return True
    if job.finished:
        return False
    # Members that have not moved yet run collectives of the previous generation, and need all of its ranks.
    stranded = job.moving == one.generation and any(not _had_rank(job, key) for key in job.movers)
    return stranded or len(working) < len(one.members)


def _rebuild(job: JobView, cluster: State) -> Result:
    """Assigns new ranks at once, without members whose tasks are gone, that leave, or that were evicted."""
    one = cluster.communicator(job.id)
    ready, working = _ready(job, cluster), active(job, cluster)
    gone = tuple(key for key in one.members if key in job.leaving or key not in (*working, *ready))
    if set(gone) >= {*one.members, *ready}:  # all remaining members want to leave: no device can take over
        gone = tuple(key for key in gone if key not in working)
    return replace(job, assigning=True, moving=0), (Assign(tuple(ready), gone),)


def _await_devices(job: JobView, cluster: State, now: float) -> Result:
    """(2): no device has a rank. Waits for devices that can come back, then assigns ranks to those that did."""
    ready, missing = _ready(job, cluster), _may_return(job, cluster)
    if not job.elastic or not job.restart_grace_s or not (ready or missing):
        return _end(job)
    job = _with_grace(job, now)
    waited = not missing or _grace_over(job, cluster, missing, now)
    if ready and waited:
        return _rebuild(job, cluster) if _backoff_over(job, cluster, now) else (job, ())
    if waited:
        return _end(job)
    return _invite_and_announce(job, cluster, missing, now)


def _await_state(job: JobView, cluster: State, waiting: list[int], now: float) -> Result:
    """(3): the ranks together lack state. Another device may bring it."""
    ready, missing = _ready(job, cluster), _may_return(job, cluster)
    if any(key in job.tasks for key in job.leaving):  # the state of a leaving device is needed
        return _rebuild(replace(job, leaving=frozenset()), cluster)
    if ready:
        return _rebuild(job, cluster)
    job = _with_grace(job, now)
    if missing and job.elastic and not _grace_over(job, cluster, missing, now):
        evicted = sorted(missing & set(cluster.link_faults_of(job.id).evicted_until))
        job, instructions = _invite_and_announce(job, cluster, missing, now)
        return job, (*(Readmit(key) for key in evicted), *instructions)
    worst = next(job.tasks[key] for key in waiting if job.tasks[key].lacks)
    return _end(job, worst.error, worst.lacks)


def _with_grace(job: JobView, now: float) -> JobView:
    """The job with the restart grace begun, if it had not begun before."""
    return job if job.grace_until is not None else replace(job, grace_until=now + job.restart_grace_s)


def _grace_over(job: JobView, cluster: State, missing: frozenset[int], now: float) -> bool:
    """Whether the restart grace is over. It is doubled while a device that came back loads the job."""
    loads = any(_at_stage(job, cluster, key, TaskStage.LOADING) for key in missing)
    return job.grace_until is not None and now >= job.grace_until + (job.restart_grace_s if loads else 0.0)


def _invite_and_announce(job: JobView, cluster: State, missing: frozenset[int], now: float) -> Result:
    instructions: tuple[JobInstruction, ...] = ()
    for key in sorted(missing):  # it may have come back before its loss was noticed
        job, more = _invite(job, cluster, key)
        instructions += more
    if missing == job.awaited or job.grace_until is None:
        return job, instructions
    announcement = Await(tuple(sorted(missing)), job.grace_until - now)
    return replace(job, awaited=missing), (*instructions, announcement)


def _end(job: JobView, error: str = "", text: str = "") -> Result:
    """Ends the job and releases every remaining task: none of them would end by itself."""
    releases = tuple(Release(key, True) for key in sorted(job.tasks))
    return replace(job, over=True), (*releases, End(error, text))


# ---- queries and small updates


def _task(job: JobView, device_id: int, incarnation: str) -> TaskView | None:
    found = job.tasks.get(device_id)
    return found if found is not None and found.incarnation == incarnation else None


def _stage(job: JobView, device_id: int, incarnation: str) -> TaskStage | None:
    found = _task(job, device_id, incarnation)
    return found.stage if found is not None else None


def active(job: JobView, cluster: State) -> list[int]:
    """The members of the newest generation whose tasks run."""
    return [key for key in cluster.communicator(job.id).members if _at_stage(job, cluster, key, TaskStage.ACTIVE)]


def _ready(job: JobView, cluster: State) -> list[int]:
    """Devices that wait for their first rank and can get one."""
    out = cluster.link_faults_of(job.id).evicted_until
    found = (key for key in job.tasks if _at_stage(job, cluster, key, TaskStage.READY))
    ready: list[int] = []
    for key in sorted(key for key in found if cluster.members[key].usable and key not in out):
        if not _cut_off(job, cluster, key, ready):
            ready.append(key)
    return ready


def _cut_off(job: JobView, cluster: State, device_id: int, ready: Sequence[int] = ()) -> bool:
    """Whether a device that never had a rank cannot connect to the members, or they to it.

    A device that had one may have state that the others lack, so the rules of link faults decide about its links.
    """
    return device_id not in job.participants and cut_off(cluster, device_id, (*active(job, cluster), *ready))


def _had_rank(job: JobView, device_id: int) -> bool:
    """Whether the device's task was assigned a rank, in the newest generation or in an older one."""
    return device_id in job.tasks and job.tasks[device_id].stage == TaskStage.ACTIVE


def _without_rank(job: JobView, one: CommunicatorState) -> list[int]:
    """Devices whose tasks had a rank and have none in the newest generation."""
    return [key for key in sorted(job.tasks) if _had_rank(job, key) and key not in one.members]


def _at_stage(job: JobView, cluster: State, device_id: int, stage: TaskStage) -> bool:
    member = cluster.members.get(device_id)
    return member is not None and _stage(job, device_id, member.info.incarnation) == stage


def _may_return(job: JobView, cluster: State) -> frozenset[int]:
    """Devices that had a rank, have none now, and may still have their state: in memory or in an arena file."""
    absent = job.participants - set(active(job, cluster)) - set(_ready(job, cluster))
    found = (cluster.members[key] for key in absent if key in cluster.members)
    return frozenset(
        one.info.device_id
        for one in found
        if one.health != Health.LEFT and (one.usable or not one.ended or one.info.keeps_memory)
    )


def _with_task(job: JobView, device_id: int, task: TaskView) -> JobView:
    return replace(job, tasks={**job.tasks, device_id: task})


def _without_task(job: JobView, device_id: int, incarnation: str) -> JobView:
    """The job without this task."""
    task = _task(job, device_id, incarnation)
    if task is None:
        return job
    tasks = {key: one for key, one in job.tasks.items() if key != device_id}
    return _reset_backoff(replace(job, tasks=tasks, leaving=job.leaving - {device_id}))


def _reset_backoff(job: JobView) -> JobView:
    """Resets the backoff: after evidence or progress, the next rebuild does not wait."""
    return replace(job, attempts=0)


def _count_attempt(job: JobView, now: float) -> JobView:
    return replace(job, attempts=job.attempts + 1, last_attempt=now)


def _backoff_over(job: JobView, cluster: State, now: float) -> bool:
    """Whether the pause since the last failed attempt is over."""
    pause = min(cluster.config.lease_s * SETTLE * 2**job.attempts, MAX_BACKOFF_S)
    return not job.attempts or now - job.last_attempt >= pause
