"""The versions and the arithmetic of a process. Devices that differ in them may compute different bits.

    {"hoop": "0.2.0", "torch": "2.13.0", "python": "3.11", "arithmetic": "5f0c6d1a9b27e384"}

A device sends its versions when it joins a cluster (``versions``); the ranks of a job also compare the result of a
numeric probe, under the key ``arithmetic`` (``hoop.engine.numeric_probe``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import metadata

REMEDIES = {
    "hoop": "install the same version of Hoop on every machine",
    "torch": "install the same version of PyTorch on every machine",
    "arithmetic": "use machines with the same type of processor",
}
"""The keys that may change a training's result, each with what the user can do. Other keys are only reported."""
_NAMES = {"hoop": "Hoop", "torch": "PyTorch", "python": "Python", "arithmetic": "the result of the numeric probe"}


def versions() -> dict[str, str]:
    """The versions of Hoop, PyTorch and Python. Does not load PyTorch; a package that is not installed is left out."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    installed = {package: _installed_version(package) for package in ("hoop", "torch")}
    return found | {package: version for package, version in installed.items() if version}


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


def mismatch(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """What of ``found`` may change the result of a training that began with ``expected``, and the remedy; or empty."""
    keys = [key for key in differing(found, expected) if key in REMEDIES]
    if not keys:
        return ""
    remedies = "; ".join(REMEDIES[key] for key in keys)
    return (
        f"{describe(found, keys)}, where the others have {describe(expected, keys)}: the weights could differ; "
        f"{remedies}, or accept it with --set allow_mixed=true"
    )
