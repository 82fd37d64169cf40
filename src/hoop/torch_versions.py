"""The versions of PyTorch that Hoop is tested with, and the answer to any other.

``scripts/torch-matrix`` runs the tests with each of them; docs/torch-backend.md has the table. The requirement in
pyproject.toml begins with ``OLDEST`` and has no upper end: a newer torch is met with a warning, not refused.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from hoop.errors import FailedPrecondition

Minor = tuple[int, int]
"""Major and minor number: (2, 15)."""

OLDEST: Minor = (2, 7)
NEWEST: Minor = (2, 15)


class UntestedTorchWarning(UserWarning):
    """The installed torch is newer than the newest that Hoop is tested with."""


def installed() -> str:
    """The version of the torch that is loaded, or would be; does not load it."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    try:
        return str(loaded or metadata.version("torch"))
    except metadata.PackageNotFoundError:
        raise FailedPrecondition(
            f"torch is not installed; Hoop is tested with {tested_range()}: pip install 'torch>={dotted(OLDEST)}'"
        ) from None


def check(version: str) -> str | None:
    """Refuses a torch that is too old with FailedPrecondition; returns a warning about one that is too new.

    A version that does not begin with two numbers (a build of one's own) is not judged.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return None
    minor = int(match[1]), int(match[2])
    if minor < OLDEST:
        raise FailedPrecondition(
            f"torch {version} is installed, which is too old for Hoop: it is tested with {tested_range()}. "
            f"Install a newer one: pip install 'torch>={dotted(OLDEST)}'"
        )
    if minor > NEWEST:
        return (
            f"torch {version} is newer than Hoop is tested with ({tested_range()}). If something fails, install a "
            f"tested one: pip install 'torch<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
    return None


def tested_range() -> str:
    """For messages: ``torch 2.7 to 2.15``."""
    return f"torch {dotted(OLDEST)} to {dotted(NEWEST)}"


def dotted(minor: Minor) -> str:
    """``2.15`` of (2, 15)."""
    return f"{minor[0]}.{minor[1]}"
