"""Passes each step and each evaluation of a job once: when the reporting rank changes, the next one repeats rows.

Used by ``JobFollower`` on every event before it is recorded or shown. A step that no rank reported, and one that two
ranks reported with different values, become warnings: neither happens as long as the engine keeps its promises
(``engine/progress_reporter.py``).

Following a job from the client's side: what its devices tell becomes progress, files and a result.

cluster ◀── start_job ── conduct        (1) with a checkpoint in every device's memory, where one is resumed
        ── events ─────▶ conduct        (2) each event is recorded and passed on
device  ◀── read ─────── conduct        (3) a snapshot is read out of the arena while training goes on
                         conduct ──▶ result

Coming back to a job that runs on a cluster, or has ended there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoop.client.cluster import Cluster, connect
from hoop.client.jobs import JobEvent, JobHandle
from hoop.engine.fault_tolerance.checkpoint import MOMENT, SEAL, packed, unpacked
from hoop.engine.job import import_path
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, HoopError, NotFound, PeerError
from hoop.files import write_bytes
from hoop.runs.api import AWAY_S
from hoop.runs.prediction import Prediction
from hoop.runs.run_recorder import DiskFullWarning, RunRecorder, saved_settings
from hoop.simulate.cost_model import Costs
from hoop.strategies.catalog import parse
from hoop.topology import Addresses
from hoop.wire.generated import hoop_pb2 as pb

REMEMBERED = 8192
"""Steps whose values are remembered, to be compared: more than a rank repeats."""


class Deduplicator:
    """What was seen of one job."""

    def __init__(self, synchronous: bool) -> None:
        """``synchronous``: a step that is run again has the same loss, so that it can be compared."""
        self.step = 0
        """The last step that was passed."""
        self._synchronous = synchronous
        self._begun: int | None = None
        """The step after which the run began, once it is known."""
        self._evaluated = -1
        self._values: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._warnings: list[str] = []

    def passes(self, kind: str, told: dict[str, Any]) -> bool:
        """Whether anything of this event is new; rows that are not are taken out of it."""
        match kind:
            case "started" if self._begun is None:  # later ones are of ranks that begin in the middle
                self._begun = int(told["done"])
            case "evaluated":
                steps, before = int(told["steps"]), self._evaluated
                self._evaluated = max(before, steps)
                return steps > before
            case "steps":
                return self._steps(told)
        return True

    def warnings(self) -> list[str]:
        """What went wrong since the last call."""
        found, self._warnings = self._warnings, []
        return found

    def _steps(self, told: dict[str, Any]) -> bool:
        first, count = int(told["first"]), len(told["loss"])
        if self._begun is not None and first > (before := max(self.step, self._begun)):
            self._warnings.append(
                f"no device reported the steps {before + 1} to {first}: they are missing in metrics and ledger"
            )
        self._compare(told)
        repeated = min(count, max(0, self.step - first))
        for name in ("loss", "seconds", "fed"):
            told[name] = told[name][repeated:]
        told["first"] += repeated
        self.step = max(self.step, first + count)
        return repeated < count

    def _compare(self, told: Mapping[str, Any]) -> None:
        """Remembers the rows; one that is known already must be the same but for the devices that computed it."""
        if not self._synchronous:
            return
        for step, (loss, fed) in enumerate(zip(told["loss"], told["fed"], strict=True), told["first"] + 1):
            value = (loss, fed[1] if fed else "")
            known = self._values.setdefault(step, value)
            if known != value and loss == loss:  # a loss that is not a number is reported elsewhere
                self._warnings.append(
                    f"step {step} was reported twice, with the losses {known[0]!r} and {loss!r}, and prints of samples "
                    f"{known[1]!r} and {value[1]!r}: please report this as a bug of Hoop"
                )
        while len(self._values) > REMEMBERED:
            self._values.popitem(last=False)


EventFields = dict[str, Any]


class JobFollower:
    """One job, from its start, or from when somebody comes back to it, to its result."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        devices: Sequence[int],
        out: Path | None = None,
        resume: Path | None = None,
        attached: int = 0,
        patience: float = 0.0,
        costs: Costs | None = None,
    ) -> None:
        """``attached``: a job that runs already, or has ended; it is followed from its beginning, and never stopped.

        ``patience``: for how many seconds a coordinator that is away is waited for. ``costs``: to predict from.
        """
        self._cluster, self._settings = cluster, settings
        self._devices = list(devices)
        self._out, self._attached, self._patience = out, bool(attached), patience
        self._parts: dict[tuple[int, int], list[tuple[dict[str, Tensor], EventFields]]] = {}
        self._accounts: dict[int, EventFields] = {}
        self._seen = Deduplicator(parse(settings.strategy).synchronous)
        self._last: EventFields = {}
        self._evaluated: EventFields = {}
        self._steps = 0
        self._moves = 0
        self._prediction = Prediction(settings, costs)
        self._damaged = 0
        self._stragglers: list[EventFields] = []
        self._states: list[EventFields] = []
        self._faults: list[str] = []
        self._full_disk = DiskFullWarning(settings.placed, lambda: self._seen.step, self._faults.append)
        self._weights = ""
        self._diverged: tuple[int, float] | None = None
        self.tensors: dict[str, Tensor] = {}
        """The trained model's tensors, by name, once it is done."""
        self._recording: RunRecorder | None = None
        if attached:
            self.job: JobHandle = cluster.job(attached)
            return
        resumed: EventFields | None = None
        name = ""
        if resume is not None:
            data = resume.read_bytes()
            resumed = unpacked(data, resume)[1]
            name = cluster.staged()
            for device_id in self._devices:
                device = cluster.device(device_id)
                device.allocate(name, len(data))
                device.write(name, data)
        self._record(resumed)
        try:
            self.job = cluster.start_job(_told(settings), self._devices, name)  # (1)
        except BaseException:
            if self._recording is not None:
                self._recording.close()
            raise

    def _record(self, resumed: EventFields | None) -> None:
        """Files from now on, of a run that began anew or with what a checkpoint told."""
        if self._out is not None:
            self._recording = RunRecorder(self._out, self._settings, self._devices, resumed)
            if resumed:
                self._evaluated = self._recording.last_evaluation() or {}

    def events(self) -> Iterator[EventFields]:
        """Every event as it is told, ``rank`` and ``time`` in it; the last is of kind ``result``."""
        try:
            for event in self.job.events(patience=self._patience):  # (2)
                fresh = self._seen.passes(event.kind, event.told)
                for text in self._seen.warnings():
                    yield {"kind": "warning", "text": text}
                if not fresh:
                    continue
                if event.kind == "started" and self._recording is None:
                    self._record(None)
                told = event.told | {"kind": event.kind, "rank": event.rank, "time": event.time}
                self._note(event)
                if self._recording is not None:
                    self._recording.note(told)
                    yield from self._recording.news()
                if event.kind == "started":
                    told |= {"devices": len(self._devices), "batch_size": self._settings.batch_size}
                if event.kind not in ("account", "ended", "failed", "job_ended"):
                    yield told
            if self._diverged is not None:
                raise _divergence(*self._diverged, self._settings)
            result = self._result()
            if self._recording is not None:
                kept = self._recording.flush(result["steps"])
                result["checkpoint"] = None if kept is None else str(kept)
                self._recording.finish(result, list(self._accounts.values()))
                yield from self._recording.news()
            yield {"kind": "result", **result}
        except BaseException as error:
            # Whoever followed it is gone, and nobody would take its checkpoints: it must not go on alone.
            if not isinstance(error, PeerError) and not self._attached:
                with contextlib.suppress(HoopError):
                    self.job.stop()
            raise
        finally:
            self._full_disk.close()
            if self._recording is not None:
                self._recording.close()

    def save(self, path: Path) -> None:
        """The trained weights, as a file."""
        write_bytes(path, packed(self.tensors, {}))

    def _note(self, event: JobEvent) -> None:
        told = event.told
        self._prediction.note(event.kind, told)
        match event.kind:
            case "started":
                self._last = told
            case "evaluated":
                self._evaluated = told
                self._look_at(told["steps"] - 1, [told["loss"]])
            case "steps":
                self._steps += len(told["loss"])
                self._look_at(told["first"], told["loss"])
            case "balanced":
                self._moves += 1
            case "damaged":
                self._damaged += 1
            case "straggler" if told["slow"]:
                self._stragglers.append(
                    {"rank": told["straggler"], "step": told["step"], "times": told["times"]}
                )
            case "state":
                self._states.append({key: told[key] for key in ("device", "step", "source")})
            case "fault":
                self._faults.append(told["fault"])
            case "snapshot":
                self._snapshot(event)
            case "account":
                self._accounts[event.rank] = told

    def _look_at(self, first: int, losses: Sequence[float]) -> None:
        """A loss that is not a number never becomes one again: the job is stopped, its weights are not kept."""
        wrong = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if wrong is not None and self._diverged is None:
            self._diverged = (first + wrong + 1, losses[wrong])
            if self._recording is not None:
                self._recording.discard(first + wrong + 1)
            self.job.stop()

    def _snapshot(self, event: JobEvent) -> None:
        """Reads one rank's part; when all parts of a step are there, they are a checkpoint."""
        told = event.told
        if not told["final"] and self._recording is None:
            return
        try:
            part = self._read(event)  # (3)
        except HoopError as error:
            if told["final"]:
                raise
            if self._recording is not None:
                self._recording.warn(f"no checkpoint of step {told['steps']}: {error}; training goes on")
            return
        # A part of before a loss does not go with those of after it: the model is cut otherwise.
        parts = self._parts.setdefault((told["steps"], told["turn"]), [])
        parts.append(part)
        if len(parts) < told["parts"]:
            return
        self._parts = {key: others for key, others in self._parts.items() if key[0] > told["steps"]}
        tensors = {name: one for found, _ in parts for name, one in found.items()}
        metadata = parts[-1][1]
        digest = weights_digest(tensors)
        if self._recording is not None and self._diverged is None:
            metadata |= {
                "settings": metadata.get("settings", {}) | {"job": self._settings.job}
            }  # as it is called here
            self._recording.checkpoint(tensors, metadata | {"weights_sha256": digest}, told["steps"])
        if told["final"]:
            self.tensors = {name: one for name, one in tensors.items() if not name.startswith(MOMENT)}
            self._weights = digest

    def _read(self, event: JobEvent) -> tuple[dict[str, Tensor], EventFields]:
        told = event.told
        where = f"what rank {event.rank} (device {event.device}) keeps of it"
        if self._patience:
            self._cluster.knock(self._patience)  # it knows where the device is
        found = unpacked(self._cluster.device(event.device).read(told["buffer"], told["bytes"]), where)
        if found[1][SEAL] != told[SEAL]:
            raise FailedPrecondition(f"{where} is a later one: it was overtaken before it was read")
        return found

    def _result(self) -> EventFields:
        accounts = [self._accounts[rank] for rank in sorted(self._accounts)]
        seconds = max((one["seconds"] for one in accounts), default=0.0)
        shares = [_shares(one["shares"]) for one in accounts]
        steps = max((one["done"] for one in accounts), default=0)
        an_epoch = self._last.get("steps_an_epoch") or 1
        samples = self._steps * self._last.get("samples", an_epoch * self._settings.batch_size) / an_epoch
        return {
            "job": self._settings.job,
            "strategy": self._settings.strategy,
            "devices": len(self._devices),
            "shards": self._settings.shards,
            "epochs": steps // an_epoch if steps % an_epoch == 0 else round(steps / an_epoch, 3),
            "steps": steps,
            "accuracy": self._evaluated.get("accuracy"),
            "loss": self._evaluated.get("loss"),
            "split": self._evaluated.get("split"),
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
            "weights_sha256": self._weights,
            "bytes_sent": sum(one["bytes_sent"] for one in accounts),
            "idle_fraction": sum(one["idle"] for one in shares) / max(1, len(shares)),
            "shares": shares,
            "memory": [one["memory"] for one in accounts],
            "parameters": self._last.get("parameters"),
            "shards_moved": self._moves,
            "stragglers": self._stragglers,
            "states": self._states,
            "damaged": self._damaged,
            "faults": self._faults,
            "stopped": any(one["stopped"] for one in accounts),
            "start_seconds": self._last.get("seconds"),
            **self._prediction.result(),
        }


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """One sha256 over a model's tensors, by name: equal for equal weights, however they were trained."""
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if not name.startswith(MOMENT)):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _told(settings: Settings) -> str:
    """What devices are told: no path of this machine's."""
    return dataclasses.replace(settings, job=import_path(settings.job)).to_json()


