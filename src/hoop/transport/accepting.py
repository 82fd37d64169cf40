"""A listening socket in a selector that survives the lack of file descriptors.

If a process has no descriptor left, ``accept`` fails and the connection stays in the queue, so a selector reports the
socket again at once and the listener's thread would spin. Then the socket leaves the selector for ``PAUSE_S`` seconds.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time

from hoop.resources import descriptor_limit

PAUSE_S = 0.1
NO_DESCRIPTOR_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of ``accept`` after which the connection is still in the queue."""


class OutOfDescriptors(Exception):
    """No connection can be accepted now."""


class AcceptingSocket:
    """A listening socket that is registered in a selector."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        self._sock, self._selector = sock, selector
        self._resume_at: float | None = None
        """When the socket comes back to the selector; None: it is there."""
        selector.register(sock, selectors.EVENT_READ)

    def accept(self) -> socket.socket | None:
        """The next connection; None if it is gone again. OutOfDescriptors: the caller may close one and try again."""
        try:
            return self._sock.accept()[0]
        except OSError as error:
            if error.errno in NO_DESCRIPTOR_ERRORS:
                raise OutOfDescriptors from error
            return None

    def pause(self) -> None:
        """Take the socket out of the selector for a while."""
        if self._resume_at is None:
            self._selector.unregister(self._sock)
            self._resume_at = time.monotonic() + PAUSE_S

    def timeout(self, usual: float | None) -> float | None:
        """How long the selector may wait: ``usual``, and not longer than the pause."""
        if self._resume_at is None:
            return usual
        pause = max(0.0, self._resume_at - time.monotonic())
        return pause if usual is None else min(usual, pause)

    def resume_if_due(self) -> None:
        """Put the socket back if its pause is over; called after every wait of the selector."""
        if self._resume_at is not None and time.monotonic() >= self._resume_at:
            self._resume_at = None
            self._selector.register(self._sock, selectors.EVENT_READ)


def pending_limit(most: int) -> int:
    """How many connections may wait to be identified: ``most``, and at most a quarter of this process's open files."""
    limit = descriptor_limit()
    return most if limit is None else max(1, min(most, limit // 4))
