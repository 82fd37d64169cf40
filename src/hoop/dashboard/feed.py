"""The dashboard's connection to a cluster: one for all browsers.

    poll thread      GetStatus, at once when an event has  ──┐
                     come, then less and less often          │
    events thread    WatchEvents                           ──┤
    a thread a job   WatchJob                              ──┼──▶ ClusterView ──▶ pages read it at their own pace
    details thread   ListBuffers of one device at a time,  ──┘
                     settings of jobs, predictions

All browsers together cause as many calls as one: a slow, dead or hostile one costs the coordinator nothing. While no
page reads the view, the status is polled less often, and no buffers are listed. The feed goes on when the coordinator
restarts, and the view says when it does not answer.

The feed may share its cores with devices that train, and each wake-up of a thread takes time from one. So a poll shows
what no event tells (memory and measured times, which pages show for seconds anyway), and whatever changes the state of
a device is an event, after which the status is polled at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hoop import job_events as ev
from hoop.client.cluster import Cluster
from hoop.client.device import Device
from hoop.dashboard import view as views
from hoop.dashboard.job_view import JobView, after_event, with_settings
from hoop.dashboard.marks import LogLine, line_of_job_event, mark_of_job_event
from hoop.dashboard.view import ClusterView
from hoop.errors import HoopError, Unauthenticated
from hoop.events import wall_clock
from hoop.job_events import Observed
from hoop.texts import parse_json

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between the first two polls after an event; each further wait is twice as long, …"""
QUIET_POLL_S = 2.0
"""… but not longer than this."""
POLL_GAP_S = 0.1
"""Shortest time between two polls: events come in bursts."""
EVENTS_S = 0.5
"""The events of a job come this often at most, together, while a page shows them, …"""
UNSHOWN_EVENTS_S = 3.0
"""… and otherwise: a page that is going to show them is this far behind at first."""
UNREAD_POLL_S = 5.0
"""The same, while no page reads the view. A page that is opened then has it polled at once."""
UNREAD_S = 3.0
"""A view that was not read for this long is read by no page."""
AGAIN_S = 1.0
"""Wait before a broken stream is opened again."""
BUFFERS_S = 30.0
"""A device's buffers are listed when the memory in use has changed, and after this time."""
BUFFERS_GAP_S = 0.05
"""Shortest time between two of these calls."""
COORDINATOR_TIMEOUT_S = 3600.0
JOIN_S = 10.0
MAX_SEEN = 20_000
"""Events that are remembered to recognize repeated ones: twice what a coordinator keeps."""

Predict = Callable[[dict[str, Any], str], float | None]
"""Predicts the seconds of a step from measured costs (``Started.costs``) and the job's settings (JSON)."""


