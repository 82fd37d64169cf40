"""A cluster of forked processes for one job, from a process that has loaded PyTorch and the data already.

    this process ── fork ──▶ head ── fork ──▶ coordinator      imports are paid once, data is shared until written
                              └──── fork ──▶ each device
    this process ◀── lines of JSON ── head                     the job's events, then ``head_done`` or ``head_failed``
    this process ── a byte, or EOF ──▶ head                    byte: stop after a step; EOF: end all processes now

This process never opens gRPC, which does not survive a fork; so it may train repeatedly. No child outlives its parent:
each child holds a pipe from its parent and leaves when that pipe closes, however the parent ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InternalError, PeerLost, error_from_name
from hoop.launch.processes import remove_arenas
from hoop.membership.heartbeats import DetectorConfig
from hoop.resources import Request, admit
from hoop.servers.advertised_address import wildcard_towards
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.tasks import TrainFunction
from hoop.topology import Address, PortRange
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role
from hoop.wire.tokens import LocalToken, Token, environment_value

STOP = b"s"
START_S = 30.0
END_S = 5.0
"""Seconds that a process has to leave before it is killed."""
LEASE_S = 20.0
"""Lease of a device in seconds. The coordinator notices a dead process of this machine by its socket; the lease must be
long enough for a live one that waits for a busy core."""
BIND_S = 20.0
"""Seconds for which a coordinator tries to listen on a port that is in use: the last attempt of the same run may be
ending."""
BIND_RETRY_S = 0.5
POLL_S = 0.01
"""Seconds between two checks whether a child has exited: not every platform has an event for it."""
REAP_S = 0.1
"""Maximum seconds that an exited child stays a zombie."""

Emit = Callable[[dict[str, Any]], None]
SetStopHandler = Callable[[Callable[[], None]], None]
Head = Callable[[Address, Emit, SetStopHandler], None]
"""The work of the head process with a running cluster: (coordinator's address, emit, set_stop_handler).

``emit`` sends an event to the parent. ``set_stop_handler`` takes the function that stops the job on request.
"""


# ---- forked children


def check_forkable(threads: str = "/proc/self/task") -> None:
    """Raise FailedPrecondition if PyTorch has started autograd threads in this process.

    With a GPU, PyTorch computes gradients in such threads, and a forked child would lack them.
    """
    for comm in Path(threads).glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            if comm.read_text().startswith("pt_autograd"):
                raise FailedPrecondition(
                    "this process has computed gradients on a machine with a GPU, and devices forked from it cannot: "
                    "train before that, or in a process of its own (`hoop train FILE.py:JOB`)"
                )


def fork(work: Callable[[], None], close: set[int]) -> int:
    """Fork a child that closes the descriptors ``close``, runs ``work`` and exits; returns its pid."""
    check_forkable()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    # Never collect garbage of the parent here: a destructor of gRPC would wait for a thread that was not forked.
    gc.freeze()
    code = 1
    try:
        for descriptor in close:
            os.close(descriptor)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def call_in_child(work: Callable[[], None], timeout_s: float) -> None:
    """Call ``work`` in a forked child, and raise the HoopError that it raises there.

    For user code that may start CUDA, as a step of PyTorch's optimizers does where there is a GPU: no child that is
    forked from a process with CUDA can use it.
    """
    read, write = os.pipe()

    def report() -> None:
        try:
            work()
        except HoopError as error:
            os.write(write, json.dumps({"error": type(error).__name__, "text": str(error)}).encode())
        else:
            os.write(write, b"{}")

    pid = fork(report, close={read})
    os.close(write)
    deadline = time.monotonic() + timeout_s
    text = b""
    try:
        while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := os.read(read, 1 << 16)):
                break
            text += part
        else:
            os.kill(pid, signal.SIGKILL)
            raise DeadlineExceeded(f"a step of your optimizer on the first weights took longer than {timeout_s:g} s")
    finally:
        os.close(read)
        os.waitpid(pid, 0)
    if not text:
        raise InternalError("the process that tries a step of the optimizer died; what it printed is above")
    if found := json.loads(text):
        raise error_from_name(found["error"], found["text"])


class Children:
    """Forked children that share a pipe from this process.

    Each child keeps ``read_end`` and leaves when ``write_end`` closes. ``end`` kills a child that does not leave.
    """

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._pids: list[int] = []
        """Pids of the children that have not been waited for."""
        self._reaping = threading.Lock()

    def start(self, work: Callable[[], None], close: set[int]) -> None:
        self._pids.append(fork(work, close))

    def reap(self) -> bool:
        """Wait for the children that have exited and remove their arenas; returns whether any child is alive."""
        with self._reaping:
            for pid in [pid for pid in self._pids if _has_exited(pid)]:
                self._pids.remove(pid)
                remove_arenas(pid)
            return bool(self._pids)

    def end(self, timeout_s: float) -> None:
        """Close the pipe and wait for the children; kill those that are alive after ``timeout_s`` seconds."""
        os.close(self.write_end)
        os.close(self.read_end)
        deadline = time.monotonic() + timeout_s
        while self.reap():
            if time.monotonic() > deadline:
                self._kill()
                deadline = float("inf")
            time.sleep(POLL_S)

    def _kill(self) -> None:
        with self._reaping:  # after waitpid() the kernel may reuse a pid
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)


class ProcessGroups:
    """Groups of children that end in order. Any thread may call ``end``; every caller waits until all have ended."""

    def __init__(self, *groups: Children) -> None:
        self._all = groups
        self._remaining = list(groups)
        self._ending = threading.Lock()

    def end(self, timeout_s: float) -> None:
        with self._ending:
            while self._remaining:
                self._remaining.pop(0).end(timeout_s)

    def reap(self) -> None:
        """Thread body: wait for exiting children, so that none stays a zombie, until no child is alive."""
        while [group for group in self._all if group.reap()]:
            time.sleep(REAP_S)


def _has_exited(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


# ---- the work of a child: the coordinator, or a device


def run_coordinator(config: CoordinatorConfig, address_pipe: int, parent_pipe: int) -> None:
    """Run a coordinator until ``parent_pipe`` closes. Writes its address, or the error, as JSON to ``address_pipe``."""

    async def run() -> None:
        parent_ended = _closed_event(parent_pipe)
        try:
            server, address = await start_coordinator(config, parent_ended)
        except HoopError as error:
            os.write(address_pipe, (json.dumps({"error": type(error).__name__, "text": str(error)}) + "\n").encode())
            return
        os.write(address_pipe, (json.dumps({"address": str(address)}) + "\n").encode())
        os.close(address_pipe)
        await parent_ended.wait()
        await server.stop()
        if config.local_token is not None:  # no device lives on
            config.local_token.withdraw()

    asyncio.run(run())


async def start_coordinator(
    config: CoordinatorConfig, parent_ended: asyncio.Event | None = None
) -> tuple[CoordinatorServer, Address]:
    """Start a coordinator. If its port was chosen beforehand and is in use, try again for ``BIND_S`` seconds."""
    deadline = time.monotonic() + (BIND_S if config.port else 0.0)
    while True:
        server = CoordinatorServer(config)
        try:
            return server, await server.start()
        except FailedPrecondition as error:
            await server.stop()
            if time.monotonic() > deadline or (parent_ended is not None and parent_ended.is_set()):
                remedy = "; --port N, on every rank, chooses another one" if config.port else ""
                raise FailedPrecondition(f"{error}{remedy}") from None
        await asyncio.sleep(BIND_RETRY_S)


def run_device(
    config: DeviceConfig, trainer: TrainFunction, error_pipe: int, parent_pipe: int, prepare: Callable[[], None]
) -> None:
    """Run a device until ``parent_pipe`` closes or it was drained.

    If it cannot start, writes the error as JSON to ``error_pipe``. ``prepare``: see ``ForkedConfig``.
    """

    async def run() -> None:
        parent_ended = _closed_event(parent_pipe)
        server = DeviceServer(config, trainer)
        await server.start()
        ends = [asyncio.ensure_future(one.wait()) for one in (parent_ended, server.dismissed)]
        await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        await server.stop()

    try:
        prepare()
        asyncio.run(run())
    except HoopError as error:
        text = f"device {config.device_id} cannot start: {error}"
        os.write(error_pipe, (json.dumps({"error": type(error).__name__, "text": text}) + "\n").encode())


def _closed_event(parent_pipe: int) -> asyncio.Event:
    """An event that is set when the parent's end of the pipe closes."""
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        loop.remove_reader(parent_pipe)
        closed.set()

    loop.add_reader(parent_pipe, on_readable)
    return closed


# ---- the parent's side


@dataclass(frozen=True)
class ForkedConfig:
    """The devices of a forked cluster."""

    devices: int
    memory: int
    """Size of each device's arena in bytes."""
    trainer: TrainFunction
    coordinator: CoordinatorConfig = field(default_factory=lambda: own_coordinator())
    join: Address | None = None
    """Address at which devices of other hosts reach the coordinator; None: there are none."""
    host: str = ""
    """Address that the devices listen on; empty: as the coordinator, all addresses or loopback."""
    ports: PortRange = field(default_factory=PortRange)
    """Ports for the services and the data links of the devices."""
    prepare: Callable[[], None] = lambda: None
    """Function that is called in the process of each device before it has threads: only then may it fork processes of
    its own."""

    @property
    def client_credentials(self) -> Credentials:
        """The credentials of a client of this cluster in a process forked from this one."""
        return Credentials(Role.CLIENT, self.coordinator.credentials.token)


def own_coordinator() -> CoordinatorConfig:
    """A coordinator whose token keeps other users of this machine out: the join token in HOOP_TOKEN, or a new one.

    The other processes are forked and have it. HOOP_TOKEN may hold a client's token for another cluster; that one is
    not used here.
    """
    text = environment_value("HOOP_TOKEN")
    token, local = (Token.parse(text, "HOOP_TOKEN") if text else None), None
    if token is None or not token.is_join:
        local = LocalToken(required=False)
        token = local.token
    return CoordinatorConfig(
        detector=DetectorConfig(lease_s=LEASE_S), credentials=Credentials(Role.COORDINATOR, token), local_token=local
    )


def meeting_coordinator(point: Address, credentials: Credentials) -> CoordinatorConfig:
    """The coordinator of rank 0, at the meeting point of a run that a scheduler started.

    On loopback without a token it makes one, which the other ranks, processes of the same user, find by the port.
    """
    if not point.is_loopback:
        return CoordinatorConfig(host=wildcard_towards(point.host), port=point.port, credentials=credentials)
    local = None
    if not credentials.required:
        local = LocalToken.obtain(point.port)
        credentials = Credentials(Role.COORDINATOR, local.token)
    return CoordinatorConfig(
        host=point.host,
        port=point.port,
        detector=DetectorConfig(lease_s=LEASE_S),
        credentials=credentials,
        local_token=local,
    )


class ForkedCluster:
    """The parent's handle of a head process and its cluster."""

    def __init__(self, config: ForkedConfig, head: Head) -> None:
        admit(Request(config.devices, config.memory))
        events_read, events_write = os.pipe()
        control_read, control_write = os.pipe()
        self._pid = fork(partial(_head, config, head, events_write, control_read), close={events_read, control_write})
        os.close(events_write)
        os.close(control_read)
        self._events = os.fdopen(events_read, "r", encoding="utf-8")
        self._control: int | None = control_write

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the head, until it is done; raises the head's error."""
        for line in self._events:
            event: dict[str, Any] = json.loads(line)
            if event["kind"] == "head_failed":
                raise error_from_name(event["error"], event["text"])
            if event["kind"] == "head_done":
                return
            yield event
        raise PeerLost("the process that leads the devices died; what it printed is above")

    def stop(self) -> None:
        """Ask the job to stop after a step. ``events`` continues to the job's end. May come before the job starts."""
        if self._control is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, STOP)

    def close(self) -> None:
        """End every process that still runs, and wait for the head."""
        if self._control is None:
            return
        os.close(self._control)
        self._control = None
        self._events.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


