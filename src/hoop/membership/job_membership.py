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

    (1) a task failed, or all tasks have reached the end of the training and their parts of the final state are known:
        the job is over
    (2) no device has a rank any more: wait for devices that can come back and may have the newest state, or a part of
        the final one, then assign ranks to those that did
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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hoop.errors import InternalError, PeerLost, TrainingStateLost, UserError, error_from_name
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
    Expel,
    FinalPartTaken,
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
    TaskHung,
    TaskLost,
    TaskReady,
    TaskResumed,
    TasksListed,
    TaskWaiting,
)
from hoop.membership.job_view import (
    MAX_BACKOFF_S,
    SETTLE,
    SILENT_HANGS,
    JobView,
    TaskStage,
    TaskView,
    active,
    backoff_over,
    can_take_part,
    count_attempt,
    had_rank,
    has_room,
    is_cut_off,
    loading,
    may_return,
    not_leaving,
    ready_devices,
    remaining,
    reset_backoff,
    silent_member,
    stage_of,
    task_of,
    with_task,
    without_rank,
    without_task,
)
from hoop.membership.state import CommunicatorState, State

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
    "Expel",
    "FinalPartTaken",
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
    "TaskHung",
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
FIRST_NOTICE_S = 1.0
"""Seconds after which a job that waits for a device which is loading it announces so for the first time."""
NOTICE_S = 10.0
"""Seconds between two later announcements of the same wait."""


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
            if job.grace_until is not None and device_id in job.holders:  # the others may be on their way, too
                job = replace(job, grace_until=max(job.grace_until, cluster.heard_time(now) + job.restart_grace_s))
            return _invite_if_room(replace(job, refused=job.refused - arrived), cluster, device_id, now)
        case InviteFailed(device_id, incarnation, refused):
            job = without_task(job, device_id, incarnation)
            if refused:
                return replace(job, refused=job.refused | {incarnation}), ()
            return replace(job, invite_again={**job.invite_again, device_id: now + cluster.config.lease_s}), ()
        case TaskHung(device_id, incarnation, generation, text):
            hangs = task_of(job, device_id, incarnation) and generation == cluster.communicator(job.id).generation
            return _expel(job, cluster, device_id, text) if hangs else (job, ())
        case TaskLost(device_id, incarnation):
            return without_task(job, device_id, incarnation), ()
        case TaskReady(device_id, incarnation):
            if task_of(job, device_id, incarnation) is None:
                return job, ()
            task = TaskView(incarnation, TaskStage.READY)
            return reset_backoff(with_task(not_leaving(job, device_id), device_id, task)), ()
        case TaskWaiting():
            return _on_waiting(job, event, cluster, now), ()
        case TaskResumed(generation):
            return _on_resumed(job, cluster, generation, now)
        case TaskFinished(device_id, incarnation, finished, failed):
            ranked = stage_of(job, device_id, incarnation) == TaskStage.ACTIVE
            job = without_task(job, device_id, incarnation)
            if finished:
                job = replace(job, finished=True, at_end=job.at_end | {device_id})
            return replace(job, failed=job.failed or (failed and ranked)), ()
        case FinalPartTaken(device_id, steps, turn, parts):
            key = steps, turn, parts
            known = job.final_parts.get(key, frozenset())
            return replace(job, final_parts={**job.final_parts, key: known | {device_id}}), ()
        case Assigned(generation, planned):
            return _on_assigned(job, cluster, generation, planned)
        case AssignFailed():
            return count_attempt(replace(job, assigning=False), now), ()
        case Delivered(generation, ok):
            return _on_delivered(job, cluster, generation, ok, now)
        case LeaveRequested(device_id, until):
            if device_id not in job.tasks:
                return job, ()
            ranks = len(active(job, cluster)) + len(ready_devices(job, cluster))
            size = job.size if job.leaving else min(job.size, ranks)  # earlier losses need no replacement now
            return replace(job, leaving={**job.leaving, device_id: until}, size=size), ()
        case LeaveCancelled(device_id):
            return _invite_if_room(not_leaving(job, device_id), cluster, device_id, now)
        case StopRequested():
            return replace(job, abandoned=job.abandoned or not active(job, cluster)), ()
        case JobTick():
            if silent := silent_member(job, cluster, now):
                text = (
                    f"device {silent} has sent nothing for {SILENT_HANGS * job.hang_s:.0f} s, and its process lives: "
                    "code in it holds Python's interpreter lock; its standard error has its stack"
                )
                return _expel(job, cluster, silent, text)
            return job, ()


