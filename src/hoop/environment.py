"""The versions and the arithmetic of a process. Devices that differ in them may compute different bits.

    {"hoop": "0.2.0", "torch": "2.13.0", "python": "3.11", "arithmetic": "5f0c6d1a9b27e384", "processor": "…"}

A device sends its versions when it joins a cluster (``versions``); the ranks of a job also compare the result of a
numeric probe, under the key ``arithmetic`` (``hoop.engine.numeric_probe``). Other versions are refused. Another
arithmetic is announced, and refused only if the user asks for the same bits (``--require-same-bits``).
"""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

REMEDIES = {
    "hoop": "install the same version of Hoop on every machine",
    "torch": "install the same version of PyTorch on every machine",
    "arithmetic": "use machines with the same type of processor",
}
"""The keys that may change a training's result, each with what the user can do. Other keys are only reported."""
ARITHMETIC, PROCESSOR = "arithmetic", "processor"
_NAMES = {
    "hoop": "Hoop",
    "torch": "PyTorch",
    "python": "Python",
    ARITHMETIC: "the result of the numeric probe",
    PROCESSOR: "the processor",
}


def versions() -> dict[str, str]:
    """The versions of Hoop, PyTorch and Python. Does not load PyTorch; a package that is not installed is left out."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    installed = {package: _installed_version(package) for package in ("hoop", "torch")}
    return found | {package: version for package, version in installed.items() if version}


@functools.cache
def processor(information: Path = Path("/proc/cpuinfo")) -> str:
    """The type of this machine's processor: its name, and the instructions by which PyTorch chooses its kernels."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in information.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = {*fields.get("flags", fields.get("Features", "")).split()}
    known = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("sve", "SVE"), ("asimd", "NEON"))
    vectors = next((name for flag, name in known if flag in flags), "")
    part = fields.get("CPU part", "")
    model = fields.get("model name") or (f"part {part}" if part else platform.processor())
    return ", ".join(filter(None, (" ".join(model.split()), platform.machine(), vectors)))[:120]


@functools.cache  # to find and read a package's metadata takes 20 ms, and a process keeps what it has loaded
def _installed_version(package: str) -> str:
    """Empty: it is not installed."""
    try:
        return metadata.version(package).partition("+")[0]  # 2.13.0+cpu: the probe compares the builds
    except metadata.PackageNotFoundError:
        return ""


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """The keys with different values, those that may change the result first. A key that one side lacks is equal."""
    keys = [*REMEDIES, *(key for key in _NAMES if key not in REMEDIES)]
    return [key for key in keys if key in found and key in expected and found[key] != expected[key]]


def describe(values: Mapping[str, str], keys: list[str]) -> str:
    """``Hoop 0.2.0, PyTorch 2.13.0``."""
    return ", ".join(f"{_NAMES.get(key, key)} {values[key]}" for key in keys if key in values)


def mismatch(found: Mapping[str, str], expected: Mapping[str, str], same_bits: bool = False) -> str:
    """Why a process with ``found`` cannot take part in a training that began with ``expected``, and the remedy; or
    empty. ``same_bits``: another arithmetic is a reason too."""
    keys = [key for key in differing(found, expected) if key in REMEDIES and (same_bits or key != ARITHMETIC)]
    if not keys:
        return ""
    remedies = "; ".join(REMEDIES[key] for key in keys)
    accept = "leave out --require-same-bits" if keys == [ARITHMETIC] else "accept it with --set allow_mixed=true"
    shown = [*keys, *([PROCESSOR] if ARITHMETIC in keys else [])]
    return (
        f"{describe(found, shown)}, where the others have {describe(expected, shown)}: the weights could differ; "
        f"{remedies}, or {accept}"
    )


def rounds_differently(found: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    """Whether the two compute other bits."""
    return ARITHMETIC in differing(found, expected)


def rounding_text(devices: Sequence[str], found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """What follows if these devices compute other bits than the others of a job."""
    types = [one.get(PROCESSOR, "an unknown processor") for one in (found, expected)]
    one = len(devices) == 1
    why = f"({types[0]}, where the others have {types[1]})" if types[0] != types[1] else f"(all have {types[0]})"
    return (
        f"{', '.join(devices)} round{'s' * one} differently from the others {why}: the result is the same to "
        "rounding, not to the bit, and depends on which device computes what; --require-same-bits refuses that"
    )
