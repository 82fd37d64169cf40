"""The rules of a job's membership one by one; ``tests/model`` runs them under every kind of fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from roster import CONFIG, NOW, after, cluster, dead, device

from hoop.errors import MembershipChanged
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership import task_membership as tm


class Job:
    """A job on devices of a cluster, and what it was last told to do."""

    def __init__(self, *device_ids: int, planned: bool = True) -> None:
        self.state = after(cluster(*device_ids), m.Created(device_ids))
        self.view = jm.JobView(1, planned=planned, restart_grace_s=60.0)
        self.now = NOW
        for key in device_ids:
            self.told(jm.TaskFound(key, "a", 1))
        self.told(jm.TasksListed())

    def told(self, event: jm.JobMembershipEvent) -> tuple[jm.JobInstruction, ...]:
        self.view, instructions = jm.advance(self.view, event, self.state, self.now)
        return instructions

    def cluster(self, *messages: m.MembershipEvent) -> tuple[jm.JobInstruction, ...]:
        self.state = after(self.state, *messages)
        return self.told(jm.JobTick())

    def assigned(self, assign: jm.JobInstruction) -> tuple[jm.JobInstruction, ...]:
        """The assignment is made and delivered."""
        assert isinstance(assign, jm.Assign)
        self.state = after(self.state, m.Rebuilt(1, assign.joining, assign.leaving, assign.planned))
        generation = self.state.communicator(1).generation
        return self.told(jm.Assigned(generation, assign.planned)) + self.told(jm.Delivered(generation))

    @property
    def generation(self) -> int:
        return self.state.communicator(1).generation


def test_a_lost_member_means_new_ranks_at_once() -> None:
    job = Job(1, 2, 3)
    (assign,) = job.cluster(dead(2))
    assert assign == jm.Assign()
    assert job.assigned(assign) == ()
    assert job.state.communicator(1).members == (1, 3)
    assert job.told(jm.TaskLost(2, "a")) == ()


def test_ranks_that_wait_without_a_reason_get_new_ones_each_time_after_twice_the_pause() -> None:
    job, pauses = Job(1, 2), []
    for _ in range(7):
        began = job.now
        found = job.told(jm.TaskWaiting(1, "a", job.generation))
        while not found:
            job.now += 0.05
            found = job.told(jm.JobTick())
        pauses.append(job.now - began)
        job.assigned(found[0])
    assert pauses[0] == pytest.approx(CONFIG.lease_s, abs=0.1)
    assert pauses[1] == pytest.approx(2 * CONFIG.lease_s, abs=0.1)
    assert max(pauses) <= jm.MAX_BACKOFF_S + 0.1
    job.told(jm.TaskResumed(job.generation))
    assert job.view.attempts == 0


def test_one_that_left_an_older_generation_finds_the_newer_rank_by_itself() -> None:
    job = Job(1, 2)
    job.assigned(job.cluster(m.Complained(1, 1, 1, 2, NOW), m.Tick(NOW + 0.3), m.Tick(NOW + 0.5))[0])
    before = job.view
    job.told(jm.TaskWaiting(1, "a", 1))
    assert job.view == before


def test_a_part_of_the_state_is_missing_and_a_device_may_still_have_it() -> None:
    """Device 2 is only silent: the job waits for it, and gives it a rank as soon as it is back."""
    job = Job(1, 2, planned=False)
    beats = [m.Heartbeat(1, "a", NOW + tenths / 10) for tenths in range(1, 20)]
    ticks = [m.Tick(NOW + tenths / 10) for tenths in range(1, 20)]
    (assign,) = job.cluster(*(one for pair in zip(beats, ticks, strict=True) for one in pair))
    job.assigned(assign)
    job.told(jm.TaskLost(2, "a"))
    found = job.told(jm.TaskWaiting(1, "a", job.generation, "second was lost", "PeerLost"))
    assert found == (jm.Await((2,), 60.0),)
    job.state = after(job.state, m.Joined(device(2), NOW + 2.0))
    assert jm.Invite(2) in job.told(jm.DeviceArrived(2))
    assert job.told(jm.TaskReady(2, "a")) == (jm.Assign(joining=(2,)),)


def test_a_part_of_the_state_is_missing_and_nobody_can_have_it() -> None:
    job = Job(1, 2, planned=False)
    job.assigned(job.cluster(dead(2))[0])
    job.told(jm.TaskLost(2, "a"))
    found = job.told(jm.TaskWaiting(1, "a", job.generation, "second was lost", "PeerLost"))
    assert found == (jm.Release(1, True), jm.End("PeerLost", "second was lost"))


def keep_memory(job: Job) -> None:
    """From now on every device has an arena that outlives its process."""
    members = {key: replace(one, info=replace(one.info, keeps_memory=True)) for key, one in job.state.members.items()}
    job.state = replace(job.state, members=members)


def evicted(job: Job) -> None:
    """Devices 1 and 2 fail to reach each other, over new links too: device 2 is left out."""
    for _ in range(2):
        complaint = m.Complained(1, job.generation, 1, 2, job.now)
        beats = [m.Heartbeat(key, "a", job.now + 0.4) for key in job.state.members]
        (assign,) = job.cluster(complaint, *beats, m.Tick(job.now + 0.5))
        job.now += 0.5
        released = job.assigned(assign)
    assert job.state.link_faults_of(1).evicted_until
    assert released == (jm.Release(2, False),)


def test_an_evicted_device_keeps_its_state_until_the_others_are_at_work() -> None:
    job = Job(1, 2, 3)
    evicted(job)
    assert job.told(jm.TaskResumed(job.generation)) == (jm.Release(2, True),)


def test_an_evicted_device_may_come_back_at_once_where_its_state_is_needed() -> None:
    job = Job(1, 2, 3, planned=False)
    evicted(job)
    for key in (1, 3):
        found = job.told(jm.TaskWaiting(key, "a", job.generation, "second was lost", "PeerLost"))
    assert jm.Readmit(2) in found
    job.state = after(job.state, m.Readmitted(1, 2))
    assert not job.state.link_faults_of(1).evicted_until
    assert job.told(jm.DeviceArrived(2)) == (jm.Invite(2),)
    assert job.told(jm.TaskReady(2, "a")) == (jm.Assign(joining=(2,)),)


def test_a_device_that_loads_what_the_job_lacks_is_waited_for_beyond_the_grace() -> None:
    job = Job(1, 2, planned=False)
    keep_memory(job)
    job.assigned(job.cluster(dead(2))[0])
    job.told(jm.TaskLost(2, "a"))
    job.told(jm.TaskWaiting(1, "a", job.generation, "second was lost", "PeerLost"))
    job.state = after(job.state, m.Joined(replace(device(2, "b"), keeps_memory=True), NOW + 59.0))
    assert jm.Invite(2) in job.told(jm.DeviceArrived(2))
    job.now = NOW + 61.0
    assert job.told(jm.JobTick()) == ()
    job.now = NOW + 121.0
    assert job.told(jm.JobTick())[-1] == jm.End("PeerLost", "second was lost")


def test_all_are_lost_and_those_that_keep_their_memory_are_waited_for() -> None:
    job = Job(1, 2)
    keep_memory(job)
    assert job.cluster(dead(1), dead(2)) == (jm.Assign(),)
    job.told(jm.TaskLost(1, "a"))
    job.told(jm.TaskLost(2, "a"))
    assert job.told(jm.AssignFailed()) == (jm.Await((1, 2), 60.0),)
    job.now += 59.0
    assert job.told(jm.JobTick()) == ()
    job.now += 1.0
    assert job.told(jm.JobTick()) == (jm.End(),)


def test_a_failed_task_ends_the_job_at_once() -> None:
    job = Job(1, 2)
    assert job.told(jm.TaskFinished(2, "a", failed=True)) == (jm.Release(1, True), jm.End())


def test_a_device_joins_between_two_steps() -> None:
    job = Job(1, 2)
    job.state = after(job.state, m.Joined(device(3), NOW))
    assert job.told(jm.DeviceArrived(3)) == (jm.Invite(3),)
    (assign,) = job.told(jm.TaskReady(3, "a"))
    assert assign == jm.Assign((3,), (), planned=True)
    assert job.assigned(assign) == (jm.Move((1, 2)),)
    assert job.told(jm.TaskResumed(2)) == ()


def test_a_device_that_leaves_dies_before_the_others_have_moved() -> None:
    """They wait for it in the generation before, in which they may never notice: they get new ranks at once."""
    job = Job(1, 2, 3)
    (assign,) = job.told(jm.LeaveRequested(3))
    assert job.assigned(assign) == (jm.Release(3, False), jm.Move((1, 2, 3)))
    job.state = after(job.state, dead(3))
    assert job.told(jm.TaskLost(3, "a")) == (jm.Assign(),)


def test_a_device_that_cannot_be_reached_is_asked_again_and_one_that_is_refused_is_not() -> None:
    job = Job(1)
    job.state = after(job.state, m.Joined(device(2), NOW), m.Joined(device(3, "b"), NOW))
    job.told(jm.DeviceArrived(2))
    job.told(jm.DeviceArrived(3))
    job.told(jm.InviteFailed(2, "a", refused=False))
    job.told(jm.InviteFailed(3, "b", refused=True))
    job.now += CONFIG.lease_s
    assert job.told(jm.JobTick()) == (jm.Invite(2),)


# ---- the device's side


def test_a_stale_assignment_is_dropped_for_the_newer_one() -> None:
    state = tm.took(tm.TaskRanks(), 1)
    state = tm.assigned(state, 4, planned=False)
    with pytest.raises(MembershipChanged, match="generation 3 is over: this device is at 4"):
        tm.assigned(state, 3, planned=False)
    assert tm.assigned(state, 4, planned=False) == state
    assert (tm.outdated(state), tm.next_step(state)) == (True, tm.NextStep.TAKE)
    assert tm.next_step(tm.took(state, 4)) == tm.NextStep.WAIT


def test_a_planned_assignment_leaves_the_links_alone_until_all_move() -> None:
    state = tm.assigned(tm.took(tm.TaskRanks(), 1), 2, planned=True)
    assert not tm.outdated(state)
    assert not state.move
    assert tm.moving(state).move
    assert not tm.moving(tm.took(state, 2)).move, "a move that is over"


def test_a_released_task_stays_until_it_is_dismissed_and_may_be_called_back() -> None:
    state = tm.released(tm.took(tm.TaskRanks(), 1), final=False)
    assert tm.next_step(state) == tm.NextStep.HAND_OVER
    assert tm.next_step(tm.assigned(state, 2, planned=False)) == tm.NextStep.TAKE
    assert tm.next_step(tm.released(state, final=True)) == tm.NextStep.LEAVE


def test_what_was_stopped_while_links_were_made_is_outdated_from_the_start() -> None:
    state = tm.stopped(tm.assigned(tm.TaskRanks(), 2, planned=False), 2)
    assert tm.outdated(tm.took(state, 2))
    assert not tm.outdated(tm.took(tm.assigned(state, 3, planned=False), 3))


def test_a_task_that_was_left_out_says_so_once() -> None:
    state = tm.assigned(tm.rejoined(tm.took(tm.TaskRanks(), 3)), 5, planned=True)
    assert (state.left_out, state.generation) == (True, 5)
    assert not tm.took(state, 5).left_out


def test_nothing_is_decided_of_a_job_that_is_over() -> None:
    job = Job(1)
    job.told(jm.TaskFinished(1, "a", finished=True))
    assert job.view.over
    assert job.told(jm.TaskReady(1, "a")) == ()
