"""The events and instructions of ``job_membership.advance``: its input, and the actions that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

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
class FinalPartTaken:
    """A device has a part of the final state, after ``steps`` steps; all ``parts`` parts with this ``turn`` are it."""

    device_id: int
    steps: int
    turn: int
    parts: int


@dataclass(frozen=True)
class TaskHung:
    """A member of this generation makes no progress and waits for nobody; ``text`` says where it is."""

    device_id: int
    incarnation: str
    generation: int
    text: str


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
    """A device is to leave. ``until``: until when it waits for another one to take its place, if none is loading."""

    device_id: int
    until: float = 0.0


@dataclass(frozen=True)
class LeaveCancelled:
    """A device is not to leave after all. If it has no rank any more, it is invited again."""

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
    | FinalPartTaken
    | TaskHung
    | TaskLost
    | Assigned
    | AssignFailed
    | Delivered
    | LeaveRequested
    | LeaveCancelled
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
class Refuse:
    """The ranks cannot go on with a device that has just joined, for the reason in ``text``: it takes no part."""

    device_id: int
    text: str


@dataclass(frozen=True)
class Expel:
    """A member lives and hangs, as ``text`` says: the ranks go on without it, and its process is to end."""

    device_id: int
    text: str


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
class AwaitMore:
    """Announce that the job has ``ranks`` devices, fewer than it needs, and for how many seconds at most it waits."""

    ranks: int
    seconds: float


@dataclass(frozen=True)
class AwaitLoading:
    """Announce that the job waits for devices that are loading it, and how long the first of them has been loading."""

    device_ids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class End:
    """The job is over. ``error`` (class) and ``text``: the lost state that ended it; empty if none."""

    error: str = ""
    text: str = ""


JobInstruction = Assign | Move | Invite | Release | Refuse | Expel | Readmit | Await | AwaitMore | AwaitLoading | End
