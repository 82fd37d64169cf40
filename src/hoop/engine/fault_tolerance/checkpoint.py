"""A training state as named tensors, in safetensors' format: what a checkpoint is.

    0.1.weight                     the model's own names
    optimizer.moment0.0.1.weight   optimizer state, under the parameter it belongs to
    metadata                       position in the data, settings; a sha256 over every byte of the file

Names and shapes are the model's, not the devices', so a run may be resumed by another number of devices or another
strategy. The format itself would load a flipped bit without a word, so nothing is loaded whose checksum does not hold.

A rank's parts of checkpoints: files' bytes in the arena, which a client reads while training goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from hoop.engine.job import names_of
from hoop.engine.progress_reporter import Emit
from hoop.engine.stage.state import StateLayout
from hoop.errors import FailedPrecondition, PeerLost
from hoop.memory import Arena

MOMENT = "optimizer.moment"
SEAL = "sha256"
"""Under this name a file's checksum is in its metadata, and is told of what lies in a device's memory."""
_OPEN = "0" * 64


class Stateful(Protocol):
    """Weights and optimizer state, as a rank holds them."""

    @property
    def layout(self) -> StateLayout: ...

    @property
    def moments(self) -> list[Tensor]: ...


def tensors_of(held: Iterable[Stateful], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state of some stages."""
    found: dict[str, Tensor] = {}
    for one in held:
        for tensor in [*one.layout.tensors, *one.layout.counters, *one.layout.frozen]:
            found[names[id(tensor)]] = tensor.detach()
        for index, moment in enumerate(one.moments):
            for parameter, view in zip(one.layout.parameters, one.layout.views_trained(moment), strict=True):
                found[f"{MOMENT}{index}.{names[id(parameter)]}"] = view
    return found


def packed(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """As the bytes of a safetensors file, sealed: the checksum covers all of it, with zeros where it stands itself."""
    about = json.dumps({SEAL: "", **metadata} | {SEAL: _OPEN})  # first, so that it is found first
    data = safetensors.torch.save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {"hoop": about}
    )
    at = data.index(_OPEN.encode())
    return b"".join((data[:at], _checksum(data, at).encode(), memoryview(data)[at + len(_OPEN) :]))


def put(arena: Arena, name: str, data: bytes) -> dict[str, Any]:
    """Into a buffer of this name; returns what a reader has to know."""
    if any(buffer.name == name for buffer in arena.buffers()):
        arena.free(name)
    buffer = arena.allocate(name, len(data))
    arena.write(buffer.address, data)
    return {"buffer": name, "bytes": len(data), SEAL: _header(data, name)[0][SEAL]}


def unpacked(data: bytes, where: Path | str = "checkpoint") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse; what is damaged is refused, with ``where`` it lies. The seal stays in the metadata."""
    metadata, end = _header(data, where)
    seal = metadata[SEAL]
    found = _checksum(data, data.find(seal.encode(), 8, end))
    if found != seal:
        raise FailedPrecondition(
            f"{where}: damaged or tampered with: its checksum is {seal[:16]}…, its {len(data)} bytes make {found[:16]}…"
        )
    try:
        return safetensors.torch.load(data), metadata
    except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise FailedPrecondition(
            f"{where}: {len(data)} bytes are not a checkpoint of Hoop's: {error!r}"
        ) from None


def _header(data: bytes, where: Path | str) -> tuple[dict[str, Any], int]:
    """The metadata, and where the header ends; a file that ends too early is called torn."""
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or len(data) < end:
        raise FailedPrecondition(f"{where}: torn: it ends after {len(data)} bytes, within its header")
    try:
        header = json.loads(data[8:end])
        metadata = json.loads(header.pop("__metadata__")["hoop"])
        whole = end + max((one["data_offsets"][1] for one in header.values()), default=0)
        torn = len(data) < whole
        if not isinstance(metadata, dict) or len(metadata[SEAL].encode()) != len(_OPEN):
            raise ValueError("no checksum")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FailedPrecondition(
            f"{where}: damaged, or not a checkpoint of Hoop's: {len(data)} bytes, {error!r}"
        ) from None
    if torn:
        raise FailedPrecondition(f"{where}: torn: {len(data)} of {whole} bytes are there")
    return metadata, end


def _checksum(data: bytes, at: int) -> str:
    """Over all bytes, with zeros for the 64 at ``at``."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:at])
    digest.update(_OPEN.encode())
    digest.update(view[at + len(_OPEN) :])
    return digest.hexdigest()


def restore(held: Sequence[Stateful], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts a checkpoint's tensors where they belong; whatever is missing or of another shape is named."""
    with torch.no_grad():
        for name, into in tensors_of(held, names_of(model)).items():
            if name not in tensors:
                raise FailedPrecondition(f"checkpoint: no {name}; is it of another model or optimizer?")
            given = tensors[name]
            if given.shape != into.shape or given.dtype != into.dtype:
                raise FailedPrecondition(
                    f"checkpoint: {name} is {given.dtype} {list(given.shape)}, the model's is "
                    f"{into.dtype} {list(into.shape)}"
                )
            into.copy_(given)


SNAPSHOT = "snapshot"
RUN = "run"
"""Under this name the run is in a snapshot's metadata."""


class SnapshotPublisher:
    """The snapshots that one rank makes."""

    def __init__(self, arena: Arena, prefix: str, emit: Emit, run: str = "", came: bool = False) -> None:
        """``run``: whose they are, for who is restarted on the arena; ``came``: there may be others of before."""
        self._came = came
        self._arena, self._prefix, self._emit, self._run = arena, prefix, emit, run
        self._made = 0
        self._newest: int | None = None

    def add(
        self,
        tensors: Mapping[str, Tensor] | None,
        done: int,
        per_epoch: int,
        final: bool,
        parts: int,
        turn: int,
    ) -> None:
        """This rank's part of one of ``parts``, if it has one; ``turn``: how often the model had been cut anew."""
        self._newest = done
        if tensors is None:
            return
        epoch, step = divmod(done, per_epoch)
        data = packed(tensors, {"steps": done, "epoch": epoch, "step": step, RUN: self._run})
        # Two in turn: one may be read while the next is written.
        where = put(self._arena, f"{self._prefix}{SNAPSHOT}{self._made % 2}", data)
        self._made += 1
        told = {"kind": "snapshot", "steps": done, "final": final, "parts": parts, "turn": turn}
        self._emit({**told, **where})

    def over(self, what: str) -> PeerLost:
        """The run cannot go on, for this was lost."""
        return PeerLost(f"{what} was lost: {self.remedy}")

    @property
    def remedy(self) -> str:
        """What to do when a run cannot go on."""
        if self._newest is None and self._came:
            return "go on from its newest checkpoint, if it has one: hoop train --resume --out DIR"
        if self._newest is None:
            return "there is no checkpoint yet, start it again (checkpoint_every says how often one is made)"
        return f"go on from the checkpoint of step {self._newest}: hoop train --resume --out DIR"
