"""Each rule of a job's membership; ``tests/model`` checks them under every kind of fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from roster import CONFIG, NOW, after, cluster, dead, device, pass_time, ran_until

from hoop.errors import MembershipChanged
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership import task_membership as tm


class Job:
    """A job on the devices of a cluster, driven by membership events."""

    def __init__(self, *device_ids: int, planned: bool = True) -> None:
        self.state = after(cluster(*device_ids), m.Created(device_ids))
        self.view = jm.JobView(1, planned=planned, restart_grace_s=60.0)
        self.now = NOW
        for key in device_ids:
            self.handle(jm.TaskFound(key, "a", 1))
        self.handle(jm.TasksListed())

    def handle(self, event: jm.JobMembershipEvent) -> tuple[jm.JobInstruction, ...]:
        self.view, instructions = jm.advance(self.view, event, self.state, self.now)
        return instructions

    def update_cluster(self, *messages: m.MembershipEvent) -> tuple[jm.JobInstruction, ...]:
        self.state = after(self.state, *messages)
        return self.handle(jm.JobTick())

    def pass_time(self, seconds: float, *beating: int) -> tuple[jm.JobInstruction, ...]:
        """Time passes for a punctual coordinator, which hears these devices."""
        instructions: tuple[jm.JobInstruction, ...] = ()
        for _ in range(round(seconds / 0.5)):
            self.state = pass_time(self.state, self.now, self.now + 0.5, *beating)
            self.now += 0.5
            instructions += self.handle(jm.JobTick())
        return instructions

    def carry_out(self, assign: jm.JobInstruction) -> tuple[jm.JobInstruction, ...]:
        """Assign the ranks and deliver them."""
        assert isinstance(assign, jm.Assign)
        self.state = after(self.state, m.Rebuilt(1, assign.joining, assign.leaving, assign.planned))
        generation = self.state.communicator(1).generation
        return self.handle(jm.Assigned(generation, assign.planned)) + self.handle(jm.Delivered(generation))

    @property
    def generation(self) -> int:
        return self.state.communicator(1).generation


def test_a_lost_member_causes_a_rank_assignment_at_once() -> None:
    job = Job(1, 2, 3)
    (assign,) = job.update_cluster(dead(2))
    assert assign == jm.Assign()
    assert job.carry_out(assign) == ()
    assert job.state.communicator(1).members == (1, 3)
    assert job.handle(jm.TaskLost(2, "a")) == ()


def test_ranks_that_wait_for_an_unknown_reason_are_reassigned_with_backoff() -> None:
    job, pauses = Job(1, 2), []
    for _ in range(7):
        began = job.now
        instructions = job.handle(jm.TaskWaiting(1, "a", job.generation))
        while not instructions:
            job.now += 0.05
            instructions = job.handle(jm.JobTick())
        pauses.append(job.now - began)
        job.carry_out(instructions[0])
    assert pauses[0] == pytest.approx(CONFIG.lease_s, abs=0.1)
    assert pauses[1] == pytest.approx(2 * CONFIG.lease_s, abs=0.1)
    assert max(pauses) <= jm.MAX_BACKOFF_S + 0.1
    job.handle(jm.TaskResumed(job.generation))
    assert job.view.attempts == 0


def test_a_task_that_left_an_older_generation_causes_no_new_assignment() -> None:
    job = Job(1, 2)
    job.carry_out(job.update_cluster(m.LinkFailureReported(1, 1, 1, 2, NOW), m.Tick(NOW + 0.3), m.Tick(NOW + 0.5))[0])
    before = job.view
    job.handle(jm.TaskWaiting(1, "a", 1))
    assert job.view == before


def test_the_job_waits_for_a_device_that_may_have_missing_state() -> None:
    """Device 2 is only silent: the job waits for it, and assigns it a rank when it is back."""
    job = Job(1, 2, planned=False)
    beats = [m.Heartbeat(1, "a", NOW + tenths / 10) for tenths in range(1, 20)]
    ticks = [m.Tick(NOW + tenths / 10) for tenths in range(1, 20)]
    (assign,) = job.update_cluster(*(one for pair in zip(beats, ticks, strict=True) for one in pair))
    job.carry_out(assign)
    job.handle(jm.TaskLost(2, "a"))
    instructions = job.handle(jm.TaskWaiting(1, "a", job.generation, "second was lost", "PeerLost"))
    assert instructions == (jm.Await((2,), 60.0),)
    job.state = after(job.state, m.Joined(device(2), NOW + 2.0))
    assert jm.Invite(2) in job.handle(jm.DeviceArrived(2))
    assert job.handle(jm.TaskReady(2, "a")) == (jm.Assign(joining=(2,)),)


def test_the_job_ends_if_no_device_can_have_missing_state() -> None:
    job = Job(1, 2, planned=False)
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    instructions = job.handle(jm.TaskWaiting(1, "a", job.generation, "second was lost", "PeerLost"))
    assert instructions == (jm.Release(1, True), jm.End("PeerLost", "second was lost"))


@pytest.mark.parametrize("planned", [False, True])
def test_a_device_with_which_the_ranks_cannot_go_on_is_refused(planned: bool) -> None:
    """It has too little memory for its part: all ranks find that out, and the others go on without it."""
    job = Job(1, 2, planned=planned)
    job.state = after(job.state, m.Joined(device(3), NOW))
    job.handle(jm.DeviceArrived(3))
    job.carry_out(job.handle(jm.TaskReady(3, "a"))[0])
    for key in (1, 2):
        assert job.handle(jm.TaskWaiting(key, "a", job.generation, "memory: rank 2", "FailedPrecondition")) == ()
    refusal = job.handle(jm.TaskWaiting(3, "a", job.generation, "memory: rank 2", "FailedPrecondition"))
    assert refusal == (jm.Refuse(3, "memory: rank 2"), jm.Assign(leaving=(3,)))
    assert job.handle(jm.InviteFailed(3, "a")) == ()
    job.carry_out(refusal[1])
    assert job.state.communicator(1).members == (1, 2)
    assert job.view.participants == {1, 2}, "nobody waits for its state"
    assert job.handle(jm.TaskResumed(job.generation)) == ()
    assert job.handle(jm.DeviceArrived(2)) == ()


def test_a_device_that_has_just_joined_is_kept_if_state_is_lacking() -> None:
    job = Job(1, 2, planned=False)
    job.state = after(job.state, m.Joined(device(3), NOW))
    job.handle(jm.DeviceArrived(3))
    job.carry_out(job.handle(jm.TaskReady(3, "a"))[0])
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    job.handle(jm.TaskWaiting(1, "a", job.generation, "second was lost", "TrainingStateLost"))
    instructions = job.handle(jm.TaskWaiting(3, "a", job.generation, "second was lost", "TrainingStateLost"))
    assert instructions[-1] == jm.End("TrainingStateLost", "second was lost")


def make_arenas_persistent(job: Job) -> None:
    """Give every device an arena that outlives its process."""
    members = {key: replace(one, info=replace(one.info, keeps_memory=True)) for key, one in job.state.members.items()}
    job.state = replace(job.state, members=members)


def evict_device_2(job: Job) -> None:
    """Devices 1 and 2 cannot reach each other, even over new links, so device 2 is evicted."""
    for _ in range(2):
        complaint = m.LinkFailureReported(1, job.generation, 1, 2, job.now)
        beats = [m.Heartbeat(key, "a", job.now + 0.4) for key in job.state.members]
        (assign,) = job.update_cluster(complaint, *beats, m.Tick(job.now + 0.5))
        job.now += 0.5
        released = job.carry_out(assign)
    assert job.state.link_faults_of(1).evicted_until
    assert released == (jm.Release(2, False),)


def test_an_evicted_device_keeps_its_state_until_the_others_resume() -> None:
    job = Job(1, 2, 3)
    evict_device_2(job)
    assert job.handle(jm.TaskResumed(job.generation)) == (jm.Release(2, True),)


def test_an_evicted_device_is_readmitted_at_once_if_its_state_is_needed() -> None:
    job = Job(1, 2, 3, planned=False)
    evict_device_2(job)
    for key in (1, 3):
        instructions = job.handle(jm.TaskWaiting(key, "a", job.generation, "second was lost", "PeerLost"))
    assert jm.Readmit(2) in instructions
    job.state = after(job.state, m.Readmitted(1, 2))
    assert not job.state.link_faults_of(1).evicted_until
    assert job.handle(jm.DeviceArrived(2)) == (jm.Invite(2),)
    assert job.handle(jm.TaskReady(2, "a")) == (jm.Assign(joining=(2,)),)


def test_the_job_waits_beyond_the_grace_for_a_device_that_loads_missing_state() -> None:
    job = Job(1, 2, planned=False)
    make_arenas_persistent(job)
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    job.handle(jm.TaskWaiting(1, "a", job.generation, "second was lost", "PeerLost"))
    job.state = after(job.state, m.Joined(replace(device(2, "b"), keeps_memory=True), NOW + 59.0))
    assert jm.Invite(2) in job.handle(jm.DeviceArrived(2))
    job.now = NOW + 61.0
    job.state = ran_until(job.state, job.now)
    assert job.handle(jm.JobTick()) == (jm.AwaitLoading((2,), 61.0),)
    job.now = NOW + 1000.0
    job.state = ran_until(job.state, job.now)
    assert job.handle(jm.JobTick()) == (jm.AwaitLoading((2,), 1000.0),), "as long as it sends heartbeats"
    job.handle(jm.TaskLost(2, "b"))
    job.state = after(job.state, m.Probed(2, "b", "connection refused"))
    assert jm.Await((2,), 60.0) not in job.handle(jm.JobTick())
    assert job.view.over


def test_a_job_without_devices_waits_for_those_with_persistent_arenas() -> None:
    job = Job(1, 2)
    make_arenas_persistent(job)
    assert job.update_cluster(dead(1), dead(2)) == (jm.Assign(),)
    job.handle(jm.TaskLost(1, "a"))
    job.handle(jm.TaskLost(2, "a"))
    assert job.handle(jm.AssignFailed()) == (jm.Await((1, 2), 60.0),)
    assert job.pass_time(59.0) == ()
    job.now += 90.0
    assert job.handle(jm.JobTick()) == (), "the coordinator did not run meanwhile, and could hear no device"
    job.state = after(job.state, m.Tick(job.now))
    assert job.handle(jm.JobTick()) == (), "what came meanwhile is heard first"
    assert job.pass_time(1.0) == (jm.End(),)


def test_the_restart_grace_stands_still_while_the_coordinator_hears_no_device() -> None:
    """Device 2 dies, which may have state that is lacking; then the coordinator is cut off from device 3, too."""
    job = on_arenas(1, 2, 3)
    job.state = after(job.state, m.Left(1, "a"))
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    awaits = job.handle(jm.TaskWaiting(3, "a", job.generation, "second was lost", "PeerLost"))
    assert awaits == (jm.Await((2,), 60.0),)
    job.pass_time(30.0, 3)
    job.pass_time(CONFIG.isolation_s - 1.0)
    job.pass_time(29.0, 3)
    assert not job.view.over
    assert any(isinstance(one, jm.End) for one in job.pass_time(2.0, 3)), "60 s in which it heard a device"


def test_a_failed_task_ends_the_job_at_once() -> None:
    job = Job(1, 2)
    assert job.handle(jm.TaskFinished(2, "a", failed=True)) == (jm.Release(1, True), jm.End())


def test_a_device_joins_between_two_steps() -> None:
    job = Job(1, 2)
    job.state = after(job.state, m.Joined(device(3), NOW))
    assert job.handle(jm.DeviceArrived(3)) == (jm.Invite(3),)
    (assign,) = job.handle(jm.TaskReady(3, "a"))
    assert assign == jm.Assign((3,), (), planned=True)
    assert job.carry_out(assign) == (jm.Move((1, 2)),)
    assert job.handle(jm.TaskResumed(2)) == ()


def test_ranks_are_reassigned_if_a_leaving_device_dies_before_the_others_move() -> None:
    """The others wait for it in the old generation, where they may never notice its death."""
    job = Job(1, 2, 3)
    (assign,) = job.handle(jm.LeaveRequested(3))
    assert job.carry_out(assign) == (jm.Release(3, False), jm.Move((1, 2, 3)))
    job.state = after(job.state, dead(3))
    assert job.handle(jm.TaskLost(3, "a")) == (jm.Assign(),)


def test_an_unreachable_device_is_invited_again_and_one_that_cannot_take_part_is_not() -> None:
    job = Job(1)
    job.state = after(job.state, m.Joined(device(2), NOW), m.Joined(device(3, "b"), NOW))
    job.handle(jm.DeviceArrived(2))
    job.handle(jm.DeviceArrived(3))
    job.handle(jm.InviteFailed(2, "a", refused=False))
    job.handle(jm.InviteFailed(3, "b", refused=True))
    job.now += CONFIG.lease_s
    assert job.handle(jm.JobTick()) == (jm.Invite(2),)


# ---- the end: the weights are the product


def finish(job: Job, device_id: int, parts: int) -> tuple[jm.JobInstruction, ...]:
    taken = job.handle(jm.FinalPartTaken(device_id, 40, 0, parts))
    return taken + job.handle(jm.TaskFinished(device_id, "a", finished=True))


def silence(heard: tuple[int, ...]) -> list[m.MembershipEvent]:
    """Events by which the leases of all devices expire but of those that are heard."""
    times = [NOW + tenths / 10 for tenths in range(1, 20)]
    events: list[m.MembershipEvent] = []
    for at in times:
        events += [m.Heartbeat(key, "a", at) for key in heard]
        events.append(m.Tick(at))
    return events


def test_a_job_at_its_end_waits_for_a_silent_device_that_may_have_a_part_of_the_weights() -> None:
    """Device 2 was cut off when the training ended on it: device 1 alone is not the model."""
    job = Job(1, 2, planned=False)
    job.carry_out(job.update_cluster(*silence(heard=(1,)))[0])
    job.handle(jm.TaskLost(2, "a"))
    assert finish(job, 1, 2) == (jm.Await((2,), 60.0),)
    job.state = after(job.state, m.Joined(device(2), NOW + 2.0))
    assert jm.Invite(2) in job.handle(jm.DeviceArrived(2))
    assert jm.End() in finish(job, 2, 2)


def test_a_data_parallel_job_waits_for_the_device_that_has_the_weights() -> None:
    """One rank of the job has taken the final snapshot: the others tell only that they have reached the end."""
    job = Job(1, 2)
    job.carry_out(job.update_cluster(*silence(heard=(2,)))[0])
    job.handle(jm.TaskLost(1, "a"))
    assert job.handle(jm.TaskFinished(2, "a", finished=True)) == (jm.Await((1,), 60.0),)
    job.state = after(job.state, m.Joined(device(1), NOW + 2.0))
    job.handle(jm.DeviceArrived(1))
    assert jm.End() in finish(job, 1, 1)


def test_a_job_whose_weights_are_lost_does_not_end_with_success() -> None:
    job = Job(1, 2, planned=False)
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    (end,) = finish(job, 1, 2)
    assert isinstance(end, jm.End)
    assert end.error == "TrainingStateLost"
    assert "device 1 had a part of it, and device 2 did not come back" in end.text


def test_a_job_whose_devices_have_no_weights_to_tell_of_ends_with_success() -> None:
    """Tasks that train something of their own, of which no device takes a final snapshot."""
    job = Job(1, 2)
    assert job.handle(jm.TaskFinished(1, "a", finished=True)) == ()
    assert job.handle(jm.TaskFinished(2, "a", finished=True)) == (jm.End(),)


def test_a_device_with_a_part_of_the_weights_does_not_leave_before_the_job_is_over() -> None:
    job = Job(1, 2, planned=False)
    assert finish(job, 1, 2) == ()
    assert jm.handover(job.view, job.state, 1, job.now).stage == jm.HandoverStage.MOVING
    assert finish(job, 2, 2) == (jm.End(),)
    assert jm.handover(job.view, job.state, 1, job.now).stage == jm.HandoverStage.DONE


# ---- a device that hangs


def test_a_device_that_hangs_is_expelled_and_the_others_go_on_at_once() -> None:
    job = Job(1, 2, 3)
    instructions = job.handle(jm.TaskHung(2, "a", 1, "it is in forward"))
    assert instructions == (jm.Expel(2, "it is in forward"), jm.Assign(leaving=(2,)))
    job.carry_out(instructions[1])
    assert job.state.communicator(1).members == (1, 3)
    assert job.handle(jm.TaskLost(2, "a")) == ()
    assert job.handle(jm.TaskResumed(job.generation)) == (), "the process that hung gets no rank again"


def test_a_report_of_an_older_generation_and_the_last_device_expel_nobody() -> None:
    job = Job(1, 2)
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    assert job.handle(jm.TaskHung(1, "a", 1, "it was in forward")) == ()
    assert job.handle(jm.TaskHung(1, "a", job.generation, "it is in forward")) == ()


def test_a_device_that_lives_and_sends_no_heartbeat_for_long_is_expelled() -> None:
    """Its process was seen to run, so that it is not dead: code in it holds the interpreter's lock."""
    job = Job(1, 2)
    job.view = replace(job.view, hang_s=10.0)
    seen: list[m.MembershipEvent] = []
    for halves in range(1, 40):
        seen += [m.Heartbeat(1, "a", NOW + halves / 2), m.Probed(2, "a", "", NOW + halves / 2)]
    job.now = NOW + 19.5
    assert job.update_cluster(*seen) == ()
    job.now = NOW + 20.1
    expel, assign = job.update_cluster(m.Heartbeat(1, "a", NOW + 20.1), m.Probed(2, "a", "", NOW + 20.1))
    assert isinstance(expel, jm.Expel)
    assert (expel.device_id, assign) == (2, jm.Assign(leaving=(2,)))


