"""How instructions are worded, and in which order they are given.

Links that fail while nobody dies: what becomes of two devices that cannot talk to each other.

    a complaint     a member says that its link to another has failed, at this generation; older ones are ignored
    (1) settling    others may have to complain too; one whose heartbeats are gone is the detector's business
    (2) tried anew  new links among the same members: a connection that was reset is no reason to lose a device
    (3) evicted     the two fail again: whoever of them more members complain of goes, else the higher number
    (4) forgiven    after a while it may come back, the next time after twice as long
    (5) readmitted  before that, where the others lack a part of a job's state that it may have

A pair is tried anew once, and where that helped up to three times a minute; so complaints make few generations.

The rules of membership that are about devices: who is alive, doubted, dead, gone.

The rules of membership: ``step(state, message) -> state, instructions``. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hoop.errors import FailedPrecondition, InvalidArgument, MembershipChanged, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.failure_detector import HeartbeatHistory
from hoop.membership.journal import communicator_record, job_record, joined_record, lost_record
from hoop.membership.state import (
    WINDOW_S,
    CommunicatorState,
    Health,
    JobState,
    LinkFaults,
    Member,
    OperationOutcome,
    State,
    with_job,
)

Result = tuple[State, tuple[m.MembershipInstruction, ...]]


def announce(kind: str, member: Member, what: str) -> m.Announce:
    return m.Announce(kind, f"{member.info} {what}", {"device": member.info.device_id})


def tell(kind: str, one: CommunicatorState, what: str) -> m.Announce:
    fields = {"communicator": one.id, "generation": one.generation}
    return m.Announce(kind, f"communicator {one.id} {kind.split('_')[1]} {what}".rstrip(), fields)


def in_order(
    record: m.Record, news: m.Announce, broken: tuple[m.MembershipInstruction, ...]
) -> tuple[m.MembershipInstruction, ...]:
    """What broke is written before why: a journal that ends between them must not call it whole."""
    records = tuple(one for one in broken if isinstance(one, m.Record))
    return (*records, record, news, *(one for one in broken if not isinstance(one, m.Record)))


SETTLING = 1 / 6
"""Of a lease: how long after the first complaint others are waited for."""
FRESH = 1 / 3
"""Of a lease: a member that has been silent for longer may be about to die, which would explain everything."""


def complained(state: State, message: m.Complained) -> Result:
    one = state.communicators.get(message.communicator_id)
    if one is None or one.generation != message.generation or one.broken_by:
        return state, ()
    if message.device_id == message.peer_id or not {message.device_id, message.peer_id} <= set(one.members):
        return state, ()
    trouble = state.trouble(one.id)
    if trouble.closed >= one.generation:
        return state, ()
    if trouble.generation != one.generation:
        trouble = replace(trouble, generation=one.generation, complaints=frozenset(), since=message.now)
    complaints = trouble.complaints | {(message.device_id, message.peer_id)}
    return state.with_trouble(one.id, replace(trouble, complaints=complaints)), ()


def worked(state: State, communicator_id: int, generation: int) -> Result:
    """All members have reached each other at this generation."""
    trouble = state.troubles.get(communicator_id)
    if trouble is None or generation <= trouble.worked:
        return state, ()
    return state.with_trouble(communicator_id, replace(trouble, worked=generation)), ()


def decided(state: State, now: float) -> Result:
    """Time passed: what is ripe is decided."""
    instructions: tuple[m.MembershipInstruction, ...] = ()
    for number, trouble in list(state.troubles.items()):
        one = state.communicators[number]
        lost = one.broken_by or trouble.generation != one.generation  # which explains it, or is the remedy
        if not lost and trouble.closed < one.generation and _ripe(state, trouble, now):
            state, more = _verdict(state, one, trouble, now)
            instructions += more
        state, more = _forgiven(state, number, now)
        instructions += more
    return state, instructions


def _ripe(state: State, trouble: LinkFaults, now: float) -> bool:
    lease = state.config.lease_s
    if now - trouble.since < SETTLING * lease:
        return False
    involved = [state.members[key] for pair in trouble.complaints for key in pair]  # (1)
    return all(one.health == Health.ALIVE and now - one.pulse.last_beat < FRESH * lease for one in involved)


def _verdict(state: State, one: CommunicatorState, trouble: LinkFaults, now: float) -> Result:
    pairs = sorted({(min(pair), max(pair)) for pair in trouble.complaints})
    hopeless = {key for pair in pairs if trouble.failed_again(pair, now) for key in pair}
    recent = tuple(entry for entry in trouble.tried if now - entry[2] < WINDOW_S)
    after = replace(
        trouble,
        closed=one.generation,
        tried=(*recent, *((pair, one.generation, now) for pair in pairs)),
    )
    named = ", ".join(f"{low} and {high}" for low, high in pairs)
    if not hopeless:  # (2)
        why = f"the link between devices {named} failed: new ones are tried"
        news = tell("links_failed", one, f"at generation {one.generation}: {why}")
        stop = m.Stop(one.id, one.generation, why, one.members)
        return state.with_trouble(one.id, after), (news, stop)
    against = Counter(peer for _, peer in trouble.complaints)  # (3)
    evicted = max(hopeless, key=lambda key: (against[key], key))
    times = trouble.evictions.get(evicted, 0) + 1
    after = replace(
        after,
        out={**trouble.out, evicted: now + WINDOW_S * 2 ** (times - 1)},
        evictions={**trouble.evictions, evicted: times},
    )
    why = f"{state.members[evicted].info} is left out: devices {named} cannot reach each other over new links"
    one = replace(one, outcome=OperationOutcome.FAILED, reason=why, broken_by=evicted)
    fields = {"communicator": one.id, "generation": one.generation, "device": evicted}
    news = m.Announce("device_evicted", f"communicator {one.id}: {why}", fields)
    stop = m.Stop(one.id, one.generation, why, one.members, evicted)
    return state.with_communicator(one).with_trouble(one.id, after), (communicator_record(one), news, stop)


def readmitted(state: State, message: m.Readmitted) -> Result:
    """(5)"""
    return _lift_evictions(state, message.communicator_id, [message.device_id])


def _forgiven(state: State, number: int, now: float) -> Result:
    """(4)"""
    return _lift_evictions(
        state, number, [key for key, until in state.trouble(number).out.items() if until <= now]
    )


def _lift_evictions(state: State, number: int, devices: list[int]) -> Result:
    """These devices may take part again; those that are not evicted are passed over."""
    trouble = state.trouble(number)
    over = sorted(key for key in devices if key in trouble.out)
    if not over:
        return state, ()
    left = {key: until for key, until in trouble.out.items() if key not in over}
    news = tuple(
        m.Announce(
            "device_forgiven",
            f"communicator {number}: device {key} may come back",
            {"communicator": number, "device": key},
        )
        for key in over
    )
    return state.with_trouble(number, replace(trouble, out=left)), news


MAX_DEVICES = 4096


def joined(state: State, message: m.Joined) -> Result:
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
    member = Member(info, HeartbeatHistory.joined(message.now, state.config))
    state = _heard(state, message.now).with_member(member)
    news = m.Announce("device_joined", text, {"device": info.device_id, "incarnation": info.incarnation})
    broken: tuple[m.MembershipInstruction, ...] = ()
    if restarted:
        # Whatever its former self was doing is gone with it.
        state, broken = _break(state, info.device_id, "it was restarted")
    return state, in_order(joined_record(info), news, broken)


def beat(state: State, message: m.Heartbeat) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        raise MembershipChanged(f"device {message.device_id} is not a member (any more): join again")
    recovered = member.health == Health.SUSPECT
    state = _heard(state, message.now)
    member = replace(member, pulse=member.pulse.beat(message.now), health=Health.ALIVE, reason="")
    instructions = (announce("device_recovered", member, "answers again"),) if recovered else ()
    return state.with_member(member), instructions


def called(state: State, message: m.CallReported) -> Result:
    member = state.members.get(message.device_id)
    if member is None or not member.usable:
        return state, ()
    if message.failure and _isolated_s(state, message.now):
        return doubted(state, message.device_id, member.info.incarnation, message.failure)
    member = replace(member, pulse=member.pulse.called(not message.failure, state.config))
    state = state.with_member(member)
    if not message.failure:
        return state, ()
    if verdict := member.pulse.failures(state.config):
        return _died(state, member, f"{verdict}: {message.failure}")
    return doubted(state, message.device_id, member.info.incarnation, message.failure)


def doubted(state: State, device_id: int, incarnation: str, reason: str) -> Result:
    member = state.members.get(device_id)
    if member is None or member.info.incarnation != incarnation or not member.usable:
        return state, ()
    if member.health == Health.SUSPECT:
        return state, (m.Probe(device_id),)
    member = replace(member, health=Health.SUSPECT, reason=reason)
    return state.with_member(member), (announce("device_suspect", member, reason), m.Probe(device_id))


def probed(state: State, message: m.Probed) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        return state, ()
    if message.failure:
        return _died(state, replace(member, ended=True), message.failure)
    return state, ()  # it lives; its next heartbeat, or the end of its lease, decides


def left(state: State, message: m.Left) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        return state, ()
    member = replace(member, health=Health.LEFT, reason="it left", ended=True)
    state, broken = _break(state.with_member(member), message.device_id, "it left")
    return state, in_order(lost_record(member), announce("device_left", member, "left"), broken)


def excused(state: State, message: m.Excused) -> State:
    for member in (state.members[key] for key in message.device_ids if key in state.members):
        pulse = replace(member.pulse, excused_until=message.until)
        state = state.with_member(replace(member, pulse=pulse))
    return state


def tick(state: State, now: float) -> Result:
    away = now - state.last_tick - state.config.lease_s / 2 if state.last_tick else 0.0
    if away > 0:
        members = {
            key: replace(one, pulse=one.pulse.excused(away, now)) for key, one in state.members.items()
        }
        state = replace(state, members=members)
    state = replace(state, last_tick=now)
    instructions: tuple[m.MembershipInstruction, ...] = ()
    believed = not 0 < _isolated_s(state, now) <= state.config.isolation_s
    for member in list(state.members.values()):
        if believed and member.usable and (verdict := member.pulse.silence(now, state.config)):
            state, more = _died(state, member, verdict)
            instructions += more
        elif member.health == Health.SUSPECT:  # one that was just dying may have answered the first probe
            instructions += (m.Probe(member.info.device_id),)
    return state, instructions


def _isolated_s(state: State, now: float) -> float:
    """For how many seconds no device at all has been heard; 0: one was, within half a lease."""
    last = max((one.pulse.last_beat for one in state.members.values() if one.usable), default=now)
    return now - last if now - last > state.config.lease_s / 2 else 0.0


def _heard(state: State, now: float) -> State:
    """A device is heard. If it is the first after all were silent, their silence meanwhile is no evidence.

    TCP's retransmission timer doubles while a network is cut, so the others may take as long again to be heard.
    """
    silence = _isolated_s(state, now)
    if not silence:
        return state
    grace = min(silence, state.config.isolation_s) if silence > state.config.lease_s else 0.0
    members = dict(state.members)
    for key, one in state.members.items():
        if one.usable:
            pulse = one.pulse.excused(silence, now)
            pulse = replace(pulse, excused_until=max(pulse.excused_until, now + grace))
            members[key] = replace(one, pulse=pulse)
    return replace(state, members=members)


def _died(state: State, member: Member, reason: str) -> Result:
    member = replace(member, health=Health.DEAD, reason=reason)
    state, broken = _break(state.with_member(member), member.info.device_id, reason)
    news = announce("device_dead", member, f"is dead: {reason}")
    return state, in_order(lost_record(member), news, broken)


def _break(state: State, device_id: int, reason: str) -> Result:
    """Every communicator with this device fails, and what it is doing stops."""
    instructions: tuple[m.MembershipInstruction, ...] = ()
    for one in state.communicators.values():
        if device_id not in one.members:
            continue
        why = (
            f"{state.members[device_id].info} is gone: {reason}; rebuild the communicator to go on without it"
        )
        if one.broken_by:  # what waits for this one has to know too
            instructions += (m.Stop(one.id, one.generation, why, one.members, device_id),)
            continue
        one = replace(one, outcome=OperationOutcome.FAILED, reason=why, broken_by=device_id)
        state = state.with_communicator(one)
        fields = {"communicator": one.id, "generation": one.generation, "device": device_id}
        instructions += (
            communicator_record(one),
            m.Announce("communicator_failed", f"communicator {one.id}: {why}", fields),
            m.Stop(one.id, one.generation, why, one.members, device_id),
        )
    return state, instructions


def _without_the_forgotten(state: State) -> State:
    """Room for newcomers: devices that are gone, and in no communicator, are forgotten."""
    needed = {device_id for one in state.communicators.values() for device_id in one.members}
    needed |= {device_id for one in state.jobs.values() for device_id in one.devices}
    kept = {key: one for key, one in state.members.items() if one.usable or key in needed}
    return replace(state, members=kept)


MAX_COMMUNICATORS = 1024


def step(state: State, message: m.MembershipEvent) -> Result:
    """The state after ``message``, and what is to be done about it; a wrong message raises."""
    match message:
        case m.Joined():
            return joined(state, message)
        case m.Heartbeat():
            return beat(state, message)
        case m.CallReported():
            return called(state, message)
        case m.LinkClosed():
            return doubted(state, message.device_id, message.incarnation, "its heartbeat link closed")
        case m.Probed():
            return probed(state, message)
        case m.Left():
            return left(state, message)
        case m.Excused():
            return excused(state, message), ()
        case m.Tick():
            state, first = tick(state, message.now)
            state, then = decided(state, message.now)
            return state, first + then
        case m.Complained():
            return complained(state, message)
        case m.LinkWorked():
            return worked(state, message.communicator_id, message.generation)
        case m.Readmitted():
            return readmitted(state, message)
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
    return state.with_communicator(replace(one, outcome=OperationOutcome.IN_PROGRESS, reason="")), ()


def _finished(state: State, message: m.Finished) -> Result:
    one = state.communicators.get(message.communicator_id)
    if one is None or one.generation != message.generation or one.broken_by:
        return state, ()
    if not message.failure:
        return state.with_communicator(replace(one, outcome=OperationOutcome.SUCCESS, reason="")), ()
    # The links are in no defined state after a failure: the next operation gets fresh ones.
    one = replace(one, outcome=OperationOutcome.FAILED, reason=message.failure, generation=one.generation + 1)
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
