"""Which of a job's failures its client gets: the one that explains the others, with the remedy."""

from __future__ import annotations

from hoop.errors import InvalidArgument, PeerCause, PeerLost, TrainingStateLost
from hoop.membership.state import CommunicatorState
from hoop.servers.job_record import JobRecord


def lost(device: int) -> PeerLost:
    return PeerLost(f"device {device} was lost", cause=PeerCause.DEVICE_LOST)


def record(*losses: PeerLost) -> JobRecord:
    return JobRecord(CommunicatorState(1, (1, 2)), "{}", losses=list(losses))


def test_lost_state_explains_more_than_the_lost_device() -> None:
    job = record(lost(1), lost(2))
    state = TrainingStateLost("stage 1 was lost: go on from the checkpoint of step 5")
    job.failures += [PeerLost("rank 0: waiting for rank 1"), state]
    assert job.outcome() is state
    mistake = InvalidArgument("lr: -1 is not positive")
    job.failures.append(mistake)
    assert job.outcome() is mistake


def test_of_lost_devices_the_last_one_is_named() -> None:
    """The job went on after the losses before it."""
    assert str(record(lost(1), lost(2)).outcome()) == "device 2 was lost"
    assert record().outcome() is None


def test_losses_of_a_job_that_ended_are_not_its_outcome() -> None:
    job = record(lost(1))
    job.ended = True
    assert job.outcome() is None
