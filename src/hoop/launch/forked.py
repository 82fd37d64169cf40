"""A cluster of forked processes for one job.

    clean process ── fork ──▶ head ── fork ──▶ coordinator     imports are paid once, data is shared until written
                               └──── fork ──▶ each device
    program       ◀── lines of JSON ── head                    the job's events, then ``head_done`` or ``head_failed``
    program       ── a byte, or EOF ──▶ head                   byte: stop after a step; EOF: end all processes now

The clean process is the program itself if it is a command of Hoop's, else one that it has started
(``runs/clean_process.py``): a process that has computed, has used a GPU or gRPC, or has threads cannot be forked. No
child outlives its parent: each child holds a pipe from its parent and leaves when that pipe closes, however the parent
ended. The head does so with the program's pipe.
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
from typing import Any, NamedTuple

from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InternalError, PeerLost, error_from_name
from hoop.job_events import Observed, Warned
from hoop.launch.processes import remove_arenas
from hoop.membership.heartbeats import DetectorConfig
from hoop.servers.advertised_address import wildcard_towards
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.tasks import TrainFunction
from hoop.standard_streams import flush, guard
from hoop.topology import Address, PortRange
from hoop.wire.auth import Credentials
from hoop.wire.channels import LOCAL_LEASE_S
from hoop.wire.roles import Role

STOP = b"s"
START_S = 30.0
END_S = 5.0
"""Seconds that a process has to leave before it is killed."""
HEAD_END_S = 60.0
"""Seconds that a head has to end its processes and itself, after its control pipe was closed, before it is killed."""
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

``emit`` sends an event to the program. ``set_stop_handler`` takes the function that stops the job on request.
"""


class HeadPipes(NamedTuple):
    """The head's ends of the two pipes to the program."""

    events: int
    """It writes events there."""
    control: int
    """It reads there that the job is to stop."""
    alive: int = -1
    """It keeps this open as long as it lives; -1: its parent waits for it."""


StartHead = Callable[[HeadPipes, set[int]], Callable[[], None]]
"""Function that starts a head process; the descriptors in the set are the program's ends of the pipes, which the head
must not have. Returns a function that waits until the head, whose control pipe was closed, has ended."""


# ---- forked children


def fork(work: Callable[[], None], close: set[int]) -> int:
    """Fork a child that closes the descriptors ``close``, runs ``work`` and exits; returns its pid."""
    flush()
    pid = os.fork()
    if pid:
        return pid
    # Never collect garbage of the parent here: a destructor of gRPC would wait for a thread that was not forked.
    gc.freeze()
    code = 1
    try:
        for descriptor in close:
            os.close(descriptor)
        guard(patient=False)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            flush()
        os._exit(code)


