"""Commit records: which step of which run a set of arena buffers holds. A restarted rank reads them.

    0      8        12       16
    | step | crc-32 | length | JSON: the run, the boot, which bytes of which buffers |          buffer "….commit"

The step is one 8-byte word. The writer sets it to -1 before it changes the buffers, and to the step afterwards. A
killed process leaves its stores in program order, so a step >= 0 means that the buffers are complete. No checksum
over the buffers is needed in every step. The page cache survives a process but not the machine, and a disk may write
pages in any order. Records from before the machine's last boot are therefore ignored.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hoop.memory.arena import Arena

SUFFIX = ".commit"
"""End of the name of a record's buffer."""
NO_STEP = -1
"""Step of a record whose buffers are being written or were never written."""
_STEP = struct.Struct("<q")
_BODY_INFO = struct.Struct("<II")  # crc-32 and length of the JSON
_HEAD = _STEP.size + _BODY_INFO.size


class CommitRecord:
    """One commit record. The writer of the buffers sets ``step``."""

    def __init__(self, arena: Arena, name: str, run: str, about: Mapping[str, Any]) -> None:
        """Allocate the record, with step ``NO_STEP``. ``about`` is JSON that describes the buffers."""
        body = json.dumps({"run": run, "boot": boot_id(), **about}).encode()
        data = _STEP.pack(NO_STEP) + _BODY_INFO.pack(zlib.crc32(body), len(body)) + body
        buffer = arena.allocate(name + SUFFIX, len(data))
        arena.write(buffer.address, data)
        self.name = buffer.name
        self._step = arena.view(buffer.address, _STEP.size).cast("q")

    @property
    def step(self) -> int:
        return self._step[0]

    @step.setter
    def step(self, step: int) -> None:
        self._step[0] = step


def commit_records(arena: Arena, prefix: str, run: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, step and JSON of every valid record of ``run`` and of this boot whose name starts with ``prefix``."""
    this_boot = boot_id()
    for buffer in arena.buffers():
        if not (buffer.name.startswith(prefix) and buffer.name.endswith(SUFFIX)):
            continue
        data = arena.read(buffer.address, buffer.size)
        if len(data) < _HEAD:
            continue
        (step,), (crc, length) = _STEP.unpack_from(data), _BODY_INFO.unpack_from(data, _STEP.size)
        body = data[_HEAD : _HEAD + length]
        if step <= NO_STEP or len(body) < length or zlib.crc32(body) != crc:
            continue
        about = json.loads(body)
        if run and this_boot and (about["run"], about["boot"]) == (run, this_boot):
            yield buffer.name, step, about


def boot_id() -> str:
    """Id of the machine's current boot. Empty where the system has none; then no commit record is valid."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
