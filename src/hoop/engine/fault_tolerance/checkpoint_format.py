"""The format of a checkpoint: a training state as named tensors, in a safetensors file.

    0.1.weight                     the model's own names
    optimizer.moment0.0.1.weight   optimizer state, under the name of its parameter
    metadata                       position in the data, settings; a sha256 of each tensor; a sha256 of the header

Names and shapes are those of the model, not of the devices, so another number of devices or another strategy can
resume from a checkpoint. safetensors does not detect a flipped bit; ``deserialize`` rejects a wrong checksum. The
header has the checksums of the tensors, so the checksum of the header covers every byte. Each byte is hashed twice on
its way to a file:

    device   hashes the snapshot in its arena                      (``copy_into``)
    client   verifies what it has read: the arena, the wire        (``verified``)
    writer   writes the device's checksums into the file           (``serialized_parts``)

A byte that is damaged later, in the client's memory or on the disk, does not match the device's checksum when the file
is read. The weights alone are hashed once more, for the run's ``weights_sha256``. A file of an earlier version has one
sha256 over all bytes.

``checkpoint_header.py`` reads the header and compares the checksums, without PyTorch.
``snapshots.py`` writes one rank's part of a checkpoint into the arena; ``runs/checkpoint_store.py`` writes the file.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from hoop.engine.fault_tolerance.checkpoint_header import (
    BLANK_CHECKSUM,
    CHECKSUM_KEY,
    METADATA_KEY,
    PADDING_KEY,
    TENSORS_KEY,
    Header,
    sha256_of,
)
from hoop.engine.job import names_of
from hoop.engine.stage.state import StateLayout
from hoop.errors import FailedPrecondition

log = logging.getLogger("hoop.engine")
MOMENT = "optimizer.moment"
CUSTOM = "hoop."
"""Prefix of the names of optimizer state, averaged weights and texts of custom training (``custom/state.py``)."""
_METADATA_BYTES = 1024


def is_training_state(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to training, not to the model."""
    return name.startswith((MOMENT, CUSTOM))


class Stateful(Protocol):
    """Weights and optimizer state of one stage."""

    @property
    def layout(self) -> StateLayout: ...

    @property
    def moments(self) -> list[Tensor]: ...


