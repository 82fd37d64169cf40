"""``JobView``: one job, as the coordinator sees it, with questions about it and small updates. Pure.

``job_membership`` has the rules that change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hoop.membership.fast_replace import replace
from hoop.membership.reachability import cut_off
from hoop.membership.state import CommunicatorState, Health, Member, State

MAX_BACKOFF_S = 30.0
"""Maximum seconds between two rebuilds without new evidence in between."""
SILENT_HANGS = 2.0
"""A member that lives hangs if it sends no heartbeat for this many times ``JobView.hang_s``."""
SETTLE = 1 / 6
"""Pause before ranks that all wait are rebuilt, as a fraction of a lease. A decision on their links may come first."""


class TaskStage(StrEnum):
    """The stage of a device's task."""

    LOADING = "loading"
    READY = "ready"
    ACTIVE = "active"


_LOADING, _READY, _ACTIVE = TaskStage.LOADING, TaskStage.READY, TaskStage.ACTIVE  # faster than attributes of the class


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
    hang_s: float = 0.0
    """Seconds without progress after which a member hangs, as the job's settings say; 0: never."""
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
    """End of the wait for devices that can come back, by ``State.heard_time``; None: the job does not wait."""
    awaited: frozenset[int] = frozenset()
    """Ids of the devices of the last announced wait."""
    holders: frozenset[int] = frozenset()
    """Ids of the participants that may have the newest state: the others had no rank in a generation that ran steps."""
    finished: bool = False
    """True if a task reached the end of the training."""
    at_end: frozenset[int] = frozenset()
    """Ids of the devices whose tasks reached the end of the training: their parts of the final state are known."""
    final_parts: Mapping[tuple[int, int, int], frozenset[int]] = field(default_factory=dict)
    """Devices that have a part of a final state, by its number of steps, its turn and its number of parts."""
    failed: bool = False
    """True if a task failed by its own code: a user error or a bug."""
    abandoned: bool = False
    """True if a user asked to stop while no device has a rank."""
    all_leaving: bool = False
    """True if all members want to leave, and no device can take over."""
    next_notice: float | None = None
    """Time of the next announcement that the job waits for a device which is loading it; None: it does not wait."""
    over: bool = False


# ---- questions


def task_of(job: JobView, device_id: int, incarnation: str) -> TaskView | None:
    task = job.tasks.get(device_id)
    return task if task is not None and task.incarnation == incarnation else None


def stage_of(job: JobView, device_id: int, incarnation: str) -> TaskStage | None:
    task = task_of(job, device_id, incarnation)
    return task.stage if task is not None else None


def active(job: JobView, cluster: State) -> list[int]:
    """The members of the newest generation whose tasks run."""
    return at_stage(job, cluster, cluster.communicator(job.id).members, _ACTIVE)


def silent_member(job: JobView, cluster: State, now: float) -> int:
    """A member that lives and has sent no heartbeat for so long that it hangs, while another one has; 0: there is none.

    Code in it holds Python's interpreter lock: no other thread of its process runs.
    """
    if not job.hang_s:
        return 0
    beats = {key: cluster.members[key].heartbeats for key in active(job, cluster) if cluster.members[key].usable}
    if all(now - history.last_heartbeat > cluster.config.lease_s for history in beats.values()):
        return 0
    limit = SILENT_HANGS * job.hang_s
    return next((key for key, history in beats.items() if history.silent_s(now) > limit), 0)


def ready_devices(job: JobView, cluster: State) -> list[int]:
    """Devices that wait for their first rank and can get one."""
    waiting = at_stage(job, cluster, job.tasks, _READY)
    if not waiting:
        return []
    out = cluster.link_faults_of(job.id).evicted_until
    ready: list[int] = []
    for key in sorted(key for key in waiting if key not in out and key not in job.leaving):
        if can_take_part(job, cluster.members[key]) and not is_cut_off(job, cluster, key, ready):
            ready.append(key)
    if not job.max_devices:
        return ready
    stay = sum(key not in job.leaving for key in active(job, cluster))
    return ready[: max(0, job.max_devices - stay)]