# ---- restarts: only devices that may have newer state are waited for


def on_arenas(*device_ids: int) -> Job:
    job = Job(*device_ids)
    joins = (m.Joined(replace(device(key), keeps_memory=True), NOW) for key in device_ids)
    job.state = after(job.state, *joins, *(m.Heartbeat(key, "a", NOW) for key in device_ids))
    return job


def restart(job: Job, device_id: int) -> tuple[jm.JobInstruction, ...]:
    job.state = after(job.state, m.Joined(replace(device(device_id, "b"), keeps_memory=True), NOW))
    job.handle(jm.DeviceArrived(device_id))
    return job.handle(jm.TaskReady(device_id, "b"))


def test_a_job_whose_only_device_is_back_does_not_wait_for_devices_that_were_lost_before() -> None:
    """Their state is older than what the device has on its arena: it had done steps without them."""
    job = on_arenas(1, 2, 3)
    job.carry_out(job.update_cluster(dead(2), dead(3))[0])
    job.handle(jm.TaskLost(2, "a"))
    job.handle(jm.TaskLost(3, "a"))
    job.handle(jm.TaskResumed(job.generation))
    job.update_cluster(dead(1))
    job.handle(jm.AssignFailed())
    assert job.handle(jm.TaskLost(1, "a")) == (jm.Await((1,), 60.0),)
    assert restart(job, 1) == (jm.Assign(joining=(1,)),)


