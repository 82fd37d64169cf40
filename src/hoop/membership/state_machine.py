"""The membership state machine: ``step(state, event) -> (state, instructions)``. Pure: no clock, no I/O.

The coordinator calls ``step`` for every event and carries out the instructions: write to the journal, publish an event,
probe a device, abort the operations of a communicator. An event that is not allowed raises and changes nothing.

    event                                       effect
    ──────────────────────────────────────────  ─────────────────────────────────────────────────────────────────────
    Joined                                      a member is added, or comes back; a restart breaks its communicators
    Heartbeat                                   renews the lease; a suspect is alive again
    CallReported, LinkClosed                    a failed call or a closed stream makes a device suspect: it is probed
    Probed                                      a process that has ended makes a device dead; one that runs gives time
    Left                                        the device is gone; its communicators are broken
    Drained                                     the device gets no new work, or does again
    HeartbeatSuspended                          silence of these devices does not count until a given time
    Tick                                        expired leases make devices dead; link faults are decided on
    LinksChecked                                connections that fail, or work again, are announced (``reachability``)
    LinkFailureReported, LinkWorked,            links between devices that are alive fail: new links, or an eviction,
    Readmitted                                  which may end early
    Created, Rebuilt, Finalized, Destroyed      life of a communicator; each rebuild begins a new generation
    Started, Finished                           an operation on a communicator; a failure begins a new generation
    JobStarted, JobEnded                        a job on the communicator with the same id

Other modules have the transitions of a topic: ``failure_detector`` (suspect, dead, alive again) and ``link_faults``.
"""

from __future__ import annotations

from hoop import environment
from hoop.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from hoop.membership import events as m
from hoop.membership import failure_detector, link_faults
from hoop.membership.fast_replace import replace
from hoop.membership.heartbeats import HeartbeatHistory
from hoop.membership.journal import communicator_record, job_record, joined_record, lost_record
from hoop.membership.reachability import describe_failures, without_device
from hoop.membership.state import (
    COORDINATOR,
    CommunicatorState,
    Health,
    JobState,
    Member,
    OperationOutcome,
    State,
    with_job,
)
from hoop.topology import MAX_DEVICES, DeviceInfo

MAX_COMMUNICATORS = 1024


def step(state: State, event: m.MembershipEvent) -> m.Result:
    """The state after ``event``, and the instructions that follow. An event that is not allowed raises."""
    match event:
        case m.Joined():
            return _on_joined(state, event)
        case m.Heartbeat():
            return failure_detector.on_heartbeat(state, event)
        case m.CallReported():
            return failure_detector.on_call_reported(state, event)
        case m.LinkClosed():
            return failure_detector.suspect(state, event.device_id, event.incarnation, "its heartbeat link closed")
        case m.Probed():
            return failure_detector.on_probed(state, event)
        case m.Left():
            return _on_left(state, event)
        case m.Drained():
            return _on_drained(state, event)
        case m.HeartbeatSuspended():
            return _on_heartbeat_suspended(state, event), ()
        case m.Tick():
            state, first = failure_detector.check_leases(state, event.now)
            state, then = link_faults.decide_link_faults(state, event.now)
            return state, first + then
        case m.LinksChecked():
            return _on_links_checked(state, event)
        case m.LinkFailureReported():
            return link_faults.on_link_failure_reported(state, event)
        case m.LinkWorked():
            return link_faults.on_link_worked(state, event.communicator_id, event.generation)
        case m.Readmitted():
            return link_faults.on_readmitted(state, event)
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


def _on_joined(state: State, event: m.Joined) -> m.Result:
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
    state = failure_detector.end_isolation(state, event.now).with_member(member)
    state = replace(state, unreachable=without_device(state.unreachable, info.device_id))  # it is checked again
    news = m.Announce("device_joined", text, {"device": info.device_id, "incarnation": info.incarnation})
    broken: tuple[m.MembershipInstruction, ...] = ()
    if restarted:
        # The operations of the previous incarnation ended with its process.
        state, broken = failure_detector.break_communicators(state, info.device_id, "it was restarted")
    return state, m.records_first(joined_record(info), news, (*_version_warnings(state, info), *broken))


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


