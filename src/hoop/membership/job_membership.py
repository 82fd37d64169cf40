"""The coordinator's view of one job: which devices take part, and when they get new ranks. Pure: no clock, no I/O.

    advance(job, event, cluster, now) -> job, instructions

``servers.job_supervisor`` calls it and carries out the instructions. ``cluster`` is the state of
``state_machine.step``: it holds each device's health, and the job's communicator, whose members are the job's ranks at
the newest generation. ``JobView`` adds the stage of the job's task on each device:

    loading ──▶ ready ──▶ active            loads code and data; waits for a rank; has one
                            │  ▲
                            ▼  │            it left a generation, and waits for a rank of a newer one
                          waiting

The rules, in the order in which ``_decide`` applies them:

    (1) a task failed, or all tasks have reached the end of the training: the job is over
    (2) no device has a rank any more: wait for devices that can come back, then assign ranks to those that did
    (3) all ranks wait, and together they lack a part of the state: wait for devices that may still have it; or they
        cannot go on for another reason, with devices that have just joined: refuse these
    (4) the generation is broken (a device died, a link failed, a task is gone): assign new ranks at once
    (5) ranks wait for an unknown reason: assign new ranks, each time after twice the pause
    (6) devices are ready to join, or may leave: assign ranks between two steps, or at once if state is partitioned

``Assign`` names the devices that come and go; ``state_machine`` numbers the ranks (``_on_rebuilt``): members in their
old order, then those that join.

(2), (3) and (4) can end a job that is not over: (2) and (3) when no device is left that may still have its state, or
when none of these came back within the restart grace; (2) and (4) when fewer devices are left than the user allows, and
no other came within the restart grace. A job that is not elastic does not wait for them. A device that loads the job is
waited for as long as it sends heartbeats, by (2), (3), (4) and by members that leave; ``AwaitLoading`` says so.

A member that wants to leave keeps its rank until (``_departing``)

    (a) at least one other member stays, which has the state too, and
    (b) another device has taken its place: the job has as many ranks as it began with; or
    (c) its deadline is over, no device is loading the job, and the strategy allows one rank less

A job may state how many devices it takes (``--devices 4:16``, ``--min 3``). Up to ``max_devices`` of them are invited:
those that join, and those of the cluster that have no work. With fewer than ``user_min_devices`` the ranks keep their
state and wait for others for the restart grace. If none come, the job ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hoop.errors import InternalError, PeerLost, UserError, error_from_name
from hoop.membership.fast_replace import replace
from hoop.membership.job_messages import (
    Assign,
    Assigned,
    AssignFailed,
    Await,
    AwaitLoading,
    AwaitMore,
    Delivered,
    DeviceArrived,
    End,
    Invite,
    InviteFailed,
    JobInstruction,
    JobMembershipEvent,
    JobTick,
    LeaveCancelled,
    LeaveRequested,
    Move,
    Readmit,
    Refuse,
    Release,
    StopRequested,
    TaskFinished,
    TaskFound,
    TaskLost,
    TaskReady,
    TaskResumed,
    TasksListed,
    TaskWaiting,
)
from hoop.membership.reachability import cut_off
from hoop.membership.state import CommunicatorState, Health, Member, State

__all__ = [
    "FIRST_NOTICE_S",
    "MAX_BACKOFF_S",
    "NOTICE_S",
    "Assign",
    "AssignFailed",
    "Assigned",
    "Await",
    "AwaitLoading",
    "AwaitMore",
    "Delivered",
    "DeviceArrived",
    "End",
    "Handover",
    "HandoverStage",
    "Invite",
    "InviteFailed",
    "JobInstruction",
    "JobMembershipEvent",
    "JobTick",
    "JobView",
    "LeaveCancelled",
    "LeaveRequested",
    "Move",
    "Readmit",
    "Refuse",
    "Release",
    "StopRequested",
    "TaskFinished",
    "TaskFound",
    "TaskLost",
    "TaskReady",
    "TaskResumed",
    "TaskStage",
    "TaskView",
    "TaskWaiting",
    "TasksListed",
    "active",
    "advance",
    "handover",
    "loading",
]
MAX_BACKOFF_S = 30.0
"""Maximum seconds between two rebuilds without new evidence in between."""
SETTLE = 1 / 6
"""Pause before ranks that all wait are rebuilt, as a fraction of a lease. A decision on their links may come first."""
FIRST_NOTICE_S = 1.0
"""Seconds after which a job that waits for a device which is loading it announces so for the first time."""
NOTICE_S = 10.0
"""Seconds between two later announcements of the same wait."""


class TaskStage(StrEnum):
    """The stage of a device's task."""

    LOADING = "loading"
    READY = "ready"
    ACTIVE = "active"


