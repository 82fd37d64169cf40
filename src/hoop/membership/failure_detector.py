"""The failure detector: which events make a device suspect, dead, or alive again. Pure transitions of ``State``.

    alive ── a failed call, a closed heartbeat stream ──▶ suspect: the coordinator probes the device
      ▲                                                      │
      └───────────── a heartbeat ────────────────────────────┤
                                                             ▼
    its process has ended, a refused connection (``Probed``), an expired lease (``Tick``), failed calls ──▶ dead

A device that is dead or has left breaks its communicators: their operations stop, and they need a rebuild.
``state_machine.step`` calls these functions; ``heartbeats`` has the time limits and the verdicts.

Silence is no evidence by itself: a process may wait for a core, or hold Python's interpreter lock. A device that is
silent for a quarter of its lease is probed: is its process there, does it run (``Probed``)? As long as it does, its
silence does not count. If the coordinator learns nothing, it asks up to three other devices, the witnesses: a device
that one of them reaches has four leases, because only its link to the coordinator is at fault. Nor does time count in
which the coordinator itself did not run, and a coordinator that is late gives every device more time.

A coordinator that receives no heartbeat from any device is itself the likely fault (its network is cut, its machine was
suspended). Neither silence nor failed calls count then, until one device sends a heartbeat again or ``isolation_s`` has
passed.
"""

from __future__ import annotations

from hoop.errors import MembershipChanged
from hoop.membership import events as m
from hoop.membership.fast_replace import replace
from hoop.membership.heartbeats import PROBE_AFTER
from hoop.membership.journal import communicator_record, lost_record
from hoop.membership.state import Health, Member, OperationOutcome, State

WITNESSES = 3
"""Maximum number of other devices that are asked whether they reach a silent one."""

_ALIVE, _SUSPECT = Health.ALIVE, Health.SUSPECT  # a class is slower to ask


def on_heartbeat(state: State, event: m.Heartbeat) -> m.Result:
    """Renews the lease; a suspect is alive again. Raises MembershipChanged for a device that must join again."""
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation or not member.usable:
        raise MembershipChanged(f"device {event.device_id} is not a member (any more): join again")
    recovered = member.health is _SUSPECT
    heartbeats = member.heartbeats
    if event.now - heartbeats.last_heartbeat > state.config.lease_s / 2:  # else this one was heard: no isolation
        heartbeats = heartbeats.discount_pause(_isolated_s(state, event.now), event.now)
        state = end_isolation(state, event.now)
    member = replace(member, heartbeats=heartbeats.with_heartbeat(event.now), health=_ALIVE, reason="")
    instructions = (m.device_event("device_recovered", member, "answers again"),) if recovered else ()
    return state.with_member(member), instructions


def on_call_reported(state: State, event: m.CallReported) -> m.Result:
    """A failed call makes a device suspect, and dead if all its calls fail for a lease while its heartbeats come.

    Calls to a device that is silent say no more than its silence does, and that has its own limit.
    """
    member = state.members.get(event.device_id)
    if member is None or not member.usable:
        return state, ()
    heartbeats, incarnation = member.heartbeats, member.info.incarnation
    if event.failure and (heartbeats.needs_probe(event.now, state.config) or _isolated_s(state, event.now)):
        return suspect(state, event.device_id, incarnation, event.failure)
    heartbeats = heartbeats.with_call(not event.failure, event.now)
    if heartbeats is not member.heartbeats:
        member = replace(member, heartbeats=heartbeats)
        state = state.with_member(member)
    if not event.failure:
        return state, ()
    if verdict := heartbeats.call_verdict(event.now, state.config):
        return _declare_dead(state, member, f"{verdict}: {event.failure}")
    return suspect(state, event.device_id, incarnation, event.failure)


def suspect(state: State, device_id: int, incarnation: str, reason: str) -> m.Result:
    """Marks a usable device as suspect and probes it."""
    member = state.members.get(device_id)
    if member is None or member.info.incarnation != incarnation or not member.usable:
        return state, ()
    if member.health == Health.SUSPECT:
        return state, (_probe(state, device_id, _heard(state, state.last_tick)),)
    member = replace(member, health=Health.SUSPECT, reason=reason)
    probe = _probe(state, device_id, _heard(state, state.last_tick))
    return state.with_member(member), (m.device_event("device_suspect", member, reason), probe)


