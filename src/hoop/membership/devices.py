"""The rules of membership that are about devices: who is alive, doubted, dead, gone."""

from __future__ import annotations

from dataclasses import replace

from hoop.errors import FailedPrecondition, MembershipChanged, ResourceExhausted
from hoop.membership import messages as m
from hoop.membership.detector import Pulse
from hoop.membership.entries import communicator_record, joined_record, lost_record
from hoop.membership.state import Health, Member, Outcome, State
from hoop.membership.words import Result, announce, in_order

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
    member = Member(info, Pulse.joined(message.now, state.config))
    state = _heard(state, message.now).with_member(member)
    news = m.Announce("device_joined", text, {"device": info.device_id, "incarnation": info.incarnation})
    broken: tuple[m.Instruction, ...] = ()
    if restarted:
        # Whatever its former self was doing is gone with it.
        state, broken = _break(state, info.device_id, "it was restarted")
    return state, in_order(joined_record(info), news, broken)


def beat(state: State, message: m.Beat) -> Result:
    member = state.members.get(message.device_id)
    if member is None or member.info.incarnation != message.incarnation or not member.usable:
        raise MembershipChanged(f"device {message.device_id} is not a member (any more): join again")
    recovered = member.health == Health.SUSPECT
    state = _heard(state, message.now)
    member = replace(member, pulse=member.pulse.beat(message.now), health=Health.ALIVE, reason="")
    instructions = (announce("device_recovered", member, "answers again"),) if recovered else ()
    return state.with_member(member), instructions


def called(state: State, message: m.Called) -> Result:
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
    instructions: tuple[m.Instruction, ...] = ()
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
