"""The rules of membership: ``step(state, message) -> state, instructions``. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import replace

from hoop.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from hoop.membership import devices, links
from hoop.membership import messages as m
from hoop.membership.entries import communicator_record, job_record
from hoop.membership.state import CommunicatorState, JobState, Outcome, State, with_job
from hoop.membership.words import Result, tell

MAX_COMMUNICATORS = 1024


def step(state: State, message: m.Message) -> Result:
    """The state after ``message``, and what is to be done about it; a wrong message raises."""
    match message:
        case m.Joined():
            return devices.joined(state, message)
        case m.Beat():
            return devices.beat(state, message)
        case m.Called():
            return devices.called(state, message)
        case m.LinkClosed():
            return devices.doubted(state, message.device_id, message.incarnation, "its heartbeat link closed")
        case m.Probed():
            return devices.probed(state, message)
        case m.Left():
            return devices.left(state, message)
        case m.Excused():
            return devices.excused(state, message), ()
        case m.Tick():
            state, first = devices.tick(state, message.now)
            state, then = links.decided(state, message.now)
            return state, first + then
        case m.Complained():
            return links.complained(state, message)
        case m.Worked():
            return links.worked(state, message.communicator_id, message.generation)
        case m.Readmitted():
            return links.readmitted(state, message)
        case m.Created():
            return _created(state, message.device_ids, message.most or MAX_COMMUNICATORS)
        case m.Rebuilt():
            return _rebuilt(state, message)
        case m.Started():
            return _started(state, message.communicator_id)
        case m.Finished():
            return _finished(state, message)
        case m.Finalized():
            one = replace(state.communicator(message.communicator_id), finalized=True)
            return state.with_communicator(one), (communicator_record(one),)
        case m.Destroyed():
            return _destroyed(state, message.communicator_id)
        case m.JobStarted(job_id, settings, run):
            job = JobState(job_id, settings, state.communicator(job_id).members, run=run)
            return replace(state, jobs=with_job(state.jobs, job)), (job_record(job),)
        case m.JobEnded():
            return _job_ended(state, message)


# ---- communicators


def _created(state: State, device_ids: tuple[int, ...], most: int) -> Result:
    if not device_ids:
        raise InvalidArgument("devices: a communicator needs at least one")
    if len(set(device_ids)) != len(device_ids):
        raise InvalidArgument(f"device_ids: {list(device_ids)} names a device twice")
    if len(state.communicators) >= most:
        how = "destroy some (CommDestroy), or raise --max-communicators"
        raise ResourceExhausted(f"{most} communicators exist; {how}")
    for device_id in device_ids:
        member = state.member(device_id)
        if not member.usable:
            raise FailedPrecondition(f"{member.info} is {member.health}: {member.reason}")
    one = CommunicatorState(state.next_communicator, device_ids)
    state = replace(state.with_communicator(one), next_communicator=one.id + 1)
    return state, (
        communicator_record(one),
        tell("communicator_created", one, f"of devices {list(device_ids)}"),
    )


def _rebuilt(state: State, message: m.Rebuilt) -> Result:
    old = state.communicator(message.communicator_id)
    wanted = dict.fromkeys((*old.members, *message.joining))
    left_out = {*message.leaving, *state.trouble(old.id).out}
    stay = (device_id for device_id in wanted if device_id not in left_out)
    members = tuple(device_id for device_id in stay if state.member(device_id).usable)
    if not members:
        raise FailedPrecondition(f"communicator {old.id}: none of its devices is alive")
    one = CommunicatorState(old.id, members, old.generation + 1, finalized=old.finalized)
    text = f"at generation {one.generation} of devices {list(members)}"
    done = (communicator_record(one), tell("communicator_rebuilt", one, text))
    stop = m.Stop(old.id, old.generation, f"communicator {old.id} was rebuilt", old.members)
    return state.with_communicator(one), done if message.planned else (*done, stop)


def _started(state: State, communicator_id: int) -> Result:
    one = state.communicator(communicator_id)
    if one.broken_by:
        raise FailedPrecondition(f"communicator {communicator_id}: {one.reason}")
    return state.with_communicator(replace(one, outcome=Outcome.IN_PROGRESS, reason="")), ()


def _finished(state: State, message: m.Finished) -> Result:
    one = state.communicators.get(message.communicator_id)
    if one is None or one.generation != message.generation or one.broken_by:
        return state, ()
    if not message.failure:
        return state.with_communicator(replace(one, outcome=Outcome.SUCCESS, reason="")), ()
    # The links are in no defined state after a failure: the next operation gets fresh ones.
    one = replace(one, outcome=Outcome.FAILED, reason=message.failure, generation=one.generation + 1)
    stop = m.Stop(one.id, message.generation, message.failure, one.members)
    news = tell("operation_failed", one, message.failure)
    return state.with_communicator(one), (communicator_record(one), news, stop)


def _destroyed(state: State, communicator_id: int) -> Result:
    one = state.communicator(communicator_id)
    left = {key: other for key, other in state.communicators.items() if key != communicator_id}
    stop = m.Stop(one.id, one.generation, f"communicator {one.id} was destroyed", one.members)
    record = m.Record({"kind": "communicator_destroyed", "id": one.id})
    calm = {key: trouble for key, trouble in state.troubles.items() if key != communicator_id}
    return replace(state, communicators=left, troubles=calm), (
        record,
        tell("communicator_destroyed", one, ""),
        stop,
    )


def _job_ended(state: State, message: m.JobEnded) -> Result:
    """Its end is written before its communicator's: a journal that ends between them must not start it again."""
    old, devices = state.jobs[message.job_id], state.communicator(message.job_id).members
    job = replace(old, devices=devices, ended=True, error=message.error, text=message.text)
    state, rest = _destroyed(replace(state, jobs=with_job(state.jobs, job)), job.id)
    return state, (job_record(job), *rest)