class ClusterFeed:
    """Follows one cluster and keeps a ``ClusterView`` of it."""

    def __init__(self, connect: Callable[[], Cluster], predict: Predict | None = None) -> None:
        """Connects; an error of ``connect`` is raised here. ``predict`` may take seconds."""
        self._connect, self._predict = connect, predict
        self._cluster = connect()
        self._lock = threading.Lock()
        self._view = ClusterView()
        self._stopped = threading.Event()
        self._wake = threading.Event()
        """An event of the coordinator has come, or the feed is closed: the poll thread need not wait."""
        self._look = threading.Event()
        """There is a new status or a job's costs, or the feed is closed: the details thread looks what has changed."""
        self._threads: list[threading.Thread] = []
        self._followers: dict[int, threading.Thread] = {}
        """By job; only the poll thread uses it."""
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._costs: OrderedDict[int, dict[str, Any]] = OrderedDict()
        """By job: costs that it has measured before its first step."""
        self._unpredicted: set[int] = set()
        """Jobs with costs whose step is to be predicted."""
        self._settings: dict[int, str] = {}
        self._devices: dict[str, Device] = {}
        """By incarnation; only the details thread uses it."""
        self._listed: dict[str, tuple[float, int]] = {}
        """By incarnation: when its buffers were listed, and the bytes in use then; only the details thread uses it."""
        self._read_at, self._jobs_shown_at = time.monotonic(), -math.inf

    @property
    def view(self) -> ClusterView:
        """The newest view; any thread may read it, and pages do so for as long as they are open."""
        was_unread, self._read_at = self._unread, time.monotonic()
        if was_unread:
            self._wake.set()
        return self._view

    @property
    def _unread(self) -> bool:
        return time.monotonic() - self._read_at > UNREAD_S

    def jobs_shown(self) -> None:
        """A page shows what jobs do. Pages call it with every update, from any thread."""
        self._jobs_shown_at = time.monotonic()

    @property
    def _events_s(self) -> float:
        """How often the events of a job are to come."""
        return EVENTS_S if time.monotonic() - self._jobs_shown_at < UNREAD_S else UNSHOWN_EVENTS_S

    def job_inputs(self, job_id: int) -> tuple[dict[str, Any], str] | None:
        """Measured costs and settings (JSON) of a job, for the simulator; None: not known. Any thread may ask."""
        with self._lock:
            costs, settings = self._costs.get(job_id), self._settings.get(job_id)
        return (costs, settings) if costs is not None and settings is not None else None

    def start(self) -> None:
        self._poll()  # so that the first page shows the devices
        for name, work in (("poll", self._poll_often), ("events", self._follow), ("details", self._ask_details)):
            self._threads.append(self._started(name, work))

    def close(self) -> None:
        """Ends the threads and the connection."""
        self._stopped.set()
        self._wake.set()
        self._look.set()
        self._cluster.close()  # ends the streams that the threads wait for
        for thread in (*self._threads, *self._followers.values()):
            thread.join(JOIN_S)

    def _started(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"hoop-dashboard-{name}", daemon=True)
        thread.start()
        return thread

    def _update(self, change: Callable[[ClusterView], ClusterView]) -> None:
        with self._lock:
            self._view = change(self._view)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Suppresses the error of a call that ``close``, or a new connection, has interrupted."""
        cluster = self._cluster
        try:
            yield
        except ValueError:  # gRPC's, for a closed channel
            if not self._stopped.is_set() and cluster is self._cluster:
                raise

    def _is_new(self, *key: Hashable) -> bool:
        """Whether an event with this key has not been seen yet; a restarted coordinator repeats events."""
        with self._lock:
            if key in self._seen:
                return False
            self._seen[key] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return True

    # ---- status

    def _poll_often(self) -> None:
        pause_s = POLL_S
        while True:
            news = self._wake.wait(UNREAD_POLL_S if self._unread else pause_s)
            pause_s = POLL_S if news else min(2 * pause_s, QUIET_POLL_S)
            self._wake.clear()
            if self._stopped.is_set():
                return
            with self._while_open():
                self._poll()
                self._follow_jobs()
            self._look.set()
            if news:
                self._stopped.wait(POLL_GAP_S)

    def _poll(self) -> None:
        try:
            status = self._cluster.status()
        except Unauthenticated as error:
            self._no_answer(error)
            self._reconnect()
        except HoopError as error:
            self._no_answer(error)
        else:
            self._update(lambda view: views.with_status(view, status, time.monotonic()))

    def _no_answer(self, error: HoopError) -> None:
        if not self._stopped.is_set():
            self._update(lambda view: views.without_answer(view, str(error), time.monotonic()))

    def _reconnect(self) -> None:
        """A coordinator that was started again may have made a new token."""
        try:
            fresh = self._connect()
        except HoopError as error:
            log.info("dashboard: %s", error)
            return
        before, self._cluster = self._cluster, fresh
        before.close()
        if self._stopped.is_set():
            fresh.close()

    # ---- the coordinator's events

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._while_open():
                    for event in self._cluster.events(follow=True):
                        if self._is_new(event.sequence, event.time, event.kind):
                            self._update(lambda view, event=event: views.with_event(view, event))  # type: ignore[misc]
                            self._wake.set()
            except HoopError as error:
                log.info("dashboard: events: %s", error)
                self._wake.set()  # the poll finds whether the coordinator answers
            self._stopped.wait(AGAIN_S)

    # ---- jobs

    def _follow_jobs(self) -> None:
        """Starts a thread for every job that is listed and not followed yet; forgets those that are listed no more."""
        listed = {job.id: job for job in self._view.jobs}
        for gone in [one for one in self._followers if one not in listed]:
            if not self._followers[gone].is_alive():
                del self._followers[gone]
                self._settings.pop(gone, None)
        for job_id, job in listed.items():
            follower = self._followers.get(job_id)
            if follower is None or (not follower.is_alive() and job.status == "running"):
                self._update(lambda view, job=job: views.with_job(view, _afresh(job)))  # type: ignore[misc]
                self._followers[job_id] = self._started(f"job-{job_id}", lambda job_id=job_id: self._watch(job_id))  # type: ignore[misc]

    def _watch(self, job_id: int) -> None:
        """Follows one job from its first event to its last."""
        after, seen_origins, ended = 0, set[str](), False
        try:
            with self._while_open():
                job = self._cluster.job(job_id)
                while not ended:
                    ended, interval_s = True, self._events_s
                    for observed in job.events(after, COORDINATOR_TIMEOUT_S, interval_s, seen_origins):
                        self._note(job_id, observed)
                        if self._stopped.is_set():
                            return
                        after = observed.sequence  # 0 when the coordinator has gone: it will count from 1 again
                        if interval_s != self._events_s and after:
                            ended = False
                            break
        except HoopError as error:  # of the job, or of the connection: then the poll thread starts another thread
            line = LogLine(wall_clock(), f"job {job_id}", type(error).__name__, str(error))
            if not self._stopped.is_set():
                self._update(lambda view: views.with_lines(view, [line], []))
                self._stopped.wait(AGAIN_S)

    def _note(self, job_id: int, observed: Observed) -> None:
        event = observed.event
        new = self._is_new(job_id, observed.time, observed.device, observed.rank, event.kind)
        line = line_of_job_event(observed, job_id) if new else None
        mark = mark_of_job_event(observed, job_id) if new else None
        if isinstance(event, ev.Started) and event.costs:
            with self._lock:
                self._costs[job_id] = event.costs
                self._unpredicted.add(job_id)
                if len(self._costs) > views.MAX_JOBS:
                    self._costs.popitem(last=False)
            self._look.set()

        def change(view: ClusterView) -> ClusterView:
            job = view.job(job_id)
            if job is not None:
                view = views.with_job(view, after_event(job, observed))
            return views.with_lines(view, [line] if line else [], [mark] if mark else [])

        self._update(change)

    # ---- details

    def _ask_details(self) -> None:
        due: list[views.DeviceView] = []
        while True:
            self._look.wait(BUFFERS_GAP_S if len(due) > 1 else None)
            self._look.clear()
            if self._stopped.is_set():
                return
            with self._while_open():
                due = [] if self._unread else self._devices_due()
                if due:
                    self._ask_buffers(due[0])
                self._ask_settings()
                self._predict_steps()

    def _devices_due(self) -> list[views.DeviceView]:
        """The devices whose buffers are to be listed: first those that were listed longest ago."""
        devices = self._view.devices
        for gone in self._listed.keys() - {one.incarnation for one in devices}:
            del self._listed[gone]
        due = []
        for one in devices:
            at_s, used = self._listed.get(one.incarnation, (-math.inf, 0))
            if not one.state.is_gone and (used != one.used + one.gpu_used or time.monotonic() - at_s > BUFFERS_S):
                due.append((at_s, one))
        return [one for _, one in sorted(due, key=lambda pair: pair[0])]

    def _ask_buffers(self, device: views.DeviceView) -> None:
        self._listed[device.incarnation] = time.monotonic(), device.used + device.gpu_used
        present = {one.incarnation for one in self._view.devices}
        for gone in [one for one in self._devices if one not in present]:
            self._devices.pop(gone).close()
        try:
            if device.incarnation not in self._devices:
                self._devices[device.incarnation] = self._cluster.device(device.id)
            buffers = self._devices[device.incarnation].buffers()
        except HoopError as error:
            log.debug("dashboard: buffers of device %d: %s", device.id, error)
            return
        self._update(lambda view: views.with_buffers(view, device.incarnation, buffers))

    def _ask_settings(self) -> None:
        for job_id in [one.id for one in self._view.jobs if one.id not in self._settings]:
            try:
                text = self._cluster.job_settings(job_id)
                settings = parse_json(text)
            except (HoopError, ValueError) as error:
                log.info("dashboard: settings of job %d: %s", job_id, error)
                return
            self._settings[job_id] = text
            if isinstance(settings, dict):
                self._change_job(job_id, lambda job, settings=settings: with_settings(job, settings))  # type: ignore[misc]

    def _predict_steps(self) -> None:
        with self._lock:
            self._unpredicted &= set(self._costs)
            ready = sorted(one for one in self._unpredicted if one in self._settings)
            self._unpredicted -= set(ready[:1])
            found = self._costs[ready[0]] if ready else None
        if found is None or self._predict is None:
            return
        job_id, costs = ready[0], found
        try:
            seconds = self._predict(costs, self._settings[job_id])
        except (HoopError, LookupError, TypeError, ValueError) as error:  # other processes wrote the costs
            log.info("dashboard: no prediction for job %d: %s", job_id, error)
            return
        self._change_job(job_id, lambda job: replace(job, predicted_step_seconds=seconds))

    def _change_job(self, job_id: int, change: Callable[[JobView], JobView]) -> None:
        def changed(view: ClusterView) -> ClusterView:
            job = view.job(job_id)
            return view if job is None else views.with_job(view, change(job))

        self._update(changed)


def _afresh(job: JobView) -> JobView:
    """The job without what its events had built up: they are going to be read from the first again."""
    return JobView(
        id=job.id,
        name=job.name,
        devices=job.devices,
        status=job.status,
        reason=job.reason,
        min_devices=job.min_devices,
        max_devices=job.max_devices,
        strategy=job.strategy,
        batch_size=job.batch_size,
        num_microbatches=job.num_microbatches,
        predicted_step_seconds=job.predicted_step_seconds,
    )
