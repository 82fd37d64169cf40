"""Follows a job from the client: its events become progress, files and a result.

    cluster ◀── start_job ── JobFollower        (1) with a checkpoint in every device's memory if the run resumes
            ── events ─────▶ JobFollower        (2) each event is recorded and passed on
    device  ◀── read ─────── JobFollower        (3) a snapshot is read out of the arena while training goes on
                             JobFollower ──▶ result

``hoop.train`` and ``hoop train`` start a job and follow it; ``attach`` follows one that runs on a cluster or has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoop import job_events as ev
from hoop.client.cluster import Cluster, connect
from hoop.client.jobs import JobHandle
from hoop.engine.custom.state import AVERAGE
from hoop.engine.fault_tolerance.checkpoint_format import (
    VerifiedCheckpoint,
    is_training_state,
    serialized_parts,
    verified,
)
from hoop.engine.fault_tolerance.checkpoint_header import CHECKSUM_KEY, read_metadata
from hoop.engine.job import import_path
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, HoopError, NotFound, PeerError, TrainingStateLost
from hoop.files import FileLock, write_parts
from hoop.job_events import JobEvent, Observed
from hoop.runs.checkpoint_store import FOLDER, name_of, read
from hoop.runs.prediction import Prediction
from hoop.runs.run_recorder import DiskFullInjector, RunRecorder, lock_folder, saved_settings
from hoop.simulate.cost_model import Costs
from hoop.strategies.catalog import parse
from hoop.topology import Addresses
from hoop.wire.auth import Credentials
from hoop.wire.generated import hoop_pb2 as pb

COORDINATOR_TIMEOUT_S = 60.0
"""Seconds that a client that follows a job waits for a coordinator that does not answer; the job goes on meanwhile."""
LAST_READ_S = 10.0
"""Least seconds for which the parts of the final state are tried to be read after the end of a job."""
READ_PAUSE_S = 0.2
REMEMBERED_STEPS = 8192
"""Number of steps whose values are kept for comparison: more than a rank repeats."""


class Deduplicator:
    """Passes each step and each evaluation of a job once.

    When the reporting rank changes, the next one repeats rows. A step that no rank reported, and a step that two ranks
    reported with different values, become warnings: either is a bug of ``engine/progress_reporter.py``.
    """

    def __init__(self, synchronous: bool) -> None:
        """``synchronous``: a step that is run again has the same loss, so that the two can be compared."""
        self.step = 0
        """Number of the last step that was passed."""
        self._synchronous = synchronous
        self._first_step: int | None = None
        """Number of steps done before the run began; None: not known yet."""
        self._evaluated = -1
        self._values: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._warnings: list[str] = []

    def filtered(self, event: JobEvent) -> JobEvent | None:
        """The event without rows that were passed before; None if nothing in it is new."""
        match event:
            case ev.Started() if self._first_step is None:  # later ones are of ranks that start in the middle
                self._first_step = event.done
            case ev.RoundingDiffers():  # a step that another device computes again has other bits
                self._synchronous = False
            case ev.Evaluated():
                before, self._evaluated = self._evaluated, max(self._evaluated, event.steps)
                return event if event.steps > before else None
            case ev.Steps():
                return self._new_steps(event)
        return event

    def warnings(self) -> list[str]:
        """Warnings since the last call."""
        found, self._warnings = self._warnings, []
        return found

    def _new_steps(self, event: ev.Steps) -> ev.Steps | None:
        first, count = event.first, len(event.loss)
        if self._first_step is not None and first > (before := max(self.step, self._first_step)):
            self._warnings.append(
                f"no device reported the steps {before + 1} to {first}: they are missing in metrics and ledger"
            )
        self._compare(event)
        repeated = min(count, max(0, self.step - first))
        self.step = max(self.step, first + count)
        if repeated == count:
            return None
        return replace(
            event,
            first=first + repeated,
            loss=event.loss[repeated:],
            seconds=event.seconds[repeated:],
            fed=event.fed[repeated:],
            metrics={name: each[repeated:] for name, each in event.metrics.items()},
        )

    def _compare(self, event: ev.Steps) -> None:
        """Remembers the rows. A repeated row must be the same, but for the devices that computed it."""
        if not self._synchronous:
            return
        for step, (loss, fed) in enumerate(zip(event.loss, event.fed, strict=True), event.first + 1):
            value = (loss, fed[1] if fed else "")
            known = self._values.setdefault(step, value)
            if known != value and loss == loss:  # NaN is reported as divergence
                self._warnings.append(
                    f"step {step} was reported twice, with the losses {known[0]!r} and {loss!r}, and fingerprints "
                    f"{known[1]!r} and {value[1]!r}: please report this as a bug of Hoop"
                )
        while len(self._values) > REMEMBERED_STEPS:
            self._values.popitem(last=False)


class JobFollower:
    """Follows one job to its result: one that ``start`` starts, or one that runs already or has ended (``attach``)."""

    job: JobHandle

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        devices: Sequence[int],
        out: Path | None,
        coordinator_timeout: float,
        costs: Costs | None = None,
    ) -> None:
        """Called by ``start`` and ``attach``, which have these parameters and set ``job``."""
        self._cluster, self._settings = cluster, settings
        self._devices = list(devices)
        self._out, self._coordinator_timeout = out, coordinator_timeout
        self._attached = False
        self._parts: dict[tuple[int, int], list[VerifiedCheckpoint]] = {}
        """Snapshots by step and resharding, until all parts of a checkpoint are there."""
        self._unread: list[tuple[Observed, ev.SnapshotTaken, HoopError]] = []
        """Parts of the final state that could not be read, each with the reason."""
        self._accounts: dict[int, tuple[int, ev.Account]] = {}
        """Device of each rank, and its account of the whole run."""
        self._deduplicator = Deduplicator(parse(settings.strategy).synchronous)
        self._started: ev.Started | None = None
        self._evaluation: dict[str, Any] = {}
        self._steps = 0
        self._rebalanced = 0
        self._prediction = Prediction(settings, costs)
        self._damaged = 0
        self._stragglers: list[dict[str, Any]] = []
        self._states: list[dict[str, Any]] = []
        self._faults: list[str] = []
        self._disk_full = DiskFullInjector(settings.parsed_faults, lambda: self._deduplicator.step, self._faults.append)
        self._weights_sha256 = ""
        self._diverged: tuple[int, float, int] | None = None
        """Step and loss of the first loss that is not finite, and the number of updates before it."""
        self.tensors: dict[str, Tensor] = {}
        """Tensors of the trained model by name, at the end."""
        self._recorder: RunRecorder | None = None

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        settings: Settings,
        devices: Sequence[int],
        out: Path | None = None,
        resume: Path | None = None,
        coordinator_timeout: float = 0.0,
        costs: Costs | None = None,
    ) -> JobFollower:
        """Starts a job on these devices. It is stopped if its follower fails.

        ``resume``: the checkpoint to start from. ``coordinator_timeout``: seconds to wait for a coordinator that does
        not answer. ``costs``: to predict from.
        """
        follower = cls(cluster, settings, devices, out, coordinator_timeout, costs)
        lock = None if out is None else lock_folder(out)  # before the checkpoint is read: it is the newest one then
        resumed: dict[str, Any] | None = None
        buffer = ""
        try:
            if resume is not None:
                data = _checkpoint_data(resume)
                # ``newest_checkpoint`` has verified the file, and each device verifies the bytes that it gets.
                resumed = read_metadata(data, resume)
                buffer = cluster.stage(data, follower._devices)
            follower._record(resumed, lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        try:
            # A device finds the job's code on its own machine: no path of this one is sent.
            sent = replace(settings, job=import_path(settings.job)).to_json()
            follower.job = cluster.start_job(sent, follower._devices, buffer)  # (1)
            follower._devices = follower.job.device_ids or follower._devices  # without those that could not be reached
        except BaseException:
            if follower._recorder is not None:
                follower._recorder.close()
            raise
        return follower

    @classmethod
    def attach(cls, cluster: Cluster, settings: Settings, job: pb.Job, out: Path | None = None) -> JobFollower:
        """Follows a job of these settings from its first event. It is never stopped because its follower fails."""
        follower = cls(cluster, settings, job.device_ids, out, COORDINATOR_TIMEOUT_S)
        follower.job, follower._attached = cluster.job(job.id), True
        return follower

    def _record(self, resumed: dict[str, Any] | None, lock: FileLock | None = None) -> None:
        """Opens the run's files; ``resumed``: metadata of the checkpoint that the run resumes from."""
        if self._out is not None:
            self._recorder = RunRecorder(self._out, self._settings, self._devices, resumed, self._attached, lock)
            if resumed:
                self._evaluation = self._recorder.last_evaluation() or {}

    def _resumed_from(self, done: int) -> dict[str, Any] | None:
        """Metadata of the checkpoint that an attached job resumed from, if this run's folder has it."""
        path = self._out / FOLDER / name_of(done) if self._out is not None and done else None
        return read(path)[1] if path is not None and path.exists() else None

    def events(self) -> Iterator[Observed]:
        """Every event once, in order; the last is ``Finished``."""
        try:
            for observed in self.job.events(coordinator_timeout=self._coordinator_timeout):  # (2)
                event = self._deduplicator.filtered(observed.event)
                yield from (Observed(ev.Warned(text)) for text in self._deduplicator.warnings())
                if event is None:
                    continue
                if isinstance(event, ev.Started):
                    if self._recorder is None:
                        self._record(self._resumed_from(event.done))
                    event = replace(event, devices=len(self._devices), batch_size=self._settings.batch_size)
                observed = replace(observed, event=event)
                self._note(observed)
                if self._prediction.problem:
                    yield Observed(ev.Warned(self._prediction.problem))
                    self._prediction.problem = ""
                if self._recorder is not None:
                    self._recorder.record(observed)
                    yield from map(Observed, self._recorder.new_events())
                if not isinstance(event, ev.Account | ev.Ended | ev.Failed | ev.JobEnded):
                    yield observed
            if self._diverged is not None:
                raise _divergence(self._diverged, self._settings)
            self._read_missing_parts()
            result = self._result()
            if self._recorder is not None:
                kept = self._recorder.flush(result["steps"])
                result["checkpoint"] = None if kept is None else str(kept)
                result["lost_files"] = self._recorder.lost_files()
                self._recorder.finish(result, dict(self._accounts[rank] for rank in sorted(self._accounts)))
                yield from map(Observed, self._recorder.new_events())
            yield Observed(ev.Finished(result))
        except BaseException as error:
            # A job without a follower must not go on alone: its checkpoints would not be written.
            if not isinstance(error, PeerError) and not self._attached:
                with contextlib.suppress(HoopError):
                    self.job.stop()
            raise
        finally:
            self._disk_full.close()
            if self._recorder is not None:
                self._recorder.close()

    def save(self, path: Path) -> None:
        """Writes the trained weights to a file."""
        write_parts(path, serialized_parts(self.tensors, {}))

    def _note(self, observed: Observed) -> None:
        """Updates what the result is made of."""
        event = observed.event
        self._prediction.note(event)
        match event:
            case ev.Started():
                self._started = event
            case ev.Evaluated():
                measured = {"loss": event.loss, "accuracy": event.accuracy, "metrics": event.metrics}
                self._evaluation = {**measured, "split": event.split}
                self._check_divergence(event.steps - 1, [event.loss], event.steps)
            case ev.Steps():
                self._steps += len(event.loss)
                self._check_divergence(event.first, event.loss, event.first)
            case ev.Balanced():
                self._rebalanced += 1
            case ev.Damaged():
                self._damaged += 1
            case ev.Straggler() if event.slow:
                self._stragglers.append({"rank": event.straggler, "step": event.step, "times": event.times})
            case ev.StateLoaded():
                self._states.append({"device": event.device, "step": event.step, "source": event.source})
            case ev.FaultInjected():
                self._faults.append(event.fault)
            case ev.SnapshotTaken():
                self._collect_snapshot(observed, event)
            case ev.Account():
                self._accounts[observed.rank] = observed.device, event

    def _check_divergence(self, first: int, losses: Sequence[float], updates: int) -> None:
        """Stops the job at a loss that is not finite, and discards its checkpoints from there on.

        ``updates``: number of updates before the first of the losses.
        """
        wrong = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if wrong is not None and self._diverged is None:
            self._diverged = (first + wrong + 1, losses[wrong], updates + wrong)
            if self._recorder is not None:
                self._recorder.discard(first + wrong + 1)
            self.job.stop()

    def _collect_snapshot(self, observed: Observed, event: ev.SnapshotTaken) -> None:
        """Reads one rank's part. When all parts of a step are there, they are a checkpoint."""
        if not event.final and self._recorder is None:
            return
        try:
            part = self._read_snapshot(observed, event)  # (3)
        except HoopError as error:
            if event.final:
                self._unread.append((observed, event, error))  # it is tried again, or there is a later one
            elif self._recorder is not None:
                self._recorder.warn(f"no checkpoint of step {event.steps}: {error}; training goes on")
            return
        # Parts from before and after a resharding do not belong together.
        parts = self._parts.setdefault((event.steps, event.turn), [])
        parts.append(part)
        if len(parts) < event.parts:
            return
        self._parts = {key: others for key, others in self._parts.items() if key[0] > event.steps}
        tensors = {name: one for part in parts for name, one in part.tensors.items()}
        checksums = {name: one for part in parts for name, one in part.checksums.items()}
        metadata = parts[-1].metadata
        digest = weights_digest(tensors)
        if self._recorder is not None and self._diverged is None:
            self._recorder.checkpoint(tensors, metadata | {"weights_sha256": digest}, event.steps, checksums)
        if event.final:
            kept = {name: one for name, one in tensors.items() if not is_training_state(name)}
            self.tensors = kept | {name: one for name, one in tensors.items() if name.startswith(AVERAGE)}
            self._weights_sha256 = digest

    def _read_missing_parts(self) -> None:
        """Tries again to read parts of the final state that could not be read; raises if it is not complete then.

        Only now the job's training is worth anything: without its weights a job has not succeeded.
        """
        deadline = time.monotonic() + max(self._coordinator_timeout, LAST_READ_S)
        while not self._weights_sha256:
            unread, self._unread = self._unread, []
            for observed, event, _ in unread:
                self._collect_snapshot(observed, event)
            if self._weights_sha256:
                return
            again = any(isinstance(error, PeerError) for _, _, error in self._unread)
            if not again or time.monotonic() > deadline:
                raise self._weights_missing()
            time.sleep(READ_PAUSE_S)

    def _weights_missing(self) -> TrainingStateLost:
        reasons = "; ".join(f"device {observed.device}: {error}" for observed, _, error in self._unread)
        return TrainingStateLost(
            f"job {self.job.id} reached its end, but its trained weights could not be read"
            f"{f' ({reasons})' if reasons else ': no device sent all parts of them'}; while the devices run, read them "
            f"with: hoop attach {self.job.id} --out DIR; else go on from the newest checkpoint with --resume"
        )

    def _read_snapshot(self, observed: Observed, event: ev.SnapshotTaken) -> VerifiedCheckpoint:
        """One rank's part, with the checksums that its device has computed."""
        where = f"the snapshot of rank {observed.rank} (device {observed.device})"
        if self._coordinator_timeout:
            self._cluster.wait_ready(self._coordinator_timeout)  # it knows the device's address
        data = bytearray(event.bytes)
        self._cluster.device(observed.device).read_into(event.buffer, memoryview(data))
        found = verified(data, where)
        if found.metadata[CHECKSUM_KEY] != event.sha256:
            raise FailedPrecondition(f"{where} is a later one: it was overwritten before it was read")
        return found

    def _result(self) -> dict[str, Any]:
        by_rank = [self._accounts[rank] for rank in sorted(self._accounts)]
        accounts = [account for _, account in by_rank]
        seconds = max((one.seconds for one in accounts), default=0.0)
        shares = [_shares(one.shares) for one in accounts]
        steps = max((one.done for one in accounts), default=0)
        started = self._started
        steps_an_epoch = (started.steps_an_epoch if started is not None else 0) or 1
        epoch_samples = started.samples if started is not None else steps_an_epoch * self._settings.batch_size
        samples = self._steps * epoch_samples / steps_an_epoch
        whole = steps % steps_an_epoch == 0
        return {
            "job": self._settings.job,
            "strategy": self._settings.strategy,
            "devices": len(self._devices),
            "device_ids": [device for device, _ in by_rank],
            "shards": self._settings.shards,
            "epochs": steps // steps_an_epoch if whole else round(steps / steps_an_epoch, 3),
            "steps": steps,
            "accuracy": self._evaluation.get("accuracy"),
            "loss": self._evaluation.get("loss"),
            "metrics": self._evaluation.get("metrics", {}),
            "split": self._evaluation.get("split"),
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
            "weights_sha256": self._weights_sha256,
            "bytes_sent": sum(one.bytes_sent for one in accounts),
            "idle_fraction": sum(one["idle"] for one in shares) / max(1, len(shares)),
            "shares": shares,
            "memory": [one.memory for one in accounts],
            "parameters": started.parameters if started is not None else None,
            "shards_moved": self._rebalanced,
            "stragglers": self._stragglers,
            "states": self._states,
            "damaged": self._damaged,
            "faults": self._faults,
            "stopped": any(one.stopped for one in accounts),
            "start_seconds": started.seconds if started is not None else None,
            **self._prediction.result(),
        }