# ---- the head process


def _head(config: ForkedConfig, head: Head, events_write: int, control_read: int) -> None:
    os.setsid()  # Ctrl-C reaches only the parent, which requests a stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler or systemd sends SIGTERM to all processes at once. The parent then requests a stop after a step, for
    # which these processes are needed; they end when the pipe from their parent closes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # drop the handler of the parent's command
    # Standard output belongs to the command: print to standard error.
    os.dup2(sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2, 1)
    parent = _Parent(events_write, control_read)
    address_read, address_write = os.pipe()
    errors_read, errors_write = os.pipe()
    coordinator, devices = Children(), Children()
    # Devices end first: each reports to the coordinator that it leaves.
    groups = ProcessGroups(devices, coordinator)
    close = {events_write, control_read, address_read, errors_read, coordinator.write_end, devices.write_end}
    try:
        work = partial(run_coordinator, config.coordinator, address_write, coordinator.read_end)
        coordinator.start(work, close | {errors_write, devices.read_end})
        os.close(address_write)
        listening = Address.parse(_coordinator_address(address_read))
        address = replace(listening, host=_LOOPBACK[listening.host]) if listening.is_wildcard else listening
        host = listening.host if listening.is_wildcard else DeviceConfig.host
        for device_id in range(1, config.devices + 1):
            credentials = Credentials(Role.DEVICE, config.coordinator.credentials.token)
            device = DeviceConfig(
                config.join or address,
                memory=config.memory,
                host=config.host or host,
                port=config.ports,
                data_port=config.ports,
                device_id=device_id,
                credentials=credentials,
            )
            work = partial(run_device, device, config.trainer, errors_write, devices.read_end, config.prepare)
            devices.start(work, (close - {address_read}) | {coordinator.read_end})
        os.close(errors_write)
        # Start threads only after the last fork: a forked child has only the forking thread.
        threading.Thread(target=parent.watch_control, args=(groups,), daemon=True).start()
        threading.Thread(target=parent.relay_errors, args=(errors_read, groups), daemon=True).start()
        threading.Thread(target=groups.reap, daemon=True).start()
        head(address, parent.emit, parent.set_stop_handler)
        parent.emit({"kind": "head_done"})
    except BaseException as error:
        text = str(error) if isinstance(error, HoopError) else traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent has ended, which may be the cause of this error
            parent.emit({"kind": "head_failed", "error": type(error).__name__, "text": text})
    finally:
        groups.end(END_S)


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - it is compared, not listened on
"""Addresses at which this machine reaches a server that listens on all addresses."""


