"""Ends a command on Ctrl-C, SIGTERM, SIGHUP, or the end of its standard input.

SIGINT is ignored in a background job of a shell without job control, and SIGHUP under nohup. A signal that was ignored
when the command started stays ignored; SIGTERM always ends it.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from hoop.signals import defer_signals
from hoop.standard_streams import guard

AGAIN_S = 0.02
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """The signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def end_by_signals() -> None:
    """Makes SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that cleanup runs; the exit code is 128 + number.

    Commands that end in another way (after a step, or after their devices have left) replace these handlers.
    """
    for number in (signal.SIGTERM, *not_ignored(signal.SIGHUP)):
        signal.signal(number, _exit)
    sys.unraisablehook = _resend_dropped_signal


def run_event_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a server: ``asyncio.run(main())``, where a signal cannot leave the event loop half made.

    Its log does not wait for a reader.
    """
    guard(patient=False)
    with defer_signals():
        runner = asyncio.Runner()
        runner.get_loop()
    with runner:
        runner.run(main())


class Signalled(SystemExit):
    """Raised by a signal. If code drops this error before it ends the command, the signal is sent again.

    Libraries drop it: PyTorch, for example, goes on without NumPy if the import of NumPy raises any error.
    """

    delivered = False
    """True as soon as it ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __del__(self) -> None:
        if not self.delivered and not sys.is_finalizing():
            _send_later(self.number)


def signal_behind(error: BaseException) -> Signalled | None:
    """The signal that caused this error: a library may raise another one in its place."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, Signalled):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


class _Resending:
    """Whether the main thread is in ``_resend_dropped_signal``, where the exception of a signal would be dropped."""

    active = False


def _exit(number: int, _: object) -> None:
    if _Resending.active:
        _send_later(number)
    else:
        raise Signalled(number)


def _resend_dropped_signal(what: sys.UnraisableHookArgs) -> None:
    """Sends a signal again if Python dropped its exception, raised in a destructor or a fork hook."""
    error = what.exc_value
    if not isinstance(error, (Signalled, KeyboardInterrupt)):
        sys.__unraisablehook__(what)
        return
    _Resending.active = True
    try:
        if isinstance(error, Signalled):
            error.delivered = True  # it is sent again here
        _send_later(error.number if isinstance(error, Signalled) else signal.SIGINT)
    finally:
        _Resending.active = False


def _send_later(number: int) -> None:
    """Sends a signal to this process from a thread, after a moment. Does not wait for the thread's start."""

    def send() -> None:
        time.sleep(AGAIN_S)
        os.kill(os.getpid(), number)

    _thread.start_new_thread(send, ())


class Stopping:
    """Waits for the signals that end a command and, with ``with_stdin``, for the end of standard input."""

    def __init__(self, with_stdin: bool = False) -> None:
        self._event = asyncio.Event()
        self._with_stdin = with_stdin
        self.number = 0
        """Number of the first signal that came; 0: none."""
        loop = asyncio.get_running_loop()
        for number in not_ignored(*ENDING):
            loop.add_signal_handler(number, self._on_signal, number)
        if with_stdin:
            loop.add_reader(sys.stdin.fileno(), self._read_stdin)

    def _on_signal(self, number: int) -> None:
        self.number = self.number or number
        self._event.set()

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._event.set()

    @property
    def abandoned(self) -> bool:
        """Whether standard input has ended: the process that started this one is gone or is ending."""
        return self._with_stdin and bool(select.select([sys.stdin], [], [], 0)[0])

    async def wait(self, *others: asyncio.Event) -> None:
        """Waits until the command is to end, or until one of the other events is set."""
        waits = [asyncio.ensure_future(one.wait()) for one in (self._event, *others)]
        try:
            await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        finally:
            for one in waits:
                one.cancel()

    async def wait_again(self) -> None:
        """Waits for another signal after the one that ended ``wait``."""
        self._event.clear()
        await self._event.wait()

    async def unless(self, work: asyncio.Future[Any]) -> bool:
        """Waits for ``work``. Returns False, and cancels it, if the command is to end before it is done."""
        stop = asyncio.ensure_future(self._event.wait())
        pair: set[asyncio.Future[Any]] = {work, stop}
        await asyncio.wait(pair, return_when="FIRST_COMPLETED")
        stop.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        work.result()
        return True