def _heard(state: State, now: float) -> list[int]:
    """The devices that the coordinator hears, by id: they can be asked about others."""
    silence = PROBE_AFTER * state.config.lease_s
    alive = (key for key, one in state.members.items() if one.health is _ALIVE)
    return sorted(key for key in alive if now - state.members[key].heartbeats.last_heartbeat <= silence)


def _probe(state: State, device_id: int, heard: list[int]) -> m.Probe:
    """Devices in a row, as those of one rack, have different witnesses: none is asked about all that fail together."""
    first, most = device_id % max(1, len(heard)), WITNESSES + 1  # it may be among them itself
    chosen = (*heard[first : first + most], *heard[: min(first, most)])
    return m.Probe(device_id, tuple(key for key in chosen if key != device_id)[:WITNESSES])


def on_probed(state: State, event: m.Probed) -> m.Result:
    """A process that has ended makes its device dead. One that runs is a sign of life."""
    member = state.members.get(event.device_id)
    if member is None or member.info.incarnation != event.incarnation or not member.usable:
        return state, ()
    if event.failure:
        return _declare_dead(state, replace(member, ended=True), event.failure)
    if event.runs_at and not (event.by_answer and member.heartbeats.first_heartbeat_until):
        history = member.heartbeats
        seen = history.with_witness(event.runs_at) if event.witness else history.with_sighting(event.runs_at)
        return state.with_member(replace(member, heartbeats=seen)), ()
    return state, ()  # no evidence: its next heartbeat, or the end of its lease, decides


def check_leases(state: State, now: float) -> m.Result:
    """Declares silent devices dead, and probes suspects and silent devices."""
    config = state.config
    if state.last_tick:
        gap = now - state.last_tick
        state = replace(state, observer=state.observer.after_tick(gap, now, config))
        # Ticks come every heartbeat interval. In the rest of the gap the coordinator did not run, and heard nobody.
        if (paused_s := gap - 2 * config.heartbeat_s) > 0:
            members = {
                key: replace(member, heartbeats=member.heartbeats.discount_pause(paused_s, now))
                for key, member in state.members.items()
            }
            state = replace(state, members=members)
        isolated_s = _isolated_s(state, now) - _isolated_s(state, state.last_tick)
        state = replace(state, deaf_s=state.deaf_s + max(0.0, paused_s, isolated_s))
    state = replace(state, last_tick=now)
    instructions: tuple[m.MembershipInstruction, ...] = ()
    believed = not 0 < _isolated_s(state, now) <= config.isolation_s
    heard: list[int] | None = None
    for member in state.members.values():  # of this moment: a state does not change
        if not member.usable:
            continue
        history = member.heartbeats
        verdict = history.silence_verdict(now, config, state.observer) if believed else ""
        if verdict:
            state, more = _declare_dead(state, member, verdict)
            instructions += more
            continue
        if believed and member.health is _ALIVE and (sign := history.other_sign(now, config, state.observer)):
            member = replace(member, health=_SUSPECT, reason=sign)
            state = state.with_member(member)
            instructions += (m.device_event("device_suspect", member, sign),)
        # A dying process may still have accepted the first probe.
        if member.health is _SUSPECT or history.needs_probe(now, config):
            heard = _heard(state, now) if heard is None else heard
            instructions += (_probe(state, member.info.device_id, heard),)
    return state, instructions


def _isolated_s(state: State, now: float) -> float:
    """Seconds since the last heartbeat of any device; 0 if one came within half a lease."""
    last = max([one.heartbeats.last_heartbeat for one in state.members.values() if one.usable], default=now)
    return now - last if now - last > state.config.lease_s / 2 else 0.0


def end_isolation(state: State, now: float) -> State:
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
            heartbeats = replace(heartbeats, suspended_until=max(heartbeats.suspended_until, now + grace))
            members[key] = replace(one, heartbeats=heartbeats)
    return replace(state, members=members)


def _declare_dead(state: State, member: Member, reason: str) -> m.Result:
    member = replace(member, health=Health.DEAD, reason=reason)
    state, broken = break_communicators(state.with_member(member), member.info.device_id, reason)
    news = m.device_event("device_dead", member, f"is dead: {reason}")
    return state, m.records_first(lost_record(member), news, broken)


def break_communicators(state: State, device_id: int, reason: str) -> m.Result:
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
