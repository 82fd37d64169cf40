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

``snapshots.py`` writes one rank's part of a checkpoint into the arena; ``runs/checkpoint_store.py`` writes the file.
"""

from __future__ import annotations

import hashlib
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

from hoop.engine.job import names_of
from hoop.engine.stage.state import StateLayout
from hoop.errors import FailedPrecondition

log = logging.getLogger("hoop.engine")
MOMENT = "optimizer.moment"
CUSTOM = "hoop."
"""Prefix of the names of optimizer state, averaged weights and texts of custom training (``custom/state.py``)."""
CHECKSUM_KEY = "sha256"
"""Key of the header's checksum, in a file's metadata and in ``snapshot`` events."""
_TENSORS_KEY = "tensors_sha256"
"""Key of the tensors' checksums, one after the other, in the order of their bytes."""
_BLANK_CHECKSUM = "0" * 64
"""Placeholder of a checksum until it is computed."""
_PADDING_KEY = "padding"
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

_METADATA_KEY = "hoop"
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
    blank = {_METADATA_KEY: _with_blank_checksums(metadata, len(tensors))}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = bytearray(safetensors.torch.save(contiguous, blank))
    header = _Header.parse(data, "checkpoint")
    header.fill_in(memoryview(data), [_sha256(data, *span) for span in header.spans.values()])
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
    found = [known.get(name) or _sha256(part) for name, part in zip(order, parts, strict=True)]
    _Header.parse(text, "checkpoint", with_tensors=False).fill_in(memoryview(text), found)
    return [bytes(text), *parts]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _header_text(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> tuple[bytearray, list[str]]:
    """The beginning of a file, with blank checksums, and the names of the tensors in the order of their bytes."""
    # In the library's order: the largest elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (list(_DTYPES).index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {_METADATA_KEY: _with_blank_checksums(metadata, len(order))}}
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
    length = len(json.dumps(json.dumps({**metadata, _PADDING_KEY: ""})))  # the file has it as a string in JSON
    return {**metadata, _PADDING_KEY: " " * (-length % _METADATA_BYTES)}


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
        found = _Header.parse(data, "checkpoint").checksum, len(data)
        return lambda: found
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
    header = _Header.parse(text, "checkpoint", with_tensors=False)

    def complete() -> tuple[str, int]:
        return header.fill_in(memory, [_sha256(memory, *span) for span in header.spans.values()]), size

    return complete


def _with_blank_checksums(metadata: Mapping[str, Any], tensors: int) -> str:
    """The metadata as JSON. The checksums come first, so that the first runs of zeros in the file are their places."""
    blank = {CHECKSUM_KEY: _BLANK_CHECKSUM, _TENSORS_KEY: _BLANK_CHECKSUM * tensors}
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
    header = _Header.parse(data, where)
    checksums = header.verify(data, where)
    metadata = header.public_metadata()
    try:
        views = _views(data, header.end) if isinstance(data, bytearray) else None
        tensors = safetensors.torch.load(bytes(data)) if views is None else views
        return VerifiedCheckpoint(tensors, metadata, checksums)
    except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise FailedPrecondition(f"{where}: {len(data)} bytes are not a checkpoint of Hoop's: {error!r}") from None


def read_metadata(data: bytes | bytearray, where: Path | str = "checkpoint") -> dict[str, Any]:
    """The metadata of a file's bytes, without its checksums being computed: for bytes that another reader verifies.

    Raises ``FailedPrecondition``, which names ``where``, for a truncated file.
    """
    return _Header.parse(data, where).public_metadata()


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


@dataclass(frozen=True)
class _Header:
    """The header of a file."""

    end: int
    """Offset of the header's end in bytes."""
    metadata: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    """First byte and end of each tensor in the file, in the order of the checksums."""

    @classmethod
    def parse(cls, data: bytes | bytearray, where: Path | str, with_tensors: bool = True) -> _Header:
        """Raises FailedPrecondition for a truncated file. ``with_tensors``: the data is the whole file."""
        end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < 8 or len(data) < end:
            raise FailedPrecondition(f"{where}: torn: it ends after {len(data)} bytes, within its header")
        try:
            header = json.loads(data[8:end])
            metadata = json.loads(header.pop("__metadata__")[_METADATA_KEY])
            offsets = {
                name: (end + one["data_offsets"][0], end + one["data_offsets"][1]) for name, one in header.items()
            }
            spans = dict(sorted(offsets.items(), key=lambda item: item[1]))
            size = max((stop for _, stop in spans.values()), default=end)
            torn = with_tensors and len(data) < size
            if not isinstance(metadata, dict) or len(metadata[CHECKSUM_KEY].encode()) != len(_BLANK_CHECKSUM):
                raise ValueError("no checksum")
            if _TENSORS_KEY in metadata and len(metadata[_TENSORS_KEY]) != len(_BLANK_CHECKSUM) * len(spans):
                raise ValueError("no checksum for each tensor")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise FailedPrecondition(
                f"{where}: damaged, or not a checkpoint of Hoop's: {len(data)} bytes, {error!r}"
            ) from None
        if torn:
            raise FailedPrecondition(f"{where}: torn: {len(data)} of {size} bytes are there")
        return cls(end, metadata, spans)

    @property
    def checksum(self) -> str:
        return str(self.metadata[CHECKSUM_KEY])

    def public_metadata(self) -> dict[str, Any]:
        """The metadata without what this format adds, but with the header's checksum."""
        return {name: value for name, value in self.metadata.items() if name not in (_TENSORS_KEY, _PADDING_KEY)}

    def fill_in(self, memory: memoryview, checksums: Sequence[str]) -> str:
        """Write the tensors' checksums into the header, whose checksums are blank, then its own, which is returned."""
        text = bytes(memory[: self.end])
        at = text.index(_BLANK_CHECKSUM.encode())
        blank = (_BLANK_CHECKSUM * len(checksums)).encode()
        start = text.index(blank, at + len(_BLANK_CHECKSUM))
        memory[start : start + len(blank)] = "".join(checksums).encode()
        found = _checksum(memory[: self.end], at)
        memory[at : at + len(found)] = found.encode()
        return found

    def verify(self, data: bytes | bytearray, where: Path | str) -> dict[str, str]:
        """The checksums of the tensors by name; raises FailedPrecondition if a byte of the file is not covered."""
        at = data.find(self.checksum.encode(), 8, self.end)
        if _TENSORS_KEY not in self.metadata:  # a file of an earlier version
            self._compare(where, f"its {len(data)} bytes", self.checksum, _checksum(data, at))
            return {}
        self._compare(
            where, f"its header of {self.end} bytes", self.checksum, _checksum(memoryview(data)[: self.end], at)
        )
        ends = [self.end, *(stop for _, stop in self.spans.values())]
        if [start for start, _ in self.spans.values()] + [len(data)] != ends:
            raise FailedPrecondition(f"{where}: damaged: its {len(data)} bytes are not those of its tensors")
        size, text = len(_BLANK_CHECKSUM), self.metadata[_TENSORS_KEY]
        found = {name: text[index * size : (index + 1) * size] for index, name in enumerate(self.spans)}
        for name, span in self.spans.items():
            self._compare(where, name, found[name], _sha256(data, *span))
        return found

    @staticmethod
    def _compare(where: Path | str, what: str, expected: str, found: str) -> None:
        if found != expected:
            raise FailedPrecondition(
                f"{where}: damaged or tampered with: the checksum of {what} is {found[:16]}…, not {expected[:16]}…"
            )


def _sha256(data: bytes | bytearray | memoryview, start: int = 0, stop: int | None = None) -> str:
    return hashlib.sha256(memoryview(data)[start:stop]).hexdigest()


def _checksum(data: bytes | bytearray | memoryview, at: int) -> str:
    """sha256 of these bytes, with zeros for the 64 characters at ``at``."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:at])
    digest.update(_BLANK_CHECKSUM.encode())
    digest.update(view[at + len(_BLANK_CHECKSUM) :])
    return digest.hexdigest()
