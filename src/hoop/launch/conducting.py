"""Following a job from the client's side: what its devices tell becomes progress, files and a result.

cluster ◀── start_job ── conduct        (1) with a checkpoint in every device's memory, where one is resumed
        ── events ─────▶ conduct        (2) each event is recorded and passed on
device  ◀── read ─────── conduct        (3) a snapshot is read out of the arena while training goes on
                         conduct ──▶ result
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from hoop.client.cluster import Cluster
from hoop.client.jobs import JobEvent, JobHandle
from hoop.engine.settings import Settings
from hoop.engine.snapshot import MOMENT, unpacked
from hoop.errors import FailedPrecondition, HoopError, InternalError, PeerError
from hoop.files import write_bytes
from hoop.launch.predicting import Prediction
from hoop.launch.recording import Recording
from hoop.topology import DeviceInfo
from hoop.wire.convert import device_info

Told = dict[str, Any]


class Conducting:
    """One job, from its start to its result."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        devices: Sequence[int],
        out: Path | None = None,
        resume: Path | None = None,
    ) -> None:
        self._cluster, self._settings = cluster, settings
        self._devices = list(devices)
        self._parts: dict[int, list[bytes]] = {}
        self._accounts: dict[int, Told] = {}
        self._heard = 0
        self._last: Told = {}
        self._evaluated: Told = {}
        self._steps = 0
        self._moves = 0
        self._prediction = Prediction(settings)
        self._weights = ""
        self._diverged: tuple[int, float] | None = None
        self.tensors: dict[str, Tensor] = {}
        """The trained model's tensors, by name, once it is done."""
        start = 0
        name = ""
        if resume is not None:
            data = resume.read_bytes()
            start = int(unpacked(data)[1]["steps"])
            name = f"resume-{secrets.token_hex(4)}"
            for device_id in self._devices:
                device = cluster.device(device_id)
                device.allocate(name, len(data))
                device.write(name, data)
        self._recording = Recording(out, settings, self._devices, start) if out is not None else None
        if self._recording is not None and start:
            self._evaluated = self._recording.last_evaluation() or {}
        try:
            self.job: JobHandle = cluster.start_job(settings.to_json(), self._devices, name)  # (1)
        except BaseException:
            if self._recording is not None:
                self._recording.close()
            raise

    def events(self) -> Iterator[Told]:
        """Every event as it is told, ``rank`` and ``time`` in it; the last is of kind ``result``."""
        try:
            for event in self.job.events():  # (2)
                if event.kind == "steps" and not self._fresh(event.told):
                    continue
                told = event.told | {"kind": event.kind, "rank": event.rank, "time": event.time}
                self._note(event)
                if self._recording is not None:
                    self._recording.note(told)
                if event.kind == "started":
                    told |= {"devices": len(self._devices), "batch_size": self._settings.batch_size}
                if event.kind not in ("account", "ended", "failed", "job_ended"):
                    yield told
            if self._diverged is not None:
                raise _divergence(*self._diverged, self._settings)
            result = self._result()
            if self._recording is not None:
                self._recording.finish(result, list(self._accounts.values()))
            yield {"kind": "result", **result}
        except BaseException as error:
            # Whoever followed it is gone, and nobody would take its checkpoints: it must not go on alone.
            if not isinstance(error, PeerError):
                with contextlib.suppress(HoopError):
                    self.job.stop()
            raise
        finally:
            if self._recording is not None:
                self._recording.close()

    def save(self, path: Path) -> None:
        """The trained weights, as a file."""
        write_bytes(path, safetensors.torch.save(self.tensors))

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
            case "snapshot":
                self._snapshot(event)
            case "account":
                self._accounts[event.rank] = told

    def _fresh(self, told: Told) -> bool:
        """Leaves of a report what was not told before: who tells may change, and tells what it remembers."""
        new = max(0, self._heard - told["first"])
        told["loss"], told["seconds"] = told["loss"][new:], told["seconds"][new:]
        told["first"] += new
        self._heard = max(self._heard, told["first"] + len(told["loss"]))
        return bool(told["loss"])

    def _look_at(self, first: int, losses: Sequence[float]) -> None:
        """A loss that is not a number never becomes one again: the job is stopped, its weights are not kept."""
        wrong = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if wrong is not None and self._diverged is None:
            self._diverged = (first + wrong + 1, losses[wrong])
            self.job.stop()

    def _snapshot(self, event: JobEvent) -> None:
        """Reads one rank's part; when all parts of a step are there, they are a checkpoint."""
        told = event.told
        data = self._read(event)  # (3)
        if data is None:
            return
        parts = self._parts.setdefault(told["steps"], [])
        parts.append(data)
        if len(parts) < told["parts"]:
            return
        del self._parts[told["steps"]]
        tensors: dict[str, Tensor] = {}
        metadata: Told = {}
        for part in parts:
            found, metadata = unpacked(part)
            tensors |= found
        digest = weights_digest(tensors)
        if self._recording is not None and self._diverged is None:
            self._recording.checkpoint(tensors, metadata | {"weights_sha256": digest}, told["steps"])
        if told["final"]:
            self.tensors = {name: one for name, one in tensors.items() if not name.startswith(MOMENT)}
            self._weights = digest

    def _read(self, event: JobEvent) -> bytes | None:
        told = event.told
        device = self._cluster.device(event.device)
        try:
            data = device.read(told["buffer"], told["bytes"])
        except HoopError:
            if told["final"]:
                raise
            return None
        if hashlib.sha256(data).hexdigest() == told["sha256"]:
            return data
        if told["final"]:
            raise InternalError(f"the last snapshot of rank {event.rank} is not what it said")
        return None  # overtaken: a newer one is being written over it

    def _result(self) -> Told:
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
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
            "weights_sha256": self._weights,
            "bytes_sent": sum(one["bytes_sent"] for one in accounts),
            "idle_fraction": sum(one["idle"] for one in shares) / max(1, len(shares)),
            "shares": shares,
            "memory": [one["memory"] for one in accounts],
            "parameters": self._last.get("parameters"),
            "shards_moved": self._moves,
            "stopped": any(one["stopped"] for one in accounts),
            "start_seconds": self._last.get("seconds"),
            **self._prediction.result(),
        }


def members(cluster: Cluster) -> dict[int, DeviceInfo]:
    """The devices that are alive, by id."""
    alive = [one for one in cluster.status().devices if one.state == "alive"]
    return {one.device.device_id: device_info(one.device) for one in alive}


def chosen(cluster: Cluster, count: int | None) -> list[int]:
    """So many devices of a cluster, or all of them."""
    alive = sorted(members(cluster))
    if not alive or (count or 0) > len(alive):
        raise FailedPrecondition(
            f"devices: {count or 'at least 1'} asked for, {len(alive)} are alive at {cluster.address}; "
            f"start more with: hoop device --join {cluster.address}"
        )
    return alive[: count or len(alive)]


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """One sha256 over a model's tensors, by name: equal for equal weights, however they were trained."""
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if not name.startswith(MOMENT)):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _divergence(step: int, loss: float, settings: Settings) -> FailedPrecondition:
    clip = "" if settings.optimizer.clip else ", or cut the gradient's norm with --set clip=1.0"
    return FailedPrecondition(
        f"the loss is {loss} at step {step}, and training does not recover from that: stopped; "
        f"checkpoints from before stay. Try a lower --lr than {settings.optimizer.lr:g}{clip}"
    )


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values()) or 1.0
    return {name: one / whole for name, one in seconds.items()}
