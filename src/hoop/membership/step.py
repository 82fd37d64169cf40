"""The rules of membership: ``step(state, message) -> state, instructions``. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import replace

from hoop.errors import FailedPrecondition, InvalidArgument, MembershipChanged, ResourceExhausted
from hoop.membership import messages as m
from hoop.membership.detector import Pulse
from hoop.membership.entries import communicator_record, job_record, joined_record, lost_record
from hoop.membership.state import CommunicatorState, Health, JobState, Member, Outcome, State, with_job

MAX_COMMUNICATORS = 1024
MAX_DEVICES = 4096

Result = tuple[State, tuple[m.Instruction, ...]]


def step(state: State, message: m.Message) -> Result:
    """The state after ``message``, and what is to be done about it; a wrong message raises."""
    match message:
        case m.Joined():
            return _joined(state, message)
        case m.Beat():
            return _beat(state, message)
        case m.Called():
            return _called(state, message)
        case m.LinkClosed():
            return _doubted(state, message.device_id, message.incarnation, "its heartbeat link closed")
        case m.Probed():
            return _probed(state, message)
        case m.Left():
            return _left(state, message)
        case m.Excused():
            return _excused(state, message), ()
        case m.Tick():
            return _tick(state, message.now)
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
            return _with_communicator(state, one), (communicator_record(one),)
        case m.Destroyed():
            return _destroyed(state, message.communicator_id)
        case m.JobStarted(job_id, settings, run):
            job = JobState(job_id, settings, state.communicator(job_id).members, run=run)
            return replace(state, jobs=with_job(state.jobs, job)), (job_record(job),)
        case m.JobEnded():
            return _job_ended(state, message)


# ---- devices


def _joined(state: State, message: m.Joined) -> Result:
    info = message.info
    if info.device_id == 0:
        # Asked again because the answer was lost, it is still the same device.
        same = (key for key, one in state.members.items() if one.info.incarnation == info.incarnation)
        info = replace(info, device_id=next(same, max(state.members, default=0) + 1))
    known = state.members.get(info.device_id)
    if known is None and len(state.members) >= MAX_DEVICES:
        state = _without_the_forgotten(state)
        if len(state.members) >= MAX_DEVICES:
            raise ResourceExhausted(f"{MAX_DEVICES} devices are known already")
    if known is not None and known.info.incarnation != info.incarnation and known.health == Health.ALIVE:
        raise FailedPrecondition(
            f"device id {info.device_id} is in use by {known.info}; choose another with --id or stop that"
        )
    restarted = known is not None and known.info.incarnation != info.incarnation
    returned = known is not None and known.info.incarnation == info.incarnation
    text = f"{info} {'came back' if restarted else 'is here again' if returned else 'joined'}"
    state = _with_member(state, Member(info, Pulse(message.now)))
    announce = m.Announce("device_joined", text, {"device": info.device_id, "incarnation": info.incarnation})
    broken: tuple[m.Instruction, ...] = ()
    if restarted:
        # Whatever its former self was doing is gone with it.
        state, broken = _break(state, info.device_id, "it was restarted")
    return state, _in_order(joined_record(info), announce, broken)


def _beat(state: State, message: m.Beat) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        raise MembershipChanged(f"device {message.device_id} is not a member (any more): join again")
    recovered = member.health == Health.SUSPECT
    member = replace(member, pulse=member.pulse.beat(message.now), health=Health.ALIVE, reason="")
    instructions = (_announce("device_recovered", member, "answers again"),) if recovered else ()
    return _with_member(state, member), instructions


def _called(state: State, message: m.Called) -> Result:
    member = state.members.get(message.device_id)
    if member is None or not member.usable:
        return state, ()
    member = replace(member, pulse=member.pulse.called(not message.failure, state.config))
    state = _with_member(state, member)
    if not message.failure:
        return state, ()
    if verdict := member.pulse.failures(state.config):
        return _died(state, member, f"{verdict}: {message.failure}")
    return _doubted(state, message.device_id, member.info.incarnation, message.failure)


def _doubted(state: State, device_id: int, incarnation: str, reason: str) -> Result:
    member = state.members.get(device_id)
    if member is None or member.info.incarnation != incarnation or not member.usable:
        return state, ()
    if member.health == Health.SUSPECT:
        return state, (m.Probe(device_id),)
    member = replace(member, health=Health.SUSPECT, reason=reason)
    return _with_member(state, member), (_announce("device_suspect", member, reason), m.Probe(device_id))


def _probed(state: State, message: m.Probed) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        return state, ()
    if message.failure:
        return _died(state, member, message.failure)
    return state, ()  # it lives; its next heartbeat, or the end of its lease, decides


def _left(state: State, message: m.Left) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        return state, ()
    member = replace(member, health=Health.LEFT, reason="it left")
    state, broken = _break(_with_member(state, member), message.device_id, "it left")
    return state, _in_order(lost_record(member), _announce("device_left", member, "left"), broken)


def _excused(state: State, message: m.Excused) -> State:
    for member in (state.members[key] for key in message.device_ids if key in state.members):
        pulse = replace(member.pulse, excused_until=message.until)
        state = _with_member(state, replace(member, pulse=pulse))
    return state


def _tick(state: State, now: float) -> Result:
    away = now - state.last_tick - state.config.lease_s / 2 if state.last_tick else 0.0
    if away > 0:
        members = {
            key: replace(one, pulse=one.pulse.excused(away, now)) for key, one in state.members.items()
        }
        state = replace(state, members=members)
    state = replace(state, last_tick=now)
    instructions: tuple[m.Instruction, ...] = ()
    for member in list(state.members.values()):
        if member.usable and (verdict := member.pulse.silence(now, state.config)):
            state, more = _died(state, member, verdict)
            instructions += more
        elif member.health == Health.SUSPECT:  # one that was just dying may have answered the first probe
            instructions += (m.Probe(member.info.device_id),)
    return state, instructions


def _died(state: State, member: Member, reason: str) -> Result:
    member = replace(member, health=Health.DEAD, reason=reason)
    state, broken = _break(_with_member(state, member), member.info.device_id, reason)
    announce = _announce("device_dead", member, f"is dead: {reason}")
    return state, _in_order(lost_record(member), announce, broken)


def _break(state: State, device_id: int, reason: str) -> Result:
    """Every communicator with this device fails, and what it is doing stops."""
    instructions: tuple[m.Instruction, ...] = ()
    for one in state.communicators.values():
        if device_id not in one.members:
            continue
        why = (
            f"{state.members[device_id].info} is gone: {reason}; rebuild the communicator to go on without it"
        )
        if one.broken_by:  # what waits for this one has to know too
            instructions += (m.Stop(one.id, one.generation, why, one.members, device_id),)
            continue
        one = replace(one, outcome=Outcome.FAILED, reason=why, broken_by=device_id)
        state = _with_communicator(state, one)
        fields = {"communicator": one.id, "generation": one.generation, "device": device_id}
        instructions += (
            communicator_record(one),
            m.Announce("communicator_failed", f"communicator {one.id}: {why}", fields),
            m.Stop(one.id, one.generation, why, one.members, device_id),
        )
    return state, instructions


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
    state = replace(_with_communicator(state, one), next_communicator=one.id + 1)
    return state, (
        communicator_record(one),
        _tell("communicator_created", one, f"of devices {list(device_ids)}"),
    )


def _rebuilt(state: State, message: m.Rebuilt) -> Result:
    old = state.communicator(message.communicator_id)
    wanted = dict.fromkeys((*old.members, *message.joining))
    stay = (device_id for device_id in wanted if device_id not in message.leaving)
    members = tuple(device_id for device_id in stay if state.member(device_id).usable)
    if not members:
        raise FailedPrecondition(f"communicator {old.id}: none of its devices is alive")
    one = CommunicatorState(old.id, members, old.generation + 1, finalized=old.finalized)
    text = f"at generation {one.generation} of devices {list(members)}"
    done = (communicator_record(one), _tell("communicator_rebuilt", one, text))
    stop = m.Stop(old.id, old.generation, f"communicator {old.id} was rebuilt", old.members)
    return _with_communicator(state, one), done if message.planned else (*done, stop)


def _started(state: State, communicator_id: int) -> Result:
    one = state.communicator(communicator_id)
    if one.broken_by:
        raise FailedPrecondition(f"communicator {communicator_id}: {one.reason}")
    return _with_communicator(state, replace(one, outcome=Outcome.IN_PROGRESS, reason="")), ()


def _finished(state: State, message: m.Finished) -> Result:
    one = state.communicators.get(message.communicator_id)
    if one is None or one.generation != message.generation or one.broken_by:
        return state, ()
    if not message.failure:
        return _with_communicator(state, replace(one, outcome=Outcome.SUCCESS, reason="")), ()
    # The links are in no defined state after a failure: the next operation gets fresh ones.
    one = replace(one, outcome=Outcome.FAILED, reason=message.failure, generation=one.generation + 1)
    stop = m.Stop(one.id, message.generation, message.failure, one.members)
    tell = _tell("operation_failed", one, message.failure)
    return _with_communicator(state, one), (communicator_record(one), tell, stop)


def _destroyed(state: State, communicator_id: int) -> Result:
    one = state.communicator(communicator_id)
    left = {key: other for key, other in state.communicators.items() if key != communicator_id}
    stop = m.Stop(one.id, one.generation, f"communicator {one.id} was destroyed", one.members)
    record = m.Record({"kind": "communicator_destroyed", "id": one.id})
    return replace(state, communicators=left), (record, _tell("communicator_destroyed", one, ""), stop)


def _job_ended(state: State, message: m.JobEnded) -> Result:
    """Its end is written before its communicator's: a journal that ends between them must not start it again."""
    old, devices = state.jobs[message.job_id], state.communicator(message.job_id).members
    job = replace(old, devices=devices, ended=True, error=message.error, text=message.text)
    state, rest = _destroyed(replace(state, jobs=with_job(state.jobs, job)), job.id)
    return state, (job_record(job), *rest)


