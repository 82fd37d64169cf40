"""Standard output and standard error of Hoop's processes: a write to them never raises, and in servers never waits.

    sys.stderr ──▶ TextIOWrapper ──▶ Outlet ──▶ descriptor 2 ──▶ terminal, pipe, file
                                                └─ the reader has left, the disk is full, nobody reads: text is lost

What is printed is for an observer: a terminal that is closed, a dead ``tee``, a full disk or a paused pager must not
end a recovery or a training. ``guard`` puts an ``Outlet`` below both streams of a process, so that every writer has
that: ``typer.echo``, Rich, log handlers, warnings, tracebacks, and what a user's code prints. ``cli/main.py`` calls it
for every command, ``launch/forked.py`` in every forked process. The streams of a user's own program stay as they are.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

PATIENCE_S = 0.1
"""Seconds for which a server waits for a reader that does not read."""
_PIECE_BYTES = 4096
"""A pipe that is ready takes this many bytes without a wait (PIPE_BUF on Linux)."""
_TEMPORARY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Outlet(io.RawIOBase):
    """A descriptor of this process as a binary file whose ``write`` never raises."""

    def __init__(self, descriptor: int, name: str, patient: bool) -> None:
        """``patient``: waits for a reader that does not read. Others drop text after ``PATIENCE_S``."""
        self.name, self.patient = name, patient
        self.error: OSError | None = None
        """Why text was lost, the last time; None: none was."""
        self._descriptor = descriptor
        self._terminal: int | None = None
        """The terminal behind the descriptor, opened so that a write never waits; None: it is none, or not needed."""
        self._stalled = False
        self._dropped = 0
        """Number of bytes that were lost since the last that were written."""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Writes all of ``data``, or loses it. Returns its length."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        if self._dropped and self.error is not None:
            gap = f"\nhoop: {self._dropped} bytes are missing here: {self.error.strerror}\n".encode()
            if not self._write(memoryview(gap)):
                self._dropped = 0
        self._dropped += len(self._write(rest))
        return size

    def _write(self, rest: memoryview) -> memoryview:
        """Writes what the descriptor takes; returns the rest."""
        descriptor = self._descriptor if self.patient else self._without_waiting()
        while rest:
            if not self.patient and not self._is_ready():
                self.error = OSError(errno.EAGAIN, "nobody reads")
                break
            try:
                rest = rest[os.write(descriptor, rest if self.patient else rest[:_PIECE_BYTES]) :]
            except BlockingIOError as error:  # a terminal is full, or another program made the descriptor non-blocking
                if not self.patient:
                    self.error = error
                    break
                self._is_ready()
            except OSError as error:
                self.error = error
                if error.errno not in _TEMPORARY:
                    self._replace()
                break
        return rest

    def _without_waiting(self) -> int:
        """The descriptor to write to: of a terminal, which says that it is ready for a line when it takes one byte, a
        second one that does not wait."""
        if self._terminal is None and self.isatty():
            with suppress(OSError):  # it may be another user's: then a write may wait for its reader
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._terminal = os.open(f"/proc/self/fd/{self._descriptor}", flags)
        return self._descriptor if self._terminal is None else self._terminal

    def _is_ready(self) -> bool:
        """Whether the descriptor takes bytes now, or soon."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        ready = bool(poll.poll(None if self.patient else 0 if self._stalled else 1e3 * PATIENCE_S))
        self._stalled = not ready
        return ready

    def _replace(self) -> None:
        """Puts /dev/null in place of a descriptor to which nothing can be written any more, for all its writers."""
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None
        with suppress(OSError):  # no descriptor is free: the next write tries again
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self._descriptor)
            os.close(null)


def guard(patient: bool = True) -> None:
    """Makes standard output and error survive. ``patient``: see ``Outlet``; standard output always is.

    A descriptor that was closed (``>&-``) becomes /dev/null: a file or socket that is opened later must not get its
    number, and with it what a library prints. May be called again, and leaves streams alone that a program replaced.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    output, errors = (
        _guarded(sys.stdout, 1, "standard output", True),
        _guarded(sys.stderr, 2, "standard error", patient),
    )
    for name, stream in (("stdout", output), ("stderr", errors)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _guarded(stream: TextIO | None, descriptor: int, name: str, patient: bool) -> Any:
    outlet = _outlet(stream)
    if outlet is not None:
        outlet.patient = patient
        return stream
    if stream is not None and _descriptor(stream) != descriptor:
        return stream  # of a notebook, or a test
    if stream is not None:
        with suppress(OSError, ValueError):  # the outlet meets the same error
            stream.flush()
    if stream is None:  # it was closed; its number may be that of another file by now
        descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    return io.TextIOWrapper(
        Outlet(descriptor, name, patient),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="surrogateescape" if stream is not None and stream.errors == "surrogateescape" else "backslashreplace",
        newline="\n",
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=bool(getattr(stream, "write_through", False)),
    )


def flush() -> None:
    """Writes what both streams have buffered, as far as it can be written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def _outlet(stream: Any) -> Outlet | None:
    below = getattr(stream, "buffer", None)
    return below if isinstance(below, Outlet) else None


def lost(stream: Any) -> OSError | None:
    """Why text that was printed on this stream was lost; None: none was, or the stream has no outlet."""
    outlet = _outlet(stream)
    if outlet is None:
        return None
    stream.flush()
    return outlet.error