def _expel(job: JobView, cluster: State, device_id: int, text: str) -> Result:
    """A member hangs: the ranks go on without it, as if its device had died. The last member of a job stays."""
    members = active(job, cluster)
    if not job.elastic or device_id not in members or len(members) == 1:
        return job, ()
    incarnation = job.tasks[device_id].incarnation
    job = without_task(replace(job, refused=job.refused | {incarnation}), device_id, incarnation)
    return job, (Expel(device_id, text),)


def _on_task_found(
    job: JobView, cluster: State, device_id: int, task: TaskView, generation: int, now: float
) -> JobView:
    one = cluster.communicator(job.id)
    if not generation:
        return job if task_of(job, device_id, task.incarnation) else with_task(job, device_id, task)
    job = replace(job, participants=job.participants | {device_id}, holders=job.holders | {device_id})
    task = replace(task, stage=TaskStage.ACTIVE)
    if generation != one.generation:  # its newest rank did not reach it
        task = replace(task, waiting=one.generation)
        job = replace(job, waits_since=now if job.waits_since is None else job.waits_since)
    return with_task(job, device_id, task)


def _invite(job: JobView, cluster: State, device_id: int, now: float) -> Result:
    """Invites a device that can take part, unless it was invited already or still has its rank."""
    member = cluster.members.get(device_id)
    if (
        member is None
        or not can_take_part(job, member)
        or not job.elastic
        or device_id in cluster.link_faults_of(job.id).evicted_until
        or is_cut_off(job, cluster, device_id)
    ):
        return job, ()
    stage = stage_of(job, device_id, member.info.incarnation)
    left_out = stage == TaskStage.ACTIVE and device_id not in cluster.communicator(job.id).members
    if member.info.incarnation in job.refused or (stage is not None and not left_out):
        return job, ()
    task = TaskView(member.info.incarnation, TaskStage.LOADING, since=now)
    return with_task(job, device_id, task), (Invite(device_id),)


def _invite_if_room(job: JobView, cluster: State, device_id: int, now: float) -> Result:
    """Invites a device, unless the job has as many as it takes: then one that lost its rank is released."""
    if has_room(job, cluster):
        return _invite(job, cluster, device_id, now)
    stranded = not job.unconfirmed_generation and device_id in without_rank(job, cluster.communicator(job.id))
    return job, (Release(device_id, True),) if stranded else ()


def _invite_idle(job: JobView, cluster: State, now: float) -> Result:
    """Invites devices that have no work: as many as the job still takes, or one if a member wants to leave and no
    device can take its place yet."""
    if job.listing_tasks or job.finished:
        return job, ()
    replacing = _wait_of_leavers(job, cluster, now) == HandoverStage.WAITING
    if not replacing and not (job.max_devices and has_room(job, cluster)):
        return job, ()
    running = (cluster.communicators[key] for key in cluster.jobs if key in cluster.communicators)
    busy = {key for one in running for key in one.members}
    invited: tuple[JobInstruction, ...] = ()
    for key in sorted(set(cluster.members) - busy - set(job.tasks)):
        member = cluster.members[key]
        if member.available and member.info.incarnation not in job.refused and key not in job.invite_again:
            job, instructions = _invite(job, cluster, key, now)
            invited += instructions
            if instructions and not (job.max_devices and has_room(job, cluster)):
                break
    return job, invited


def _on_waiting(job: JobView, event: TaskWaiting, cluster: State, now: float) -> JobView:
    """A member waits. A member that left an older generation takes its newer rank by itself."""
    one = cluster.communicator(job.id)
    task = task_of(job, event.device_id, event.incarnation)
    if task is None or task.stage != TaskStage.ACTIVE or event.generation != one.generation:
        return job
    task = replace(task, waiting=event.generation, lacks=event.lacks, error=event.error)
    since = now if job.waits_since is None else job.waits_since
    return with_task(replace(job, waits_since=since), event.device_id, task)