def _divergence(step: int, loss: float, settings: Settings) -> FailedPrecondition:
    clip = "" if settings.optimizer.clip else ", or cut the gradient's norm with --set clip=1.0"
    return FailedPrecondition(
        f"the loss is {loss} at step {step}, and training does not recover from that: stopped; "
        f"checkpoints from before stay. Try a lower --lr than {settings.optimizer.lr:g}{clip}"
    )


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values()) or 1.0
    return {name: one / whole for name, one in seconds.items()}


def find(cluster: Cluster, job_id: int | None) -> pb.Job:
    """The job of this number; without one, the only one that runs, or else the last."""
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
    address: Addresses, job_id: int | None, out: Path | None = None, stop: bool = False
) -> Iterator[dict[str, Any]]:
    """Everything that a job told, and tells, from its beginning to its result; ``out`` gets its files.

    It is never stopped by whoever attached, unless ``stop`` asks it to, after a step.
    """
    with connect(address) as cluster:
        job = find(cluster, job_id)
        settings = Settings.from_json(cluster.job_settings(job.id))
        if out is not None and (out / "config.json").exists() and saved_settings(out)[0] != settings:
            raise FailedPrecondition(f"--out: {out} holds another run than job {job.id}; name another folder")
        conducting = JobFollower(
            cluster, settings, list(job.device_ids), out, attached=job.id, patience=AWAY_S
        )
        if stop and job.status == "running":
            conducting.job.stop(AWAY_S)
        yield {
            "kind": "attached",
            "job": job.id,
            "name": job.name,
            "status": job.status,
        }
        yield from conducting.events()
