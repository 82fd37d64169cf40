"""The header of a checkpoint, and the checksums in it: what can be read and verified without PyTorch.

``checkpoint_format.py`` has the format, and reads the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoop.errors import FailedPrecondition

METADATA_KEY = "hoop"
"""Key of Hoop's metadata, JSON in a string, among the metadata of a safetensors file."""
CHECKSUM_KEY = "sha256"
"""Key of the header's checksum, in a file's metadata and in ``snapshot`` events."""
TENSORS_KEY = "tensors_sha256"
"""Key of the tensors' checksums, one after the other, in the order of their bytes."""
BLANK_CHECKSUM = "0" * 64
"""Placeholder of a checksum until it is computed."""
PADDING_KEY = "padding"


def read_metadata(data: bytes | bytearray, where: Path | str = "checkpoint") -> dict[str, Any]:
    """The metadata of a file's bytes, without its checksums being computed: for bytes that another reader verifies.

    Raises ``FailedPrecondition``, which names ``where``, for a truncated file.
    """
    return Header.parse(data, where).public_metadata()


def verified_metadata(data: bytes | bytearray, where: Path | str = "checkpoint") -> dict[str, Any]:
    """The metadata of a file's bytes, all of which were compared with their checksums.

    Raises ``FailedPrecondition``, which names ``where``, for a truncated or damaged file.
    """
    header = Header.parse(data, where)
    header.verify(data, where)
    return header.public_metadata()


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    end: int
    """Offset of the header's end in bytes."""
    metadata: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    """First byte and end of each tensor in the file, in the order of the checksums."""

    @classmethod
    def parse(cls, data: bytes | bytearray, where: Path | str, with_tensors: bool = True) -> Header:
        """Raises FailedPrecondition for a truncated file. ``with_tensors``: the data is the whole file."""
        end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < 8 or len(data) < end:
            raise FailedPrecondition(f"{where}: torn: it ends after {len(data)} bytes, within its header")
        try:
            header = json.loads(data[8:end])
            metadata = json.loads(header.pop("__metadata__")[METADATA_KEY])
            offsets = {
                name: (end + one["data_offsets"][0], end + one["data_offsets"][1]) for name, one in header.items()
            }
            spans = dict(sorted(offsets.items(), key=lambda item: item[1]))
            size = max((stop for _, stop in spans.values()), default=end)
            torn = with_tensors and len(data) < size
            if not isinstance(metadata, dict) or len(metadata[CHECKSUM_KEY].encode()) != len(BLANK_CHECKSUM):
                raise ValueError("no checksum")
            if TENSORS_KEY in metadata and len(metadata[TENSORS_KEY]) != len(BLANK_CHECKSUM) * len(spans):
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
        return {name: value for name, value in self.metadata.items() if name not in (TENSORS_KEY, PADDING_KEY)}

    def fill_in(self, memory: memoryview, checksums: Sequence[str]) -> str:
        """Write the tensors' checksums into the header, whose checksums are blank, then its own, which is returned."""
        text = bytes(memory[: self.end])
        at = text.index(BLANK_CHECKSUM.encode())
        blank = (BLANK_CHECKSUM * len(checksums)).encode()
        start = text.index(blank, at + len(BLANK_CHECKSUM))
        memory[start : start + len(blank)] = "".join(checksums).encode()
        checksum = _checksum(memory[: self.end], at)
        memory[at : at + len(checksum)] = checksum.encode()
        return checksum

    def verify(self, data: bytes | bytearray, where: Path | str) -> dict[str, str]:
        """The checksums of the tensors by name; raises FailedPrecondition if a byte of the file is not covered."""
        at = data.find(self.checksum.encode(), 8, self.end)
        if TENSORS_KEY not in self.metadata:  # a file of an earlier version
            self._compare(where, f"its {len(data)} bytes", self.checksum, _checksum(data, at))
            return {}
        self._compare(
            where, f"its header of {self.end} bytes", self.checksum, _checksum(memoryview(data)[: self.end], at)
        )
        ends = [self.end, *(stop for _, stop in self.spans.values())]
        if [start for start, _ in self.spans.values()] + [len(data)] != ends:
            raise FailedPrecondition(f"{where}: damaged: its {len(data)} bytes are not those of its tensors")
        size, text = len(BLANK_CHECKSUM), self.metadata[TENSORS_KEY]
        checksums = {name: text[index * size : (index + 1) * size] for index, name in enumerate(self.spans)}
        for name, span in self.spans.items():
            self._compare(where, name, checksums[name], sha256_of(data, *span))
        return checksums

    @staticmethod
    def _compare(where: Path | str, what: str, expected: str, actual: str) -> None:
        if actual != expected:
            raise FailedPrecondition(
                f"{where}: damaged or tampered with: the checksum of {what} is {actual[:16]}…, not {expected[:16]}…"
            )


def sha256_of(data: bytes | bytearray | memoryview, start: int = 0, stop: int | None = None) -> str:
    return hashlib.sha256(memoryview(data)[start:stop]).hexdigest()


def _checksum(data: bytes | bytearray | memoryview, at: int) -> str:
    """sha256 of these bytes, with zeros for the 64 characters at ``at``."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:at])
    digest.update(BLANK_CHECKSUM.encode())
    digest.update(view[at + len(BLANK_CHECKSUM) :])
    return digest.hexdigest()
