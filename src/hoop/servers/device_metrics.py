"""The metrics of a device, read from its state at each scrape. All names are in docs/dashboard.md.

The training thread maintains nothing for them: bytes are counted by the links, steps are in the events and in the
commit records of the arena, and memory is what the last heartbeat reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from hoop.environment import versions
from hoop.errors import HoopError
from hoop.memory import Arena, ArenaBuffer
from hoop.memory.commit_record import commit_records
from hoop.servers.heartbeat import HeartbeatClient
from hoop.servers.metrics_endpoint import label
from hoop.servers.tasks import Tasks
from hoop.topology import DeviceInfo
from hoop.transport import Transport
from hoop.wire.generated import hoop_pb2 as pb

MAX_BUFFERS = 50
"""Maximum number of buffers with a series of their own, the largest ones."""
OTHER = "other"
"""Name of the series in which the other buffers are summed."""


class DeviceCollector(Collector):
    """The metrics of one device. ``collect`` runs on a thread of the endpoint, one scrape at a time or several."""

    def __init__(
        self,
        info: Callable[[], DeviceInfo],
        arena: Arena,
        memory: Callable[[], pb.DeviceMemory],
        tasks: Tasks,
        heartbeats: HeartbeatClient,
        transports: Sequence[Transport],
    ) -> None:
        """``memory``: what the last heartbeat reported."""
        self._info, self._arena, self._memory = info, arena, memory
        self._tasks, self._heartbeats, self._transports = tasks, heartbeats, transports
        self._steps: dict[int, int] = {}
        """Maximum number of steps of each job that a scrape has seen."""
        self._bytes: dict[tuple[str, str], int] = {}
        """Maximum count of bytes that a scrape has seen, by transport and direction. A link that is replaced after
        damage takes its count along, and a counter must not fall."""

    def collect(self) -> Iterator[Metric]:
        info = self._info()
        about = {"device": str(info.device_id), "host": label(info.host), "gpu": label(info.gpu)}
        yield InfoMetricFamily("hoop_build", "The version of Hoop.", value={"version": label(versions()["hoop"])})
        yield InfoMetricFamily("hoop_device", "This device.", value=about)
        yield from self._arena_metrics()
        yield from self._gpu_metrics()
        yield from self._link_metrics()
        yield CounterMetricFamily(
            "hoop_heartbeat_failures",
            "How often the coordinator could not be reached, or did not answer.",
            value=self._heartbeats.failures,
        )
        running = self._tasks.running()
        yield GaugeMetricFamily("hoop_tasks_running", "Jobs that run on this device.", value=len(running))
        steps = CounterMetricFamily(
            "hoop_task_steps", "Steps that this device has done, or reported, of a running job.", labels=["job"]
        )
        for job_id, run in running.items():
            self._steps[job_id] = max(self._steps.get(job_id, 0), self._committed(job_id, run))
            steps.add_metric([str(job_id)], self._steps[job_id])
        self._steps = {key: count for key, count in self._steps.items() if key in running}
        yield steps

    def _committed(self, job_id: int, run: str) -> int:
        """The newest step that a commit record of the job names, or that this device has reported."""
        report = self._tasks.progress(job_id)
        reported = report.done if report is not None else 0
        try:
            records = list(commit_records(self._arena, f"job{job_id}.", run))
        except (HoopError, ValueError, KeyError):  # a buffer was freed, or is being written
            return reported
        return max([reported, *(step for _, step, _ in records)])

    def _arena_metrics(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("hoop_arena_capacity_bytes", "Size of the arena.", value=self._arena.capacity)
        yield GaugeMetricFamily("hoop_arena_used_bytes", "Bytes in named buffers.", value=self._arena.used)
        by_name = GaugeMetricFamily(
            "hoop_arena_buffer_bytes", "Size of a named buffer; small ones together as other.", labels=["buffer"]
        )
        for name, size in buffer_sizes(self._arena.buffers()).items():
            by_name.add_metric([name], size)
        yield by_name

    def _gpu_metrics(self) -> Iterator[Metric]:
        memory = self._memory()
        if not memory.HasField("gpu"):
            return
        gpu = memory.gpu
        yield GaugeMetricFamily("hoop_gpu_memory_total_bytes", "Memory of the GPU.", value=gpu.total)
        yield GaugeMetricFamily("hoop_gpu_memory_free_bytes", "Free memory of the GPU.", value=gpu.free)
        yield GaugeMetricFamily("hoop_gpu_arena_capacity_bytes", "Hoop's memory on the GPU.", value=gpu.capacity)
        yield GaugeMetricFamily("hoop_gpu_arena_used_bytes", "Bytes of it in named buffers.", value=gpu.used)

    def _link_metrics(self) -> Iterator[Metric]:
        sent = CounterMetricFamily("hoop_link_sent_bytes", "Bytes sent to other devices.", labels=["transport"])
        received = CounterMetricFamily(
            "hoop_link_received_bytes", "Bytes received from other devices.", labels=["transport"]
        )
        for transport in self._transports:
            name = transport.scheme
            for direction, family, count in zip("sr", (sent, received), transport.byte_counts(), strict=True):
                if count is not None:
                    highest = max(count, self._bytes.get((name, direction), 0))
                    self._bytes[name, direction] = highest
                    family.add_metric([name], highest)
        yield from (sent, received)


def buffer_sizes(buffers: Sequence[ArenaBuffer]) -> dict[str, int]:
    """Bytes of the buffers by label, at most ``MAX_BUFFERS`` and ``OTHER``. Equal shortened names are summed."""
    found: Counter[str] = Counter()
    for index, one in enumerate(sorted(buffers, key=lambda one: (-one.size, one.name))):
        found[label(one.name) if index < MAX_BUFFERS else OTHER] += one.size
    return dict(found)
