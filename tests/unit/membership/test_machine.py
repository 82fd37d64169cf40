"""Stateful test: invariants of the membership state, and of the state that its journal replays to.

The machine sends random messages, valid or not, and sometimes restarts the coordinator, which continues with the state
that its journal replays to.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from roster import CONFIG, NOW, device, stops

from hoop.errors import MembershipChanged, UserError
from hoop.membership import events as m
from hoop.membership.journal import communicator_entry, decode, encode, replay, snapshot
from hoop.membership.state import Health, OperationOutcome, State
from hoop.membership.state_machine import step

device_ids = st.integers(1, 5)
picks = st.integers(0, 5)
incarnations = st.sampled_from("ab")
failures = st.sampled_from(["", "connection refused"])


class Membership(RuleBasedStateMachine):
    """A coordinator's state, its journal, and a history of both."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.state = State(CONFIG, last_tick=self.now)
        self.journal: list[bytes] = []
        self.generations: dict[int, int] = {}
        """The highest generation that each communicator ever had."""
        self.destroyed: set[int] = set()
        self.assignments: dict[tuple[int, int], tuple[int, ...]] = {}
        """The members of each communicator, by generation."""
        self.device_generations: dict[tuple[int, int], int] = {}
        """The generation that each device is at, by communicator and device."""
        self.committed: dict[int, int] = {}
        """Number of committed steps of each communicator."""
        self.done: dict[tuple[int, int], int] = {}
        """Number of steps that each device has, by communicator and device."""

    def send(self, message: m.MembershipEvent) -> None:
        old, members, communicators = self.state, dict(self.state.members), dict(self.state.communicators)
        try:
            new, instructions = step(old, message)
        except (UserError, MembershipChanged):
            new, instructions = old, ()
        assert (old.members, old.communicators) == (members, communicators), "the old state was changed"
        records = [one.entry for one in instructions if isinstance(one, m.Record)]
        self.journal += map(encode, records)
        self.check_stops(old, new, instructions)
        self.state = new

    def check_stops(self, old: State, new: State, instructions: tuple[m.MembershipInstruction, ...]) -> None:
        """A stop is sent when a generation ends or breaks, and for each further loss in a broken one."""
        sent: dict[tuple[int, int], list[m.Stop]] = {}
        for one in stops(instructions):
            sent.setdefault((one.communicator_id, one.generation), []).append(one)
        for before in old.communicators.values():
            now = new.communicators.get(before.id)
            broke = now is not None and now.broken_by != 0 and before.broken_by == 0
            if now is None or now.generation != before.generation or broke:
                stop = sent[before.id, before.generation].pop(0)
                assert stop.members == before.members
                assert stop.lost_device == (now.broken_by if now is not None and broke else 0)
        for further in (stop for remaining in sent.values() for stop in remaining):
            number = further.communicator_id
            if new.link_faults_of(number).decided_generation > old.link_faults_of(number).decided_generation:
                assert further.lost_device in (
                    0,
                    new.communicators[number].broken_by,
                )  # the links are set up again
                continue
            assert new.communicators[number].broken_by, "a stop of a generation that is not broken"
            assert further.lost_device in further.members

    def picked(self, pick: int) -> int:
        """Return the id of an existing communicator, or sometimes an unknown id."""
        known = sorted(self.state.communicators)
        return known[pick - 1] if 0 < pick <= len(known) else known[-1] if pick and known else 1000

    # ---- arbitrary events

    @initialize()
    def begin_with_three(self) -> None:
        for device_id in (1, 2, 3):
            self.join(device_id, "a")
        self.send(m.Created((1, 2)))

    @rule(device_id=st.integers(0, 5), incarnation=incarnations)
    def join(self, device_id: int, incarnation: str) -> None:
        self.send(m.Joined(device(device_id, incarnation), self.now))

    @rule(device_id=device_ids, incarnation=incarnations)
    def beat(self, device_id: int, incarnation: str) -> None:
        self.send(m.Heartbeat(device_id, incarnation, self.now))

    @rule()
    def send_all_heartbeats(self) -> None:
        for member in self.state.members.values():
            self.send(m.Heartbeat(member.info.device_id, member.info.incarnation, self.now))

    @rule(device_id=device_ids, failure=failures)
    def call(self, device_id: int, failure: str) -> None:
        self.send(m.CallReported(device_id, failure, self.now))

    @rule(device_id=device_ids, incarnation=incarnations)
    def close_link(self, device_id: int, incarnation: str) -> None:
        self.send(m.LinkClosed(device_id, incarnation))

    @rule(device_id=device_ids, incarnation=incarnations, failure=failures)
    def probe(self, device_id: int, incarnation: str, failure: str) -> None:
        self.send(m.Probed(device_id, incarnation, failure))

    @rule(device_id=device_ids, incarnation=incarnations)
    def leave(self, device_id: int, incarnation: str) -> None:
        self.send(m.Left(device_id, incarnation))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.6, 60.0]), watched=st.booleans())
    def pass_time(self, seconds: float, watched: bool) -> None:
        self.now += seconds
        if watched:
            self.send(m.Tick(self.now))
            histories = [one.heartbeats for one in self.state.members.values() if one.usable]
            shortest_silence = min((self.now - one.last_heartbeat for one in histories), default=0.0)
            for one in histories:
                allowed = CONFIG.first_heartbeat_s if one.first_heartbeat_until else CONFIG.lease_s
                silent = self.now - max(one.last_heartbeat, one.suspended_until)
                assert silent <= allowed or shortest_silence > CONFIG.lease_s / 2

    @rule(members=st.lists(device_ids, max_size=4).map(tuple))
    def create(self, members: tuple[int, ...]) -> None:
        self.send(m.Created(members))

    @rule(data=st.data())
    def create_of_usable(self, data: st.DataObject) -> None:
        if usable := self.state.usable():
            chosen = data.draw(st.lists(st.sampled_from(usable), min_size=1, unique=True))
            count = len(self.state.communicators)
            self.send(m.Created(tuple(chosen)))
            assert len(self.state.communicators) == count + 1

    @rule(pick=picks, joining=st.lists(device_ids, max_size=1).map(tuple), reached=st.integers(0, 5))
    def rebuild(self, pick: int, joining: tuple[int, ...], reached: int) -> None:
        old = self.state.communicators.get(self.picked(pick))
        if old is not None and not any(self.state.members[one].usable for one in old.members):
            joining = ()  # without a live member the state is lost, whichever device joins
        self.send(m.Rebuilt(self.picked(pick), joining))
        self.deliver_assignments(reached)

    # ---- link failures between live devices

    @rule(pick=picks, late=st.sampled_from([0, 0, 0, 1, -1]), accuser=device_ids, peer=device_ids)
    def complain(self, pick: int, late: int, accuser: int, peer: int) -> None:
        communicator_id = self.picked(pick)
        one, before = self.state.communicators.get(communicator_id), self.state
        generation = self.generations.get(communicator_id, 1) - late
        self.send(m.LinkFailureReported(communicator_id, generation, accuser, peer, self.now))
        if one is None or generation != one.generation or not {accuser, peer} <= set(one.members):
            assert self.state == before, "a complaint of another generation or of a non-member had an effect"

    @rule(pick=picks, late=st.sampled_from([0, 0, 1]))
    def work(self, pick: int, late: int) -> None:
        communicator_id = self.picked(pick)
        self.send(m.LinkWorked(communicator_id, self.generations.get(communicator_id, 1) - late))

    @rule(data=st.data())
    def complain_until_a_device_is_evicted(self, data: st.DataObject) -> None:
        """Two members cannot reach each other: within two generations exactly one of them is evicted."""
        self.send_all_heartbeats()
        pairs = [one for one in self.state.communicators.values() if not one.broken_by and len(one.members) > 1]
        if not pairs:
            return
        chosen = data.draw(st.sampled_from(pairs))
        low, high = sorted(chosen.members)[:2]
        if (
            self.state.link_faults_of(chosen.id).decided_generation >= chosen.generation
        ):  # another pair's failure was decided already
            self.send(m.Rebuilt(chosen.id))
        for _ in range(2):
            one = self.state.communicators[chosen.id]
            self.send(m.LinkFailureReported(one.id, one.generation, low, high, self.now))
            for _ in range(4):
                self.now += CONFIG.heartbeat_s
                self.send_all_heartbeats()
                self.send(m.Tick(self.now))
            self.send(m.Rebuilt(chosen.id))
            self.deliver_assignments()
        left = self.state.communicators[chosen.id].members
        assert not {low, high} <= set(left), "both are still members"
        assert set(chosen.members) - set(left) <= {low, high}, "another device was evicted"
        assert left, "no member is left"

    # ---- commits: each device has the last assignment that reached it; a step needs all members of a generation

    def deliver_assignments(self, reached: int = 100) -> None:
        for one in self.state.communicators.values():
            members = self.assignments.setdefault((one.id, one.generation), one.members)
            assert members == one.members, "two members disagree on a generation"
            for device_id in one.members[:reached]:
                held = self.device_generations.get((one.id, device_id), 0)
                self.device_generations[one.id, device_id] = max(held, one.generation)

    @rule(reached=st.integers(0, 3))
    def deliver_some_assignments(self, reached: int) -> None:
        self.deliver_assignments(reached)

    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        """Commit a step in each generation that all its members are at: at most one, and it has all steps."""
        for (key, generation), members in self.assignments.items():
            if key == self.picked(pick) and all(
                self.device_generations.get((key, one)) == generation for one in members
            ):
                lead = max(self.done.get((key, one), 0) for one in members)
                assert lead == self.committed.get(key, 0), "a committed step was lost, or two generations commit"
                self.committed[key] = lead + 1
                self.done |= {(key, one): lead + 1 for one in members}

    @rule(pick=picks)
    def start(self, pick: int) -> None:
        self.send(m.Started(self.picked(pick)))

    @rule(pick=picks, late=st.sampled_from([0, 0, 0, 1, -1]), failure=failures)
    def finish(self, pick: int, late: int, failure: str) -> None:
        communicator_id = self.picked(pick)
        self.send(m.Finished(communicator_id, self.generations.get(communicator_id, 1) - late, failure))

    @rule(pick=picks)
    def finalize(self, pick: int) -> None:
        self.send(m.Finalized(self.picked(pick)))

    @rule(pick=picks)
    def destroy(self, pick: int) -> None:
        communicator_id = self.picked(pick)
        known = communicator_id in self.state.communicators
        self.send(m.Destroyed(communicator_id))
        assert communicator_id not in self.state.communicators
        if known:
            self.destroyed.add(communicator_id)

    @rule()
    def restart(self) -> None:
        """Kill the coordinator; its successor rewrites the journal as FileJournal does."""
        self.state = self.replayed()
        self.journal = [encode(entry) for entry in snapshot(self.state)]
        assert self.replayed() == self.state, "the snapshot differs from the state"

    def replayed(self) -> State:
        return replay(decode(b"".join(self.journal), Path("journal")), CONFIG, self.now)

    # ---- invariants

    @invariant()
    def generations_do_not_decrease_and_ids_are_not_reused(self) -> None:
        for one in self.state.communicators.values():
            assert one.generation >= self.generations.get(one.id, 1)
            assert one.id not in self.destroyed
            assert one.id < self.state.next_communicator
            self.generations[one.id] = one.generation

    @invariant()
    def device_ids_are_consistent_and_lost_devices_have_a_reason(self) -> None:
        assert all(key == member.info.device_id > 0 for key, member in self.state.members.items())
        assert all(member.reason for member in self.state.members.values() if not member.usable)

    @invariant()
    def only_alive_and_suspect_devices_are_usable(self) -> None:
        usable = self.state.usable()
        assert sorted(usable) == sorted(
            key for key, member in self.state.members.items() if member.health in (Health.ALIVE, Health.SUSPECT)
        )

    @invariant()
    def a_lost_device_breaks_its_communicators(self) -> None:
        for one in self.state.communicators.values():
            assert len(set(one.members)) == len(one.members) > 0
            if not all(self.state.members[device_id].usable for device_id in one.members):
                assert one.broken_by in one.members
            if one.broken_by:
                assert (one.outcome, bool(one.reason)) == (OperationOutcome.FAILED, True)

    @invariant()
    def the_journal_replays_to_the_state(self) -> None:
        again = self.replayed()
        assert {key: one.info for key, one in again.members.items()} == {
            key: one.info for key, one in self.state.members.items()
        }
        assert {key: one.usable or one.health for key, one in again.members.items()} == {
            key: one.usable or one.health for key, one in self.state.members.items()
        }
        assert [communicator_entry(one) for one in again.communicators.values()] == [
            communicator_entry(one) for one in self.state.communicators.values()
        ], "communicators differ in more than the outcome of their last operation"
        assert again.next_communicator == self.state.next_communicator


Membership.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestMembership = Membership.TestCase