def _on_left(state: State, event: m.Left) -> m.Result:
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation or not member.usable:
        return state, ()
    member = replace(member, health=Health.LEFT, reason="it left", ended=True)
    state, broken = failure_detector.break_communicators(state.with_member(member), event.device_id, "it left")
    return state, m.records_first(lost_record(member), m.device_event("device_left", member, "left"), broken)


def _on_drained(state: State, event: m.Drained) -> m.Result:
    member = state.member(event.device_id)
    if not member.usable or member.draining == event.draining:
        return state, ()
    member = replace(member, draining=event.draining)
    kind, what = ("device_draining", "gets no new work") if event.draining else ("device_kept", "may get work again")
    return state.with_member(member), (m.device_event(kind, member, what),)


def _on_heartbeat_suspended(state: State, event: m.HeartbeatSuspended) -> State:
    for member in (state.members[key] for key in event.device_ids if key in state.members):
        heartbeats = replace(member.heartbeats, suspended_until=event.until)
        state = state.with_member(replace(member, heartbeats=heartbeats))
    return state


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


def _on_links_checked(state: State, event: m.LinksChecked) -> m.Result:
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


# ---- communicators


def _on_created(state: State, device_ids: tuple[int, ...], limit: int) -> m.Result:
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
        m.communicator_event("communicator_created", one, f"of devices {list(device_ids)}"),
    )


def _on_rebuilt(state: State, event: m.Rebuilt) -> m.Result:
    old = state.communicator(event.communicator_id)
    wanted = dict.fromkeys((*old.members, *event.joining))
    left_out = {*event.leaving, *state.link_faults_of(old.id).evicted_until}
    stay = (device_id for device_id in wanted if device_id not in left_out)
    members = tuple(device_id for device_id in stay if state.member(device_id).usable)
    if not members:
        raise FailedPrecondition(f"communicator {old.id}: none of its devices is alive")
    one = CommunicatorState(old.id, members, old.generation + 1, finalized=old.finalized)
    text = f"at generation {one.generation} of devices {list(members)}"
    done = (communicator_record(one), m.communicator_event("communicator_rebuilt", one, text))
    stop = m.Stop(old.id, old.generation, f"communicator {old.id} was rebuilt", old.members)
    return state.with_communicator(one), done if event.planned else (*done, stop)


def _on_started(state: State, communicator_id: int) -> m.Result:
    one = state.communicator(communicator_id)
    if one.broken_by:
        raise FailedPrecondition(f"communicator {communicator_id}: {one.reason}")
    return state.with_communicator(replace(one, outcome=OperationOutcome.IN_PROGRESS, reason="")), ()


def _on_finished(state: State, event: m.Finished) -> m.Result:
    one = state.communicators.get(event.communicator_id)
    if one is None or one.generation != event.generation or one.broken_by:
        return state, ()
    if not event.failure:
        return state.with_communicator(replace(one, outcome=OperationOutcome.SUCCESS, reason="")), ()
    # A failed operation leaves its links in an undefined state: the next operation gets new ones.
    one = replace(one, outcome=OperationOutcome.FAILED, reason=event.failure, generation=one.generation + 1)
    stop = m.Stop(one.id, event.generation, event.failure, one.members)
    news = m.communicator_event("operation_failed", one, event.failure)
    return state.with_communicator(one), (communicator_record(one), news, stop)


def _on_destroyed(state: State, communicator_id: int) -> m.Result:
    one = state.communicator(communicator_id)
    left = {key: other for key, other in state.communicators.items() if key != communicator_id}
    stop = m.Stop(one.id, one.generation, f"communicator {one.id} was destroyed", one.members)
    record = m.Record({"kind": "communicator_destroyed", "id": one.id})
    faults = {key: other for key, other in state.link_faults.items() if key != communicator_id}
    return replace(state, communicators=left, link_faults=faults), (
        record,
        m.communicator_event("communicator_destroyed", one, ""),
        stop,
    )


def _on_job_ended(state: State, event: m.JobEnded) -> m.Result:
    """Writes the job's end before its communicator's: a journal cut between them must not restart the job."""
    old, devices = state.jobs[event.job_id], state.communicator(event.job_id).members
    job = replace(old, devices=devices, ended=True, error=event.error, text=event.text)
    state, rest = _on_destroyed(replace(state, jobs=with_job(state.jobs, job)), job.id)
    return state, (job_record(job), *rest)
