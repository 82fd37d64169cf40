"""A device is killed or stopped: how fast it is detected, which operations fail, and which continue."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoop
from hoop.errors import FailedPrecondition, InvalidArgument, NotFound, PeerError, PeerLost
from hoop.wire.generated import gpu_sim_pb2 as lab

if TYPE_CHECKING:
    from background import Running

    Connect = Callable[..., hoop.Cluster]
    Wait = Callable[..., Any]
    Signal = Callable[[int, int], None]

LONG_S = 240.0
"""Deadline of every wait. A dead process is detected in milliseconds and a stopped one after its lease of 1.5 s, on a
machine that is not busy; the recovery benchmark measures both."""
LARGE = 4_000_000
PAUSE_S = 0.01
"""Between the all-reduces of a communicator that a fault does not concern."""


@pytest.fixture
def three_devices(start: Callable[..., Running]) -> Running:
    """``hoop up`` with three devices, for one test. A device that is stopped is dead as soon as between hosts."""
    return start("up", "--devices", 3, "--memory", "64MiB", "--lab", "--lease", "1.5s")


def vectors(count: int, ranks: int) -> list[Any]:
    return [np.arange(count, dtype="float32") % 5 + rank for rank in range(ranks)]


def assert_all_reduce_works(comm: hoop.Communicator) -> None:
    """An all-reduce gives the right result on every rank."""
    x = vectors(1000, comm.size)
    for rank, found in enumerate(comm.all_reduce(x)):
        np.testing.assert_array_equal(found, sum(x), err_msg=f"rank {rank}")


class AllReduceLoop:
    """Runs all-reduces of a buffer in a thread until it is stopped or fails."""

    def __init__(self, comm: hoop.Communicator, buffer: hoop.Buffer, pause_s: float) -> None:
        self.buffer = buffer
        self.iterations = 0
        self.running = threading.Event()
        """Set after the first iteration, so that another one is in progress."""
        self.error: BaseException | None = None
        self._comm, self._pause_s = comm, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause_s):
                self._comm.all_reduce(self.buffer, op="max")
                self.iterations += 1
                self.running.set()
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LONG_S)

    def wait_for_another(self) -> None:
        """Waits until an all-reduce has ended that had not begun before."""
        wanted, deadline = self.iterations + 2, time.monotonic() + LONG_S
        while self.iterations < wanted:
            assert self._thread.is_alive(), self.error
            assert time.monotonic() < deadline, "no further all-reduce has ended"
            threading.Event().wait(PAUSE_S)

    def failure(self, within: float) -> str:
        """The message of the error it failed with."""
        self._thread.join(within)
        assert not self._thread.is_alive(), f"still running after {within:g} s"
        # PeerLost during an operation, or FailedPrecondition if the next one starts after the detection.
        assert isinstance(self.error, PeerLost | FailedPrecondition), self.error
        return str(self.error)


@contextmanager
def all_reduce_loop(
    comm: hoop.Communicator, name: str, count: int = LARGE, pause_s: float = 0.0
) -> Iterator[AllReduceLoop]:
    """Keeps an all-reduce in progress inside the block; with pauses, one after the other."""
    loop = AllReduceLoop(comm, comm.buffer(name, count), pause_s)
    try:
        assert loop.running.wait(LONG_S)
        yield loop
    finally:
        loop.stop()


def test_a_device_is_killed(
    three_devices: Running,
    connect: Connect,
    await_event: Wait,
    status: Callable[[str], dict[str, Any]],
    comm_status: Callable[[str, int], lab.GetCommStatusResponse],
    send_signal: Signal,
) -> None:
    """During an all-reduce: every error names the device, no call hangs, and the survivors continue."""
    cluster = connect(three_devices.address)
    comm, idle, other = (cluster.communicator(ids) for ids in ([1, 2, 3], [2, 1], [3, 1]))
    victim = comm.devices[1].info
    name = f"device 2 (pid {victim.pid}, {victim.address})"
    with all_reduce_loop(other, "other", 1000, PAUSE_S) as unaffected, all_reduce_loop(comm, "x") as loop:
        send_signal(victim.pid, signal.SIGKILL)
        dead = await_event(three_devices.address, "device_dead", LONG_S, device=2)
        await_event(three_devices.address, "communicator_failed", LONG_S, communicator=comm.id, device=2)
        answer = comm_status(three_devices.address, comm.id)
        failure = loop.failure(LONG_S)
        assert answer.status == lab.FAILED
        assert all(name in text for text in (dead.text, answer.reason, failure))
        unaffected.wait_for_another()
        reported = status(three_devices.address)
        assert [device["state"] for device in reported["devices"]] == ["alive", "dead", "alive"]
        assert reported["devices"][1]["reason"] in dead.text
        communicators = {one["id"]: one for one in reported["communicators"]}
        assert communicators[comm.id]["status"] == communicators[idle.id]["status"] == "failed"
        assert name in communicators[comm.id]["reason"]
        assert communicators[other.id]["status"] != "failed"
    assert unaffected.error is None
    assert other.status().generation == 1

    for broken in (comm, idle):
        with pytest.raises(FailedPrecondition, match=r"device 2 .* is gone: .* rebuild the communicator"):
            broken.barrier()
    assert comm_status(three_devices.address, comm.id).status == lab.FAILED
    with pytest.raises(FailedPrecondition, match=r"device 2 .* is dead"):
        cluster.communicator([1, 2])
    with pytest.raises(FailedPrecondition, match="3 were asked for, 2 are alive"):
        cluster.communicator(3)
    with pytest.raises(FailedPrecondition, match=r"device 2 .* is dead"):
        cluster.copy((1, 0x1000), (2, 0x1000), 8)
    with pytest.raises(PeerError, match="device 2"):
        cluster.device(2).read(0x1000, 8)

    assert comm.rebuild() is comm
    assert comm.generation > 1
    assert [device.id for device in comm.devices] == [1, 3]
    assert_all_reduce_works(comm)
    with pytest.raises(InvalidArgument, match=r"on 3 devices, communicator \d+ has 2; after a rebuild"):
        comm.all_reduce(loop.buffer)
    buffer = comm.buffer("x", LARGE, reuse=True).fill(vectors(LARGE, 2))
    comm.all_reduce(buffer)
    for rank in range(2):
        np.testing.assert_array_equal(buffer.read(rank), sum(vectors(LARGE, 2)))
    assert idle.rebuild().size == 1
    for working in (idle, other, cluster.communicator(2)):
        assert_all_reduce_works(working)


def test_staging_is_freed_on_the_surviving_devices(
    three_devices: Running, connect: Connect, await_event: Wait, send_signal: Signal
) -> None:
    """The first of three devices is killed while an all-reduce of arrays is requested or runs."""
    cluster = connect(three_devices.address)
    comm = cluster.communicator([1, 2, 3])
    handle = comm.all_reduce(vectors(LARGE, 3), wait=False)
    send_signal(comm.devices[0].info.pid, signal.SIGKILL)
    # PeerLost, or FailedPrecondition if the coordinator knows of the death before the request reaches it.
    with pytest.raises((PeerLost, FailedPrecondition), match="device 1"):
        handle.wait(LONG_S)
    assert [device.buffers() for device in comm.devices[1:]] == [{}, {}]
    with pytest.raises((PeerError, FailedPrecondition), match="device 1"):
        comm.all_reduce(vectors(10, 3))
    assert [device.buffers() for device in comm.devices[1:]] == [{}, {}]
    # The caller may detect the death before the coordinator does.
    await_event(three_devices.address, "device_dead", LONG_S, device=1)
    assert_all_reduce_works(comm.rebuild())


def test_a_stopped_device_is_declared_dead_and_rejoins(
    three_devices: Running, connect: Connect, await_event: Wait, send_signal: Signal
) -> None:
    """Its sockets stay open, so only its lease detects it. When it continues, it rejoins by itself."""
    cluster = connect(three_devices.address)
    comm, other = cluster.communicator([1, 2, 3]), cluster.communicator([1, 3])
    info = comm.devices[1].info
    with all_reduce_loop(other, "other", 1000, PAUSE_S) as unaffected, all_reduce_loop(comm, "x") as loop:
        send_signal(info.pid, signal.SIGSTOP)
        dead = await_event(three_devices.address, "device_dead", LONG_S, device=2)
        assert "no heartbeat for" in dead.text
        assert f"device 2 (pid {info.pid}" in loop.failure(LONG_S)
        comm.rebuild()
        assert_all_reduce_works(comm)
        send_signal(info.pid, signal.SIGCONT)
        rejoined = await_event(three_devices.address, "device_joined", LONG_S, after=dead.sequence, device=2)
        assert "is here again" in rejoined.text
        assert rejoined.fields["incarnation"] == info.incarnation
        unaffected.wait_for_another()
    assert unaffected.error is None
    assert [device.id for device in comm.devices] == [1, 3]
    assert_all_reduce_works(comm)
    again = cluster.communicator([2, 3, 1])
    assert_all_reduce_works(again)
    buffer = again.buffer("x", LARGE, reuse=True).fill(vectors(LARGE, 3))  # its memory is intact
    again.all_reduce(buffer)
    for rank in range(3):
        np.testing.assert_array_equal(buffer.read(rank), sum(vectors(LARGE, 3)))
    assert [member.state for member in cluster.status().devices] == ["alive"] * 3


def test_arrays_do_not_wait_for_a_silent_device(
    three_devices: Running, connect: Connect, await_event: Wait, send_signal: Signal
) -> None:
    """Neither in the operation, nor when its staging memory is freed, nor in the next call."""
    cluster = connect(three_devices.address)
    comm = cluster.communicator([2, 1])
    assert_all_reduce_works(comm)
    handle = comm.all_reduce(vectors(LARGE, 2), wait=False)
    send_signal(comm.devices[0].info.pid, signal.SIGSTOP)
    with pytest.raises(PeerError, match="device 2"):
        handle.wait(LONG_S)
    await_event(three_devices.address, "device_dead", LONG_S, device=2)
    with pytest.raises(PeerError, match="device 2"):
        comm.all_reduce(vectors(10, 2))
    assert comm.devices[1].buffers() == {}
    assert_all_reduce_works(comm.rebuild())


def test_the_only_device_is_stopped_and_recovers(
    start: Callable[..., Running], connect: Connect, send_signal: Signal, await_event: Wait
) -> None:
    """If all devices are silent, the coordinator suspects itself and declares none of them dead. The operation that
    runs goes on with the device, over a new connection."""
    up = start("up", "--devices", 1, "--memory", "64MiB", "--lease", "1.5s")
    cluster = connect(up.address)
    comm = cluster.communicator(1)
    pid = comm.devices[0].info.pid
    with all_reduce_loop(comm, "x") as loop:
        send_signal(pid, signal.SIGSTOP)
        await_event(up.address, "device_suspect", LONG_S, device=1)  # its connection was given up
        send_signal(pid, signal.SIGCONT)
        await_event(up.address, "device_recovered", LONG_S, device=1)
        loop.wait_for_another()
    assert loop.error is None
    assert_all_reduce_works(comm)
    assert "device_dead" not in {one.kind for one in cluster.events()}


def test_a_communicator_survives_an_invalid_operation(start: Callable[..., Running], connect: Connect) -> None:
    """One rank's buffer name is wrong: all ranks stop, the error names the device, and the next operation runs."""
    cluster = connect(start("up", "--devices", 2, "--memory", "16MiB").address)
    comm = cluster.communicator(2)
    buffer = comm.buffer("x", 1000)
    wrong = hoop.Buffer(buffer.devices, ("x", "y"), 0, 1000, buffer.dtype)
    short = hoop.Buffer(buffer.devices, ("x", "x"), 0, 1001, buffer.dtype)
    for attempt in range(3):
        with pytest.raises(NotFound, match=r"device 2: .*no buffer is called 'y'"):
            comm.all_reduce(wrong)
        state = comm.status()
        assert (state.status, state.generation) == ("failed", attempt + 2)
        assert "no buffer is called 'y'" in state.reason
        assert_all_reduce_works(comm)
        assert comm.status().status == "success"
    with pytest.raises(IndexError, match="past the end of buffer 'x'"):
        comm.all_reduce(short)
    handles = [comm.all_reduce(each, wait=False) for each in (buffer, wrong, buffer, wrong, buffer)]
    outcomes = []
    for handle in handles:
        try:
            handle.wait(LONG_S)
            outcomes.append("done")
        except NotFound:
            outcomes.append("refused")
    assert outcomes == ["done", "refused", "done", "refused", "done"]
    assert [member.state for member in cluster.status().devices] == ["alive"] * 2
    assert "device_suspect" not in [event.kind for event in cluster.events()]
