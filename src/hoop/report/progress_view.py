"""What a person sees while a job trains: ``hoop train``, ``hoop attach`` and ``hoop.train`` show the same.

    a terminal            lines of events above one line of progress, which is replaced
    a notebook            the same, in one output of the cell; it needs no widgets
    a file, a pipe        lines of events; an epoch, or else the progress, at most every ``LINE_S`` seconds

Everything goes to standard error, or to the cell of the notebook. A view never raises because nobody reads any more: a
closed terminal or a full disk ends the display, not the training.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hoop import job_events as ev
from hoop.job_events import JobEvent
from hoop.report.run_summary import accuracy_name, headline
from hoop.texts import counted, printable

LINE_S = 10.0
"""Seconds between lines of progress where lines are not replaced."""
FREE_EPOCHS = 10
"""Where lines are not replaced, this many epochs have a line each, however short they are."""
SAME_KIND = 5
"""Lines about events of one kind that may come in thousands; the summary counts all."""
WINDOW = 40
"""Number of events over which the speed is measured."""
BAR = 20
"""Characters of the bar."""
NOTEBOOK_LINES = 100
"""Lines that the output of a notebook's cell keeps."""
NOTEBOOK_WIDTH = 100
NOTEBOOK_S = 0.2
"""Smallest time between two updates of a notebook's cell."""


class QuietView:
    """A view that shows nothing (``hoop.train(quiet=True)``), and the interface of all views."""

    _failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        """Shows what happens now."""

    def show(self, event: JobEvent) -> None:
        """Calls ``note``. An error of it is reported once and ends only the view."""
        if self._failed:
            return
        try:
            self.note(event)
        except Exception as error:
            self._failed = True
            text = f"hoop: nothing more is shown, training goes on: {type(error).__name__}: {error}"
            _LinesOutput().line(printable(text))

    def note(self, event: JobEvent) -> None:
        """Shows an event of the job."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Shows the result in one line."""


class WarningsView(QuietView):
    """The view of ``--json``: warnings on standard error, and nothing else."""

    def note(self, event: JobEvent) -> None:
        if isinstance(event, ev.Warned | ev.RoundingDiffers):
            _LinesOutput().line(f"warning: {event.text}")


