"""The dashboard's view of a cluster: pure functions from answers and events to immutable, bounded values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hoop import job_events as ev
from hoop.dashboard import view as views
from hoop.dashboard.curve import Curve
from hoop.dashboard.job_view import MAX_CHECKPOINTS, JobView, after_event, with_settings
from hoop.dashboard.marks import Mark, MarkKind, count_happenings, line_of_job_event, mark_of_event, mark_of_job_event
from hoop.dashboard.view import ClusterView, DeviceState
from hoop.events import Event
from hoop.job_events import JobEvent, Observed
from hoop.wire.generated import hoop_pb2 as pb


def member(device: int, state: str = "alive", host: str = "a", **fields: object) -> pb.Member:
    described = pb.DeviceDescription(device_id=device, host=host, incarnation=f"run-{device}")
    return pb.Member(device=described, state=state, **fields)  # type: ignore[arg-type]


def status(*members: pb.Member, jobs: tuple[pb.Job, ...] = ()) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(address="127.0.0.1:1", pid=7, devices=members, jobs=jobs)


def states(view: ClusterView) -> dict[int, DeviceState]:
    return {one.id: one.state for one in view.devices}


def job_after(*events: JobEvent) -> JobView:
    job = JobView(1, status="running", batch_size=10)
    for number, event in enumerate(events):
        job = after_event(job, Observed(event, time=float(number)))
    return job


def steps(first: int, *losses: float) -> ev.Steps:
    return ev.Steps(first, list(losses), [0.1] * len(losses), 0.01, [None] * len(losses))


def test_states_follow_the_status_and_the_jobs() -> None:
    running = pb.Job(id=3, device_ids=[2, 1], status="running")
    members = [member(1), member(2), member(3), member(4, "suspect"), member(5, "draining"), member(6, left_out=True)]
    view = views.with_status(ClusterView(), status(*members, jobs=(running,)), 1.0)
    assert states(view) == {
        1: DeviceState.TRAINING,
        2: DeviceState.TRAINING,
        3: DeviceState.STANDBY,
        4: DeviceState.SUSPECT,
        5: DeviceState.DRAINING,
        6: DeviceState.UNREACHABLE,
    }
    assert [(one.id, one.rank) for one in view.devices if one.job == 3] == [(1, 1), (2, 0)]


def test_a_device_that_loads_a_job_is_joining() -> None:
    job = JobView(1, status="running", devices=(1,))
    job = after_event(job, Observed(ev.WaitingForDevice([2], 1.0, "device 2 loads")))
    running = pb.Job(id=1, device_ids=[1], status="running")
    view = views.with_status(ClusterView(jobs=(job,)), status(member(1), member(2), jobs=(running,)), 1.0)
    assert states(view)[2] is DeviceState.JOINING


def test_devices_that_have_loaded_the_job_and_train_are_not_joining() -> None:
    job = JobView(1, status="running", devices=(1, 2))
    for event in (ev.WaitingForDevice([1, 2, 3], 1.0, "devices load"), steps(0, 1.0)):
        job = after_event(job, Observed(event))
    assert job.loading == (3,)


def test_a_dead_device_stays_on_the_ring_for_some_seconds_and_the_others_close_up() -> None:
    view = views.with_status(ClusterView(), status(member(1), member(2)), 1.0)
    view = views.with_status(view, status(member(1), member(2, "dead")), 2.0)
    view = views.with_status(view, status(member(1), member(2, "dead")), 1.9 + views.GONE_S)
    assert [(one.id, one.state) for one in view.on_ring] == [(1, DeviceState.STANDBY), (2, DeviceState.DEAD)]
    view = views.with_status(view, status(member(1), member(2, "dead")), 2.1 + views.GONE_S)
    assert [one.id for one in view.on_ring] == [1]
    assert states(view)[2] is DeviceState.DEAD, "the table lists it as long as the coordinator does"


def test_a_device_that_the_coordinator_forgets_is_shown_as_left_for_some_seconds() -> None:
    view = views.with_status(ClusterView(), status(member(1), member(2)), 1.0)
    view = views.with_status(view, status(member(1)), 2.0)
    assert states(view)[2] is DeviceState.LEFT
    assert states(views.with_status(view, status(member(1)), 2.1 + views.GONE_S)) == {1: DeviceState.STANDBY}


def test_without_an_answer_the_last_state_stays() -> None:
    view = views.with_status(ClusterView(), status(member(1)), 1.0)
    lost = views.without_answer(view, "no answer", 2.0)
    assert (lost.problem, states(lost)) == ("no answer", states(view))
    assert views.with_status(lost, status(member(1)), 3.0).problem == ""


def test_histories_are_bounded() -> None:
    view = ClusterView()
    for number in range(views.MAX_LINES + 50):
        view = views.with_event(view, Event(number, float(number), "device_joined", "x"))
    assert (len(view.lines), len(view.marks)) == (views.MAX_LINES, views.MAX_MARKS)
    assert view.lines[-1].time == views.MAX_LINES + 49, "the newest stay"
    jobs = tuple(pb.Job(id=number, status="ended") for number in range(1, 30))
    view = views.with_status(view, status(jobs=(pb.Job(id=30, status="running"), *jobs)), 1.0)
    assert [one.id for one in view.jobs] == [*range(23, 30), 30]
    buffers = {f"buffer {number}": (0, number + 1) for number in range(500)}
    view = views.with_buffers(views.with_status(view, status(member(1)), 1.0), "run-1", buffers)
    (device,) = view.devices
    assert len(device.buffers) == views.MAX_BUFFERS
    assert sum(one.bytes for one in device.buffers) == sum(range(1, 501)), "the rest is summed up"
    snapshots = [ev.SnapshotTaken(number, False, 1, 0, "b", 1, "") for number in range(100)]
    assert len(job_after(*snapshots).checkpoints) == MAX_CHECKPOINTS


def test_a_long_name_is_shortened() -> None:
    view = views.with_status(ClusterView(), status(member(1, host="h" * 10_000)), 1.0)
    assert len(view.devices[0].host) == views.MAX_NAME


@pytest.mark.parametrize("count", [1, 5, 599, 600, 601, 5000])
def test_a_curve_is_bounded_and_keeps_the_mean(count: int) -> None:
    curve = Curve()
    for number in range(count):
        curve = curve.extended([(number, float(number))], max_points=600)
    assert len(curve.x) <= 600
    assert curve.stride * len(curve.x) + len(curve.pending) == count
    assert curve.x == tuple(sorted(curve.x))
    total = curve.stride * sum(curve.y) + sum(value for _, value in curve.pending)
    assert total == pytest.approx(sum(range(count)))


def test_a_value_that_is_not_finite_is_not_drawn() -> None:
    assert Curve().extended([(1, float("nan")), (2, float("inf")), (3, 1.0)]).x == (3,)


def test_steps_that_another_rank_repeats_are_counted_once() -> None:
    job = job_after(steps(0, 4.0, 3.0), steps(1, 3.0, 2.0), steps(0, 4.0))
    assert (job.done, job.loss.x, job.loss.y) == (3, (1, 2, 3), (4.0, 3.0, 2.0))


def test_speed_and_remaining_time() -> None:
    job = job_after(ev.Started(100, 0, 10, 1000, 5, [], 0.0, "", ""), steps(0, *[1.0] * 10), steps(10, *[1.0] * 10))
    assert job.samples_a_second == 100
    assert job.remaining_s == 8


def test_shards_stragglers_and_recovery() -> None:
    job = job_after(ev.Balanced(5, [3, 1]), ev.Straggler(6, 1, True, 2.5))
    assert (job.shards, job.stragglers) == ((3, 1), ((1, 2.5),))
    assert after_event(job, Observed(ev.Straggler(9, 1, False, 1.0))).stragglers == ()
    job = after_event(job, Observed(ev.Recovered(7, 0.3, "lost", [2], 1, 4)))
    assert (job.recoveries, job.last_pause_s, job.generation, job.shards) == (1, 0.3, 4, ())


def test_parts_of_one_checkpoint_are_one_row() -> None:
    parts = [ev.SnapshotTaken(5, False, 2, 0, "b", 10, ""), ev.SnapshotTaken(5, False, 2, 0, "b", 20, "")]
    (found,) = job_after(*parts).checkpoints
    assert (found.parts, found.of_parts, found.bytes) == (2, 2, 30)


@pytest.mark.parametrize("settings", [{"batch_size": "many"}, {"batch_size": -1}, {"strategy": ["x"]}, {}])
def test_settings_of_another_process_may_be_anything(settings: dict[str, object]) -> None:
    assert with_settings(JobView(1, batch_size=3), settings).batch_size == 3


def test_a_recovery_says_how_long_it_took_and_what_was_repeated() -> None:
    recovered = ev.Recovered(7, 0.25, "", [], 3, 2)
    mark = mark_of_job_event(Observed(recovered, time=9.0), 4)
    assert mark is not None
    assert (mark.kind, mark.seconds, mark.source) == (MarkKind.RECOVERY, 0.25, "job 4")
    assert "3 ranks after 0.25 s; nothing repeated" in mark.text
    again = mark_of_job_event(Observed(replace(recovered, missing=[1, 2])), 4)
    assert again is not None
    assert "computed again: 2 shards" in again.text


def test_steps_are_curves_and_not_lines() -> None:
    assert line_of_job_event(Observed(steps(0, 1.0)), 1) is None
    line = line_of_job_event(Observed(ev.DeviceLost(2, "gone")), 1)
    assert line is not None
    assert line.text == "device 2 was lost: gone"


def test_a_device_that_is_gone_sends_nothing() -> None:
    """While a job waits, its dead device has a rank: the page showed its bytes a second for minutes."""
    running = pb.Job(id=3, device_ids=[1], status="running")
    activity = pb.TaskActivity(job_id=3, at_s=1.0, steps=1)
    alive = views.with_status(ClusterView(), status(member(1, activities=[activity]), jobs=(running,)), 1.0)
    assert alive.workers(3)
    dead = views.with_status(alive, status(member(1, "dead", activities=[activity]), jobs=(running,)), 2.0)
    assert [(one.state, one.activity) for one in dead.devices] == [(DeviceState.DEAD, None)]
    assert not dead.workers(3)


def marks_of_a_kill_and_an_added_device() -> list[Mark]:
    """As a cluster of three devices reports them."""
    events = [
        Event(1, 0.0, "coordinator_started", "coordinator", {}),
        *(
            Event(1 + one, 0.5 * one, "device_joined", f"device {one} joined", {"device": str(one)})
            for one in (1, 2, 3)
        ),
        Event(5, 5.0, "job_started", "job 1 on devices 1, 2, 3", {}),
        Event(6, 20.0, "device_suspect", "device 3: its heartbeat link closed", {"device": "3"}),
        Event(7, 20.1, "device_dead", "device 3 is dead", {"device": "3"}),
        Event(8, 20.1, "links_failed", "at generation 1: rank 2 is gone", {}),
        Event(9, 20.2, "communicator_rebuilt", "at generation 2", {}),
        Event(10, 40.0, "device_joined", "device 4 joined", {"device": "4"}),
        Event(11, 45.0, "communicator_rebuilt", "at generation 3", {}),
    ]
    observed = [
        Observed(ev.DeviceLost(device=3, text="gone"), time=20.15),
        Observed(ev.Recovered(step=9, pause_s=0.1, text="", missing=[], ranks=2, generation=2), time=20.3),
        Observed(ev.StateLoaded(step=30, device=4, source="device 1"), time=45.1),
        Observed(ev.Resized(step=30, pause_s=0.1, text="", missing=[], ranks=3, generation=3), time=45.2),
    ]
    found = [*map(mark_of_event, events), *(mark_of_job_event(one, 1) for one in observed)]
    return [mark for mark in found if mark is not None]


def test_one_kill_and_one_added_device_are_one_fault_one_recovery_and_one_join() -> None:
    """The timeline counted 3 faults, 4 recoveries and 7 joins: each by as many processes as report it."""
    counts = count_happenings(marks_of_a_kill_and_an_added_device())
    assert {kind: count for kind, count in counts.items() if count} == {
        MarkKind.FAULT: 1,
        MarkKind.RECOVERY: 1,
        MarkKind.JOIN: 1,
        MarkKind.JOB: 1,
    }


def test_two_devices_that_die_together_are_two_faults_and_links_that_fail_alone_are_one() -> None:
    dead = [Mark(1.0 + 0.1 * one, MarkKind.FAULT, "dead", subject=f"device {one}") for one in (1, 2)]
    assert count_happenings(dead)[MarkKind.FAULT] == 2
    links = [Mark(at, MarkKind.FAULT, "links", subject="links_failed") for at in (1.0, 2.0, 500.0)]
    assert count_happenings(links)[MarkKind.FAULT] == 2
