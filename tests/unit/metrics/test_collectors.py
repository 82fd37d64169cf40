"""The collectors of coordinator and device, over states that the real state machine made, and the Grafana dashboard."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (hoop[dashboard])")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hoop import job_events as ev
from hoop.membership import events as m
from hoop.memory import Arena
from hoop.memory.commit_record import CommitRecord
from hoop.servers import coordinator as servers_coordinator
from hoop.servers.coordinator_metrics import MAX_COMMUNICATOR_SERIES, CoordinatorCollector
from hoop.servers.device_metrics import MAX_BUFFERS, OTHER, DeviceCollector, buffer_sizes
from hoop.servers.heartbeat import HeartbeatClient
from hoop.servers.job_progress import JobProgress, PauseHistogram
from hoop.servers.job_record import JobRecord
from hoop.servers.jobs import Jobs
from hoop.servers.operation_runner import OperationRunner
from hoop.servers.operations import OperationGroups, OperationQueue
from hoop.servers.tasks import Tasks
from hoop.topology import Address
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.generated import hoop_pb2 as pb

sys.path.append(str(Path(__file__).parents[1] / "membership"))
from roster import device

GRAFANA = Path(__file__).parents[3] / "examples" / "grafana" / "hoop.json"
HOSTILE = 'a"b\\c\n{}<script>' + "x" * 500
Sample = tuple[str, frozenset[tuple[str, str]]]


def scrape(collector: Collector) -> dict[Sample, float]:
    """All samples, after a round through the text format."""
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(collector)
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for one in family.samples:
            key = one.name, frozenset(one.labels.items())
            assert key not in found, f"{key} twice"
            found[key] = one.value
    return found


def key(name: str, /, **labels: str) -> Sample:
    return name, frozenset(labels.items())


class Coordinator:
    """A coordinator with three devices, which exist in its state only, and a job on them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.coordinator = servers_coordinator.Coordinator(servers_coordinator.CoordinatorConfig())
        operations = OperationQueue(self.coordinator, OperationGroups())
        no_check: Any = None  # it would connect to the devices
        self.jobs = Jobs(self.coordinator, operations, no_check)
        self.collector = CoordinatorCollector(self.coordinator, self.jobs, operations)
        for one in (1, 2, 3):
            self.coordinator.apply(m.Joined(device(one), time.monotonic()))
        self.coordinator.apply(m.Created((1, 2, 3)))
        text = json.dumps(settings)
        state = self.coordinator.apply(m.JobStarted(1, text))
        self.record = JobRecord(state.communicator(1), text)
        self.jobs._jobs[1] = self.record

    @property
    def samples(self) -> dict[Sample, float]:
        return scrape(self.collector)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator({"job": "mnist", "batch_size": 64})


def steps(first: int, losses: list[float], seconds: float = 0.5) -> ev.Steps:
    return ev.Steps(first, losses, [seconds] * len(losses), 0.1, [None] * len(losses))


def test_devices_communicators_and_jobs_are_those_of_the_state(coordinator: Coordinator) -> None:
    before = coordinator.samples
    assert before[key("hoop_devices", state="alive")] == 3
    assert before[key("hoop_devices", state="dead")] == 0
    assert before[key("hoop_device_joins_total")] == 3
    assert before[key("hoop_communicator_generation", communicator="1")] == 1
    assert before[key("hoop_jobs", status="running")] == 1
    assert before[key("hoop_job_devices", job="1", name="mnist")] == 3

    async def change() -> dict[Sample, float]:
        for event in (m.Left(3, "a"), m.Drained(2), m.Rebuilt(1)):
            coordinator.coordinator.apply(event)
        changed = coordinator.samples
        coordinator.coordinator.apply(m.JobEnded(1, error="UserError", text="wrong"))
        await coordinator.coordinator.stop()
        return changed

    after = asyncio.run(change())
    assert after[key("hoop_devices", state="left")] == 1
    assert after[key("hoop_devices", state="draining")] == 1
    assert after[key("hoop_device_leaves_total")] == 1
    assert after[key("hoop_communicator_generation", communicator="1")] == 2
    assert after[key("hoop_communicator_members", communicator="1")] == 2
    assert after[key("hoop_events_total", kind="device_left")] == 1
    ended = coordinator.samples
    assert (ended[key("hoop_jobs", status="running")], ended[key("hoop_jobs", status="failed")]) == (0, 1)