class ProgressView(QuietView):
    """The view for people."""

    def __init__(self, console: Console | None = None) -> None:
        """``console``: for standard error, if it is left out."""
        self._output = _find_output(console)
        self._started: ev.Started | None = None
        self._devices = 0
        self._accuracy = ""
        self._losses: list[float] = []
        self._marks: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._printed = 0.0
        self._epochs = 0
        """Number of lines about epochs."""
        self._kinds: Counter[type[JobEvent]] = Counter()
        """Number of events of the kinds of which only ``SAME_KIND`` are shown."""

    def __enter__(self) -> Self:
        self._output.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()

    def say(self, text: str) -> None:
        if self._output.replaces:
            self._output.status(_shown(text))
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        self._output.line(_shown(text))

    def note(self, event: JobEvent) -> None:
        match event:
            case ev.Started():
                self._start(event)
            case ev.Steps():
                self._advance(event)
            case ev.Evaluated():
                self._evaluated(event)
            case ev.Warned() | ev.RoundingDiffers():
                self._print(f"warning: {event.text}")
            case ev.Hung():
                then = "" if event.over else f"\nIf it goes on like this, it is replaced after {event.limit_s:.0f} s"
                self._print(f"warning: {event.text}{then} (hang_s)")
            case ev.DeviceLost():
                self._print(f"device {event.device} was lost: {event.text}")
            case ev.Straggler(slow=True):
                slower = f"{event.times:.1f} times slower than the others"
                self._print_some(event, f"rank {event.straggler} is a straggler, {slower}: it gets fewer shards")
            case ev.Straggler():
                self._print_some(event, f"rank {event.straggler} is no straggler any more")
            case ev.FaultInjected():
                self._print(f"step {event.step}: {event.fault}, as asked")
            case ev.Damaged():
                self._print_some(event, f"damaged on the way, and sent again: {event.text}")
            case (
                ev.CoordinatorLost()
                | ev.CoordinatorBack()
                | ev.WaitingForRestart()
                | ev.WaitingForDevice()
                | ev.Refused()
            ):
                self._print(event.text)
            case ev.StateLoaded():
                self._print(f"step {event.step}: device {event.device} has its state from {event.source}")
            case ev.Reassigned():
                for text in event.left_out.values():
                    self._print(text)
            case ev.Resized():
                self._devices = event.ranks
                self._print(f"step {event.step}: goes on with {counted(event.ranks, 'device')}")
            case ev.Recovered():
                self._devices = event.ranks
                devices = counted(event.ranks, "device")
                self._print(f"step {event.step}: goes on with {devices}, {event.pause_s:.1f} s later")

    def finish(self, result: Mapping[str, Any]) -> None:
        self._print(f"{headline(result)}, weights {result['weights_sha256'][:12]}")

    def _print_some(self, event: ev.Straggler | ev.Damaged, text: str) -> None:
        """Prints a line about an event of a kind that may come in thousands, unless there were enough of them."""
        kind = type(event)
        self._kinds[kind] += 1
        if self._kinds[kind] > SAME_KIND:
            return
        step = f"step {event.step}: " if isinstance(event, ev.Straggler) else ""
        last = " (no more lines of this kind; the summary counts them)" if self._kinds[kind] == SAME_KIND else ""
        self._print(f"{step}{text}{last}")

    def _start(self, event: ev.Started) -> None:
        self._started, self._devices = event, event.devices
        self._marks.append((time.monotonic(), event.done))
        self._printed = time.monotonic()
        after = f", after step {event.done}" if event.done else ""
        lines = [
            f"{counted(event.parameters, 'parameter')} on {counted(event.devices, 'device')}",
            f"{counted(event.steps, 'step')}{after}",
            f"first step after {event.seconds:.1f} s",
        ]
        self._print(" · ".join(lines))
        if len(event.stages) > 1:
            for stage, where in enumerate(event.stages):
                self._print(f"  stage {stage}: {where}")

    def _advance(self, event: ev.Steps) -> None:
        done = event.first + len(event.loss)
        self._losses += event.loss
        self._marks.append((time.monotonic(), done))
        assert self._started is not None, "Started comes before Steps"
        if self._output.replaces:
            self._output.status(self._progress(done, event.loss, self._output.width))
        elif time.monotonic() - self._printed > LINE_S:
            self._printed = time.monotonic()
            self._print(self._progress(done, event.loss, None))

    def _progress(self, done: int, losses: Sequence[float], width: int | None) -> str:
        """The line of progress. In a narrow terminal the least important parts are left out."""
        assert self._started is not None, "checked by the caller"
        per_epoch, steps = self._started.steps_an_epoch, self._started.steps
        filled = round(BAR * min(1.0, done / max(1, steps)))
        parts = [  # as they stand in the line, each with its importance
            (0, f"epoch {(done - 1) // per_epoch + 1}/{-(-steps // per_epoch)}"),
            (7, "" if width is None else "━" * filled + "─" * (BAR - filled)),
            (1, f"step {done}/{steps}"),
            (2, f"loss {sum(losses) / len(losses):.4f}" if losses else ""),
            (4, self._accuracy),
            (6, self._speed()),
            (5, counted(self._devices, "device")),
            (3, self._left(done, steps)),
        ]
        return fit_parts([(importance, text) for importance, text in parts if text], width)

    def _speed(self) -> str:
        """Samples a second over the last events; empty before the second one."""
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        if last <= first or now <= then or self._started is None:
            return ""
        return f"{(now - then) * self._started.batch_size / (last - first):,.0f} samples/s"

    def _left(self, done: int, steps: int) -> str:
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        return f"{(steps - done) * (last - first) / (now - then):.0f} s left" if now > then else ""

    def _evaluated(self, event: ev.Evaluated) -> None:
        shown = [] if event.accuracy is None else [f"{accuracy_name(event.split)} {event.accuracy:.2%}"]
        shown += [f"{name} {value:.4g}" for name, value in event.metrics.items() if name != "accuracy"]
        self._accuracy = "  ".join(shown)
        last = self._started is None or event.steps >= self._started.steps
        due = time.monotonic() - self._printed > LINE_S
        if not (self._output.replaces or self._epochs < FREE_EPOCHS or last or due):
            return  # a thousand short epochs are not a thousand lines of a log
        self._epochs += 1
        self._printed = time.monotonic()
        trained = f"loss {sum(self._losses) / len(self._losses):.4f}  " if self._losses else ""
        self._losses = []
        self._print(
            f"epoch {event.epoch:>3}  {trained}{'test' if event.split == 'test' else 'training'} loss "
            f"{event.loss:.4f}  {self._accuracy}  {self._speed()}".rstrip()
        )