_LOADING, _READY, _ACTIVE = TaskStage.LOADING, TaskStage.READY, TaskStage.ACTIVE  # a class is slower to ask


@dataclass(frozen=True)
class TaskView:
    """The job's task on one device, as the coordinator sees it."""

    incarnation: str
    stage: TaskStage
    waiting: int = 0
    """Generation that the task has left; it waits for a rank of a newer one. 0: it does not wait."""
    lacks: str = ""
    """Text of the error by which the ranks of that generation lack state; empty: only links failed."""
    error: str = ""
    """Name of the error class for ``lacks``."""
    since: float = 0.0
    """Time when the task began to load the job, if the stage is ``LOADING``."""


@dataclass(frozen=True)
class JobView:
    """One job, as the coordinator sees it. Immutable."""

    id: int
    elastic: bool = True
    """Whether devices may join and leave: every device has the whole state, or other devices hold replicas of its
    part."""
    planned: bool = True
    """True if no rank has the only copy of a part of the state (data parallel, except a sharded update without
    replicas): ranks then change between two steps and no state has to move first."""
    restart_grace_s: float = 60.0
    """Seconds that the job waits for devices that can come back; 0: not at all."""
    size: int = 0
    """Target number of ranks: the initial number, or the number when a leave was requested if smaller.

    A member may leave once this many ranks remain.
    """
    min_ranks: int = 1
    """The larger of the strategy's minimum and ``user_min_devices``."""
    user_min_devices: int = 1
    """Minimum number of devices that the user allows. With fewer the job waits."""
    max_devices: int = 0
    """Maximum number of devices that the job takes. 0: no limit is stated, and only devices that join are invited."""
    tasks: Mapping[int, TaskView] = field(default_factory=dict)
    """The job's tasks by device id, without tasks that have ended."""
    participants: frozenset[int] = frozenset()
    """Ids of all devices that ever had a rank."""
    leaving: Mapping[int, float] = field(default_factory=dict)
    """Time until which each device that is to leave waits for another device to take its place."""
    listing_tasks: bool = True
    """True while the coordinator starts the tasks, or looks for them after a restart: no rule applies before
    ``TasksListed``."""
    assigning: bool = False
    """True while an ``Assign`` is under way: its ranks are not in the cluster's state yet."""
    undelivered: int = 0
    """Newest generation whose ranks did not reach every member."""
    planned_generation: int = 0
    """Generation to which members move between two steps; 0: none."""
    had_rank_before: tuple[int, ...] = ()
    """Ids of the devices that had a rank when the newest generation was assigned."""
    invite_again: Mapping[int, float] = field(default_factory=dict)
    """Time of the next invitation of each device that an invitation did not reach."""
    refused: frozenset[str] = frozenset()
    """Incarnations that cannot take part: their data differs, or they do not have the job's code."""
    newcomers: frozenset[int] = frozenset()
    """Devices that have their first rank in a generation whose ranks have not run steps together yet."""
    unconfirmed_generation: int = 0
    """Newest generation, until its ranks run steps together; 0 after that. No join or leave is planned before."""
    waits_since: float | None = None
    """Time when the first member of the newest generation began to wait; None: none waits."""
    attempts: int = 0
    """Number of rebuilds since the last evidence or progress."""
    last_attempt: float = 0.0
    grace_until: float | None = None
    """End of the wait for devices that can come back; None: the job does not wait."""
    awaited: frozenset[int] = frozenset()
    """Ids of the devices of the last announced wait."""
    finished: bool = False
    """True if a task reached the end of the training."""
    failed: bool = False
    """True if a task failed by its own code: a user error or a bug."""
    abandoned: bool = False
    """True if a user asked to stop while no device has a rank."""
    all_leaving: bool = False
    """True if all members want to leave, and no device can take over."""
    next_notice: float | None = None
    """Time of the next announcement that the job waits for a device which is loading it; None: it does not wait."""
    over: bool = False