def test_a_job_waits_for_devices_that_may_have_newer_state() -> None:
    """The device that is back had a rank of a generation that ran no steps: the others may have gone on before."""
    job = on_arenas(1, 2, 3)
    job.carry_out(job.update_cluster(dead(2), dead(3))[0])
    job.handle(jm.TaskLost(2, "a"))
    job.handle(jm.TaskLost(3, "a"))
    job.update_cluster(dead(1))
    job.handle(jm.AssignFailed())
    assert job.handle(jm.TaskLost(1, "a")) == (jm.Await((1, 2, 3), 60.0),)
    assert restart(job, 1) == (jm.Await((2, 3), 60.0),)


def test_older_state_is_waited_for_if_the_newest_is_gone() -> None:
    job = on_arenas(1, 2)
    job.carry_out(job.update_cluster(dead(2))[0])
    job.handle(jm.TaskLost(2, "a"))
    job.handle(jm.TaskResumed(job.generation))
    job.update_cluster(m.Left(1, "a"))
    job.handle(jm.AssignFailed())
    assert job.handle(jm.TaskLost(1, "a")) == (jm.Await((2,), 60.0),)


# ---- the device's side of rank assignment


def test_a_stale_assignment_is_dropped_for_the_newer_one() -> None:
    state = tm.took(tm.TaskRanks(), 1)
    state = tm.assigned(state, 4, planned=False)
    with pytest.raises(MembershipChanged, match="generation 3 is over: this device is at 4"):
        tm.assigned(state, 3, planned=False)
    assert tm.assigned(state, 4, planned=False) == state
    assert (tm.outdated(state), tm.next_step(state)) == (True, tm.NextStep.TAKE)
    assert tm.next_step(tm.took(state, 4)) == tm.NextStep.WAIT


