"""What a forked child of a cluster does: it is the coordinator, or a device, until its parent ends.

Forked children that never outlive their parent.

A cluster of forked processes, for one job, from a process that has loaded everything already.

    this process ── fork ──▶ head ── fork ──▶ coordinator      imports are paid once, data is shared until written
                              └──── fork ──▶ each device
    this process ◀── lines of JSON ── head                     the job's events, then its result or its error
    this process ── a byte, or the end ──▶ head                stop after a step; or: end all of it, now

This process never opens gRPC, which does not survive a fork: so it may train again and again. Nobody outlives it:
each child holds a pipe from its parent and leaves when that closes, however the parent ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InternalError, PeerLost, named
from hoop.membership.failure_detector import DetectorConfig
from hoop.memory.storage import default_directory
from hoop.resources import Request, admit
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.tasks import Trainer
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role
from hoop.wire.tokens import Token


def coordinate(config: CoordinatorConfig, say: int, held: int) -> None:
    """A coordinator, which says where it is."""

    async def run() -> None:
        ended = _until_closed(held)
        server = CoordinatorServer(config)
        address = await server.start()
        os.write(say, f"{address}\n".encode())
        os.close(say)
        await ended.wait()
        await server.stop()

    asyncio.run(run())


def serve(config: DeviceConfig, trainer: Trainer, complain: int, held: int) -> None:
    """A device; why one cannot start is told as a line of JSON."""

    async def run() -> None:
        ended = _until_closed(held)
        server = DeviceServer(config, trainer)
        await server.start()
        await ended.wait()
        await server.stop()

    try:
        asyncio.run(run())
    except HoopError as error:
        text = f"device {config.device_id} cannot start: {error}"
        os.write(complain, (json.dumps({"error": type(error).__name__, "text": text}) + "\n").encode())


def _until_closed(held: int) -> asyncio.Event:
    """Set when the other end of this pipe closes: the head has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:
        loop.remove_reader(held)
        ended.set()

    loop.add_reader(held, heard)
    return ended


POLL_S = 0.01
"""A child's end makes no event that can be awaited on every platform."""
REAP_S = 0.1
"""How long at most a child that has ended stays a zombie."""


def check_forkable(threads: str = "/proc/self/task") -> None:
    """Beside a GPU, PyTorch computes gradients in threads of its own, which a forked process lacks for good."""
    for comm in Path(threads).glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if comm.read_text().startswith("pt_autograd"):
                raise FailedPrecondition(
                    "this process has computed gradients on a machine with a GPU, and devices forked from it cannot: "
                    "train before that, or in a process of its own (`hoop train FILE.py:JOB`)"
                )


def fork(work: Callable[[], None], close: set[int]) -> int:
    """A child that does this and nothing else; these descriptors of the parent's are closed in it."""
    check_forkable()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
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


class Children:
    """Each keeps the end ``held`` of a pipe and leaves when ``hold`` closes; one that does not is killed."""

    def __init__(self) -> None:
        self.held, self.hold = os.pipe()
        self._pids: list[int] = []
        """Of children that have not been waited for."""
        self._reaping = threading.Lock()

    def start(self, work: Callable[[], None], close: set[int]) -> None:
        self._pids.append(fork(work, close))

    def reap(self) -> bool:
        """Waits for the children that have ended, and removes what they left; whether any still lives."""
        with self._reaping:
            for pid in [pid for pid in self._pids if _ended(pid)]:
                self._pids.remove(pid)
                _forget(pid)
            return bool(self._pids)

    def end(self, patience: float) -> None:
        """Lets them leave, and waits for it; those that have not left in time are killed together."""
        os.close(self.hold)
        os.close(self.held)
        deadline = time.monotonic() + patience
        while self.reap():
            if time.monotonic() > deadline:
                self._kill()
                deadline = float("inf")
            time.sleep(POLL_S)

    def _kill(self) -> None:
        with self._reaping:  # a process that was waited for has given up its number
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)


class ProcessGroups:
    """Children of several kinds, which leave one kind after the other; any thread may ask, and all of them wait."""

    def __init__(self, *kinds: Children) -> None:
        self._all = kinds
        self._kinds = list(kinds)
        self._ending = threading.Lock()

    def end(self, patience: float) -> None:
        with self._ending:
            while self._kinds:
                self._kinds.pop(0).end(patience)

    def reap(self) -> None:
        """Waits for children that end, while any lives, so that none stays a zombie. Runs in a thread of its own."""
        while [kind for kind in self._all if kind.reap()]:
            time.sleep(REAP_S)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _forget(pid: int) -> None:
    """One that was killed could not delete its memory (on Linux it has no name)."""
    for folder in {default_directory(0), default_directory(sys.maxsize)}:
        for left in folder.glob(f"hoop-{pid}-*.arena"):
            left.unlink(missing_ok=True)


Head = Callable[[Address, Callable[[dict[str, Any]], None], Callable[[Callable[[], None]], None]], None]
"""What the head does with a cluster that is up: (where it is, tell the parent, whom to call when asked to stop)."""
STOP = b"s"
START_S = 30.0
END_S = 5.0
"""How long a process may take to leave before it is killed."""
LEASE_S = 20.0
"""A process of this machine that dies is noticed by its socket; one that only computes on a busy core is not dead."""


