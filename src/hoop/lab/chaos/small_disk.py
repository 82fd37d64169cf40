"""A file system of a few MiB that can be filled and emptied: a tmpfs, which needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BALLAST = "ballast"
_BLOCK = 64 << 10


def unavailable_reason() -> str:
    """Returns why no file system can be mounted on this machine; empty if it can."""
    if os.geteuid():
        return "a small disk needs root to mount one"
    with tempfile.TemporaryDirectory(prefix="hoop-disk-") as folder:
        try:
            with small_disk(Path(folder), 1 << 20):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"a small disk cannot be mounted: {error}"


class SmallDisk:
    """A mounted file system of limited size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> int:
        """Writes a file until nothing fits any more; returns its size."""
        written = 0
        with open(self.folder / BALLAST, "ab", buffering=0) as file:
            for size in (_BLOCK, 4096, 1):
                with contextlib.suppress(OSError):
                    while count := file.write(b"\0" * size):
                        written += count
        return written

    def free(self) -> None:
        """Removes what ``fill`` wrote."""
        (self.folder / BALLAST).unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """Mounts ``size`` bytes at an existing folder for the length of the block."""
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "hoop-chaos", str(folder)]
    subprocess.run(options, check=True, capture_output=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