def test_a_planned_assignment_keeps_the_links_until_all_ranks_move() -> None:
    state = tm.assigned(tm.took(tm.TaskRanks(), 1), 2, planned=True)
    assert not tm.outdated(state)
    assert not state.move
    assert tm.moving(state, 2).move
    assert not tm.moving(tm.took(state, 2), 2).move, "the move is over"


def test_a_late_move_of_an_older_generation_is_void() -> None:
    """Not all ranks may have the newer planned assignment yet."""
    state = tm.assigned(tm.assigned(tm.took(tm.TaskRanks(), 1), 2, planned=True), 3, planned=True)
    assert not tm.moving(state, 2).move
    assert tm.moving(state, 3).move


def test_a_released_task_stays_until_the_final_release_and_may_get_a_rank_again() -> None:
    state = tm.released(tm.took(tm.TaskRanks(), 1), 2, final=False)
    assert tm.next_step(state) == tm.NextStep.HAND_OVER
    assert tm.next_step(tm.assigned(state, 3, planned=False)) == tm.NextStep.TAKE
    assert tm.next_step(tm.released(state, 2, final=True)) == tm.NextStep.LEAVE


@pytest.mark.parametrize("final", [False, True])
def test_a_late_release_takes_no_rank_of_a_newer_generation(final: bool) -> None:
    state = tm.assigned(tm.took(tm.TaskRanks(), 1), 4, planned=False)
    assert tm.released(state, 3, final) == state
    assert tm.next_step(tm.released(state, 4, final=True)) == tm.NextStep.LEAVE, "the job is over"