def wait_for_child(pid: int, timeout_s: float) -> None:
    """Waits for a child that is to end, and kills it after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(POLL_S)


class Children:
    """Forked children that share a pipe from this process.

    Each child keeps ``read_end`` and leaves when ``write_end`` closes. ``end`` kills a child that does not leave.
    """

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._exited: dict[int, Callable[[str], None]] = {}
        """Pids of the children that have not been waited for, with their ``on_exit``."""
        self._reaping = threading.Lock()
        self._ending = False

    def start(self, work: Callable[[], None], close: set[int], on_exit: Callable[[str], None] | None = None) -> None:
        """Forks a child. ``on_exit`` is called with how it exited, in words, if it does so before ``end``."""
        self._exited[fork(work, close)] = on_exit or (lambda how: None)

    def reap(self) -> bool:
        """Wait for the children that have exited and remove their arenas; returns whether any child is alive."""
        with self._reaping:
            for pid in list(self._exited):
                if (how := _exit_of(pid)) is not None:
                    on_exit = self._exited.pop(pid)
                    remove_arenas(pid)
                    if not self._ending:
                        on_exit(how)
            return bool(self._exited)

    def end(self, timeout_s: float) -> None:
        """Close the pipe and wait for the children; kill those that are alive after ``timeout_s`` seconds."""
        with self._reaping:
            self._ending = True
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
            for pid in self._exited:
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


def _exit_of(pid: int) -> str | None:
    """How a child has exited, in words; None if it is alive."""
    try:
        exited, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "exit code unknown"
    if not exited:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    number = -code
    names = {member.value: member.name for member in signal.Signals}
    killed = f"killed by {names.get(number, f'signal {number}')}"
    return f"{killed}, by somebody or because memory is full" if number == signal.SIGKILL else killed


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
        ends = [asyncio.ensure_future(wait) for wait in (parent_ended.wait(), server.coordinator.wait_failed())]
        await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        await server.stop()

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
    config: DeviceConfig, trainer: TrainFunction, reports: int, parent_pipe: int, prepare: Callable[[], None]
) -> None:
    """Run a device until ``parent_pipe`` closes or it was drained.

    Writes to the pipe ``reports`` that it has joined, or why it cannot start. ``prepare``: see ``ForkedConfig``.
    """
    joined = False

    async def run() -> None:
        nonlocal joined
        parent_ended = _closed_event(parent_pipe)
        server = DeviceServer(config, trainer)
        await server.start()
        _report(reports, config.device_id, joined=True)
        joined = True
        ends = [asyncio.ensure_future(one.wait()) for one in (parent_ended, server.dismissed)]
        await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        await server.stop()

    try:
        prepare()
        asyncio.run(run())
    except HoopError as error:
        _report(
            reports,
            config.device_id,
            error=type(error).__name__,
            text=f"device {config.device_id} cannot start: {error}",
        )
    except Exception as error:
        if not joined:
            what = f"a bug in Hoop: {type(error).__name__}: {error}; its traceback is above"
            traceback.print_exc()
            text = f"device {config.device_id} cannot start: {what}"
            _report(reports, config.device_id, error=InternalError.__name__, text=text)
            return
        raise


def _report(pipe: int, device_id: int, **fields: Any) -> None:
    """Write one line to the head about a device that starts: see ``_Program.watch_devices``."""
    os.write(pipe, (json.dumps({"device": device_id, **fields}) + "\n").encode())


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
    awaited: int
    """Number of devices with which the job begins: if fewer are left before these have joined, all end."""
    join_timeout_s: float | None = None
    """Seconds that these have to join before the work of the head begins; None: that work waits for them itself."""
    coordinator: CoordinatorConfig = field(default_factory=lambda: own_coordinator())
    join: Address | None = None
    """Address at which devices of other hosts reach the coordinator; None: there are none."""
    host: str = ""
    """Address that the devices listen on; empty: as the coordinator, all addresses or loopback."""
    ports: PortRange = field(default_factory=PortRange)
    """Ports for the services and the data links of the devices."""
    grows: bool = False
    """Whether ``memory`` is the most that an arena may take, which it reserves as the job needs it."""
    prepare: Callable[[], None] = lambda: None
    """Function that is called in the process of each device before it has threads: only then may it fork processes of
    its own."""

    @property
    def client_credentials(self) -> Credentials:
        """The credentials of a client of this cluster in a process forked from this one."""
        return self.coordinator.credentials.for_role(Role.CLIENT)


def own_coordinator() -> CoordinatorConfig:
    """A coordinator for processes of this user on this machine."""
    return CoordinatorConfig(
        detector=DetectorConfig(lease_s=LOCAL_LEASE_S), credentials=Credentials(Role.COORDINATOR, local=True)
    )


def meeting_coordinator(point: Address, credentials: Credentials) -> CoordinatorConfig:
    """The coordinator of rank 0, at the meeting point of a run that a scheduler started.

    On loopback without a token the other ranks, processes of the same user, find it by the port.
    """
    if not point.is_loopback:
        return CoordinatorConfig(host=wildcard_towards(point.host), port=point.port, credentials=credentials)
    if not credentials.required:
        credentials = Credentials(Role.COORDINATOR, local=True)
    return CoordinatorConfig(
        host=point.host, port=point.port, detector=DetectorConfig(lease_s=LOCAL_LEASE_S), credentials=credentials
    )


class ForkedCluster:
    """The program's handle of a head process and its cluster."""

    def __init__(self, start: StartHead) -> None:
        events_read, events_write = os.pipe()
        control_read, control_write = os.pipe()
        self._events = os.fdopen(events_read, "r", encoding="utf-8")
        self._control: int | None = control_write
        try:
            self._wait = start(HeadPipes(events_write, control_read), {events_read, control_write})
        except BaseException:
            self._wait = lambda: None
            self.close()
            raise
        finally:
            os.close(events_write)
            os.close(control_read)

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
        self._wait()


def fork_head(work: Callable[[HeadPipes], None], pipes: HeadPipes, others: set[int]) -> Callable[[], None]:
    """Fork a head from this process, which must be clean: see ``StartHead``."""
    pid = fork(partial(work, pipes), close=others)
    return partial(wait_for_child, pid, HEAD_END_S)


# ---- the head process


