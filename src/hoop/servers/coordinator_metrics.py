"""The metrics of a coordinator, read from its state at each scrape. All names are in docs/dashboard.md.

Counters begin at 0 with the process. Series are bounded: states and kinds of events are the coordinator's own words,
jobs are limited by ``--max-jobs``, and of the communicators only the newest have series of their own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hoop.environment import versions
from hoop.events import Event
from hoop.membership.state import Health
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_progress import JobProgress, PauseHistogram
from hoop.servers.jobs import Jobs
from hoop.servers.metrics_endpoint import label
from hoop.servers.operations import OperationQueue
from hoop.wire.job_settings import check_settings

MAX_COMMUNICATOR_SERIES = 100
DRAINING = "draining"
JOB_LABELS = ("job", "name")
_DEVICE_COUNTERS = {
    "device_joined": ("hoop_device_joins", "Devices that joined, or came back."),
    "device_left": ("hoop_device_leaves", "Devices that left on purpose."),
    "device_dead": ("hoop_devices_lost", "Devices that were declared dead."),
    "device_evicted": ("hoop_device_evictions", "Devices that were left out because their links failed."),
}
"""Name and help of the counter for each kind of the coordinator's events."""


class CoordinatorCollector(Collector):
    """The metrics of one coordinator. ``collect`` runs on a thread of the endpoint."""

    def __init__(self, coordinator: Coordinator, jobs: Jobs, operations: OperationQueue) -> None:
        self._coordinator, self._jobs, self._operations = coordinator, jobs, operations
        self._events: Counter[str] = Counter()
        """Number of events of each kind that were published since this object was made. The log itself drops old
        events."""
        self._counting = threading.Lock()
        coordinator.events.subscribe(self._count)

    def _count(self, event: Event) -> None:
        with self._counting:
            self._events[event.kind] += 1

    def collect(self) -> Iterator[Metric]:
        info = {"version": label(versions().get("hoop", ""))}
        yield InfoMetricFamily("hoop_build", "The version of Hoop.", value=info)
        yield from self._devices()
        yield from self._communicators()
        yield from self._job_metrics()
        yield _histogram("hoop_recovery_seconds", "Pauses of jobs after a failure.", self._jobs.recovery_pauses)
        yield _histogram("hoop_resize_seconds", "Pauses of jobs for a join or a leave.", self._jobs.resize_pauses)
        yield GaugeMetricFamily(
            "hoop_operations_in_flight",
            "Batches of collectives that were accepted and have not ended.",
            value=self._operations.in_flight,
        )
        with self._counting:
            counts = dict(self._events)
        events = CounterMetricFamily("hoop_events", "Events that the coordinator published, by kind.", labels=["kind"])
        for kind, count in sorted(counts.items()):
            events.add_metric([label(kind)], count)
        yield events
        for kind, (name, text) in _DEVICE_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=counts.get(kind, 0))

    def _devices(self) -> Iterator[Metric]:
        members = self._coordinator.state.members.values()
        states = Counter(DRAINING if one.draining and one.usable else str(one.health) for one in members)
        devices = GaugeMetricFamily("hoop_devices", "Devices by state.", labels=["state"])
        for state in (*map(str, Health), DRAINING):
            devices.add_metric([state], states[state])
        yield devices
        memory = [
            found
            for one in members
            if one.usable and (found := self._coordinator.memory.get(one.info.device_id)) is not None
        ]
        text = "Memory of all usable devices, by their last heartbeats:"
        yield GaugeMetricFamily(
            "hoop_cluster_arena_capacity_bytes", f"{text} capacity.", value=sum(one.capacity for one in memory)
        )
        yield GaugeMetricFamily(
            "hoop_cluster_arena_used_bytes", f"{text} in named buffers.", value=sum(one.used for one in memory)
        )

    def _communicators(self) -> Iterator[Metric]:
        communicators = self._coordinator.state.communicators
        yield GaugeMetricFamily("hoop_communicators", "Communicators that exist.", value=len(communicators))
        labels = ["communicator"]
        generation = GaugeMetricFamily("hoop_communicator_generation", "Generation of a communicator.", labels=labels)
        size = GaugeMetricFamily("hoop_communicator_members", "Members of a communicator.", labels=labels)
        broken = GaugeMetricFamily("hoop_communicator_broken", "1: it has lost a member.", labels=labels)
        for key in sorted(communicators)[-MAX_COMMUNICATOR_SERIES:]:
            one = communicators[key]
            generation.add_metric([str(key)], one.generation)
            size.add_metric([str(key)], len(one.members))
            broken.add_metric([str(key)], 1 if one.broken_by else 0)
        yield from (generation, size, broken)

    def _job_metrics(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("hoop_jobs", "Jobs by status; of ended ones the last 16 are known.", labels=["status"])
        descriptions = self._jobs.descriptions()
        statuses = Counter(one.status for one in descriptions)
        for status in ("running", "ended", "failed"):
            jobs.add_metric([status], statuses[status])
        yield jobs
        devices = GaugeMetricFamily("hoop_job_devices", "Devices of a job.", labels=JOB_LABELS)
        steps = CounterMetricFamily("hoop_job_steps", "Steps done, as last reported.", labels=JOB_LABELS)
        loss = GaugeMetricFamily("hoop_job_loss", "Training loss of the last reported step.", labels=JOB_LABELS)
        speed = GaugeMetricFamily(
            "hoop_job_samples_per_second",
            "Speed of the last reported steps; 0 while none are reported.",
            labels=JOB_LABELS,
        )
        evaluated = GaugeMetricFamily("hoop_job_evaluation_loss", "Loss of the last evaluation.", labels=JOB_LABELS)
        accuracy = GaugeMetricFamily(
            "hoop_job_evaluation_accuracy", "Accuracy of the last evaluation, 0 to 1.", labels=JOB_LABELS
        )
        for one in descriptions:
            names = [str(one.id), label(one.name)]
            if one.status == "running":
                devices.add_metric(names, len(one.device_ids))
            progress = self._jobs.progress(one.id)
            if progress is None:
                continue
            if (report := progress.steps()) is not None:
                steps.add_metric(names, report.done)
                loss.add_metric(names, report.loss)
            if one.status == "running" and (batch := self._batch_size(one.id)):
                speed.add_metric(names, batch * progress.steps_per_second(time.monotonic()))
            _add_evaluation(progress, names, evaluated.add_metric, accuracy.add_metric)
        yield from (devices, steps, loss, speed, evaluated, accuracy)

    def _batch_size(self, job_id: int) -> int:
        """Samples of a step; 0 if the job's settings do not state it."""
        job = self._coordinator.state.jobs.get(job_id)
        found = check_settings(job.settings).get("batch_size") if job is not None else None
        return found if isinstance(found, int) and 0 < found < 1 << 31 else 0


def _add_evaluation(
    progress: JobProgress,
    names: list[str],
    add_loss: Callable[[list[str], float], None],
    add_accuracy: Callable[[list[str], float], None],
) -> None:
    found = progress.evaluated()
    if found is not None:
        add_loss(names, found[0])
        if found[1] is not None:
            add_accuracy(names, found[1])


def _histogram(name: str, text: str, pauses: PauseHistogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=pauses.cumulative(), sum_value=pauses.seconds)