def _coordinator_address(address_read: int) -> str:
    ready, _, _ = select.select([address_read], [], [], START_S + BIND_S)
    if not ready:
        raise DeadlineExceeded(f"the coordinator was not up within {START_S + BIND_S:g} s")
    with os.fdopen(address_read, "r", encoding="utf-8") as line:
        text = line.readline().strip()
    if not text:
        raise InternalError("the coordinator ended as it started; what it printed is above")
    found: dict[str, str] = json.loads(text)
    if "error" in found:
        raise error_from_name(found["error"], found["text"])
    return found["address"]


class _Parent:
    """The head's end of the two pipes to its parent: events to it, control bytes from it."""

    def __init__(self, events_write: int, control_read: int) -> None:
        self._events = os.fdopen(events_write, "w", encoding="utf-8")
        self._control_read = control_read
        self._write_lock = threading.Lock()
        self._stop_handler_set = threading.Event()
        self._stop_handler: Callable[[], None] = lambda: None

    def emit(self, event: dict[str, Any]) -> None:
        with self._write_lock:
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()

    def set_stop_handler(self, stop: Callable[[], None]) -> None:
        """Set the function that stops the job; an earlier stop request calls it now."""
        self._stop_handler = stop
        self._stop_handler_set.set()

    def watch_control(self, groups: ProcessGroups) -> None:
        """Thread body: a byte requests a stop after a step; EOF ends all processes at once."""
        while os.read(self._control_read, 1) == STOP:
            threading.Thread(target=self._stop_job, daemon=True).start()
        groups.end(END_S)  # the parent is gone: no further event would be read
        os._exit(1)

    def _stop_job(self) -> None:
        self._stop_handler_set.wait(START_S)
        with contextlib.suppress(HoopError):  # the job has ended, or failed and reports that itself
            self._stop_handler()

    def relay_errors(self, errors_read: int, groups: ProcessGroups) -> None:
        """Thread body: when a device cannot start, report its error and end all: the others would wait for it."""
        with os.fdopen(errors_read, "r", encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(BrokenPipeError):
                    self.emit({"kind": "head_failed", **json.loads(line)})
                groups.end(END_S)
                os._exit(1)
