"""Which frames of a stack are the user's own code: neither Hoop's nor a library's."""

from __future__ import annotations

import os
import sysconfig

HOOP = os.path.dirname(__file__) + os.sep
"""Folder of Hoop's own code, as the names of its files in stacks begin."""
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(filename: str) -> bool:
    """Whether a file is neither of Hoop nor of an installed library."""
    return not (filename.startswith(("<", HOOP)) or filename.startswith(_LIBRARIES))
