"""The membership state machine: ``step(state, event) -> (state, instructions)``. Pure: no clock, no I/O.

The coordinator calls ``step`` for every event and carries out the instructions: write to the journal, publish an event,
probe a device, abort the operations of a communicator. An event that is not allowed raises and changes nothing.

    event                                       effect
    ──────────────────────────────────────────  ─────────────────────────────────────────────────────────────────────
    Joined                                      a member is added, or comes back; a restart breaks its communicators
    Heartbeat                                   renews the lease; a suspect is alive again
    CallReported, LinkClosed                    a failed call or a closed stream makes a device suspect: it is probed
    Probed                                      a refused connection makes a suspect dead
    Left                                        the device is gone; its communicators are broken
    Drained                                     the device gets no new work, or does again
    Excused                                     silence of these devices does not count until a given time
    Tick                                        expired leases make devices dead; link faults are decided on
    LinksChecked                                connections that fail, or work again, are announced (``reachability``)
    Complained, LinkWorked, Readmitted          link faults, see below
    Created, Rebuilt, Finalized, Destroyed      life of a communicator; each rebuild begins a new generation
    Started, Finished                           an operation on a communicator; a failure begins a new generation
    JobStarted, JobEnded                        a job on the communicator with the same id

Link faults: two devices that are alive cannot reach each other.

    complaint       a member reports that its link to another member failed; complaints of older generations are ignored
    (1) settle      wait for more complaints. If a member has stopped sending heartbeats, leave it to the detector
    (2) relink      make new links among the same members: a reset connection is no reason to lose a device
    (3) evict       the pair failed again: evict the device that more members complain about, else the higher id
    (4) lift        the eviction ends after a time that doubles with each eviction of the device
    (5) readmit     the eviction ends early, where other members lack job state that the device may have

A pair gets new links once, and up to three times a minute where they worked in between. So complaints cause few
generations.
"""

from __future__ import annotations

from collections import Counter

from hoop import environment
from hoop.errors import FailedPrecondition, InvalidArgument, MembershipChanged, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.copies import replace
from hoop.membership.failure_detector import HeartbeatHistory
from hoop.membership.journal import communicator_record, job_record, joined_record, lost_record
from hoop.membership.reachability import describe_failures, without_device
from hoop.membership.state import (
    COORDINATOR,
    RELINK_WINDOW_S,
    CommunicatorState,
    Health,
    JobState,
    LinkFaults,
    Member,
    OperationOutcome,
    State,
    with_job,
)
from hoop.topology import MAX_DEVICES, DeviceInfo

MAX_COMMUNICATORS = 1024
SETTLING = 1 / 6
"""Fraction of a lease: how long after the first complaint the state machine waits for more."""
FRESH = 1 / 3
"""Fraction of a lease: a member that has been silent for longer may be about to die, which would explain the fault."""

Result = tuple[State, tuple[m.MembershipInstruction, ...]]
_ALIVE, _SUSPECT = Health.ALIVE, Health.SUSPECT  # a class is slower to ask


def step(state: State, event: m.MembershipEvent) -> Result:
    """The state after ``event``, and the instructions that follow. An event that is not allowed raises."""
    match event:
        case m.Joined():
            return _on_joined(state, event)
        case m.Heartbeat():
            return _on_heartbeat(state, event)
        case m.CallReported():
            return _on_call_reported(state, event)
        case m.LinkClosed():
            return _suspect(state, event.device_id, event.incarnation, "its heartbeat link closed")
        case m.Probed():
            return _on_probed(state, event)
        case m.Left():
            return _on_left(state, event)
        case m.Drained():
            return _on_drained(state, event)
        case m.Excused():
            return _on_excused(state, event), ()
        case m.Tick():
            state, first = _check_leases(state, event.now)
            state, then = _decide_link_faults(state, event.now)
            return state, first + then
        case m.LinksChecked():
            return _on_links_checked(state, event)
        case m.Complained():
            return _on_complained(state, event)
        case m.LinkWorked():
            return _on_link_worked(state, event.communicator_id, event.generation)
        case m.Readmitted():
            return _on_readmitted(state, event)
        case m.Created():
            return _on_created(state, event.device_ids, event.limit or MAX_COMMUNICATORS)
        case m.Rebuilt():
            return _on_rebuilt(state, event)
        case m.Started():
            return _on_started(state, event.communicator_id)
        case m.Finished():
            return _on_finished(state, event)
        case m.Finalized():
            one = replace(state.communicator(event.communicator_id), finalized=True)
            return state.with_communicator(one), (communicator_record(one),)
        case m.Destroyed():
            return _on_destroyed(state, event.communicator_id)
        case m.JobStarted(job_id, settings, run):
            job = JobState(job_id, settings, state.communicator(job_id).members, run=run)
            return replace(state, jobs=with_job(state.jobs, job)), (job_record(job),)
        case m.JobEnded():
            return _on_job_ended(state, event)


