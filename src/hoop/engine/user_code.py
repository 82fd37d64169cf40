"""Distinguishes exceptions of the user's code from bugs in Hoop: a job's model, data and loss run inside Hoop.

An exception of that code is reported as the user's, with its traceback and without Hoop's frames; any other is a bug.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hoop.errors import FailedPrecondition, HoopError, InternalError, UserError
from hoop.user_frames import is_users

_MODULES = f"torch{os.sep}nn{os.sep}"
"""Part of the path of PyTorch's modules. They count as user code, because the user chose these layers and losses."""


@contextmanager
def attribute_exceptions(where: str) -> Iterator[None]:
    """Re-raises a HoopError unchanged; converts any other exception to UserError or InternalError."""
    try:
        yield
    except HoopError:
        raise
    except SystemExit as error:
        raise UserError(
            f"your code called sys.exit, {where}: {error}\n{_users_frames(error)}\nA device ends with its run. To stop "
            "a run early use run.stop() in a callback, or max_steps; for an error raise an exception"
        ) from error
    except Exception as error:
        raise classify_exception(error, where) from error


def classify_exception(error: Exception, where: str) -> HoopError:
    """UserError if a frame is in user code, or in torch.nn, or the error is a SyntaxError; else InternalError.

    FailedPrecondition if a GPU has no memory left, in user code too.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [index for index, frame in enumerate(frames) if is_users(frame.filename)]
    if not users and any(_MODULES in frame.filename for frame in frames):
        users = [len(frames) - 1]  # no frame of the user's code: show where PyTorch raised
    what = "".join(traceback.format_exception_only(error)).strip()
    if is_out_of_memory(error):  # the frame that asked for the last of the memory says nothing about the others
        return FailedPrecondition(f"memory: a GPU is full, {where}: {what}")
    if not users and not isinstance(error, SyntaxError):
        return InternalError(f"a bug in Hoop, {where}: {what}\n{''.join(traceback.format_list(frames)).rstrip()}")
    shown = "".join(traceback.format_list(frames[users[0] :] if users else [])).rstrip()
    return UserError(f"your code failed, {where}: {what}" + (f"\n{shown}" if shown else ""))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch found no memory on a GPU. Without importing PyTorch."""
    return type(error).__name__ == "OutOfMemoryError" and type(error).__module__.partition(".")[0] == "torch"


def _users_frames(error: BaseException) -> str:
    """The traceback from the first frame in the user's code on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if is_users(frame.filename)), 0)
    return "".join(traceback.format_list(frames[first:])).rstrip()
