"""A device dies, or falls silent: who knows it when, what fails, and what goes on."""

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

KNOWN_S = 2.0
"""Until the death of a process must be known; it takes some milliseconds."""
LEASE_S = 2.5
"""The same for one that is silent: its lease is 1.5 s."""
PROMPT_S = 4.0
"""Until an operation with a silent one must have failed."""
BACK_S = 3.0
"""Until one that was silent must be a member again, once it goes on."""
LARGE = 4_000_000


@pytest.fixture
def three(start: Callable[..., Running]) -> Running:
    """Three devices, to be broken by the test."""
    return start("up", "--devices", 3, "--memory", "64MiB")


def vectors(count: int, ranks: int) -> list[Any]:
    return [np.arange(count, dtype="float32") % 5 + rank for rank in range(ranks)]


def works(comm: hoop.Communicator) -> None:
    """It can be used, and what comes out is right on every rank."""
    x = vectors(1000, comm.size)
    for rank, found in enumerate(comm.all_reduce(x)):
        np.testing.assert_array_equal(found, sum(x), err_msg=f"rank {rank}")


class Loop:
    """All-reduces a buffer again and again, in a thread, until it is stopped or fails."""

    def __init__(self, comm: hoop.Communicator, buffer: hoop.Buffer) -> None:
        self.buffer = buffer
        self.turns = 0
        self.turning = threading.Event()
        """One has been done, so another is under way."""
        self.error: BaseException | None = None
        self._comm = comm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._comm.all_reduce(self.buffer, op="max")
                self.turns += 1
                self.turning.set()
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def failure(self, within: float) -> str:
        """What it failed with."""
        self._thread.join(within)
        assert not self._thread.is_alive(), f"still at it after {within:g} s"
        # In the middle of one; or the next was begun when it was known already.
        assert isinstance(self.error, PeerLost | FailedPrecondition), self.error
        return str(self.error)


@contextmanager
def looping(comm: hoop.Communicator, name: str, count: int = LARGE) -> Iterator[Loop]:
    """An operation is in progress inside the block."""
    loop = Loop(comm, comm.buffer(name, count))
    try:
        assert loop.turning.wait(30)
        yield loop
    finally:
        loop.stop()


def test_a_device_is_killed(
    three: Running,
    connect: Connect,
    await_event: Wait,
    status: Callable[[str], dict[str, Any]],
    comm_status: Callable[[str, int], lab.GetCommStatusResponse],
    send_signal: Signal,
) -> None:
    """In the middle of an all-reduce. All know it by name, at once; nobody hangs; the survivors go on."""
    cluster = connect(three.address)
    comm, idle, other = (cluster.communicator(ids) for ids in ([1, 2, 3], [2, 1], [3, 1]))
    victim = comm.devices[1].info
    name = f"device 2 (pid {victim.pid}, {victim.address})"
    with looping(other, "other", 1000) as unaffected, looping(comm, "x") as loop:
        began = time.monotonic()
        send_signal(victim.pid, signal.SIGKILL)
        dead = await_event(three.address, "device_dead", KNOWN_S, device=2)
        await_event(three.address, "communicator_failed", KNOWN_S, communicator=comm.id, device=2)
        answer = comm_status(three.address, comm.id)
        failure = loop.failure(KNOWN_S)
        assert time.monotonic() - began < KNOWN_S
        assert answer.status == lab.FAILED
        assert all(name in text for text in (dead.text, answer.reason, failure))
        turns, found = unaffected.turns, status(three.address)
        assert [device["state"] for device in found["devices"]] == ["alive", "dead", "alive"]
        assert found["devices"][1]["reason"] in dead.text
        stands = {one["id"]: one for one in found["communicators"]}
        assert stands[comm.id]["status"] == stands[idle.id]["status"] == "failed"
        assert name in stands[comm.id]["reason"]
        assert stands[other.id]["status"] != "failed"
    assert unaffected.error is None
    assert unaffected.turns > turns
    assert other.status().generation == 1

    for broken in (comm, idle):
        with pytest.raises(FailedPrecondition, match=r"device 2 .* is gone: .* rebuild the communicator"):
            broken.barrier()
    assert comm_status(three.address, comm.id).status == lab.FAILED
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
    works(comm)
    with pytest.raises(InvalidArgument, match=r"on 3 devices, communicator \d+ has 2; after a rebuild"):
        comm.all_reduce(loop.buffer)
    kept = comm.buffer("x", LARGE, reuse=True).fill(vectors(LARGE, 2))
    comm.all_reduce(kept)
    for rank in range(2):
        np.testing.assert_array_equal(kept.read(rank), sum(vectors(LARGE, 2)))
    assert idle.rebuild().size == 1
    for mended in (idle, other, cluster.communicator(2)):
        works(mended)


def test_staging_is_freed_where_there_is_somebody_left(
    three: Running, connect: Connect, await_event: Wait, send_signal: Signal
) -> None:
    """The first of three is killed while arrays are on their way: the others have their memory back."""
    cluster = connect(three.address)
    comm = cluster.communicator([1, 2, 3])
    handle = comm.all_reduce(vectors(LARGE, 3), wait=False)
    send_signal(comm.devices[0].info.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="device 1"):
        handle.wait(KNOWN_S)
    assert [device.buffers() for device in comm.devices[1:]] == [{}, {}]
    with pytest.raises((PeerError, FailedPrecondition), match="device 1"):
        comm.all_reduce(vectors(10, 3))
    assert [device.buffers() for device in comm.devices[1:]] == [{}, {}]
    await_event(three.address, "device_dead", KNOWN_S, device=1)  # who called it may know before the coordinator
    works(comm.rebuild())


