"""Distinguishes exceptions of the user's code from bugs in Hoop: a job's model, data and loss run inside Hoop.

An exception of that code is reported as the user's, with its traceback and without Hoop's frames; any other is a bug.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hoop.errors import HoopError, InternalError, UserError

_HOOP = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MODULES = f"torch{os.sep}nn{os.sep}"
"""Part of the path of PyTorch's modules. They count as user code, because the user chose these layers and losses."""


@contextmanager
def attribute_exceptions(where: str) -> Iterator[None]:
    """Re-raises a HoopError unchanged; converts any other exception to UserError or InternalError."""
    try:
        yield
    except HoopError:
        raise
    except Exception as error:
        raise classify_exception(error, where) from error


def classify_exception(error: Exception, where: str) -> HoopError:
    """UserError if a frame is in user code, or in torch.nn, or the error is a SyntaxError; else InternalError."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [index for index, frame in enumerate(frames) if _is_users(frame.filename)]
    if not users and any(_MODULES in frame.filename for frame in frames):
        users = [len(frames) - 1]  # no frame of the user's code: show where PyTorch raised
    what = "".join(traceback.format_exception_only(error)).strip()
    if not users and not isinstance(error, SyntaxError):
        return InternalError(f"a bug in Hoop, {where}: {what}\n{''.join(traceback.format_list(frames)).rstrip()}")
    shown = "".join(traceback.format_list(frames[users[0] :] if users else [])).rstrip()
    return UserError(f"your code failed, {where}: {what}" + (f"\n{shown}" if shown else ""))


def _is_users(filename: str) -> bool:
    return not (filename.startswith(("<", _HOOP)) or filename.startswith(_LIBRARIES))