Result = tuple[JobView, tuple[JobInstruction, ...]]


def advance(job: JobView, event: JobMembershipEvent, cluster: State, now: float) -> Result:
    """The job after an event, and the instructions that follow."""
    if job.over or job.id not in cluster.communicators:
        return job, ()
    job, first = _record(job, event, cluster, now)
    job, invited = _invite_idle(job, cluster, now)
    job, then = _decide(_with_all_leaving(job, cluster, now), cluster, now)
    due = [key for key, when in job.invite_again.items() if when <= now and not job.over] if job.invite_again else ()
    for device_id in due:
        job = replace(job, invite_again={key: at for key, at in job.invite_again.items() if key != device_id})
        job, more = _invite_if_room(job, cluster, device_id, now)
        then += more
    job, notices = _announce_loading(job, cluster, now)
    return job, (*first, *invited, *then, *notices)


# ---- recording an event


def _record(job: JobView, event: JobMembershipEvent, cluster: State, now: float) -> Result:
    match event:
        case TaskFound(device_id, incarnation, generation):
            return _on_task_found(
                job, cluster, device_id, TaskView(incarnation, TaskStage.LOADING, since=now), generation, now
            ), ()
        case TasksListed():
            return replace(job, listing_tasks=False), ()
        case DeviceArrived(device_id):
            member = cluster.members.get(device_id)
            arrived = {member.info.incarnation} if member is not None else set()
            return _invite_if_room(replace(job, refused=job.refused - arrived), cluster, device_id, now)
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
            return _reset_backoff(_with_task(_not_leaving(job, device_id), device_id, task)), ()
        case TaskWaiting():
            return _on_waiting(job, event, cluster, now), ()
        case TaskResumed(generation):
            return _on_resumed(job, cluster, generation, now)
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
        case LeaveRequested(device_id, until):
            if device_id not in job.tasks:
                return job, ()
            ranks = len(active(job, cluster)) + len(_ready(job, cluster))
            size = job.size if job.leaving else min(job.size, ranks)  # earlier losses need no replacement now
            return replace(job, leaving={**job.leaving, device_id: until}, size=size), ()
        case LeaveCancelled(device_id):
            return _invite_if_room(_not_leaving(job, device_id), cluster, device_id, now)
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


def _invite(job: JobView, cluster: State, device_id: int, now: float) -> Result:
    """Invites a device that can take part, unless it was invited already or still has its rank."""
    member = cluster.members.get(device_id)
    if (
        member is None
        or not _can_take_part(job, member)
        or not job.elastic
        or device_id in cluster.link_faults_of(job.id).evicted_until
        or _cut_off(job, cluster, device_id)
    ):
        return job, ()
    stage = _stage(job, device_id, member.info.incarnation)
    left_out = stage == TaskStage.ACTIVE and device_id not in cluster.communicator(job.id).members
    if member.info.incarnation in job.refused or (stage is not None and not left_out):
        return job, ()
    task = TaskView(member.info.incarnation, TaskStage.LOADING, since=now)
    return _with_task(job, device_id, task), (Invite(device_id),)


def _invite_if_room(job: JobView, cluster: State, device_id: int, now: float) -> Result:
    """Invites a device, unless the job has as many as it takes: then one that lost its rank is released."""
    if _has_room(job, cluster):
        return _invite(job, cluster, device_id, now)
    stranded = not job.unconfirmed_generation and device_id in _without_rank(job, cluster.communicator(job.id))
    return job, (Release(device_id, True),) if stranded else ()


def _invite_idle(job: JobView, cluster: State, now: float) -> Result:
    """Invites devices that have no work: as many as the job still takes, or one if a member wants to leave and no
    device can take its place yet."""
    if job.listing_tasks or job.finished:
        return job, ()
    replacing = _wait_of_leavers(job, cluster, now) == HandoverStage.WAITING
    if not replacing and not (job.max_devices and _has_room(job, cluster)):
        return job, ()
    running = (cluster.communicators[key] for key in cluster.jobs if key in cluster.communicators)
    busy = {key for one in running for key in one.members}
    invited: tuple[JobInstruction, ...] = ()
    for key in sorted(set(cluster.members) - busy - set(job.tasks)):
        member = cluster.members[key]
        if member.available and member.info.incarnation not in job.refused and key not in job.invite_again:
            job, instructions = _invite(job, cluster, key, now)
            invited += instructions
            if instructions and not (job.max_devices and _has_room(job, cluster)):
                break
    return job, invited