def test_steps_loss_and_speed_are_those_of_the_newest_report(coordinator: Coordinator) -> None:
    assert key("hoop_job_loss", job="1", name="mnist") not in coordinator.samples
    coordinator.record.emit(steps(0, [2.0, 1.5], seconds=0.5))
    found = coordinator.samples
    assert found[key("hoop_job_steps_total", job="1", name="mnist")] == 2
    assert found[key("hoop_job_loss", job="1", name="mnist")] == 1.5
    assert found[key("hoop_job_samples_per_second", job="1", name="mnist")] == 128
    coordinator.record.emit(steps(2, [1.0]))
    assert coordinator.samples[key("hoop_job_steps_total", job="1", name="mnist")] == 3
    coordinator.record.emit(steps(1, [1.5]))  # after a recovery rows are reported again
    assert coordinator.samples[key("hoop_job_steps_total", job="1", name="mnist")] == 3, "a counter never falls"
    coordinator.record.emit(ev.Evaluated(3, 1, 0.4, 0.9, "test"))
    found = coordinator.samples
    assert found[key("hoop_job_evaluation_loss", job="1", name="mnist")] == 0.4
    assert found[key("hoop_job_evaluation_accuracy", job="1", name="mnist")] == 0.9


def test_a_job_that_reports_nothing_for_long_has_no_speed() -> None:
    progress = JobProgress()
    progress.add("steps", steps(0, [1.0], seconds=20.0).to_json())
    assert progress.steps_per_second(time.monotonic() + 50) == pytest.approx(0.05)
    assert progress.steps_per_second(time.monotonic() + 70) == 0


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "{}", '{"first":"x","loss":["a"],"seconds":[{}],"rate":0,"fed":[]}', "1" * 5000]
)
def test_events_of_hostile_devices_are_passed_over(coordinator: Coordinator, text: str) -> None:
    for kind in ("steps", "evaluated"):
        coordinator.record.append(kind, text, 0, 1, "x:1")
    assert key("hoop_job_loss", job="1", name="mnist") not in coordinator.samples


def test_a_pause_is_counted_once_a_generation(coordinator: Coordinator) -> None:
    lost = ev.Recovered(step=3, pause_s=0.2, text="", missing=[], ranks=2, generation=2)
    for event in (lost, lost, ev.Resized(step=4, pause_s=0.01, text="", missing=[], ranks=3, generation=3)):
        coordinator.jobs._count_pause(coordinator.record, event)
    found = coordinator.samples
    assert found[key("hoop_recovery_seconds_count")] == 1
    assert found[key("hoop_recovery_seconds_sum")] == pytest.approx(0.2)
    assert found[key("hoop_recovery_seconds_bucket", le="0.1")] == 0
    assert found[key("hoop_recovery_seconds_bucket", le="0.25")] == 1
    assert found[key("hoop_resize_seconds_count")] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "x", None, 10**400])
def test_a_pause_that_is_no_number_of_seconds_counts_as_0(value: object) -> None:
    pauses = PauseHistogram()
    pauses.add(value)
    assert (pauses.seconds, pauses.cumulative()[-1]) == (0.0, ("+Inf", 1))


def test_label_values_are_bounded_and_escaped() -> None:
    found = Coordinator({"job": HOSTILE}).samples
    (name,) = [dict(labels)["name"] for metric, labels in found if metric == "hoop_job_devices"]
    assert name.startswith('a"b\\c')
    assert "\n" not in name
    assert len(name.encode()) <= 64


def test_series_of_communicators_are_bounded(coordinator: Coordinator) -> None:
    for _ in range(MAX_COMMUNICATOR_SERIES + 20):
        coordinator.coordinator.apply(m.Created((1,)))
    found = coordinator.samples
    assert found[key("hoop_communicators")] == MAX_COMMUNICATOR_SERIES + 21
    assert len([one for one in found if one[0] == "hoop_communicator_members"]) == MAX_COMMUNICATOR_SERIES


class Device:
    """The parts of a device that its metrics are about."""

    def __init__(self, arena: Arena, transport: TcpTransport) -> None:
        self.arena, self.transport = arena, transport
        self.tasks = Tasks(arena, arena, OperationRunner(arena, transport, None), None, False)
        self.heartbeats: Any = HeartbeatClient.__new__(HeartbeatClient)  # without a channel, which needs a loop
        self.heartbeats.failures = 2
        self.memory = pb.DeviceMemory()
        self.collector = DeviceCollector(
            lambda: device(7), arena, lambda: self.memory, self.tasks, self.heartbeats, [transport]
        )


@pytest.fixture
def one_device(tmp_path: Path) -> Iterator[Device]:
    with (
        Arena.create(tmp_path / "arena", 1 << 20) as arena,
        TcpTransport(Address("127.0.0.1", 0)) as transport,
    ):
        assert isinstance(transport, TcpTransport)
        yield Device(arena, transport)


