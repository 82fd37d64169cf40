"""When a job goes on without a device that is to leave: by its replacement, or without one after a deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from roster import NOW, after, cluster, dead, device

from hoop.errors import FailedPrecondition, NotFound
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.job_membership import HandoverStage


class Job:
    """A job on these devices, of a cluster that may have more. ``then``: what follows when its ranks run steps."""

    then: tuple[jm.JobInstruction, ...] = ()

    def __init__(self, *device_ids: int, planned: bool = True, idle: int = 0, min_ranks: int = 1) -> None:
        self.state = after(cluster(*device_ids), m.Created(device_ids), m.JobStarted(1, "{}"))
        if idle:
            self.join(idle)
        self.view = jm.JobView(1, planned=planned, size=len(device_ids), min_ranks=min_ranks)
        self.now = NOW
        for key in device_ids:
            self.handle(jm.TaskFound(key, "a", 1))
        self.handle(jm.TasksListed())

    def join(self, device_id: int) -> None:
        self.state = after(self.state, m.Joined(device(device_id), NOW), m.Heartbeat(device_id, "a", NOW))

    def handle(self, event: jm.JobMembershipEvent) -> tuple[jm.JobInstruction, ...]:
        self.view, instructions = jm.advance(self.view, event, self.state, self.now)
        return instructions

    def arrive(self, device_id: int) -> None:
        """A device joins and begins to load the job."""
        self.join(device_id)
        assert jm.Invite(device_id) in self.handle(jm.DeviceArrived(device_id))

    def carry_out(self, instructions: tuple[jm.JobInstruction, ...]) -> tuple[int, ...]:
        """Assigns and delivers the ranks, and runs steps with them; returns the members."""
        (assign,) = (one for one in instructions if isinstance(one, jm.Assign))
        self.state = after(self.state, m.Rebuilt(1, assign.joining, assign.leaving, assign.planned))
        one = self.state.communicator(1)
        self.handle(jm.Assigned(one.generation, assign.planned))
        self.handle(jm.Delivered(one.generation))
        self.then = self.handle(jm.TaskResumed(one.generation))
        return one.members

    def stage(self, device_id: int) -> HandoverStage:
        return jm.handover(self.view, self.state, device_id, self.now).stage


@pytest.mark.parametrize("planned", [True, False])
def test_a_device_leaves_when_its_replacement_is_ready(planned: bool) -> None:
    job = Job(1, 2, planned=planned)
    job.arrive(3)
    assert job.handle(jm.LeaveRequested(1, NOW)) == (), "device 3 is loading: one move, not two"
    job.now += 12.0
    assert jm.handover(job.view, job.state, 1, job.now) == jm.Handover(HandoverStage.LOADING, (3,), 12.0)
    assert job.carry_out(job.handle(jm.TaskReady(3, "a"))) == (2, 3)
    assert job.then == (jm.Release(1, True),)
    job.handle(jm.TaskFinished(1, "a"))
    assert job.stage(1) == HandoverStage.DONE


@pytest.mark.parametrize("planned", [True, False])
def test_the_last_device_stays_until_its_replacement_has_the_state(planned: bool) -> None:
    """It was given up before: the job ended although its replacement was loading it."""
    job = Job(1, planned=planned)
    job.arrive(2)
    job.handle(jm.LeaveRequested(1, NOW))
    assert not job.view.all_leaving
    assert job.carry_out(job.handle(jm.TaskReady(2, "a"))) == (1, 2), "first the state is copied to device 2"
    assert job.carry_out(job.then) == (2,)
    assert job.then == (jm.Release(1, True),)


def test_the_wait_for_a_loading_device_is_announced_and_has_no_end() -> None:
    job = Job(1)
    job.arrive(2)
    assert job.handle(jm.LeaveRequested(1, NOW)) == ()
    job.now += 1.0
    assert job.handle(jm.JobTick()) == (jm.AwaitLoading((2,), 1.0),)
    assert job.handle(jm.JobTick()) == (), "not with every tick"
    job.now += 3600.0
    assert job.handle(jm.JobTick()) == (jm.AwaitLoading((2,), 3601.0),)
    job.state = after(job.state, dead(2))
    job.handle(jm.TaskLost(2, "a"))
    assert job.view.all_leaving, "it sends no heartbeats any more: no device can take over"


def test_a_device_without_work_is_invited_to_take_the_place() -> None:
    job = Job(1, 2, idle=7)
    assert job.handle(jm.LeaveRequested(2, NOW + 60.0)) == (jm.Invite(7),)
    assert job.carry_out(job.handle(jm.TaskReady(7, "a"))) == (1, 7)


def test_without_a_replacement_the_others_go_on_after_the_deadline() -> None:
    job = Job(1, 2)
    assert job.handle(jm.LeaveRequested(2, NOW + 60.0)) == ()
    job.now += 59.0
    assert job.handle(jm.JobTick()) == ()
    assert job.stage(2) == HandoverStage.WAITING
    job.now += 1.0
    assert job.carry_out(job.handle(jm.JobTick())) == (1,)


def test_a_strategy_that_needs_two_devices_keeps_them() -> None:
    job = Job(1, 2, planned=False, min_ranks=2)
    job.handle(jm.LeaveRequested(2, NOW))
    job.now += 60.0
    assert job.handle(jm.JobTick()) == ()
    assert job.stage(2) == HandoverStage.WAITING


def test_a_strategy_that_needs_two_devices_waits_for_one_that_loads_after_a_loss() -> None:
    """It went on with one device before, and the job failed although the next one was loading it."""
    job = Job(1, 2, planned=False, min_ranks=2)
    job.arrive(3)
    job.state = after(job.state, dead(2))
    job.now += 5.0
    assert job.handle(jm.TaskLost(2, "a")) == (jm.AwaitLoading((3,), 5.0),)
    assert job.carry_out(job.handle(jm.TaskReady(3, "a"))) == (1, 3)


def test_owners_of_replicas_leave_one_after_the_other() -> None:
    """Two devices that left with the same assignment could take the only copies of their state with them."""
    job = Job(1, 2, 3, planned=False)
    first = job.handle(jm.LeaveRequested(1, NOW))
    job.handle(jm.LeaveRequested(2, NOW))
    assert job.stage(2) == HandoverStage.MOVING
    assert job.carry_out(first) == (2, 3)
    assert job.carry_out(job.then) == (3,)


def test_a_cancelled_leave_changes_nothing() -> None:
    job = Job(1, 2)
    before = job.view
    job.handle(jm.LeaveRequested(2, NOW + 60.0))
    job.handle(jm.LeaveCancelled(2))
    assert replace(job.view, all_leaving=False) == before
    job.now += 61.0
    assert job.handle(jm.JobTick()) == ()


def test_a_device_whose_leave_is_cancelled_too_late_is_invited_again() -> None:
    job = Job(1, 2)
    assert job.carry_out(job.handle(jm.LeaveRequested(2, NOW))) == (1,)
    job.handle(jm.TaskFinished(2, "a"))
    assert job.handle(jm.LeaveCancelled(2)) == (jm.Invite(2),)


def test_a_device_whose_state_the_others_lack_gets_a_rank_again_before_it_leaves() -> None:
    """Device 1 has left its generation; the others lack state that it has. It is not done before they have it."""
    job = Job(1, 2, planned=False)
    first = job.handle(jm.LeaveRequested(1, NOW))
    job.state = after(job.state, m.Drained(1))
    (assign,) = (one for one in first if isinstance(one, jm.Assign))
    job.state = after(job.state, m.Rebuilt(1, assign.joining, assign.leaving))
    assert job.handle(jm.Assigned(2)) == (jm.Release(1, False),)
    assert jm.Invite(1) in job.handle(jm.TaskWaiting(2, "a", 2, "second was lost", "PeerLost"))
    assert job.stage(1) == HandoverStage.MOVING
    assert job.handle(jm.TaskReady(1, "a")) == (jm.Assign(joining=(1,)),)
    assert job.stage(1) == HandoverStage.MOVING


def test_all_devices_that_leave_at_once_wait_for_nothing() -> None:
    job = Job(1, 2)
    job.handle(jm.LeaveRequested(1, NOW))
    job.handle(jm.LeaveRequested(2, NOW))
    assert job.view.all_leaving


def test_earlier_losses_need_no_replacement_when_a_device_leaves() -> None:
    job = Job(1, 2, 3)
    job.state = after(job.state, dead(3))
    assert job.carry_out(job.handle(jm.TaskLost(3, "a"))) == (1, 2)
    job.handle(jm.LeaveRequested(2, NOW + 60.0))
    job.arrive(4)
    assert job.carry_out(job.handle(jm.TaskReady(4, "a"))) == (1, 4)


def test_a_device_that_is_drained_gets_no_new_work() -> None:
    job = Job(1, idle=2)
    job.state = after(job.state, m.Drained(2))
    assert job.handle(jm.DeviceArrived(2)) == ()
    assert job.state.usable() == [1]
    with pytest.raises(FailedPrecondition, match=r"^device 2 .* is being drained and gets no new work; choose another"):
        after(job.state, m.Created((1, 2)))
    assert after(job.state, m.Joined(device(2), NOW)).members[2].draining, (
        "a device that stalled is drained all the same"
    )
    assert not after(job.state, m.Drained(2, draining=False)).members[2].draining
    with pytest.raises(NotFound, match=r"^device 9 is unknown"):
        after(job.state, m.Drained(9))