def _on_waiting(job: JobView, event: TaskWaiting, cluster: State, now: float) -> JobView:
    """A member waits. A member that left an older generation takes its newer rank by itself."""
    one = cluster.communicator(job.id)
    task = _task(job, event.device_id, event.incarnation)
    if task is None or task.stage != TaskStage.ACTIVE or event.generation != one.generation:
        return job
    task = replace(task, waiting=event.generation, lacks=event.lacks, error=event.error)
    since = now if job.waits_since is None else job.waits_since
    return _with_task(replace(job, waits_since=since), event.device_id, task)


def _on_resumed(job: JobView, cluster: State, generation: int, now: float) -> Result:
    one = cluster.communicator(job.id)
    if generation != one.generation:
        return job, ()
    job = replace(
        _reset_backoff(job), unconfirmed_generation=0, planned_generation=0, grace_until=None, awaited=frozenset()
    )
    job = replace(job, newcomers=frozenset())
    instructions: tuple[JobInstruction, ...] = ()
    for key in _without_rank(job, one):  # the running ranks have its state
        if key in job.leaving or key in cluster.link_faults_of(job.id).evicted_until:
            instructions += (Release(key, True),)
        else:
            job, more = _invite_if_room(job, cluster, key, now)
            instructions += more
    kept = {key: until for key, until in job.leaving.items() if key in one.members or not _had_rank(job, key)}
    return replace(job, leaving=kept), instructions


def _on_assigned(job: JobView, cluster: State, generation: int, planned: bool) -> Result:
    one = cluster.communicator(job.id)
    job = replace(job, assigning=False)
    if one.generation != generation:
        return job, ()
    tasks = dict(job.tasks)
    for key in one.members:
        if key in tasks:
            tasks[key] = TaskView(tasks[key].incarnation, TaskStage.ACTIVE)
    had_rank = tuple(key for key in sorted(job.tasks) if _had_rank(job, key))
    newcomers = frozenset(one.members) & (job.newcomers | set(one.members) - job.participants)
    participants = job.participants | set(one.members)
    job = replace(job, tasks=tasks, participants=participants, newcomers=newcomers, waits_since=None)
    job = replace(
        job,
        unconfirmed_generation=generation,
        planned_generation=generation if planned else 0,
        had_rank_before=had_rank,
    )
    # Not final until the new ranks run: the state of the released devices may still be needed.
    gone = {*job.leaving, *cluster.link_faults_of(job.id).evicted_until}
    return job, tuple(Release(key, False) for key in _without_rank(job, one) if key in gone)


def _on_delivered(job: JobView, cluster: State, generation: int, ok: bool, now: float) -> Result:
    if generation != cluster.communicator(job.id).generation:
        return job, ()
    if not ok:
        return _count_attempt(replace(job, undelivered=generation), now), ()
    return job, (Move(job.had_rank_before),) if job.planned_generation == generation else ()


# ---- rules


def _decide(job: JobView, cluster: State, now: float) -> Result:
    one = cluster.communicator(job.id)
    if job.assigning or job.listing_tasks:
        return job, ()
    working = active(job, cluster)
    waiting = [key for key in working if job.tasks[key].waiting == one.generation]
    stuck = bool(working) and len(waiting) == len(working)
    if job.failed:  # (1)
        return _end(job)
    if job.finished and not _finishing(job, one, working, waiting):
        return _end(job)
    if not working:
        return _end(job) if job.abandoned or job.all_leaving else _await_devices(job, cluster, now)  # (2)
    if stuck and any(job.tasks[key].lacks for key in waiting):
        return _await_state(job, cluster, waiting, now)  # (3)
    # Other devices may still hold a part of the state of a device that leaves: it stays until the ranks run again.
    departing = _departing(job, cluster, now)
    dispensable = departing if job.planned else ()
    if _broken(job, cluster, one, working):  # (4)
        if not _backoff_over(job, cluster, now) or _needs_loading(job, cluster):
            return job, ()
        if 0 < len(_remaining(job, cluster)) < job.user_min_devices:
            return _await_more(job, cluster, now)
        return _rebuild(job, cluster, dispensable)
    if waiting and job.waits_since is not None:  # (5)
        pause = cluster.config.lease_s * (SETTLE if stuck else 1.0) * 2**job.attempts
        if now - job.waits_since < min(pause, MAX_BACKOFF_S):
            return job, ()
        return _rebuild(_count_attempt(job, now), cluster, dispensable)
    ready = _ready(job, cluster)
    if not job.unconfirmed_generation and not job.finished and (ready or departing):  # (6)
        if job.planned:
            assign = Assign(tuple(ready), departing, planned=True)
            return replace(job, assigning=True), (assign,)
        return _rebuild(job, cluster, departing)
    return job, ()