# ---- devices


def _on_joined(state: State, event: m.Joined) -> Result:
    info = event.info
    if info.device_id == 0:
        # A device whose join was answered, but that never got the answer, asks again: it keeps its id.
        same = (key for key, one in state.members.items() if one.info.incarnation == info.incarnation)
        info = replace(info, device_id=next(same, max(state.members, default=0) + 1))
    known = state.members.get(info.device_id)
    if known is None and len(state.members) >= MAX_DEVICES:
        state = _without_unused_members(state)
        if len(state.members) >= MAX_DEVICES:
            raise ResourceExhausted(f"{MAX_DEVICES} devices are known already")
    if known is not None and known.info.incarnation != info.incarnation and known.health == Health.ALIVE:
        raise FailedPrecondition(
            f"device id {info.device_id} is in use by {known.info}; choose another with --id or stop that"
        )
    restarted = known is not None and known.info.incarnation != info.incarnation
    returned = known is not None and known.info.incarnation == info.incarnation
    text = f"{info} {'came back' if restarted else 'is here again' if returned else 'joined'}"
    draining = known is not None and returned and known.draining
    member = Member(info, HeartbeatHistory.joined(event.now, state.config), draining=draining)
    state = _end_isolation(state, event.now).with_member(member)
    state = replace(state, unreachable=without_device(state.unreachable, info.device_id))  # it is checked again
    news = m.Announce("device_joined", text, {"device": info.device_id, "incarnation": info.incarnation})
    broken: tuple[m.MembershipInstruction, ...] = ()
    if restarted:
        # The operations of the previous incarnation ended with its process.
        state, broken = _break_communicators(state, info.device_id, "it was restarted")
    return state, _records_first(joined_record(info), news, (*_version_warnings(state, info), *broken))


def _version_warnings(state: State, info: DeviceInfo) -> tuple[m.Announce, ...]:
    """An event if a device that joins has other versions than one that is here: a job may refuse it."""
    for member in state.members.values():
        if member.usable and (keys := environment.differing(info.versions, member.info.versions)):
            text = (
                f"{info} has {environment.describe(info.versions, keys)}, where device {member.info.device_id} has "
                f"{environment.describe(member.info.versions, keys)}"
            )
            return (m.Announce("device_differs", text, {"device": info.device_id, "keys": " ".join(keys)}),)
    return ()


def _on_heartbeat(state: State, event: m.Heartbeat) -> Result:
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation or not member.usable:
        raise MembershipChanged(f"device {event.device_id} is not a member (any more): join again")
    recovered = member.health is _SUSPECT
    if event.now - member.heartbeats.last_heartbeat > state.config.lease_s / 2:  # else this one was heard: no isolation
        state = _end_isolation(state, event.now)
    member = replace(member, heartbeats=member.heartbeats.with_heartbeat(event.now), health=_ALIVE, reason="")
    instructions = (_device_event("device_recovered", member, "answers again"),) if recovered else ()
    return state.with_member(member), instructions


def _on_call_reported(state: State, event: m.CallReported) -> Result:
    member = state.members.get(event.device_id)
    if member is None or not member.usable:
        return state, ()
    if event.failure and _isolated_s(state, event.now):
        return _suspect(state, event.device_id, member.info.incarnation, event.failure)
    member = replace(member, heartbeats=member.heartbeats.with_call(not event.failure, state.config))
    state = state.with_member(member)
    if not event.failure:
        return state, ()
    if verdict := member.heartbeats.call_verdict(state.config):
        return _declare_dead(state, member, f"{verdict}: {event.failure}")
    return _suspect(state, event.device_id, member.info.incarnation, event.failure)