def fit_parts(parts: Sequence[tuple[int, str]], width: int | None) -> str:
    """The texts of ``parts`` in one line of at most ``width`` characters, without the least important ones.

    A part is its importance, 0 for the most important, and its text. The most important one always stays.
    """
    kept: list[tuple[int, str]] = sorted(parts)
    while width is not None and len(kept) > 1 and sum(len(text) + 3 for _, text in kept) - 3 > width:
        kept.pop()
    return " · ".join(text for part, text in parts if (part, text) in kept)


def _shown(text: object) -> str:
    """The text with escaped control characters, of any length."""
    return printable(str(text), sys.maxsize)


# ---- where the lines go


class _Output(Protocol):
    """Where a view writes. No method raises because nothing can be written."""

    replaces: bool
    """Whether the status is replaced in place. Else there is none, and every line stays."""

    @property
    def width(self) -> int:
        """Characters of a line."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def line(self, text: str) -> None:
        """Writes a line that stays."""

    def status(self, text: str) -> None:
        """Replaces the line of progress."""


def _find_output(console: Console | None) -> _Output:
    if console is not None:
        return _TerminalOutput(console) if console.is_terminal else _LinesOutput(console)
    if (display := _notebook_display()) is not None:
        return _NotebookOutput(display)
    console = _console()
    return _TerminalOutput(console) if console.is_terminal else _LinesOutput(console)


def _console() -> Console:
    # Rich ends the program if nobody reads its file any more: so it gets a file that always takes everything.
    return Console(file=_LastingFile(sys.stderr), highlight=False, force_jupyter=False)  # type: ignore[arg-type]


class _LastingFile:
    """A text file that takes everything: what cannot be written any more is dropped."""

    def __init__(self, file: TextIO | None) -> None:
        """``file``: None in a program without standard error."""
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):  # its reader is gone; the disk is full; it is closed
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._file.flush()

    def isatty(self) -> bool:
        try:
            return self._file is not None and self._file.isatty()
        except ValueError:  # closed
            return False


class _LinesOutput:
    """Lines in a file or a pipe."""

    replaces = False

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _console()

    @property
    def width(self) -> int:
        return self._console.width

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def status(self, text: str) -> None:
        pass


class _TerminalOutput(_LinesOutput):
    """Lines above a status, in a terminal.

    What else this program prints meanwhile stands above the status too. No thread of Rich draws it: devices may be
    forked from this process.
    """

    replaces = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        stdout_is_terminal = sys.stdout is not None and _LastingFile(sys.stdout).isatty()
        self._live = Live(
            Text(""),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=stdout_is_terminal,  # never what goes to a file
        )

    def open(self) -> None:
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def status(self, text: str) -> None:
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


class _NotebookOutput:
    """Lines and the status below them, in one output of a notebook's cell, which is replaced."""

    replaces = True
    width = NOTEBOOK_WIDTH

    def __init__(self, display: Any) -> None:
        """``display``: IPython's function."""
        self._display = display
        self._handle: Any = None
        self._lines: deque[str] = deque(maxlen=NOTEBOOK_LINES)
        self._status = ""
        self._drawn = 0.0

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._status = ""
        self._draw()

    def line(self, text: str) -> None:
        self._lines.append(text)
        self._draw()

    def status(self, text: str) -> None:
        self._status = text
        if time.monotonic() - self._drawn > NOTEBOOK_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        output = {"text/plain": "\n".join([*self._lines, *filter(None, [self._status])])}
        with contextlib.suppress(Exception):  # the front end may be gone: that must not end the training
            if self._handle is None:
                self._handle = self._display(output, raw=True, display_id=True)
            else:
                self._handle.update(output, raw=True)


def _notebook_display() -> Any:
    """IPython's ``display`` in the kernel of a notebook; None elsewhere, in IPython's terminal too."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    return importlib.import_module("IPython.display").display