def _departing(job: JobView, cluster: State, now: float) -> tuple[int, ...]:
    """The members that may leave with the next assignment: (a), (b), (c) of the rules at the top.

    Where the state is partitioned, one at a time: the next one may hold its replica.
    """
    if not job.leaving:
        return ()
    members = active(job, cluster)
    asked = [key for key in members if key in job.leaving]
    if not asked or len(asked) == len(members):  # (a)
        return ()
    ranks = len(members) + len(_ready(job, cluster))
    replaced = max(0, ranks - job.size)
    found = asked[:replaced]  # (b)
    if not loading(job, cluster):
        found += [key for key in asked[replaced:] if job.leaving[key] <= now]  # (c)
    found = found[: max(0, ranks - job.min_ranks)]
    return tuple(found if job.planned else found[:1])


def _needs_loading(job: JobView, cluster: State) -> bool:
    """Whether the strategy cannot go on with the remaining devices alone, and others are loading the job."""
    ranks = len(active(job, cluster)) + len(_ready(job, cluster))
    return ranks < job.min_ranks and bool(loading(job, cluster))


def _with_all_leaving(job: JobView, cluster: State, now: float) -> JobView:
    """The job, with ``all_leaving`` set if all members want to leave now and no device can take over."""
    if not job.leaving and not job.all_leaving:
        return job
    members = active(job, cluster)
    if job.listing_tasks or not members:
        return job
    leave_now = all(job.leaving.get(key, now + 1.0) <= now for key in members)
    all_leave = leave_now and not (_ready(job, cluster) or loading(job, cluster))
    return job if all_leave == job.all_leaving else replace(job, all_leaving=all_leave)


def _finishing(job: JobView, one: CommunicatorState, working: list[int], waiting: list[int]) -> bool:
    """After a task reached the end of the training: whether another task will still reach it.

    A task that waits and lacks state will not: the state went with the tasks that ended. Nor will a task that was to
    join at a planned generation to which the other ranks do not move any more.
    """
    left = [key for key in working if not (key in waiting and job.tasks[key].lacks)]
    return any(key in job.had_rank_before for key in left) if job.planned_generation == one.generation else bool(left)


def _broken(job: JobView, cluster: State, one: CommunicatorState, working: list[int]) -> bool:
    """Whether the ranks of the newest generation are known to be unable to run."""
    if one.broken_by or cluster.link_faults_of(job.id).decided_generation >= one.generation:
        return True
    if job.undelivered == one.generation:
        return True
    if job.finished:
        return False
    # Members that have not moved yet run collectives of the previous generation, and need all of its ranks.
    stranded = job.planned_generation == one.generation and any(not _had_rank(job, key) for key in job.had_rank_before)
    return stranded or len(working) < len(one.members)


def _rebuild(job: JobView, cluster: State, departing: tuple[int, ...] = ()) -> Result:
    """Assigns new ranks at once, without members whose tasks are gone, that depart, or that were evicted."""
    one = cluster.communicator(job.id)
    ready, working = _ready(job, cluster), active(job, cluster)
    gone = tuple(key for key in one.members if key in departing or key not in (*working, *ready))
    return replace(job, assigning=True, planned_generation=0), (Assign(tuple(ready), gone),)