def _suspect(state: State, device_id: int, incarnation: str, reason: str) -> Result:
    """Marks a usable device as suspect and probes it."""
    member = state.members.get(device_id)
    if member is None or member.info.incarnation != incarnation or not member.usable:
        return state, ()
    if member.health == Health.SUSPECT:
        return state, (m.Probe(device_id),)
    member = replace(member, health=Health.SUSPECT, reason=reason)
    return state.with_member(member), (_device_event("device_suspect", member, reason), m.Probe(device_id))


def _on_probed(state: State, event: m.Probed) -> Result:
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation or not member.usable:
        return state, ()
    if event.failure:
        return _declare_dead(state, replace(member, ended=True), event.failure)
    return state, ()  # the process lives; its next heartbeat, or the end of its lease, decides


def _on_left(state: State, event: m.Left) -> Result:
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation or not member.usable:
        return state, ()
    member = replace(member, health=Health.LEFT, reason="it left", ended=True)
    state, broken = _break_communicators(state.with_member(member), event.device_id, "it left")
    return state, _records_first(lost_record(member), _device_event("device_left", member, "left"), broken)


def _on_drained(state: State, event: m.Drained) -> Result:
    member = state.member(event.device_id)
    if not member.usable or member.draining == event.draining:
        return state, ()
    member = replace(member, draining=event.draining)
    kind, what = ("device_draining", "gets no new work") if event.draining else ("device_kept", "may get work again")
    return state.with_member(member), (_device_event(kind, member, what),)


def _on_excused(state: State, event: m.Excused) -> State:
    for member in (state.members[key] for key in event.device_ids if key in state.members):
        heartbeats = replace(member.heartbeats, excused_until=event.until)
        state = state.with_member(replace(member, heartbeats=heartbeats))
    return state


def _check_leases(state: State, now: float) -> Result:
    """Declares silent devices dead, and probes suspects again."""
    # Ticks come every heartbeat interval. A gap of half a lease means that the coordinator itself was paused.
    paused_s = now - state.last_tick - state.config.lease_s / 2 if state.last_tick else 0.0
    if paused_s > 0:
        members = {
            key: replace(one, heartbeats=one.heartbeats.discount_pause(paused_s, now))
            for key, one in state.members.items()
        }
        state = replace(state, members=members)
    state = replace(state, last_tick=now)
    config = state.config
    instructions: tuple[m.MembershipInstruction, ...] = ()
    believed = not 0 < _isolated_s(state, now) <= config.isolation_s
    for member in state.members.values():  # of this moment: a state does not change
        if believed and member.usable and (verdict := member.heartbeats.silence_verdict(now, config)):
            state, more = _declare_dead(state, member, verdict)
            instructions += more
        elif member.health is _SUSPECT:  # a dying process may still have accepted the first probe
            instructions += (m.Probe(member.info.device_id),)
    return state, instructions


def _isolated_s(state: State, now: float) -> float:
    """Seconds since the last heartbeat of any device; 0 if one came within half a lease."""
    last = max([one.heartbeats.last_heartbeat for one in state.members.values() if one.usable], default=now)
    return now - last if now - last > state.config.lease_s / 2 else 0.0


def _end_isolation(state: State, now: float) -> State:
    """A device sent a message. If all devices were silent before, discounts that silence for every member.

    TCP's retransmission timer doubles while a network is cut, so the other devices may need as long again.
    """
    silence = _isolated_s(state, now)
    if not silence:
        return state
    grace = min(silence, state.config.isolation_s) if silence > state.config.lease_s else 0.0
    members = dict(state.members)
    for key, one in state.members.items():
        if one.usable:
            heartbeats = one.heartbeats.discount_pause(silence, now)
            heartbeats = replace(heartbeats, excused_until=max(heartbeats.excused_until, now + grace))
            members[key] = replace(one, heartbeats=heartbeats)
    return replace(state, members=members)


