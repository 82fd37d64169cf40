"""Links that fail while nobody dies: what becomes of two devices that cannot talk to each other.

    a complaint     a member says that its link to another has failed, at this generation; older ones are ignored
    (1) settling    others may have to complain too; one whose heartbeats are gone is the detector's business
    (2) tried anew  new links among the same members: a connection that was reset is no reason to lose a device
    (3) evicted     the two fail again: whoever of them more members complain of goes, else the higher number
    (4) forgiven    after a while it may come back, the next time after twice as long
    (5) readmitted  before that, where the others lack a part of a job's state that it may have

A pair is tried anew once, and where that helped up to three times a minute; so complaints make few generations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hoop.membership import messages as m
from hoop.membership.entries import communicator_record
from hoop.membership.state import CommunicatorState, Health, Outcome, State
from hoop.membership.trouble import WINDOW_S, Trouble
from hoop.membership.words import Result, tell

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
    instructions: tuple[m.Instruction, ...] = ()
    for number, trouble in list(state.troubles.items()):
        one = state.communicators[number]
        lost = one.broken_by or trouble.generation != one.generation  # which explains it, or is the remedy
        if not lost and trouble.closed < one.generation and _ripe(state, trouble, now):
            state, more = _verdict(state, one, trouble, now)
            instructions += more
        state, more = _forgiven(state, number, now)
        instructions += more
    return state, instructions


def _ripe(state: State, trouble: Trouble, now: float) -> bool:
    lease = state.config.lease_s
    if now - trouble.since < SETTLING * lease:
        return False
    involved = [state.members[key] for pair in trouble.complaints for key in pair]  # (1)
    return all(one.health == Health.ALIVE and now - one.pulse.last_beat < FRESH * lease for one in involved)


def _verdict(state: State, one: CommunicatorState, trouble: Trouble, now: float) -> Result:
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
    one = replace(one, outcome=Outcome.FAILED, reason=why, broken_by=evicted)
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