def _await_devices(job: JobView, cluster: State, now: float) -> Result:
    """(2): no device has a rank. Waits for devices that can come back, then assigns ranks to those that did."""
    ready, missing = _ready(job, cluster), _may_return(job, cluster)
    if not job.elastic or not job.restart_grace_s or not (ready or missing):
        return _end(job)
    job = _with_grace(job, now)
    waited = not missing or _grace_over(job, cluster, missing, now)
    if ready and waited and len(ready) < job.user_min_devices:
        return _await_more(job, cluster, now)
    if ready and waited:
        return _rebuild(job, cluster) if _backoff_over(job, cluster, now) else (job, ())
    if waited:
        return _end(job)
    return _invite_and_announce(job, cluster, missing, now)


def _await_more(job: JobView, cluster: State, now: float) -> Result:
    """(2), (4): fewer devices are left than the user allows. Waits for others until the restart grace is over."""
    began, job = job.grace_until is None, _with_grace(job, now)
    ranks = len(_remaining(job, cluster))
    assert job.grace_until is not None, "it has begun"
    if job.elastic and (now < job.grace_until or loading(job, cluster)):
        return job, (AwaitMore(ranks, job.grace_until - now),) if began else ()
    waited = f", and no other came within {job.restart_grace_s:g} s" if job.elastic and job.restart_grace_s else ""
    text = (
        f"{ranks} device{' is' if ranks == 1 else 's are'} left, fewer than the {job.user_min_devices} that the job "
        f"needs (--min){waited}; start devices, and go on with --resume if it has --out, or with a lower --min"
    )
    return _end(job, PeerLost.__name__, text)


def _await_state(job: JobView, cluster: State, waiting: list[int], now: float) -> Result:
    """(3): the ranks together lack state. Another device may bring it."""
    worst = next(job.tasks[key] for key in waiting if job.tasks[key].lacks)
    if job.newcomers and not job.newcomers.issuperset(waiting) and not _lacks_state(worst):
        return _refuse_newcomers(job, cluster, waiting, worst.lacks, now)
    # A leaving device without a rank may hold the missing state: cancel its leave; it is invited again below.
    for key in job.leaving.keys() & job.participants - set(waiting):
        job = _not_leaving(job, key)
    ready, missing = _ready(job, cluster), _may_return(job, cluster)
    if ready:
        return _rebuild(job, cluster)
    job = _with_grace(job, now)
    if missing and job.elastic and not _grace_over(job, cluster, missing, now):
        evicted = sorted(missing & set(cluster.link_faults_of(job.id).evicted_until))
        job, instructions = _invite_and_announce(job, cluster, missing, now)
        return job, (*(Readmit(key) for key in evicted), *instructions)
    return _end(job, worst.error, worst.lacks)


def _refuse_newcomers(job: JobView, cluster: State, waiting: list[int], text: str, now: float) -> Result:
    """The ranks cannot go on with devices that have just joined: assigns ranks without these. They never had state."""
    if not _backoff_over(job, cluster, now):
        return job, ()
    refused = tuple(Refuse(key, text) for key in sorted(job.newcomers & job.tasks.keys()))
    members = cluster.communicator(job.id).members
    gone = tuple(key for key in members if key in job.newcomers or key not in waiting)
    job = replace(job, assigning=True, planned_generation=0, participants=job.participants - job.newcomers)
    return job, (*refused, Assign(leaving=gone))


def _lacks_state(task: TaskView) -> bool:
    """Whether the ranks of a task lack state, rather than memory, for example."""
    return not isinstance(error_from_name(task.error, ""), UserError | InternalError)


def _with_grace(job: JobView, now: float) -> JobView:
    """The job with the restart grace begun, if it had not begun before."""
    return job if job.grace_until is not None else replace(job, grace_until=now + job.restart_grace_s)


def _grace_over(job: JobView, cluster: State, missing: frozenset[int], now: float) -> bool:
    """Whether the restart grace is over. It does not end while a device that came back loads the job."""
    loads = missing & set(loading(job, cluster))
    return job.grace_until is not None and now >= job.grace_until and not loads


def _invite_and_announce(job: JobView, cluster: State, missing: frozenset[int], now: float) -> Result:
    instructions: tuple[JobInstruction, ...] = ()
    for key in sorted(missing):  # it may have come back before its loss was noticed
        job, more = _invite(job, cluster, key, now)
        instructions += more
    if missing == job.awaited or job.grace_until is None:
        return job, instructions
    announcement = Await(tuple(sorted(missing)), job.grace_until - now)
    return replace(job, awaited=missing), (*instructions, announcement)