def _declare_dead(state: State, member: Member, reason: str) -> Result:
    member = replace(member, health=Health.DEAD, reason=reason)
    state, broken = _break_communicators(state.with_member(member), member.info.device_id, reason)
    news = _device_event("device_dead", member, f"is dead: {reason}")
    return state, _records_first(lost_record(member), news, broken)


def _break_communicators(state: State, device_id: int, reason: str) -> Result:
    """Fails every communicator of a lost device, and stops its operations."""
    instructions: tuple[m.MembershipInstruction, ...] = ()
    for one in state.communicators.values():
        if device_id not in one.members:
            continue
        why = f"{state.members[device_id].info} is gone: {reason}; rebuild the communicator to go on without it"
        if one.broken_by:  # operations that wait for this device must fail too
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


def _without_unused_members(state: State) -> State:
    """Forgets devices that are gone and in no communicator and no job, to make room for new ones."""
    needed = {device_id for one in state.communicators.values() for device_id in one.members}
    needed |= {device_id for one in state.jobs.values() for device_id in one.devices}
    kept = {key: one for key, one in state.members.items() if one.usable or key in needed}
    return replace(
        state,
        members=kept,
        unreachable={
            one: text for one, text in state.unreachable.items() if {one.source, one.target} <= {COORDINATOR, *kept}
        },
    )


def _on_links_checked(state: State, event: m.LinksChecked) -> Result:
    """Stores which connections fail, and announces each device to which others cannot connect, or can again."""
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation:
        return state, ()
    before = state.unreachable
    known = {one for one in event.results if {one.source, one.target} <= {COORDINATOR, *state.members}}
    after = {one: text for one, text in before.items() if one not in known}
    after |= {one: event.results[one] for one in known if event.results[one]}
    state = replace(state, unreachable=after)
    instructions: tuple[m.MembershipInstruction, ...] = ()
    for target in sorted({one.target for one in known}):
        failed = [one for one in after if one.target == target]
        was = [one for one in before if one.target == target]
        fields = {"device": target, "sources": " ".join(str(one.source) for one in sorted(failed or was))}
        info = state.members[target].info
        if set(failed) - set(was):
            text = f"{info}: {describe_failures(state, target, failed)}"
            instructions += (m.Announce("device_unreachable", text, fields),)
        elif was and not failed:
            instructions += (
                m.Announce("device_reachable", f"{info} can be reached by all that failed before", fields),
            )
    return state, instructions


# ---- link faults


def _on_complained(state: State, event: m.Complained) -> Result:
    one = state.communicators.get(event.communicator_id)
    if one is None or one.generation != event.generation or one.broken_by:
        return state, ()
    if event.device_id == event.peer_id or not {event.device_id, event.peer_id} <= set(one.members):
        return state, ()
    faults = state.link_faults_of(one.id)
    if faults.decided_generation >= one.generation:
        return state, ()
    if faults.generation != one.generation:
        faults = replace(faults, generation=one.generation, complaints=frozenset(), first_complaint_at=event.now)
    complaints = faults.complaints | {(event.device_id, event.peer_id)}
    return state.with_link_faults(one.id, replace(faults, complaints=complaints)), ()


def _on_link_worked(state: State, communicator_id: int, generation: int) -> Result:
    faults = state.link_faults.get(communicator_id)
    if faults is None or generation <= faults.working_generation:
        return state, ()
    return state.with_link_faults(communicator_id, replace(faults, working_generation=generation)), ()


def _decide_link_faults(state: State, now: float) -> Result:
    """Decides on complaints that have settled, and ends evictions whose time is over."""
    instructions: tuple[m.MembershipInstruction, ...] = ()
    for communicator_id, faults in list(state.link_faults.items()):
        one = state.communicators[communicator_id]
        # A lost device explains the complaints, and a new generation has new links: both make them void.
        void = one.broken_by or faults.generation != one.generation
        if not void and faults.decided_generation < one.generation and _settled(state, faults, now):
            state, more = _relink_or_evict(state, one, faults, now)
            instructions += more
        state, more = _lift_expired_evictions(state, communicator_id, now)
        instructions += more
    return state, instructions