def test_a_late_release_does_not_end_a_task_that_was_invited_again() -> None:
    state = tm.rejoined(tm.released(tm.took(tm.TaskRanks(), 1), 2, final=False), 3)
    assert tm.released(state, 2, final=True) == state
    assert tm.next_step(tm.assigned(state, 4, planned=False)) == tm.NextStep.TAKE


def test_a_late_assignment_gives_no_rank_to_a_task_that_was_released_since() -> None:
    state = tm.released(tm.took(tm.TaskRanks(), 1), 3, final=False)
    with pytest.raises(MembershipChanged, match="generation 2 is over: this device is at 3"):
        tm.assigned(state, 2, planned=False)


def test_a_generation_stopped_during_link_setup_is_outdated_from_the_start() -> None:
    state = tm.stopped(tm.assigned(tm.TaskRanks(), 2, planned=False), 2)
    assert tm.outdated(tm.took(state, 2))
    assert not tm.outdated(tm.took(tm.assigned(state, 3, planned=False), 3))


def test_a_task_that_was_left_out_reports_it_once() -> None:
    state = tm.assigned(tm.rejoined(tm.took(tm.TaskRanks(), 3), 4), 5, planned=True)
    assert (state.left_out, state.generation) == (True, 5)
    assert not tm.took(state, 5).left_out


def test_a_task_that_was_left_out_reports_it_in_the_generation_after_one_whose_links_it_cannot_open() -> None:
    state = tm.assigned(tm.rejoined(tm.took(tm.TaskRanks(), 3), 4), 5, planned=False)
    state = tm.gave_up(state, 5)
    assert (state.left_out, tm.next_step(state)) == (True, tm.NextStep.WAIT)
    assert tm.assigned(state, 6, planned=False).left_out


def test_a_task_that_is_left_out_while_it_takes_an_older_assignment_reports_it() -> None:
    state = tm.assigned(tm.took(tm.TaskRanks(), 3), 5, planned=False)
    state = tm.took(tm.rejoined(state, 5), 5)
    assert state.left_out
    assert tm.assigned(state, 6, planned=False).left_out


def test_events_of_a_job_that_is_over_are_ignored() -> None:
    job = Job(1)
    job.handle(jm.TaskFinished(1, "a", finished=True))
    assert job.view.over
    assert job.handle(jm.TaskReady(1, "a")) == ()