def _end(job: JobView, error: str = "", text: str = "") -> Result:
    """Ends the job and releases every remaining task: none of them would end by itself."""
    releases = tuple(Release(key, True) for key in sorted(job.tasks))
    return replace(job, over=True), (*releases, End(error, text))


# ---- devices that leave, and the wait for devices that load


class HandoverStage(StrEnum):
    """What a device that leaves has to wait for."""

    WAITING = "waiting"
    """It waits for another device: none can take its place yet."""
    LOADING = "loading"
    """It waits for a device that is loading the job."""
    MOVING = "moving"
    """It waits until the ranks go on without it."""
    DONE = "done"
    """The job does not need it."""


@dataclass(frozen=True)
class Handover:
    """How far a device has handed over its part of a job."""

    stage: HandoverStage
    device_ids: tuple[int, ...] = ()
    """Ids of the devices that are loading the job."""
    seconds: float = 0.0
    """Seconds for which they have been loading it."""


def handover(job: JobView, cluster: State, device_id: int, now: float) -> Handover:
    """How far a device that is to leave has handed over its part of the job."""
    if job.over or job.id not in cluster.communicators:
        return Handover(HandoverStage.DONE)
    if job.listing_tasks:
        return Handover(HandoverStage.MOVING)
    if device_id not in job.tasks or device_id not in job.participants:
        return Handover(HandoverStage.DONE)
    members = cluster.communicator(job.id).members
    # A non-member is MOVING: the others are still recovering its state, or will invite it again.
    if device_id not in members or job.assigning or device_id in _departing(job, cluster, now):
        return Handover(HandoverStage.MOVING)
    if found := loading(job, cluster):
        return Handover(HandoverStage.LOADING, tuple(sorted(found)), now - min(found.values()))
    if _ready(job, cluster) or _departing(job, cluster, now) or job.unconfirmed_generation or job.finished:
        return Handover(HandoverStage.MOVING)
    if _broken(job, cluster, cluster.communicator(job.id), active(job, cluster)):
        return Handover(HandoverStage.MOVING)
    return Handover(HandoverStage.WAITING)


def loading(job: JobView, cluster: State) -> dict[int, float]:
    """Devices that load the job and can take a rank after that, and since when they load it."""
    found = _at_stage(job, cluster, job.tasks, _LOADING)
    if not found:
        return {}
    out = cluster.link_faults_of(job.id).evicted_until
    return {
        key: job.tasks[key].since
        for key in found
        if _can_take_part(job, cluster.members[key]) and key not in out and key not in job.leaving
    }


def _wait_of_leavers(job: JobView, cluster: State, now: float) -> HandoverStage:
    """What the members that are to leave wait for; ``DONE`` if there are none."""
    if not job.leaving:
        return HandoverStage.DONE
    asked = [key for key in active(job, cluster) if key in job.leaving]
    stages = {handover(job, cluster, key, now).stage for key in asked}
    found = (one for one in (HandoverStage.WAITING, HandoverStage.LOADING, HandoverStage.MOVING) if one in stages)
    return next(found, HandoverStage.DONE)


def _announce_loading(job: JobView, cluster: State, now: float) -> Result:
    """Announces, now and then, that the job waits for devices which are loading it."""
    found = {} if job.over else loading(job, cluster)
    if not found and job.next_notice is None:
        return job, ()
    if found and not _needs_loading(job, cluster) and _wait_of_leavers(job, cluster, now) != HandoverStage.LOADING:
        returned = _may_return(job, cluster) if job.grace_until is not None else frozenset()
        found = {key: since for key, since in found.items() if key in returned}
    seconds = now - min(found.values(), default=now)
    if seconds < FIRST_NOTICE_S:
        return job if job.next_notice is None else replace(job, next_notice=None), ()
    if job.next_notice is not None and now < job.next_notice:
        return job, ()
    notice = AwaitLoading(tuple(sorted(found)), seconds)
    return replace(job, next_notice=now + NOTICE_S), (notice,)


# ---- queries and small updates


def _task(job: JobView, device_id: int, incarnation: str) -> TaskView | None:
    found = job.tasks.get(device_id)
    return found if found is not None and found.incarnation == incarnation else None