def _settled(state: State, faults: LinkFaults, now: float) -> bool:
    """(1)"""
    lease = state.config.lease_s
    if now - faults.first_complaint_at < SETTLING * lease:
        return False
    involved = [state.members[key] for pair in faults.complaints for key in pair]
    return all(one.health == Health.ALIVE and now - one.heartbeats.last_heartbeat < FRESH * lease for one in involved)


def _relink_or_evict(state: State, one: CommunicatorState, faults: LinkFaults, now: float) -> Result:
    pairs = sorted({(min(pair), max(pair)) for pair in faults.complaints})
    hopeless = {key for pair in pairs if faults.failed_again(pair, now) for key in pair}
    recent = tuple(entry for entry in faults.relinked if now - entry[2] < RELINK_WINDOW_S)
    after = replace(
        faults, decided_generation=one.generation, relinked=(*recent, *((pair, one.generation, now) for pair in pairs))
    )
    named = ", ".join(f"{low} and {high}" for low, high in pairs)
    if not hopeless:  # (2)
        why = f"the link between devices {named} failed: new ones are tried"
        news = _communicator_event("links_failed", one, f"at generation {one.generation}: {why}")
        stop = m.Stop(one.id, one.generation, why, one.members)
        return state.with_link_faults(one.id, after), (news, stop)
    against = Counter(peer for _, peer in faults.complaints)  # (3)
    evicted = max(hopeless, key=lambda key: (against[key], key))
    times = faults.eviction_counts.get(evicted, 0) + 1
    after = replace(
        after,
        evicted_until={**faults.evicted_until, evicted: now + RELINK_WINDOW_S * 2 ** (times - 1)},
        eviction_counts={**faults.eviction_counts, evicted: times},
    )
    why = f"{state.members[evicted].info} is left out: devices {named} cannot reach each other over new links"
    one = replace(one, outcome=OperationOutcome.FAILED, reason=why, broken_by=evicted)
    fields = {"communicator": one.id, "generation": one.generation, "device": evicted}
    news = m.Announce("device_evicted", f"communicator {one.id}: {why}", fields)
    stop = m.Stop(one.id, one.generation, why, one.members, evicted)
    return state.with_communicator(one).with_link_faults(one.id, after), (communicator_record(one), news, stop)


def _lift_expired_evictions(state: State, communicator_id: int, now: float) -> Result:
    """(4)"""
    return _lift_evictions(
        state,
        communicator_id,
        [key for key, until in state.link_faults_of(communicator_id).evicted_until.items() if until <= now],
    )


def _on_readmitted(state: State, event: m.Readmitted) -> Result:
    """(5)"""
    return _lift_evictions(state, event.communicator_id, [event.device_id])


def _lift_evictions(state: State, communicator_id: int, devices: list[int]) -> Result:
    """Ends the evictions of these devices; ids of devices that are not evicted are ignored."""
    faults = state.link_faults_of(communicator_id)
    over = sorted(key for key in devices if key in faults.evicted_until)
    if not over:
        return state, ()
    left = {key: until for key, until in faults.evicted_until.items() if key not in over}
    news = tuple(
        m.Announce(
            "device_forgiven",
            f"communicator {communicator_id}: device {key} may come back",
            {"communicator": communicator_id, "device": key},
        )
        for key in over
    )
    return state.with_link_faults(communicator_id, replace(faults, evicted_until=left)), news


# ---- communicators


def _on_created(state: State, device_ids: tuple[int, ...], limit: int) -> Result:
    if not device_ids:
        raise InvalidArgument("devices: a communicator needs at least one")
    if len(set(device_ids)) != len(device_ids):
        raise InvalidArgument(f"device_ids: {list(device_ids)} names a device twice")
    if len(state.communicators) >= limit:
        how = "destroy some (CommDestroy), or raise the coordinator's --max-communicators"
        raise ResourceExhausted(f"{limit} communicators exist; {how}")
    for device_id in device_ids:
        member = state.member(device_id)
        if not member.usable:
            raise FailedPrecondition(f"{member.info} is {member.health}: {member.reason}")
        if member.draining:
            raise FailedPrecondition(f"{member.info} is being drained and gets no new work; choose another device")
    one = CommunicatorState(state.next_communicator, device_ids)
    state = replace(state.with_communicator(one), next_communicator=one.id + 1)
    return state, (
        communicator_record(one),
        _communicator_event("communicator_created", one, f"of devices {list(device_ids)}"),
    )


