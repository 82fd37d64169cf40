"""The journal in a file.

A torn last line (the coordinator died while it wrote) is cut off; a bad line before good ones is damage.
"""

from __future__ import annotations

import os
from pathlib import Path

from hoop.errors import ResourceExhausted
from hoop.membership.detector import DetectorConfig
from hoop.membership.journal import Entry, decode, encode, restore, snapshot


class FileJournal:
    """An open journal file."""

    def __init__(self, path: Path, config: DetectorConfig, now: float) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        self.state = restore(decode(data, path), config, now, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        with open(fresh, "wb", opener=_private) as file:
            file.writelines(encode(entry) for entry in snapshot(self.state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync_folder(path.parent)
        self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115 - closed by close()

    def append(self, *entries: Entry) -> None:
        """Writes entries and syncs them, or leaves the journal as it was and raises."""
        lines = b"".join(map(encode, entries))
        good = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(lines)
            os.fsync(self._file.fileno())
        except OSError as error:
            written, why = 0, error.strerror
        else:
            why = "the disk is full"
        if written != len(lines):
            os.ftruncate(self._file.fileno(), good)  # half a line would spoil the next one
            raise ResourceExhausted(f"journal {self.path}: cannot write {len(lines)} bytes: {why}; make room")

    def close(self) -> None:
        self._file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