def _on_resumed(job: JobView, cluster: State, generation: int, now: float) -> Result:
    one = cluster.communicator(job.id)
    if generation != one.generation:
        return job, ()
    job = replace(
        reset_backoff(job), unconfirmed_generation=0, planned_generation=0, grace_until=None, awaited=frozenset()
    )
    job = replace(job, newcomers=frozenset(), holders=frozenset(one.members))
    instructions: tuple[JobInstruction, ...] = ()
    for key in without_rank(job, one):  # the running ranks have its state
        if key in job.leaving or key in cluster.link_faults_of(job.id).evicted_until:
            instructions += (Release(key, True),)
        else:
            job, more = _invite_if_room(job, cluster, key, now)
            instructions += more
    kept = {key: until for key, until in job.leaving.items() if key in one.members or not had_rank(job, key)}
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
    ranked = tuple(key for key in sorted(job.tasks) if had_rank(job, key))
    newcomers = frozenset(one.members) & (job.newcomers | set(one.members) - job.participants)
    participants = job.participants | set(one.members)
    holders = job.holders | set(one.members)
    job = replace(job, tasks=tasks, participants=participants, holders=holders, newcomers=newcomers, waits_since=None)
    job = replace(
        job,
        unconfirmed_generation=generation,
        planned_generation=generation if planned else 0,
        had_rank_before=ranked,
    )
    # Not final until the new ranks run: the state of the released devices may still be needed.
    gone = {*job.leaving, *cluster.link_faults_of(job.id).evicted_until}
    return job, tuple(Release(key, False) for key in without_rank(job, one) if key in gone)


def _on_delivered(job: JobView, cluster: State, generation: int, ok: bool, now: float) -> Result:
    if generation != cluster.communicator(job.id).generation:
        return job, ()
    if not ok:
        return count_attempt(replace(job, undelivered=generation), now), ()
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
    at_end = job.finished and not _finishing(job, one, working, waiting)
    if at_end and _has_final_state(job):
        return _end(job)
    if not working and not at_end and (job.abandoned or job.all_leaving):
        return _end(job)
    if stuck and any(job.tasks[key].lacks for key in waiting):
        return _await_state(job, cluster, waiting, now)  # (3)
    if at_end or not working:
        return _await_devices(job, cluster, now)  # (2)
    # Other devices may still hold a part of the state of a device that leaves: it stays until the ranks run again.
    departing = _departing(job, cluster, now)
    dispensable = departing if job.planned else ()
    if _broken(job, cluster, one, working):  # (4)
        if not backoff_over(job, cluster, now) or _needs_loading(job, cluster):
            return job, ()
        if 0 < len(remaining(job, cluster)) < job.user_min_devices:
            return _await_more(job, cluster, now)
        return _rebuild(job, cluster, dispensable)
    if waiting and job.waits_since is not None:  # (5)
        pause = cluster.config.lease_s * (SETTLE if stuck else 1.0) * 2**job.attempts
        if now - job.waits_since < min(pause, MAX_BACKOFF_S):
            return job, ()
        return _rebuild(count_attempt(job, now), cluster, dispensable)
    ready = ready_devices(job, cluster)
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
    ranks = len(members) + len(ready_devices(job, cluster))
    replaced = max(0, ranks - job.size)
    found = asked[:replaced]  # (b)
    if not loading(job, cluster):
        found += [key for key in asked[replaced:] if job.leaving[key] <= now]  # (c)
    found = found[: max(0, ranks - job.min_ranks)]
    return tuple(found if job.planned else found[:1])


def _needs_loading(job: JobView, cluster: State) -> bool:
    """Whether the strategy cannot go on with the remaining devices alone, and others are loading the job."""
    ranks = len(active(job, cluster)) + len(ready_devices(job, cluster))
    return ranks < job.min_ranks and bool(loading(job, cluster))


def _with_all_leaving(job: JobView, cluster: State, now: float) -> JobView:
    """The job, with ``all_leaving`` set if all members want to leave now and no device can take over."""
    if not job.leaving and not job.all_leaving:
        return job
    members = active(job, cluster)
    if job.listing_tasks or not members:
        return job
    leave_now = all(job.leaving.get(key, now + 1.0) <= now for key in members)
    all_leave = leave_now and not (ready_devices(job, cluster) or loading(job, cluster))
    return job if all_leave == job.all_leaving else replace(job, all_leaving=all_leave)