def _on_rebuilt(state: State, event: m.Rebuilt) -> Result:
    old = state.communicator(event.communicator_id)
    wanted = dict.fromkeys((*old.members, *event.joining))
    left_out = {*event.leaving, *state.link_faults_of(old.id).evicted_until}
    stay = (device_id for device_id in wanted if device_id not in left_out)
    members = tuple(device_id for device_id in stay if state.member(device_id).usable)
    if not members:
        raise FailedPrecondition(f"communicator {old.id}: none of its devices is alive")
    one = CommunicatorState(old.id, members, old.generation + 1, finalized=old.finalized)
    text = f"at generation {one.generation} of devices {list(members)}"
    done = (communicator_record(one), _communicator_event("communicator_rebuilt", one, text))
    stop = m.Stop(old.id, old.generation, f"communicator {old.id} was rebuilt", old.members)
    return state.with_communicator(one), done if event.planned else (*done, stop)


def _on_started(state: State, communicator_id: int) -> Result:
    one = state.communicator(communicator_id)
    if one.broken_by:
        raise FailedPrecondition(f"communicator {communicator_id}: {one.reason}")
    return state.with_communicator(replace(one, outcome=OperationOutcome.IN_PROGRESS, reason="")), ()


def _on_finished(state: State, event: m.Finished) -> Result:
    one = state.communicators.get(event.communicator_id)
    if one is None or one.generation != event.generation or one.broken_by:
        return state, ()
    if not event.failure:
        return state.with_communicator(replace(one, outcome=OperationOutcome.SUCCESS, reason="")), ()
    # A failed operation leaves its links in an undefined state: the next operation gets new ones.
    one = replace(one, outcome=OperationOutcome.FAILED, reason=event.failure, generation=one.generation + 1)
    stop = m.Stop(one.id, event.generation, event.failure, one.members)
    news = _communicator_event("operation_failed", one, event.failure)
    return state.with_communicator(one), (communicator_record(one), news, stop)


def _on_destroyed(state: State, communicator_id: int) -> Result:
    one = state.communicator(communicator_id)
    left = {key: other for key, other in state.communicators.items() if key != communicator_id}
    stop = m.Stop(one.id, one.generation, f"communicator {one.id} was destroyed", one.members)
    record = m.Record({"kind": "communicator_destroyed", "id": one.id})
    faults = {key: other for key, other in state.link_faults.items() if key != communicator_id}
    return replace(state, communicators=left, link_faults=faults), (
        record,
        _communicator_event("communicator_destroyed", one, ""),
        stop,
    )


def _on_job_ended(state: State, event: m.JobEnded) -> Result:
    """Writes the job's end before its communicator's: a journal cut between them must not restart the job."""
    old, devices = state.jobs[event.job_id], state.communicator(event.job_id).members
    job = replace(old, devices=devices, ended=True, error=event.error, text=event.text)
    state, rest = _on_destroyed(replace(state, jobs=with_job(state.jobs, job)), job.id)
    return state, (job_record(job), *rest)


# ---- instructions


def _device_event(kind: str, member: Member, what: str) -> m.Announce:
    return m.Announce(kind, f"{member.info} {what}", {"device": member.info.device_id})


def _communicator_event(kind: str, one: CommunicatorState, what: str) -> m.Announce:
    fields = {"communicator": one.id, "generation": one.generation}
    return m.Announce(kind, f"communicator {one.id} {kind.split('_')[1]} {what}".rstrip(), fields)


def _records_first(
    record: m.Record, news: m.Announce, broken: tuple[m.MembershipInstruction, ...]
) -> tuple[m.MembershipInstruction, ...]:
    """Orders the instructions: records of broken communicators first, then the device's record, then the rest.

    A journal cut between them must not show a lost device in a communicator that is not broken.
    """
    records = tuple(one for one in broken if isinstance(one, m.Record))
    return (*records, record, news, *(one for one in broken if not isinstance(one, m.Record)))