def _stage(job: JobView, device_id: int, incarnation: str) -> TaskStage | None:
    found = _task(job, device_id, incarnation)
    return found.stage if found is not None else None


def active(job: JobView, cluster: State) -> list[int]:
    """The members of the newest generation whose tasks run."""
    return _at_stage(job, cluster, cluster.communicator(job.id).members, _ACTIVE)


def _ready(job: JobView, cluster: State) -> list[int]:
    """Devices that wait for their first rank and can get one."""
    found = _at_stage(job, cluster, job.tasks, _READY)
    if not found:
        return []
    out = cluster.link_faults_of(job.id).evicted_until
    ready: list[int] = []
    for key in sorted(key for key in found if key not in out and key not in job.leaving):
        if _can_take_part(job, cluster.members[key]) and not _cut_off(job, cluster, key, ready):
            ready.append(key)
    if not job.max_devices:
        return ready
    stay = sum(key not in job.leaving for key in active(job, cluster))
    return ready[: max(0, job.max_devices - stay)]


def _remaining(job: JobView, cluster: State) -> list[int]:
    """Devices that would get a rank now.

    Health is checked, because a dead device's task may not have been removed yet.
    """
    out = cluster.link_faults_of(job.id).evicted_until
    found = (*active(job, cluster), *_ready(job, cluster))
    return [key for key in found if cluster.members[key].usable and key not in out]


def _has_room(job: JobView, cluster: State) -> bool:
    """Whether the job takes another device beside those that have a rank and stay, and those that will get one."""
    if not job.max_devices:
        return True
    without, members = _without_rank(job, cluster.communicator(job.id)), cluster.members
    taking_part = (key for key in job.tasks if key not in without and key not in job.leaving)
    return sum(key in members and members[key].usable for key in taking_part) < job.max_devices


def _cut_off(job: JobView, cluster: State, device_id: int, ready: Sequence[int] = ()) -> bool:
    """Whether a device that never had a rank cannot connect to the members, or they to it.

    A device that had one may have state that the others lack, so the rules of link faults decide about its links.
    """
    return device_id not in job.participants and cut_off(cluster, device_id, (*active(job, cluster), *ready))


def _can_take_part(job: JobView, member: Member) -> bool:
    """Whether a device may get a rank. One that leaves may if it had one: the others may lack its state."""
    return member.available or (member.usable and member.info.device_id in job.participants)


def _had_rank(job: JobView, device_id: int) -> bool:
    """Whether the device's task was assigned a rank, in the newest generation or in an older one."""
    return device_id in job.tasks and job.tasks[device_id].stage == TaskStage.ACTIVE


def _without_rank(job: JobView, one: CommunicatorState) -> list[int]:
    """Devices whose tasks had a rank and have none in the newest generation."""
    return [key for key in sorted(job.tasks) if _had_rank(job, key) and key not in one.members]


def _at_stage(job: JobView, cluster: State, device_ids: Iterable[int], stage: TaskStage) -> list[int]:
    """Devices, of those given, whose task is at this stage, and was started by their present process."""
    tasks, members = job.tasks, cluster.members
    return [
        key
        for key in device_ids
        if (task := tasks.get(key)) is not None
        and task.stage == stage
        and (member := members.get(key)) is not None
        and task.incarnation == member.info.incarnation
    ]


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
    return _reset_backoff(_not_leaving(replace(job, tasks=tasks), device_id))


def _not_leaving(job: JobView, device_id: int) -> JobView:
    if device_id not in job.leaving:
        return job
    return replace(job, leaving={key: until for key, until in job.leaving.items() if key != device_id})


def _reset_backoff(job: JobView) -> JobView:
    """Resets the backoff: after evidence or progress, the next rebuild does not wait."""
    return replace(job, attempts=0) if job.attempts else job


def _count_attempt(job: JobView, now: float) -> JobView:
    return replace(job, attempts=job.attempts + 1, last_attempt=now)


def _backoff_over(job: JobView, cluster: State, now: float) -> bool:
    """Whether the pause since the last failed attempt is over."""
    pause = min(cluster.config.lease_s * SETTLE * 2**job.attempts, MAX_BACKOFF_S)
    return not job.attempts or now - job.last_attempt >= pause
