"""Compiles the native core into this folder:

    python -m hoop.native.build

``make install`` runs it, and ``setup.py`` calls ``build`` for a wheel. A C compiler is enough, because the library is
loaded with ctypes and needs no headers of Python: the one that ``CC`` names, ``cc``, ``gcc`` or ``clang``, or else the
one in PyPI's package ``ziglang``. Without one Hoop works with Python and NumPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("core.c", "fold_kernels.h", "operand_kernels.h")
LIBRARY = "libhoop_native.so.1"
"""Not ``….so``: Python would take that for an extension module."""
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    # Every result has the bits of NumPy's: no fused multiply-add. Nobody reads floating-point exception flags.
    "-ffp-contract=off",
    "-fno-trapping-math",
)
_TIMEOUT_S = 300
_MACHINES = ("x86_64", "aarch64", "arm64")


class BuildError(Exception):
    """The library cannot be built here; the text says why."""


def source_hash(folder: Path = HERE) -> int:
    """A hash of the sources, never 0. A library built from other sources is not loaded."""
    digest = hashlib.blake2b(digest_size=8)
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    return int.from_bytes(digest.digest(), "little") | 1


def compiler() -> list[str]:
    """The command of a C compiler; raises BuildError if there is none."""
    if named := os.environ.get("CC"):
        return shlex.split(named)
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        # Without a target it would use instructions that only this machine's processor has.
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{os.uname().machine}-linux-gnu"]
    raise BuildError("there is no C compiler: install one, or pip install ziglang")


def build(folder: Path = HERE) -> Path:
    """Compiles the library into ``folder`` and returns its path; raises BuildError."""
    if not sys.platform.startswith("linux") or os.uname().machine not in _MACHINES:
        raise BuildError("the native core is for Linux on x86-64 and aarch64")
    command = [*compiler(), *_FLAGS, f"-DHOOP_SOURCE_HASH={source_hash()}ULL"]
    target = folder / LIBRARY
    made = None
    try:
        # Renamed when it is complete: another process may load the library now.
        descriptor, made = tempfile.mkstemp(suffix=".tmp", dir=folder)
        os.close(descriptor)
        done = subprocess.run(
            [*command, "-o", made, str(HERE / SOURCES[0])],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
        os.chmod(made, 0o755)  # noqa: S103 - a program file like any other
        os.replace(made, target)
        made = None
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the native core cannot be built in {folder}: {error}") from error
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                os.unlink(made)
    return target


def main() -> int:
    try:
        sys.stdout.write(f"built {build()}\n")
    except BuildError as error:
        sys.stderr.write(f"Hoop works without its native core, more slowly: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
