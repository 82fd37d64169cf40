"""Real processes: ``python -m hoop …`` in the background, ended whatever happens, and what they say.

A cluster for a module (``up``) where nothing is broken; processes for one test (``start``) where something is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from interrupts import interrupts

import hoop
from hoop.events import Event
from hoop.wire.channels import channel_options
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import Stub

HOOP = (sys.executable, "-m", "hoop")
START_S = 30.0
"""Until something that starts must be up, on a machine that is busy with other tests."""
END_S = 10.0
SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
LAB = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]
GRPC_NOISE = re.compile(
    r'Traceback \(most recent call last\):\n  File "src/python/grpcio[^\n]*\nasyncio.exceptions.CancelledError\n'
)
"""What grpc.aio sometimes prints when a server stops while somebody has a stream open."""
_serial = itertools.count(1)


class Running:
    """A command in the background; whatever it writes is kept, and a stack trace in it fails the test."""

    def __init__(self, arguments: tuple[object, ...], folder: Path, ignoring: bool = False) -> None:
        """``ignoring``: it is started with SIGINT ignored, as in the background of a shell."""
        self.arguments = tuple(map(str, arguments))
        self._log = folder / f"{next(_serial)}-{self.arguments[0]}.err"
        self._heard = b""
        with open(self._log, "wb") as errors, interrupts(ignored=ignoring):
            # A session of its own: a signal to its group is what a terminal sends at Ctrl-C.
            self.process = subprocess.Popen(
                [*HOOP, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._first = ""

    def __repr__(self) -> str:
        return f"hoop {' '.join(self.arguments)}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """What it wrote to standard error so far."""
        return self._log.read_text(errors="replace")

    def line(self, within: float = START_S) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                what = "closed its output" if ready else f"said nothing for {within:g} s"
                raise AssertionError(f"{self} {what} after {self._heard!r}; its errors:\n{self.errors}")
            self._heard += data
        text, _, self._heard = self._heard.partition(b"\n")
        return text.decode()

    @property
    def first(self) -> str:
        """The first line: that it is up, and where."""
        self._first = self._first or self.line()
        return self._first

    @property
    def address(self) -> str:
        return self.first.split()[-1]

    @property
    def id(self) -> int:
        """A device's."""
        return int(self.first.split()[1])

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)

    def wait(self, within: float = END_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self} did not end within {within:g} s; its errors:\n{self.errors}"
            ) from None

    def kill(self) -> None:
        """As the kernel would when memory is short: no goodbye."""
        self.process.kill()
        self.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.process.returncode == -signal.SIGKILL:  # it could not delete its memory
            for folder in ("/dev/shm", tempfile.gettempdir()):
                for arena in Path(folder).glob(f"hoop-{self.pid}-*.arena"):
                    arena.unlink()
        errors = GRPC_NOISE.sub("", self.errors)
        for complaint in ("Traceback", "never awaited", "never retrieved", "a bug in Hoop"):
            assert complaint not in errors, f"{self}: {errors}"


@contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Running]]:
    """Starts commands, and ends what is left of them, the last first."""
    with ExitStack() as ended:

        def start(*arguments: object, ignoring: bool = False) -> Running:
            running = Running(arguments, folder, ignoring)
            ended.callback(running.end)
            return running

        yield start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts ``hoop …`` in the background, for this test."""
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """``hoop up`` with the options in ``UP`` of the module, for all of its tests."""
    with starting(tmp_path_factory.mktemp("up")) as begin:
        running = begin("up", *request.module.UP)
        assert running.first.startswith("coordinator ")
        yield running


@pytest.fixture
def cluster(up: Running) -> Iterator[hoop.Cluster]:
    """A connection to the module's cluster, for this test."""
    with hoop.connect(up.address) as connected:
        yield connected


@pytest.fixture
def connect() -> Iterator[Callable[..., hoop.Cluster]]:
    """Connections for this test."""
    with ExitStack() as closed:
        yield lambda address, **options: closed.enter_context(hoop.connect(address, **options))


@pytest.fixture
def run_hoop() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``hoop …`` to its end."""

    def run(
        *arguments: object, environment: Mapping[str, str] | None = None, within: float = START_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*HOOP, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
            env={**os.environ, **(environment or {})},
            check=False,
        )

    return run


@pytest.fixture
def status(run_hoop: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[[str], dict[str, Any]]:
    """What ``hoop status --json`` says."""

    def ask(address: str) -> dict[str, Any]:
        answer = run_hoop("status", "--coordinator", address, "--json")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    return ask


@pytest.fixture
def await_event() -> Callable[..., Event]:
    """Waits for an event of this kind and with these fields; past or to come, but ``within`` seconds."""

    def wait(address: str, kind: str, within: float = END_S, after: int = 0, **fields: object) -> Event:
        wanted = {name: str(value) for name, value in fields.items()}
        seen = []
        with grpc.insecure_channel(address, options=channel_options()) as channel:
            request = pb.WatchEventsRequest(after=after, follow=True)
            try:
                for event in Stub(channel, SERVICE).WatchEvents(request, timeout=within, wait_for_ready=True):
                    seen.append(f"{event.sequence} {event.kind}: {event.text}")
                    if event.kind == kind and wanted.items() <= dict(event.fields).items():
                        return Event(event.sequence, event.time, event.kind, event.text, dict(event.fields))
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
        raise AssertionError(f"no {kind} {wanted or ''} within {within:g} s; there were {seen}")

    return wait


@pytest.fixture
def comm_status() -> Callable[[str, int], lab.GetCommStatusResponse]:
    """What the lab's GetCommStatus says."""

    def ask(address: str, communicator_id: int) -> lab.GetCommStatusResponse:
        with grpc.insecure_channel(address, options=channel_options()) as channel:
            return Stub(channel, LAB).GetCommStatus(
                lab.GetCommStatusRequest(commId=communicator_id), timeout=END_S
            )

    return ask


@pytest.fixture
def gone() -> Callable[..., None]:
    """Waits for the end of a process that is not a child of this one."""

    def wait(pid: int, within: float = END_S) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ended, _, _ = select.select([descriptor], [], [], within)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} is still there after {within:g} s"

    return wait


@pytest.fixture
def send_signal() -> Iterator[Callable[[int, int], None]]:
    """Signals a device of ``hoop up``; one that was stopped goes on at the end, whatever happens."""
    stopped = []

    def send(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:
            stopped.append(pid)
        os.kill(pid, number)

    yield send
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