def _checkpoint_data(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FailedPrecondition(
            f"{path}: it was there when this command began, and another run has removed it; try again"
        ) from None


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """One sha256 over a model's tensors in the order of their names; optimizer state is left out."""
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if not is_training_state(name)):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _divergence(diverged: tuple[int, float, int], settings: Settings) -> FailedPrecondition:
    step, loss, updates = diverged
    clip = "" if settings.optimizer.clip else ", or cut the gradient's norm with --set clip=1.0"
    rate = f"a lower --lr than {settings.optimizer.lr:g}{clip}"
    data = (
        "look for numbers that are not finite in the data (torch.isfinite), and in what the model and the loss return"
    )
    advice = (
        f"Try {rate}; or {data}" if updates else f"No update came before it, so the learning rate has no part: {data}"
    )
    return FailedPrecondition(
        f"the loss is {loss} at step {step}, and training does not recover from that: stopped; "
        f"checkpoints from before stay. {advice}"
    )


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values()) or 1.0
    return {name: one / whole for name, one in seconds.items()}


def find(cluster: Cluster, job_id: int | None) -> pb.Job:
    """The job with this id; without an id the one that runs, or else the last one."""
    known = {one.id: one for one in cluster.status().jobs}
    running = [one for one in known.values() if one.status == "running"]
    if job_id is not None and job_id not in known:
        raise NotFound(f"job: {job_id} is unknown at {cluster.address}; known: {sorted(known) or 'none'}")
    if not known:
        raise NotFound(f"job: none was started at {cluster.address}; see hoop train --coordinator --detach")
    if job_id is None and len(running) > 1:
        numbers = ", ".join(str(one.id) for one in running)
        raise FailedPrecondition(f"job: several run at {cluster.address}: {numbers}; name one of them")
    return known[job_id or (running or list(known.values()))[-1].id]


def attach(
    address: Addresses,
    job_id: int | None,
    out: Path | None = None,
    stop: bool = False,
    credentials: Credentials | None = None,
) -> Iterator[Observed]:
    """A job's events from its first to its result; ``out`` gets its files.

    The job goes on when this iterator is closed. With ``stop`` it is asked to stop after a step. ``credentials`` None:
    those of the environment.
    """
    with connect(address, credentials=credentials) as cluster:
        job = find(cluster, job_id)
        settings = Settings.from_json(cluster.job_settings(job.id))
        if out is not None and (out / "config.json").exists():
            saved = saved_settings(out)[0]
            if replace(saved, job=import_path(saved.job)) != settings:
                raise FailedPrecondition(f"--out: {out} holds another run than job {job.id}; name another folder")
        follower = JobFollower.attach(cluster, settings, job, out)
        if stop and job.status == "running":
            follower.job.stop(COORDINATOR_TIMEOUT_S)
        yield Observed(ev.Attached(job.id, job.name, job.status))
        yield from follower.events()