def test_a_device_falls_silent_and_comes_back(
    three: Running, connect: Connect, await_event: Wait, send_signal: Signal
) -> None:
    """Stopped, it keeps its sockets: only its lease tells. When it goes on it is a member again by itself."""
    cluster = connect(three.address)
    comm, other = cluster.communicator([1, 2, 3]), cluster.communicator([1, 3])
    info = comm.devices[1].info
    with looping(other, "other", 1000) as unaffected, looping(comm, "x") as loop:
        began = time.monotonic()
        send_signal(info.pid, signal.SIGSTOP)
        dead = await_event(three.address, "device_dead", LEASE_S, device=2)
        assert time.monotonic() - began < LEASE_S
        assert "no heartbeat for" in dead.text
        assert f"device 2 (pid {info.pid}" in loop.failure(PROMPT_S - LEASE_S)
        turns = unaffected.turns
        comm.rebuild()
        works(comm)
        send_signal(info.pid, signal.SIGCONT)
        back = await_event(three.address, "device_joined", BACK_S, after=dead.sequence, device=2)
        assert "is here again" in back.text
        assert back.fields["incarnation"] == info.incarnation
    assert unaffected.error is None
    assert unaffected.turns > turns
    assert [device.id for device in comm.devices] == [1, 3]
    works(comm)
    again = cluster.communicator([2, 3, 1])
    works(again)
    buffer = again.buffer("x", LARGE, reuse=True).fill(vectors(LARGE, 3))  # what it had, it still has
    again.all_reduce(buffer)
    for rank in range(3):
        np.testing.assert_array_equal(buffer.read(rank), sum(vectors(LARGE, 3)))
    assert [member.state for member in cluster.status().devices] == ["alive"] * 3


def test_arrays_do_not_wait_for_a_silent_device(
    three: Running, connect: Connect, await_event: Wait, send_signal: Signal
) -> None:
    """Neither the operation, nor the freeing of its memory afterwards, nor the next call."""
    cluster = connect(three.address)
    comm = cluster.communicator([2, 1])
    works(comm)
    handle = comm.all_reduce(vectors(LARGE, 2), wait=False)
    began = time.monotonic()
    send_signal(comm.devices[0].info.pid, signal.SIGSTOP)
    with pytest.raises(PeerError, match="device 2"):
        handle.wait(20)
    assert time.monotonic() - began < 2 * PROMPT_S
    await_event(three.address, "device_dead", LEASE_S, device=2)
    began = time.monotonic()
    with pytest.raises(PeerError, match="device 2"):
        comm.all_reduce(vectors(10, 2))
    assert time.monotonic() - began < PROMPT_S
    assert comm.devices[1].buffers() == {}
    works(comm.rebuild())


def test_the_only_device_falls_silent(
    start: Callable[..., Running], connect: Connect, send_signal: Signal, await_event: Wait
) -> None:
    """All devices are silent: the coordinator blames itself, and nobody is dead when the device goes on."""
    up = start("up", "--devices", 1, "--memory", "64MiB")
    cluster = connect(up.address)
    comm = cluster.communicator(1)
    pid = comm.devices[0].info.pid
    with looping(comm, "x") as loop:
        send_signal(pid, signal.SIGSTOP)
        assert "device 1" in loop.failure(10 * PROMPT_S), "what it was doing fails when its connection is given up"
    send_signal(pid, signal.SIGCONT)
    await_event(up.address, "device_recovered", 10 * BACK_S, device=1)
    works(comm)
    assert "device_dead" not in {one.kind for one in cluster.events()}


def test_a_mistake_breaks_nothing(start: Callable[..., Running], connect: Connect) -> None:
    """One rank's buffer has the wrong name: all ranks stop, the device is named, the next operation runs."""
    cluster = connect(start("up", "--devices", 2, "--memory", "16MiB").address)
    comm = cluster.communicator(2)
    buffer = comm.buffer("x", 1000)
    wrong = hoop.Buffer(buffer.devices, ("x", "y"), 0, 1000, buffer.dtype)
    short = hoop.Buffer(buffer.devices, ("x", "x"), 0, 1001, buffer.dtype)
    for turn in range(3):
        began = time.monotonic()
        with pytest.raises(NotFound, match=r"device 2: .*no buffer is called 'y'"):
            comm.all_reduce(wrong)
        assert time.monotonic() - began < KNOWN_S
        stands = comm.status()
        assert (stands.status, stands.generation) == ("failed", turn + 2)
        assert "no buffer is called 'y'" in stands.reason
        works(comm)
        assert comm.status().status == "success"
    with pytest.raises(IndexError, match="past the end of buffer 'x'"):
        comm.all_reduce(short)
    handles = [comm.all_reduce(each, wait=False) for each in (buffer, wrong, buffer, wrong, buffer)]
    outcomes = []
    for handle in handles:
        try:
            handle.wait(10)
            outcomes.append("done")
        except NotFound:
            outcomes.append("refused")
    assert outcomes == ["done", "refused", "done", "refused", "done"]
    assert [member.state for member in cluster.status().devices] == ["alive"] * 2
    assert "device_suspect" not in [event.kind for event in cluster.events()]