def _finishing(job: JobView, one: CommunicatorState, working: list[int], waiting: list[int]) -> bool:
    """After a task reached the end of the training: whether another task will still reach it.

    A task that waits and lacks state will not: the state went with the tasks that ended. Nor will a task that was to
    join at a planned generation to which the other ranks do not move any more.
    """
    left = [key for key in working if not (key in waiting and job.tasks[key].lacks)]
    return any(key in job.had_rank_before for key in left) if job.planned_generation == one.generation else bool(left)


def _has_final_state(job: JobView) -> bool:
    """Whether all parts of a final state are known, or none exists: no device can tell of another part."""
    if any(len(devices) >= parts for (_, _, parts), devices in job.final_parts.items()):
        return True
    return not job.final_parts and job.at_end >= job.holders


def _broken(job: JobView, cluster: State, one: CommunicatorState, working: list[int]) -> bool:
    """Whether the ranks of the newest generation are known to be unable to run."""
    if one.broken_by or cluster.link_faults_of(job.id).decided_generation >= one.generation:
        return True
    if job.undelivered == one.generation:
        return True
    if job.finished:
        return False
    # Members that have not moved yet run collectives of the previous generation, and need all of its ranks.
    stranded = job.planned_generation == one.generation and any(not had_rank(job, key) for key in job.had_rank_before)
    return stranded or len(working) < len(one.members)


def _rebuild(job: JobView, cluster: State, departing: tuple[int, ...] = ()) -> Result:
    """Assigns new ranks at once, without members whose tasks are gone, that depart, or that were evicted."""
    one = cluster.communicator(job.id)
    ready, working = ready_devices(job, cluster), active(job, cluster)
    gone = tuple(key for key in one.members if key in departing or key not in (*working, *ready))
    return replace(job, assigning=True, planned_generation=0), (Assign(tuple(ready), gone),)


def _await_devices(job: JobView, cluster: State, now: float) -> Result:
    """(2): no device has a rank. Waits for devices that can come back, then assigns ranks to those that did."""
    ready, missing = ready_devices(job, cluster), may_return(job, cluster)
    newest = missing & job.holders
    # Devices that were lost before the newest ranks ran have older state only: they are waited for if it is needed.
    missing = newest if newest or ready or job.finished else missing
    if not job.elastic or not job.restart_grace_s or not (ready or missing):
        return _end(job)
    job = _with_grace(job, cluster, now)
    waited = not missing or _grace_over(job, cluster, missing, now)
    if ready and waited and len(ready) < job.user_min_devices:
        return _await_more(job, cluster, now)
    if ready and waited:
        return _rebuild(job, cluster) if backoff_over(job, cluster, now) else (job, ())
    if waited:
        return _end(job)
    return _invite_and_announce(job, cluster, missing, now)


def _await_more(job: JobView, cluster: State, now: float) -> Result:
    """(2), (4): fewer devices are left than the user allows. Waits for others until the restart grace is over."""
    began, job = job.grace_until is None, _with_grace(job, cluster, now)
    ranks = len(remaining(job, cluster))
    assert job.grace_until is not None, "it has begun"
    left_s = job.grace_until - cluster.heard_time(now)
    if job.elastic and (left_s > 0 or loading(job, cluster)):
        return job, (AwaitMore(ranks, left_s),) if began else ()
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
        job = not_leaving(job, key)
    ready, missing = ready_devices(job, cluster), may_return(job, cluster)
    if ready:
        return _rebuild(job, cluster)
    job = _with_grace(job, cluster, now)
    if missing and job.elastic and not _grace_over(job, cluster, missing, now):
        evicted = sorted(missing & set(cluster.link_faults_of(job.id).evicted_until))
        job, instructions = _invite_and_announce(job, cluster, missing, now)
        return job, (*(Readmit(key) for key in evicted), *instructions)
    return _end(job, worst.error, worst.lacks)


def _refuse_newcomers(job: JobView, cluster: State, waiting: list[int], text: str, now: float) -> Result:
    """The ranks cannot go on with devices that have just joined: assigns ranks without these. They never had state."""
    if not backoff_over(job, cluster, now):
        return job, ()
    refused = tuple(Refuse(key, text) for key in sorted(job.newcomers & job.tasks.keys()))
    members = cluster.communicator(job.id).members
    gone = tuple(key for key in members if key in job.newcomers or key not in waiting)
    job = replace(job, assigning=True, planned_generation=0, participants=job.participants - job.newcomers)
    return job, (*refused, Assign(leaving=gone))