@dataclass(frozen=True)
class ForkedConfig:
    """So many devices, with so much memory each."""

    devices: int
    memory: int
    trainer: Trainer
    coordinator: CoordinatorConfig = field(
        default_factory=lambda: CoordinatorConfig(
            detector=DetectorConfig(lease_s=LEASE_S), credentials=Credentials(Role.COORDINATOR, own_token())
        )
    )


def own_token() -> Token | None:
    """The join token in HOOP_TOKEN, so that other users of this machine have no say in a job; else none.

    It may be a client's, for a cluster elsewhere: then it is not for this one.
    """
    text = os.environ.get("HOOP_TOKEN")
    token = Token.parse(text, "HOOP_TOKEN") if text else None
    return token if token is not None and token.is_join else None


class ForkedCluster:
    """A head process and its cluster, seen from the process that started them."""

    def __init__(self, config: ForkedConfig, head: Head) -> None:
        admit(Request(config.devices, config.memory))
        told, tells = os.pipe()
        lives, life = os.pipe()
        self._pid = fork(partial(_head, config, head, tells, lives), close={told, life})
        os.close(tells)
        os.close(lives)
        self._told = os.fdopen(told, "r", encoding="utf-8")
        self._life: int | None = life

    def events(self) -> Iterator[dict[str, Any]]:
        """What the head tells, until it is done; raises what it failed with."""
        for line in self._told:
            event: dict[str, Any] = json.loads(line)
            if event["kind"] == "head_failed":
                raise named(event["error"], event["text"])
            if event["kind"] == "head_done":
                return
            yield event
        raise PeerLost("the process that leads the devices died; what it printed is above")

    def stop(self) -> None:
        """Asks the job to stop; its events go on to its end. At any time, also before the job has started."""
        if self._life is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._life, STOP)

    def close(self) -> None:
        """Ends whatever still runs and waits for it."""
        if self._life is None:
            return
        os.close(self._life)
        self._life = None
        self._told.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _head(config: ForkedConfig, head: Head, tells: int, lives: int) -> None:
    os.setsid()  # Ctrl-C reaches the parent, which asks for a stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the command's own handlers are not for its children
        signal.signal(number, signal.SIG_DFL)
    os.dup2(sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2, 1)  # standard output is the command's
    parent = _Parent(tells, lives)
    heard, say = os.pipe()
    complaints, complain = os.pipe()
    leading, devices = Children(), Children()
    family = ProcessGroups(
        devices, leading
    )  # in this order they leave: a device says goodbye to its coordinator
    close = {tells, lives, heard, complaints, leading.hold, devices.hold}
    try:
        work = partial(coordinate, config.coordinator, say, leading.held)
        leading.start(work, close | {complain, devices.held})
        os.close(say)
        address = Address.parse(_first_line(heard))
        for device_id in range(1, config.devices + 1):
            proof = Credentials(Role.DEVICE, config.coordinator.credentials.token)
            device = DeviceConfig(address, memory=config.memory, device_id=device_id, credentials=proof)
            work = partial(serve, device, config.trainer, complain, devices.held)
            devices.start(work, (close - {heard}) | {leading.held})
        os.close(complain)
        # Threads only now: what is forked must have one.
        threading.Thread(target=parent.listen, args=(family,), daemon=True).start()
        threading.Thread(target=parent.relay, args=(complaints, family), daemon=True).start()
        threading.Thread(target=family.reap, daemon=True).start()
        head(address, parent.tell, parent.whom)
        parent.tell({"kind": "head_done"})
    except BaseException as error:
        text = str(error) if isinstance(error, HoopError) else traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent has ended, which may be why this failed
            parent.tell({"kind": "head_failed", "error": type(error).__name__, "text": text})
    finally:
        family.end(END_S)


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _first_line(heard: int) -> str:
    ready, _, _ = select.select([heard], [], [], START_S)
    if not ready:
        raise DeadlineExceeded(f"the coordinator was not up within {START_S:g} s")
    with os.fdopen(heard, "r", encoding="utf-8") as line:
        text = line.readline().strip()
    if not text:
        raise InternalError("the coordinator ended as it started; what it printed is above")
    return text


class _Parent:
    """The process that started the head: it is told what happens, and may ask for a stop."""

    def __init__(self, tells: int, lives: int) -> None:
        self._out = os.fdopen(tells, "w", encoding="utf-8")
        self._lives = lives
        self._telling = threading.Lock()
        self._known = threading.Event()
        self._stop: Callable[[], None] = lambda: None

    def tell(self, event: dict[str, Any]) -> None:
        with self._telling:
            self._out.write(json.dumps(event) + "\n")
            self._out.flush()

    def whom(self, stop: Callable[[], None]) -> None:
        """What to call when asked to stop; a wish from before is granted now."""
        self._stop = stop
        self._known.set()

    def listen(self, family: ProcessGroups) -> None:
        """A byte asks to stop after a step; the end of the pipe, to end everything at once."""
        while os.read(self._lives, 1) == STOP:
            threading.Thread(target=self._ask, daemon=True).start()
        family.end(END_S)  # nobody will hear the rest
        os._exit(1)

    def _ask(self) -> None:
        self._known.wait(START_S)
        with contextlib.suppress(HoopError):  # it ended by itself, or failed and says so
            self._stop()

    def relay(self, complaints: int, family: ProcessGroups) -> None:
        """A device that cannot start is the end of it: the others wait for it in vain."""
        with os.fdopen(complaints, "r", encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(BrokenPipeError):
                    self.tell({"kind": "head_failed", **json.loads(line)})
                family.end(END_S)
                os._exit(1)
