"""Any sequence of messages at all: what always holds of the state, and of what a restart makes of its journal.

The machine sends random messages, sensible or not, and now and then restarts the coordinator: it goes on with
the state that its journal replays to.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from roster import CONFIG, NOW, device, stops

from hoop.errors import MembershipChanged, UserError
from hoop.membership import messages as m
from hoop.membership.entries import communicator_entry
from hoop.membership.journal import decode, encode, replay, snapshot
from hoop.membership.state import Health, Outcome, State
from hoop.membership.step import step

device_ids = st.integers(1, 5)
picks = st.integers(0, 5)
incarnations = st.sampled_from("ab")
failures = st.sampled_from(["", "connection refused"])


class Membership(RuleBasedStateMachine):
    """A coordinator's state, its journal, and what has been seen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.state = State(CONFIG, last_tick=self.now)
        self.journal: list[bytes] = []
        self.generations: dict[int, int] = {}
        """The highest of each communicator that there ever was."""
        self.destroyed: set[int] = set()

    def send(self, message: m.Message) -> None:
        old, members, communicators = self.state, dict(self.state.members), dict(self.state.communicators)
        try:
            new, instructions = step(old, message)
        except (UserError, MembershipChanged):
            new, instructions = old, ()
        assert (old.members, old.communicators) == (members, communicators), "the old state was changed"
        records = [one.entry for one in instructions if isinstance(one, m.Record)]
        self.journal += map(encode, records)
        self.check_told(old, new, instructions)
        self.state = new

    def check_told(self, old: State, new: State, instructions: tuple[m.Instruction, ...]) -> None:
        """Whoever works on something that is over is told to stop; of further losses too, for its streams."""
        told: dict[tuple[int, int], list[m.Stop]] = {}
        for one in stops(instructions):
            told.setdefault((one.communicator_id, one.generation), []).append(one)
        for before in old.communicators.values():
            now = new.communicators.get(before.id)
            broke = now is not None and now.broken_by != 0 and before.broken_by == 0
            if now is None or now.generation != before.generation or broke:
                stop = told[before.id, before.generation].pop(0)
                assert stop.members == before.members
                assert stop.lost_device == (now.broken_by if now is not None and broke else 0)
        for further in (stop for left in told.values() for stop in left):
            assert new.communicators[further.communicator_id].broken_by, "a stop of something that goes on"
            assert further.lost_device in further.members

    def picked(self, pick: int) -> int:
        """One of the communicators that there are; now and then one that there is not."""
        known = sorted(self.state.communicators)
        return known[pick - 1] if 0 < pick <= len(known) else known[-1] if pick and known else 1000

    # ---- anything may happen

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
        self.send(m.Beat(device_id, incarnation, self.now))

    @rule()
    def everybody_beats(self) -> None:
        for member in self.state.members.values():
            self.send(m.Beat(member.info.device_id, member.info.incarnation, self.now))

    @rule(device_id=device_ids, failure=failures)
    def call(self, device_id: int, failure: str) -> None:
        self.send(m.Called(device_id, failure, self.now))

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
            silent = [self.now - one.pulse.last_beat for one in self.state.members.values() if one.usable]
            assert max(silent, default=0.0) <= CONFIG.lease_s

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

    @rule(pick=picks)
    def rebuild(self, pick: int) -> None:
        self.send(m.Rebuilt(self.picked(pick)))

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
        """The coordinator is killed; its successor rewrites the journal as FileJournal does."""
        self.state = self.replayed()
        self.journal = [encode(entry) for entry in snapshot(self.state)]
        assert self.replayed() == self.state, "a snapshot is the state"

    def replayed(self) -> State:
        return replay(decode(b"".join(self.journal), Path("journal")), CONFIG, self.now)

    # ---- and this always holds

    @invariant()
    def generations_do_not_decrease_and_ids_do_not_come_back(self) -> None:
        for one in self.state.communicators.values():
            assert one.generation >= self.generations.get(one.id, 1)
            assert one.id not in self.destroyed
            assert one.id < self.state.next_communicator
            self.generations[one.id] = one.generation

    @invariant()
    def every_device_is_itself(self) -> None:
        assert all(key == member.info.device_id > 0 for key, member in self.state.members.items())
        assert all(member.reason for member in self.state.members.values() if not member.usable)

    @invariant()
    def only_the_living_are_usable(self) -> None:
        usable = self.state.usable()
        assert sorted(usable) == sorted(
            key
            for key, member in self.state.members.items()
            if member.health in (Health.ALIVE, Health.SUSPECT)
        )

    @invariant()
    def who_is_gone_breaks_its_communicators(self) -> None:
        for one in self.state.communicators.values():
            assert len(set(one.members)) == len(one.members) > 0
            if not all(self.state.members[device_id].usable for device_id in one.members):
                assert one.broken_by in one.members
            if one.broken_by:
                assert (one.outcome, bool(one.reason)) == (Outcome.FAILED, True)

    @invariant()
    def the_journal_replays_to_it(self) -> None:
        again = self.replayed()
        assert {key: one.info for key, one in again.members.items()} == {
            key: one.info for key, one in self.state.members.items()
        }
        assert {key: one.usable or one.health for key, one in again.members.items()} == {
            key: one.usable or one.health for key, one in self.state.members.items()
        }
        assert [communicator_entry(one) for one in again.communicators.values()] == [
            communicator_entry(one) for one in self.state.communicators.values()
        ], "all but the outcome of their latest work"
        assert again.next_communicator == self.state.next_communicator


Membership.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestMembership = Membership.TestCase
