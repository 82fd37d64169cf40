"""How many devices a job takes (``--devices 4:16``), and how few it accepts (``--min``)."""

from __future__ import annotations

from roster import NOW, after, cluster, dead, device, ran_until

from hoop.membership import events as m
from hoop.membership import job_membership as jm


class Job:
    """A job on the first ``first`` devices of a cluster."""

    def __init__(self, *device_ids: int, first: int, max_devices: int = 0, user_min_devices: int = 1) -> None:
        members = device_ids[:first]
        self.state = after(cluster(*device_ids), m.Created(members), m.JobStarted(1, "{}"))
        self.view = jm.JobView(
            1, size=first, min_ranks=user_min_devices, user_min_devices=user_min_devices, max_devices=max_devices
        )
        self.now = NOW
        for key in members:
            self.handle(jm.TaskFound(key, "a", 1))
        self.began = self.handle(jm.TasksListed())

    def handle(self, event: jm.JobMembershipEvent) -> tuple[jm.JobInstruction, ...]:
        self.view, instructions = jm.advance(self.view, event, self.state, self.now)
        return instructions

    def join(self, device_id: int) -> tuple[jm.JobInstruction, ...]:
        self.state = after(self.state, m.Joined(device(device_id), NOW), m.Heartbeat(device_id, "a", NOW))
        return self.handle(jm.DeviceArrived(device_id))

    def lose(self, device_id: int) -> tuple[jm.JobInstruction, ...]:
        """Its death is known first, then the stream of its task's events ends."""
        self.state = after(self.state, dead(device_id))
        return self.handle(jm.JobTick()) + self.handle(jm.TaskLost(device_id, "a"))

    def carry_out(self, instructions: tuple[jm.JobInstruction, ...]) -> tuple[int, ...]:
        """Assigns and delivers the ranks, and runs steps with them; returns the members."""
        (assign,) = (one for one in instructions if isinstance(one, jm.Assign))
        self.state = after(self.state, m.Rebuilt(1, assign.joining, assign.leaving, assign.planned))
        one = self.state.communicator(1)
        self.handle(jm.Assigned(one.generation, assign.planned))
        self.handle(jm.Delivered(one.generation))
        self.then = self.handle(jm.TaskResumed(one.generation))
        return one.members


def test_devices_without_work_are_invited_up_to_the_most() -> None:
    job = Job(1, 2, 3, 4, 5, first=2, max_devices=4)
    assert job.began == (jm.Invite(3), jm.Invite(4))
    assert job.carry_out(job.handle(jm.TaskReady(3, "a"))) == (1, 2, 3)
    assert job.carry_out(job.handle(jm.TaskReady(4, "a"))) == (1, 2, 3, 4)
    assert job.join(6) == (), "it has as many as it takes"


def test_a_job_that_states_no_limit_invites_only_devices_that_join() -> None:
    job = Job(1, 2, 3, first=2)
    assert job.began == ()
    assert job.join(4) == (jm.Invite(4),)


def test_a_device_that_joins_is_taken_until_there_are_enough() -> None:
    job = Job(1, 2, first=2, max_devices=3)
    assert job.join(3) == (jm.Invite(3),)
    assert job.join(4) == (), "device 3 will get the last place"


def test_a_lost_device_is_replaced_by_one_without_work() -> None:
    job = Job(1, 2, 3, first=2, max_devices=2)
    assert job.began == ()
    instructions = job.lose(2)
    assert jm.Invite(3) in instructions
    assert job.carry_out(instructions) == (1,), "the others do not wait for it"
    assert job.carry_out(job.handle(jm.TaskReady(3, "a"))) == (1, 3)


def test_a_device_that_comes_back_to_a_full_job_is_released() -> None:
    """Device 2 was declared dead, device 3 took its place, and device 2 was only slow."""
    job = Job(1, 2, 3, first=2, max_devices=2)
    job.state = after(job.state, dead(2))
    assert job.carry_out(job.handle(jm.JobTick())) == (1,)
    assert job.carry_out(job.handle(jm.TaskReady(3, "a"))) == (1, 3)
    assert job.join(2) == (jm.Release(2, True),)
    job.handle(jm.TaskFinished(2, "a"))
    assert jm.Invite(2) in job.lose(3), "now there is room for it"


def test_a_device_of_another_job_is_not_invited() -> None:
    job = Job(1, 2, 3, first=1, max_devices=1)
    job.state = after(job.state, m.Created((2,)), m.JobStarted(2, "{}"))
    assert jm.Invite(3) in job.lose(1)
    assert 2 not in job.view.tasks


def test_a_leaving_device_is_replaced_although_the_job_is_full() -> None:
    job = Job(1, 2, 3, first=2, max_devices=2)
    assert jm.Invite(3) in job.handle(jm.LeaveRequested(2, NOW + 60.0))
    assert job.carry_out(job.handle(jm.TaskReady(3, "a"))) == (1, 3)


def test_too_few_devices_wait_for_others_and_keep_their_state() -> None:
    job = Job(1, 2, 3, first=3, user_min_devices=2)
    assert job.carry_out(job.lose(3)) == (1, 2), "two are enough"
    assert job.lose(2) == (jm.AwaitMore(1, 60.0),)
    job.now += 59.0
    assert job.handle(jm.JobTick()) == (), "it is announced once"
    assert jm.Invite(4) in job.join(4)
    job.now += 600.0
    assert not any(isinstance(one, jm.End) for one in job.handle(jm.JobTick())), "a device that loads is waited for"
    assert job.carry_out(job.handle(jm.TaskReady(4, "a"))) == (1, 4)
    assert not job.view.over


def test_without_others_the_job_ends_after_the_grace_and_says_why() -> None:
    job = Job(1, 2, first=2, user_min_devices=2)
    job.lose(2)
    job.now += 60.0
    job.state = ran_until(job.state, job.now)
    *released, end = job.handle(jm.JobTick())
    assert released == [jm.Release(1, True)]
    assert isinstance(end, jm.End)
    assert end.error == "PeerLost"
    assert end.text.startswith(
        "1 device is left, fewer than the 2 that the job needs (--min), and no other came within 60 s; start devices"
    )


def test_after_the_loss_of_all_devices_the_job_ends_as_without_a_least_number() -> None:
    job = Job(1, 2, first=2, user_min_devices=2)
    assert job.lose(1) == (jm.AwaitMore(1, 60.0),)
    assert job.lose(2) == (jm.Assign(leaving=(1,)),)
    assert job.handle(jm.AssignFailed()) == (jm.End(),), "no device is left that may have the state"