def remaining(job: JobView, cluster: State) -> list[int]:
    """Devices that would get a rank now.

    Health is checked, because a dead device's task may not have been removed yet.
    """
    out = cluster.link_faults_of(job.id).evicted_until
    device_ids = (*active(job, cluster), *ready_devices(job, cluster))
    return [key for key in device_ids if cluster.members[key].usable and key not in out]


def has_room(job: JobView, cluster: State) -> bool:
    """Whether the job takes another device beside those that have a rank and stay, and those that will get one."""
    if not job.max_devices:
        return True
    without, members = without_rank(job, cluster.communicator(job.id)), cluster.members
    taking_part = (key for key in job.tasks if key not in without and key not in job.leaving)
    return sum(key in members and members[key].usable for key in taking_part) < job.max_devices


def is_cut_off(job: JobView, cluster: State, device_id: int, ready: Sequence[int] = ()) -> bool:
    """Whether a device that never had a rank cannot connect to the members, or they to it.

    A device that had one may have state that the others lack, so the rules of link faults decide about its links.
    """
    return device_id not in job.participants and cut_off(cluster, device_id, (*active(job, cluster), *ready))


def can_take_part(job: JobView, member: Member) -> bool:
    """Whether a device may get a rank. One that leaves may if it had one: the others may lack its state."""
    return member.available or (member.usable and member.info.device_id in job.participants)


def had_rank(job: JobView, device_id: int) -> bool:
    """Whether the device's task was assigned a rank, in the newest generation or in an older one."""
    return device_id in job.tasks and job.tasks[device_id].stage == TaskStage.ACTIVE


def without_rank(job: JobView, one: CommunicatorState) -> list[int]:
    """Devices whose tasks had a rank and have none in the newest generation."""
    return [key for key in sorted(job.tasks) if had_rank(job, key) and key not in one.members]


def at_stage(job: JobView, cluster: State, device_ids: Iterable[int], stage: TaskStage) -> list[int]:
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


def may_return(job: JobView, cluster: State) -> frozenset[int]:
    """Devices that had a rank, have none now, and may still have their state: in memory or in an arena file.

    Those that have reached the end of the training have reported their part of the final state.
    """
    absent = job.participants - set(active(job, cluster)) - set(ready_devices(job, cluster)) - job.at_end
    members = (cluster.members[key] for key in absent if key in cluster.members)
    return frozenset(
        member.info.device_id
        for member in members
        if member.health != Health.LEFT and (member.usable or not member.ended or member.info.keeps_memory)
    )


def loading(job: JobView, cluster: State) -> dict[int, float]:
    """Devices that load the job and can take a rank after that, and since when they load it."""
    device_ids = at_stage(job, cluster, job.tasks, _LOADING)
    if not device_ids:
        return {}
    out = cluster.link_faults_of(job.id).evicted_until
    return {
        key: job.tasks[key].since
        for key in device_ids
        if can_take_part(job, cluster.members[key]) and key not in out and key not in job.leaving
    }


# ---- small updates


def with_task(job: JobView, device_id: int, task: TaskView) -> JobView:
    return replace(job, tasks={**job.tasks, device_id: task})


def without_task(job: JobView, device_id: int, incarnation: str) -> JobView:
    """The job without this task."""
    task = task_of(job, device_id, incarnation)
    if task is None:
        return job
    tasks = {key: task for key, task in job.tasks.items() if key != device_id}
    return reset_backoff(not_leaving(replace(job, tasks=tasks), device_id))


def not_leaving(job: JobView, device_id: int) -> JobView:
    if device_id not in job.leaving:
        return job
    return replace(job, leaving={key: until for key, until in job.leaving.items() if key != device_id})


def reset_backoff(job: JobView) -> JobView:
    """Resets the backoff: after evidence or progress, the next rebuild does not wait."""
    return replace(job, attempts=0) if job.attempts else job


def count_attempt(job: JobView, now: float) -> JobView:
    return replace(job, attempts=job.attempts + 1, last_attempt=now)


def backoff_over(job: JobView, cluster: State, now: float) -> bool:
    """Whether the pause since the last failed attempt is over."""
    pause = min(cluster.config.lease_s * SETTLE * 2**job.attempts, MAX_BACKOFF_S)
    return not job.attempts or now - job.last_attempt >= pause
