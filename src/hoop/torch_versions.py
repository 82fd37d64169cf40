"""The versions of PyTorch that Hoop is tested with, and the check of the installed version.

``scripts/torch-matrix`` runs the tests with each of them; docs/torch-backend.md has the table. The requirement in
pyproject.toml has ``OLDEST`` as its lower bound and no upper bound: a newer torch causes a warning, not an error.
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
    """The installed torch is newer than the newest tested version."""


def installed_version() -> str:
    """The version of the loaded or installed torch. Does not load it."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    try:
        return str(loaded or metadata.version("torch"))
    except metadata.PackageNotFoundError:
        raise FailedPrecondition(
            f"torch is not installed; Hoop is tested with {tested_range()}: pip install 'torch>={dotted(OLDEST)}'"
        ) from None


def check_version(version: str) -> str | None:
    """Raise FailedPrecondition if ``version`` is too old; return a warning if it is newer than the tested ones.

    A version that does not begin with two numbers (a custom build) is accepted.
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
    """The tested versions as text: ``torch 2.7 to 2.15``."""
    return f"torch {dotted(OLDEST)} to {dotted(NEWEST)}"


def dotted(minor: Minor) -> str:
    """(2, 15) as ``2.15``."""
    return f"{minor[0]}.{minor[1]}"