def test_memory_of_a_device_by_buffer(one_device: Device) -> None:
    one_device.arena.allocate(HOSTILE[:100].replace("\n", ""), 4096)
    one_device.arena.allocate(OTHER, 64)
    for index in range(MAX_BUFFERS + 5):
        one_device.arena.allocate(f"b{index}", 128)
    found = scrape(one_device.collector)
    sizes = {
        dict(labels)["buffer"]: size for (name, labels), size in found.items() if name == "hoop_arena_buffer_bytes"
    }
    assert len(sizes) == MAX_BUFFERS + 1
    assert sizes[OTHER] == 64 + 6 * 128, "the buffer of that name, and those that are too many"
    assert sum(sizes.values()) == found[key("hoop_arena_used_bytes")]
    assert found[key("hoop_arena_capacity_bytes")] == one_device.arena.capacity
    assert found[key("hoop_heartbeat_failures_total")] == 2
    assert found[key("hoop_device_info", device="7", host="here", gpu="")] == 1
    assert not [name for name, _ in found if name.startswith("hoop_gpu")]


def test_buffers_with_names_that_become_equal_are_summed(one_device: Device) -> None:
    for middle in "ab":
        one_device.arena.allocate("n" * 50 + middle + "n" * 50, 64)
    assert list(buffer_sizes(one_device.arena.buffers()).values()) == [128]


def test_gpu_memory_is_what_the_last_heartbeat_had(one_device: Device) -> None:
    one_device.memory = pb.DeviceMemory(gpu=pb.GpuMemory(name="G", total=100, free=30, capacity=50, used=20))
    found = scrape(one_device.collector)
    assert found[key("hoop_gpu_memory_total_bytes")] == 100
    assert found[key("hoop_gpu_memory_free_bytes")] == 30
    assert found[key("hoop_gpu_arena_used_bytes")] == 20


def test_steps_of_a_task_are_in_the_commit_record(one_device: Device) -> None:
    record = CommitRecord(one_device.arena, "job5.state", "run", {"rows": []})
    assert one_device.collector._committed(5, "run") == 0
    record.step = 12
    assert one_device.collector._committed(5, "run") == 12
    assert one_device.collector._committed(5, "other") == 0
    assert one_device.collector._committed(6, "run") == 0


def test_bytes_of_links_stay_counted_when_the_links_are_closed(one_device: Device) -> None:
    with TcpTransport(Address("127.0.0.1", 0)) as other:
        peers = [one_device.transport.address, other.address]
        ends = [one.endpoint(1, 1, rank, peers) for rank, one in enumerate((one_device.transport, other))]
        deadline = time.monotonic() + 60
        ends[0].send(1, memoryview(bytes(1000)), deadline)
        ends[1].recv_into(0, memoryview(bytearray(1000)), deadline)
        ends[1].send(0, memoryview(bytes(500)), deadline)
        ends[0].recv_into(1, memoryview(bytearray(500)), deadline)
        open_links = scrape(one_device.collector)
        for one in ends:
            one.close()
    closed = scrape(one_device.collector)
    for found in (open_links, closed):
        assert found[key("hoop_link_sent_bytes_total", transport="tcp")] >= 1000
        assert 500 <= found[key("hoop_link_received_bytes_total", transport="tcp")] < 1000


def test_the_grafana_dashboard_uses_only_metrics_that_exist(coordinator: Coordinator, one_device: Device) -> None:
    one_device.memory = pb.DeviceMemory(gpu=pb.GpuMemory(total=1))
    one_device.arena.allocate("weights", 64)
    coordinator.record.emit(steps(0, [2.0]))
    coordinator.record.emit(ev.Evaluated(3, 1, 0.4, 0.9, "test"))
    families = [*coordinator.collector.collect(), *one_device.collector.collect()]
    exported = {one.name for family in families for one in family.samples}
    exported |= {f"{one.name}_total" for one in families if one.type == "counter"}
    board = json.loads(GRAFANA.read_text("utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    expressions += [one["expr"] for one in board["annotations"]["list"]]
    assert len(expressions) > 20
    used = {name for text in expressions for name in re.findall(r"\bhoop_\w+", text)}
    assert all(re.search(r"\bhoop_\w+", text) for text in expressions)
    assert used <= exported, f"not exported: {sorted(used - exported)}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_the_page_of_the_documentation_names_every_metric(coordinator: Coordinator, one_device: Device) -> None:
    one_device.memory = pb.DeviceMemory(gpu=pb.GpuMemory(total=1))
    page = (GRAFANA.parents[2] / "docs" / "dashboard.md").read_text("utf-8")
    families = [*coordinator.collector.collect(), *one_device.collector.collect()]
    suffix = {"counter": "_total", "info": "_info"}
    missing = [one.name for one in families if f"`{one.name}{suffix.get(one.type, '')}" not in page]
    assert not missing
