"""What a device's memory says of itself: which step of which run some of its bytes hold, for who is restarted on it.

    0      8        12       16
    | step | crc-32 | length | JSON: the run, the boot, which bytes of which buffers |          buffer "….claim"

The step is one word, -1 while the bytes are being written: it is set to -1 before, and to the step after. A process
that is killed leaves what it had stored in the order in which it stored it, so a step that is there is whole, and no
checksum over the bytes is needed in every step. The page cache outlives a process and not the machine; pages that a
disk got in any order prove nothing, and so a claim of before the machine's last boot is not believed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hoop.memory.arena import Arena

SUFFIX = ".claim"
NO_STEP = -1
"""The step of what is being written, or never was."""
_STEP = struct.Struct("<q")
_ABOUT = struct.Struct("<II")
_HEAD = _STEP.size + _ABOUT.size


class CommitRecord:
    """One claim, to be kept up to date by whoever writes the bytes."""

    def __init__(self, arena: Arena, name: str, run: str, about: Mapping[str, Any]) -> None:
        """Made while the bytes are not there yet: it claims nothing at first."""
        told = json.dumps({"run": run, "boot": boot(), **about}).encode()
        data = _STEP.pack(NO_STEP) + _ABOUT.pack(zlib.crc32(told), len(told)) + told
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
    """What can be believed of this run, under names that begin so: each name, step, and what it is about."""
    here = boot()
    for buffer in arena.buffers():
        if not (buffer.name.startswith(prefix) and buffer.name.endswith(SUFFIX)):
            continue
        data = arena.read(buffer.address, buffer.size)
        if len(data) < _HEAD:
            continue
        (step,), (crc, length) = _STEP.unpack_from(data), _ABOUT.unpack_from(data, _STEP.size)
        told = data[_HEAD : _HEAD + length]
        if step <= NO_STEP or len(told) < length or zlib.crc32(told) != crc:
            continue
        about = json.loads(told)
        if run and here and (about["run"], about["boot"]) == (run, here):
            yield buffer.name, step, about


def boot() -> str:
    """Which of this machine's lives this is; empty where that cannot be known, and nothing is believed."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