def _lacks_state(task: TaskView) -> bool:
    """Whether the ranks of a task lack state, rather than memory, for example."""
    return not isinstance(error_from_name(task.error, ""), UserError | InternalError)


def _with_grace(job: JobView, cluster: State, now: float) -> JobView:
    """The job with the restart grace begun, if it had not begun before.

    Time in which the coordinator hears no device does not count: none that comes back could reach it.
    """
    if job.grace_until is not None:
        return job
    return replace(job, grace_until=cluster.heard_time(now) + job.restart_grace_s)


def _grace_over(job: JobView, cluster: State, missing: frozenset[int], now: float) -> bool:
    """Whether the restart grace is over. It does not end while a device that came back loads the job."""
    loads = missing & set(loading(job, cluster))
    return job.grace_until is not None and cluster.heard_time(now) >= job.grace_until and not loads


def _invite_and_announce(job: JobView, cluster: State, missing: frozenset[int], now: float) -> Result:
    instructions: tuple[JobInstruction, ...] = ()
    for key in sorted(missing):  # it may have come back before its loss was noticed
        job, more = _invite(job, cluster, key, now)
        instructions += more
    if missing == job.awaited or job.grace_until is None:
        return job, instructions
    announcement = Await(tuple(sorted(missing)), job.grace_until - cluster.heard_time(now))
    return replace(job, awaited=missing), (*instructions, announcement)


def _end(job: JobView, error: str = "", text: str = "") -> Result:
    """Ends the job and releases every remaining task: none of them would end by itself."""
    if job.finished and not job.failed and not text and not _has_final_state(job):
        error, text = TrainingStateLost.__name__, _missing_parts(job)
    releases = tuple(Release(key, True) for key in sorted(job.tasks))
    return replace(job, over=True), (*releases, End(error, text))


def _missing_parts(job: JobView) -> str:
    """Why a job that has reached its end has no final state, for its user."""
    known = sorted(set().union(*job.final_parts.values()))
    gone = sorted(job.holders - job.at_end)
    has = (
        f"device{'s' * (len(known) != 1)} {_listed(known)} had a part of it"
        if known
        else "no device has reported a part"
    )
    lost = f", and device{'s' * (len(gone) != 1)} {_listed(gone)} did not come back" if gone else ""
    return (
        f"the training reached its end, but its final state is not complete: {has}{lost}; go on from the newest "
        "checkpoint: hoop train --resume --out DIR"
    )


def _listed(device_ids: Sequence[int]) -> str:
    return ", ".join(map(str, device_ids))


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
    if any(device_id in devices for devices in job.final_parts.values()):
        return Handover(HandoverStage.MOVING)  # until the job is over: clients read the final state here
    if device_id not in job.tasks or device_id not in job.participants:
        return Handover(HandoverStage.DONE)
    members = cluster.communicator(job.id).members
    # A non-member is MOVING: the others are still recovering its state, or will invite it again.
    if device_id not in members or job.assigning or device_id in _departing(job, cluster, now):
        return Handover(HandoverStage.MOVING)
    if found := loading(job, cluster):
        return Handover(HandoverStage.LOADING, tuple(sorted(found)), now - min(found.values()))
    if ready_devices(job, cluster) or _departing(job, cluster, now) or job.unconfirmed_generation or job.finished:
        return Handover(HandoverStage.MOVING)
    if _broken(job, cluster, cluster.communicator(job.id), active(job, cluster)):
        return Handover(HandoverStage.MOVING)
    return Handover(HandoverStage.WAITING)


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
        returned = may_return(job, cluster) if job.grace_until is not None else frozenset()
        found = {key: since for key, since in found.items() if key in returned}
    seconds = now - min(found.values(), default=now)
    if seconds < FIRST_NOTICE_S:
        return job if job.next_notice is None else replace(job, next_notice=None), ()
    if job.next_notice is not None and now < job.next_notice:
        return job, ()
    notice = AwaitLoading(tuple(sorted(found)), seconds)
    return replace(job, next_notice=now + NOTICE_S), (notice,)
