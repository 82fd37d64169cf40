"""Whose fault an exception is: a job's model, data and loss are the user's code, and run inside Hoop.

What they raise is told as the user's, with their own traceback and without Hoop's frames; anything else is a bug.
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
"""Layers and losses of PyTorch's that Hoop calls were chosen, and fed, by the user."""


@contextmanager
def blaming_user_code(where: str) -> Iterator[None]:
    """Turns what is raised here into an error that says whose it is."""
    try:
        yield
    except HoopError:
        raise
    except Exception as error:
        raise blamed(error, where) from error


def blamed(error: Exception, where: str) -> HoopError:
    """The error as Hoop tells it: the user's if it went through code outside Hoop, Python and its libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [index for index, frame in enumerate(frames) if _is_users(frame.filename)]
    if not users and any(_MODULES in frame.filename for frame in frames):
        users = [len(frames) - 1]  # nothing of theirs to show but where PyTorch noticed
    what = "".join(traceback.format_exception_only(error)).strip()
    if not users and not isinstance(error, SyntaxError):
        return InternalError(f"a bug in Hoop, {where}: {what}\n{''.join(traceback.format_list(frames)).rstrip()}")
    shown = "".join(traceback.format_list(frames[users[0] :] if users else [])).rstrip()
    return UserError(f"your code failed, {where}: {what}" + (f"\n{shown}" if shown else ""))


def _is_users(filename: str) -> bool:
    return not (filename.startswith(("<", _HOOP)) or filename.startswith(_LIBRARIES))