def run_head(prepare: Callable[[], ForkedConfig], head: Head, pipes: HeadPipes) -> None:
    """The work of the head process.

    ``prepare`` loads what the devices share, and returns their configuration; an error of it is the head's.
    """
    os.setsid()  # Ctrl-C reaches only the parent, which requests a stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler or systemd sends SIGTERM to all processes at once. The parent then requests a stop after a step, for
    # which these processes are needed; they end when the pipe from their parent closes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # drop the handler of the parent's command
    # Standard output belongs to the command: print to standard error.
    os.dup2(sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2, 1)
    parent = _Program(pipes)
    address_read, address_write = os.pipe()
    reports_read, reports_write = os.pipe()
    coordinator, devices = Children(), Children()
    # Devices end first: each reports to the coordinator that it leaves.
    groups = ProcessGroups(devices, coordinator)
    close = {address_read, reports_read, coordinator.write_end, devices.write_end}
    close |= {descriptor for descriptor in pipes if descriptor >= 0}
    try:
        config = prepare()
        work = partial(run_coordinator, config.coordinator, address_write, coordinator.read_end)
        coordinator.start(work, close | {reports_write, devices.read_end})
        os.close(address_write)
        listening = Address.parse(_coordinator_address(address_read))
        address = replace(listening, host=_LOOPBACK[listening.host]) if listening.is_wildcard else listening
        host = listening.host if listening.is_wildcard else DeviceConfig.host
        for device_id in range(1, config.devices + 1):
            credentials = config.coordinator.credentials.for_role(Role.DEVICE)
            device = DeviceConfig(
                config.join or address,
                memory=config.memory,
                grows=config.grows,
                host=config.host or host,
                port=config.ports,
                data_port=config.ports,
                device_id=device_id,
                credentials=credentials,
            )
            work = partial(run_device, device, config.trainer, reports_write, devices.read_end, config.prepare)
            on_exit = partial(_report_exit, reports_write, device_id)
            devices.start(work, (close - {address_read}) | {coordinator.read_end}, on_exit)
        # Start threads only after the last fork: a forked child has only the forking thread.
        threading.Thread(target=parent.watch_control, args=(groups,), daemon=True).start()
        counts = (config.devices, config.awaited)
        threading.Thread(target=parent.watch_devices, args=(reports_read, *counts, groups), daemon=True).start()
        threading.Thread(target=groups.reap, daemon=True).start()
        if config.join_timeout_s is not None:
            parent.wait_for_devices(config.awaited, config.join_timeout_s)
        head(address, parent.emit, parent.set_stop_handler)
        parent.emit({"kind": "head_done"})
    except BaseException as error:
        text = str(error) if isinstance(error, HoopError) else traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent has ended, which may be the cause of this error
            parent.emit({"kind": "head_failed", "error": type(error).__name__, "text": text})
    finally:
        groups.end(END_S)


def _report_exit(pipe: int, device_id: int, how: str) -> None:
    _report(pipe, device_id, exited=how)


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


class _Program:
    """The head's ends of the two pipes to the program: events to it, control bytes from it."""

    def __init__(self, pipes: HeadPipes) -> None:
        self._events = os.fdopen(pipes.events, "w", encoding="utf-8")
        self._control_read = pipes.control
        self._write_lock = threading.Lock()
        self._stop_lock = threading.Lock()
        self._stop_handler: Callable[[], None] | None = None
        self._stop_pending = False
        """Whether a stop was requested before there was a handler."""
        self._joined = 0
        self._all_joined = threading.Event()

    def emit(self, event: dict[str, Any]) -> None:
        with self._write_lock:
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()

    def set_stop_handler(self, stop: Callable[[], None]) -> None:
        """Set the function that stops the job; an earlier stop request, however long ago, calls it now."""
        with self._stop_lock:
            self._stop_handler = stop
            pending, self._stop_pending = self._stop_pending, False
        if pending:
            self._stop_job()

    def watch_control(self, groups: ProcessGroups) -> None:
        """Thread body: a byte requests a stop after a step; EOF ends all processes at once."""
        while os.read(self._control_read, 1) == STOP:
            self._stop_job()
        groups.end(END_S)  # the parent is gone: no further event would be read
        os._exit(1)

    def _stop_job(self) -> None:
        """Calls the handler, in a thread of its own, or leaves that to ``set_stop_handler``."""
        with self._stop_lock:
            handler = self._stop_handler
            self._stop_pending = handler is None

        def call() -> None:
            with contextlib.suppress(HoopError):  # the job has ended, or failed and reports that itself
                if handler is not None:
                    handler()

        threading.Thread(target=call, daemon=True).start()

    def watch_devices(self, reports_read: int, devices: int, awaited: int, groups: ProcessGroups) -> None:
        """Thread body: reports devices that cannot start, or end before ``awaited`` of ``devices`` have joined.

        If fewer than ``awaited`` are left, all end: the others would wait for them. A device's own lines precede that
        of its exit, for they are in one pipe. Once the awaited devices have joined, the coordinator notices what
        happens to those that have joined.
        """
        joined, failed = set[int](), set[int]()
        with os.fdopen(reports_read, "r", encoding="utf-8") as lines:
            for line in lines:
                report = json.loads(line)
                device_id = report.pop("device")
                if "joined" in report:
                    joined.add(device_id)
                    self._joined = len(joined - failed)
                    if self._joined == awaited:
                        self._all_joined.set()
                    continue
                if device_id in failed or (device_id in joined and self._all_joined.is_set()):
                    continue
                failed.add(device_id)
                if "exited" in report:
                    text = f"device {device_id} ended while the devices started: {report['exited']}"
                    report = {"error": PeerLost.__name__, "text": text}
                enough = self._all_joined.is_set() or devices - len(failed) >= awaited
                with contextlib.suppress(BrokenPipeError):
                    if enough:
                        text = f"{report['text']}; the job goes on without it"
                        self.emit(Observed(Warned(text)).to_fields())
                        continue
                    self.emit({"kind": "head_failed", **report})
                groups.end(END_S)
                os._exit(1)

    def wait_for_devices(self, awaited: int, timeout_s: float) -> None:
        if not self._all_joined.wait(timeout_s):
            raise DeadlineExceeded(
                f"{awaited} devices were not all there within {timeout_s:g} s: {self._joined} have joined; the others "
                "are alive and have not"
            )