def _without_the_forgotten(state: State) -> State:
    """Room for newcomers: devices that are gone, and in no communicator, are forgotten."""
    needed = {device_id for one in state.communicators.values() for device_id in one.members}
    needed |= {device_id for one in state.jobs.values() for device_id in one.devices}
    kept = {key: one for key, one in state.members.items() if one.usable or key in needed}
    return replace(state, members=kept)


# ---- small words


def _with_member(state: State, member: Member) -> State:
    return replace(state, members={**state.members, member.info.device_id: member})


def _with_communicator(state: State, one: CommunicatorState) -> State:
    return replace(state, communicators={**state.communicators, one.id: one})


def _announce(kind: str, member: Member, what: str) -> m.Announce:
    return m.Announce(kind, f"{member.info} {what}", {"device": member.info.device_id})


def _tell(kind: str, one: CommunicatorState, what: str) -> m.Announce:
    fields = {"communicator": one.id, "generation": one.generation}
    return m.Announce(kind, f"communicator {one.id} {kind.split('_')[1]} {what}".rstrip(), fields)


def _in_order(
    record: m.Record, announce: m.Announce, broken: tuple[m.Instruction, ...]
) -> tuple[m.Instruction, ...]:
    """What broke is written before why: a journal that ends between them must not call it whole."""
    records = tuple(one for one in broken if isinstance(one, m.Record))
    return (*records, record, announce, *(one for one in broken if not isinstance(one, m.Record)))