def tensors_of(stages: Iterable[Stateful], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state of these stages, by name. ``names``: see ``job.names_of``."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        layout = stage.layout
        found |= named_tensors(layout, layout.tensors, layout.counters, stage.moments, names)
    return found


def named_tensors(
    layout: StateLayout,
    tensors: Sequence[Tensor],
    counters: Sequence[Tensor],
    moments: Sequence[Tensor],
    names: Mapping[int, str],
) -> dict[str, Tensor]:
    """The state of a stage by name: parameters, buffers, counters and moments in the order of its layout."""
    found: dict[str, Tensor] = {}
    for own, tensor in [*zip(layout.tensors, tensors, strict=True), *zip(layout.counters, counters, strict=True)]:
        found[names[id(own)]] = tensor.detach()
    for tensor in layout.frozen:
        found[names[id(tensor)]] = tensor.detach()
    for index, moment in enumerate(moments):
        for parameter, view in zip(layout.parameters, layout.views_trained(moment), strict=True):
            found[f"{MOMENT}{index}.{names[id(parameter)]}"] = view
    return found


def restore(stages: Sequence[Stateful], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies a checkpoint's tensors into these stages. Raises on a missing tensor or another shape or dtype."""
    with torch.no_grad():
        for name, into in tensors_of(stages, names_of(model)).items():
            if name not in tensors:
                raise FailedPrecondition(f"checkpoint: no {name}; is it of another model or optimizer?")
            given = tensors[name]
            if given.shape != into.shape or given.dtype != into.dtype:
                raise FailedPrecondition(
                    f"checkpoint: {name} is {given.dtype} {list(given.shape)}, the model's is "
                    f"{into.dtype} {list(into.shape)}"
                )
            into.copy_(given)


# ---- the file format

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in a file, in the order in which it has their tensors."""


def serialize(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """The bytes of a safetensors file, with its checksums."""
    blank = {METADATA_KEY: _with_blank_checksums(metadata, len(tensors))}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = bytearray(safetensors.torch.save(contiguous, blank))
    header = Header.parse(data, "checkpoint")
    header.fill_in(memoryview(data), [sha256_of(data, *span) for span in header.spans.values()])
    return bytes(data)


def _has_rare_dtype(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor has a dtype that is left to the safetensors library, which copies the whole file."""
    return any(tensor.dtype not in _DTYPES for tensor in tensors.values())


def serialized_parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], checksums: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """The bytes of ``serialize``, to be written one part after the other: the header, then each tensor's own memory.

    A tensor is not copied: it must not change until its part is written. ``checksums``: what ``verified`` has returned
    for these tensors, which are not hashed again.
    """
    if _has_rare_dtype(tensors):
        return [serialize(tensors, metadata)]
    known = checksums or {}
    text, order = _header_text(tensors, metadata)
    parts = [_bytes_of(tensors[name]) for name in order]
    of_tensors = [known.get(name) or sha256_of(part) for name, part in zip(order, parts, strict=True)]
    Header.parse(text, "checkpoint", with_tensors=False).fill_in(memoryview(text), of_tensors)
    return [bytes(text), *parts]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _header_text(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> tuple[bytearray, list[str]]:
    """The beginning of a file, with blank checksums, and the names of the tensors in the order of their bytes."""
    # In the library's order: the largest elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (list(_DTYPES).index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: _with_blank_checksums(metadata, len(order))}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text), order


def padded(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with a length that is a multiple of 1 KiB, so that a snapshot fits where the one before it was.

    Numbers in it, such as losses, have more digits or fewer.
    """
    length = len(json.dumps(json.dumps({**metadata, PADDING_KEY: ""})))  # the file has it as a string in JSON
    return {**metadata, PADDING_KEY: " " * (-length % _METADATA_BYTES)}


def copy_into(
    allocate: Callable[[int], memoryview], tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> Callable[[], tuple[str, int]]:
    """Copies each tensor once, to its place in a file in memory that ``allocate(size)`` returns.

    Then the tensors may change. Another thread may call the result, which completes the bytes of ``serialize`` with
    their checksums, and returns that of the header and their size. Until then the file has wrong checksums.
    """
    if _has_rare_dtype(tensors):
        data = serialize(tensors, metadata)
        allocate(len(data))[:] = data
        checksum_and_size = Header.parse(data, "checkpoint").checksum, len(data)
        return lambda: checksum_and_size
    text, order = _header_text(tensors, metadata)
    end = len(text)
    size = end + sum(tensors[name].nbytes for name in order)
    memory = allocate(size)
    memory[:end] = text
    content = torch.frombuffer(memory, dtype=torch.uint8)
    for name in order:
        tensor = tensors[name].detach()
        begin, end = end, end + tensor.nbytes
        if end > begin:
            content[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    header = Header.parse(text, "checkpoint", with_tensors=False)

    def complete() -> tuple[str, int]:
        return header.fill_in(memory, [sha256_of(memory, *span) for span in header.spans.values()]), size

    return complete


def _with_blank_checksums(metadata: Mapping[str, Any], tensors: int) -> str:
    """The metadata as JSON. The checksums come first, so that the first runs of zeros in the file are their places."""
    blank = {CHECKSUM_KEY: BLANK_CHECKSUM, TENSORS_KEY: BLANK_CHECKSUM * tensors}
    return json.dumps(blank | dict(metadata) | blank)


def deserialize(data: bytes | bytearray, where: Path | str = "checkpoint") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and metadata of a file's bytes; the metadata contains the checksum.

    The tensors of a ``bytearray`` are views of it, those of ``bytes`` copies.
    Raises ``FailedPrecondition``, which names ``where``, for a truncated or damaged file.
    """
    found = verified(data, where)
    return found.tensors, found.metadata


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """What a file's bytes hold, or those of a snapshot, after all of them were compared with their checksums."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    checksums: dict[str, str]
    """SHA-256 of each tensor, by name; empty for a file of an earlier version."""


def verified(data: bytes | bytearray, where: Path | str = "checkpoint") -> VerifiedCheckpoint:
    """Does what ``deserialize`` does, with the checksums of the tensors, for ``serialized_parts``."""
    header = Header.parse(data, where)
    checksums = header.verify(data, where)
    metadata = header.public_metadata()
    try:
        views = _views(data, header.end) if isinstance(data, bytearray) else None
        tensors = safetensors.torch.load(bytes(data)) if views is None else views
        return VerifiedCheckpoint(tensors, metadata, checksums)
    except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise FailedPrecondition(f"{where}: {len(data)} bytes are not a checkpoint of Hoop's: {error!r}") from None


def _views(data: bytearray, end: int) -> dict[str, Tensor] | None:
    """The tensors of a file as views of its bytes; None if one has a type that only the library has.

    ``end``: of its header. PyTorch checks that the views are inside.
    """
    kinds = {name: kind for kind, name in _DTYPES.items()}
    header = json.loads(data[8:end])
    header.pop("__metadata__")
    if any(one["dtype"] not in kinds for one in header.values()):
        return None
    found = {}
    for name, one in header.items():
        kind, shape, (begin, stop) = kinds[one["dtype"]], one["shape"], one["data_offsets"]
        count = math.prod(shape)
        if begin < 0 or stop - begin != count * kind.itemsize:
            raise ValueError(f"{name} has {stop - begin} bytes")
        if count:
            found[name] = torch.frombuffer(data, dtype=kind, count=count, offset=end + begin).view(shape)
        else:
            found[name] = torch.empty(shape, dtype=kind)
    return found
