"""Link faults: two devices that are alive cannot reach each other. Pure transitions of ``State``.

    complaint       a member reports that its link to another member failed; complaints of older generations are ignored
    (1) settle      wait for more complaints. If a member has stopped sending heartbeats, leave it to the detector
    (2) relink      make new links among the same members: a reset connection is no reason to lose a device
    (3) evict       the pair failed again: evict the device that more members complain about, else the higher id
    (4) lift        the eviction ends after a time that doubles with each eviction of the device
    (5) readmit     the eviction ends early, where other members lack job state that the device may have

A pair gets new links once, and up to three times a minute where they worked in between. So complaints cause few
generations. ``state_machine.step`` calls these functions.
"""

from __future__ import annotations

from collections import Counter

from hoop.membership import events as m
from hoop.membership.fast_replace import replace
from hoop.membership.journal import communicator_record
from hoop.membership.state import RELINK_WINDOW_S, CommunicatorState, Health, LinkFaults, OperationOutcome, State

SETTLING = 1 / 6
"""Time that the state machine waits for more complaints after the first one, as a fraction of a lease."""
FRESH = 1 / 3
"""Silence of a member, as a fraction of a lease, from which on it may be about to die, which would explain the
fault."""


def on_link_failure_reported(state: State, event: m.LinkFailureReported) -> m.Result:
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


def on_link_worked(state: State, communicator_id: int, generation: int) -> m.Result:
    """The members of a generation have reached each other. The journal records it for a restarted coordinator."""
    record: tuple[m.MembershipInstruction, ...] = ()
    communicator = state.communicators.get(communicator_id)
    if communicator is not None and communicator.generation == generation and not communicator.ran:
        communicator = replace(communicator, ran=True)
        state, record = state.with_communicator(communicator), (communicator_record(communicator),)
    faults = state.link_faults.get(communicator_id)
    if faults is None or generation <= faults.working_generation:
        return state, record
    return state.with_link_faults(communicator_id, replace(faults, working_generation=generation)), record


def decide_link_faults(state: State, now: float) -> m.Result:
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
    """(1) Whether the wait for further complaints is over and all involved devices are alive."""
    lease = state.config.lease_s
    if now - faults.first_complaint_at < SETTLING * lease:
        return False
    involved = [state.members[key] for pair in faults.complaints for key in pair]
    return all(one.health == Health.ALIVE and now - one.heartbeats.last_heartbeat < FRESH * lease for one in involved)


def _relink_or_evict(state: State, one: CommunicatorState, faults: LinkFaults, now: float) -> m.Result:
    pairs = sorted({(min(pair), max(pair)) for pair in faults.complaints})
    hopeless = {key for pair in pairs if faults.failed_again(pair, now) for key in pair}
    recent = tuple(entry for entry in faults.relinked if now - entry[2] < RELINK_WINDOW_S)
    after = replace(
        faults, decided_generation=one.generation, relinked=(*recent, *((pair, one.generation, now) for pair in pairs))
    )
    named = ", ".join(f"{low} and {high}" for low, high in pairs)
    if not hopeless:  # (2)
        why = f"the link between devices {named} failed: new ones are tried"
        news = m.communicator_event("links_failed", one, f"at generation {one.generation}: {why}")
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


def _lift_expired_evictions(state: State, communicator_id: int, now: float) -> m.Result:
    """(4) Ends evictions whose time is over."""
    return _lift_evictions(
        state,
        communicator_id,
        [key for key, until in state.link_faults_of(communicator_id).evicted_until.items() if until <= now],
    )


def on_readmitted(state: State, event: m.Readmitted) -> m.Result:
    """(5) Ends an eviction early."""
    return _lift_evictions(state, event.communicator_id, [event.device_id])


def _lift_evictions(state: State, communicator_id: int, devices: list[int]) -> m.Result:
    """Ends the evictions of these devices; ids of devices that are not evicted are ignored."""
    faults = state.link_faults_of(communicator_id)
    over = sorted(key for key in devices if key in faults.evicted_until)
    if not over:
        return state, ()
    left = {key: until for key, until in faults.evicted_until.items() if key not in over}
    news = tuple(
        m.Announce(
            "eviction_ended",
            f"communicator {communicator_id}: device {key} may come back",
            {"communicator": communicator_id, "device": key},
        )
        for key in over
    )
    return state.with_link_faults(communicator_id, replace(faults, evicted_until=left)), news
