"""A device, the coordinator or all of them end and are started again: what they had is there."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoop
from hoop.errors import FailedPrecondition, PeerError
from hoop.wire.generated import gpu_sim_pb2 as lab

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]
    Wait = Callable[..., Any]

BACK_S = 2.0
"""Until a restarted coordinator must have everything again; devices knock at least every second."""


def vectors(count: int, ranks: int) -> list[Any]:
    return [np.arange(count, dtype="float32") % 5 + rank for rank in range(ranks)]


def works(comm: hoop.Communicator) -> None:
    x = vectors(1000, comm.size)
    for rank, found in enumerate(comm.all_reduce(x)):
        np.testing.assert_array_equal(found, sum(x), err_msg=f"rank {rank}")


def test_a_device_is_restarted_on_its_arena(start: Start, connect: Connect, await_event: Wait, tmp_path: Path) -> None:
    """Killed without a warning, it has its id, its buffers and their bytes again."""
    coordinator = start("coordinator")

    def device(number: int) -> Running:
        return start(
            "device",
            "--join",
            coordinator.address,
            "--memory",
            "16MiB",
            "--arena",
            tmp_path / f"{number}.arena",
        )

    one, two = device(1), device(2)
    cluster = connect(coordinator.address)
    comm = cluster.communicator([one.id, two.id])
    x = vectors(1000, 2)
    comm.buffer("weights", 1000).fill(x)
    comm.buffer("empty", 0)
    comm.barrier()
    old = comm.devices[1]
    before = old.buffers()
    two.kill()
    dead = await_event(coordinator.address, "device_dead", BACK_S, device=two.id)
    again = device(2)
    assert again.id == two.id
    joined = await_event(coordinator.address, "device_joined", after=dead.sequence, device=two.id)
    assert "came back" in joined.text
    assert joined.fields["incarnation"] != old.info.incarnation

    found = cluster.device(again.id)
    assert (found.info.pid, found.info.incarnation) == (again.pid, joined.fields["incarnation"])
    assert found.buffers() == before
    np.testing.assert_array_equal(np.frombuffer(found.read("weights", 4000), "float32"), x[1])
    with pytest.raises(FailedPrecondition, match=rf"device {two.id} \(pid .* rebuild the communicator"):
        comm.barrier()
    fresh = cluster.communicator([two.id, one.id])
    weights = fresh.buffer("weights", 1000, reuse=True)
    fresh.all_reduce(weights)
    for rank in range(2):
        np.testing.assert_array_equal(weights.read(rank), sum(x))
    assert comm.rebuild().size == 2  # it is alive, so it is in it again
    works(comm)


def test_the_coordinator_is_restarted_on_its_journal(
    start: Start,
    connect: Connect,
    await_event: Wait,
    comm_status: Callable[[str, int], lab.GetCommStatusResponse],
    tmp_path: Path,
) -> None:
    """Killed without a warning. Nobody else is restarted: the devices find it, and go on as they were."""
    journal = tmp_path / "journal"
    first = start("coordinator", "--journal", journal)
    port = first.address.rpartition(":")[2]
    devices = [start("device", "--join", first.address, "--memory", "16MiB") for _ in range(3)]
    ids = [device.id for device in devices]
    cluster = connect(first.address)
    comm, gone, broken = (cluster.communicator(members) for members in (ids[::-1], ids[:1], ids[:2]))
    buffer = comm.buffer("x", 1000).fill(vectors(1000, 3))
    comm.all_reduce(buffer)
    comm.rebuild()
    gone.destroy()
    devices[0].signal(signal.SIGTERM)
    assert devices[0].wait() == 0
    last = cluster.communicator(ids[1:])
    first.kill()
    with open(journal, "ab") as file:
        file.write(b'1f3a5c77 {"kind":"communica')  # it was just writing

    second = start("coordinator", "--journal", journal, "--port", port)
    assert second.address == first.address
    began = time.monotonic()
    for device_id in ids[1:]:
        await_event(second.address, "device_recovered", BACK_S, device=device_id)
    assert time.monotonic() - began < BACK_S
    status = cluster.status()  # over the connection that it had
    assert status.pid == second.pid
    assert {member.device.device_id: member.state for member in status.devices} == {
        ids[0]: "left",
        ids[1]: "alive",
        ids[2]: "alive",
    }
    pids = {member.device.device_id: member.device.pid for member in status.devices}
    assert pids == {device.id: device.pid for device in devices}
    stands = {one.id: one for one in status.communicators}
    assert sorted(stands) == [comm.id, broken.id, last.id]
    assert [member.device_id for member in stands[last.id].members] == ids[1:]
    assert [member.device_id for member in stands[comm.id].members] == ids[::-1]
    assert stands[comm.id].generation >= 2
    for one in (comm, broken):
        assert comm_status(second.address, one.id).status == lab.FAILED
        assert f"device {ids[0]}" in stands[one.id].reason
    works(last)
    works(comm.rebuild())
    assert comm.generation > stands[comm.id].generation
    assert [device.id for device in comm.devices] == ids[:0:-1]
    found = comm.buffer("x", 1000, reuse=True)
    for rank in range(2):
        np.testing.assert_array_equal(found.read(rank), sum(vectors(1000, 3)))
    assert cluster.communicator(1).id == last.id + 1  # an id is never given twice


def test_a_device_that_died_with_the_coordinator(
    start: Start, connect: Connect, await_event: Wait, tmp_path: Path
) -> None:
    """The restarted coordinator finds out by itself; what does not need it works."""
    options = ("--journal", tmp_path / "journal")
    first = start("coordinator", *options)
    devices = [start("device", "--join", first.address, "--memory", "16MiB") for _ in range(2)]
    ids = [device.id for device in devices]
    cluster = connect(first.address)
    both, one = cluster.communicator(ids), cluster.communicator(ids[:1])
    first.kill()
    devices[1].kill()
    second = start("coordinator", *options, "--port", first.address.rpartition(":")[2])
    await_event(second.address, "device_dead", BACK_S, device=ids[1])
    await_event(second.address, "device_recovered", BACK_S, device=ids[0])
    works(one)
    with pytest.raises(FailedPrecondition, match=rf"device {ids[1]} \(pid {devices[1].pid}.* rebuild"):
        both.barrier()
    works(both.rebuild())


def test_work_of_the_former_coordinator_is_kept_apart(
    start: Start, connect: Connect, await_event: Wait, tmp_path: Path
) -> None:
    """Devices that are still at it when the coordinator is back do not mix it with what it asks for next."""
    options = ("--journal", tmp_path / "journal")
    first = start("coordinator", *options)
    devices = [start("device", "--join", first.address, "--memory", "64MiB") for _ in range(2)]
    ids = [device.id for device in devices]
    cluster = connect(first.address)
    comm = cluster.communicator(ids)
    large, count = comm.buffer("large", 4_000_000), 1_000_000
    large.fill([np.zeros(large.count, "float32")] * 2)
    buffer = comm.buffer("x", count)
    with ThreadPoolExecutor(1) as thread:

        def long() -> None:
            with comm.group():
                for _ in range(1000):
                    comm.all_reduce(large)

        comm.barrier()
        work = thread.submit(long)
        until = time.monotonic() + 10
        while comm.status().status == "success":  # the barrier's: until the group is under way
            assert time.monotonic() < until
        first.kill()
        with pytest.raises(PeerError):
            work.result(10)
    second = start("coordinator", *options, "--port", first.address.rpartition(":")[2])
    for device_id in ids:
        await_event(second.address, "device_recovered", BACK_S, device=device_id)
    for turn in range(1, 6):
        buffer.fill([np.full(count, turn, "float32")] * 2)
        comm.all_reduce(buffer, timeout=20)
        for rank in range(2):
            np.testing.assert_array_equal(buffer.read(rank), np.full(count, 2 * turn, "float32"))


def test_without_a_journal_devices_join_anew(start: Start, connect: Connect, await_event: Wait) -> None:
    """A coordinator that remembers nothing gets its devices back, under their ids, but no communicators."""
    first = start("coordinator")
    device = start("device", "--join", first.address, "--memory", "1MiB", "--id", 7)
    assert device.id == 7
    first.kill()
    second = start("coordinator", "--port", first.address.rpartition(":")[2])
    await_event(second.address, "device_joined", BACK_S, device=7)
    works(connect(second.address).communicator([7]))


def test_a_damaged_journal_is_named(run_hoop: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    """A bad line before good ones is no torn tail: nothing is guessed, nothing is overwritten."""
    journal = tmp_path / "journal"
    damaged = b"00000000 {}\n00000000 {}\n"
    journal.write_bytes(damaged)
    answer = run_hoop("coordinator", "--journal", journal)
    assert answer.returncode == 2
    assert f"journal {journal}, line 1: the checksum does not hold; move the file away" in answer.stderr
    assert journal.read_bytes() == damaged


def test_up_goes_on_from_its_state(start: Start, connect: Connect, tmp_path: Path) -> None:
    """Ended by Ctrl-C and by SIGKILL: the third has what the first was given."""
    state = tmp_path / "state"
    options = ("up", "--devices", 2, "--memory", "8MiB", "--state", state)
    x = vectors(100, 2)
    first = start(*options)
    cluster = connect(first.address)
    comm = cluster.communicator([2, 1])
    comm.buffer("weights", 100).fill(x)
    first.signal(signal.SIGINT)
    assert first.wait() == 0
    assert sorted(path.name for path in state.iterdir()) == ["device-1.arena", "device-2.arena", "journal"]
    assert [oct(path.stat().st_mode & 0o077) for path in (state, *state.iterdir())] == ["0o0"] * 4

    second = start(*options)
    cluster = connect(second.address)
    assert [member.state for member in cluster.status().devices] == ["alive"] * 2
    (known,) = cluster.status().communicators
    assert (known.id, known.status) == (comm.id, "failed")
    again = cluster.communicator([2, 1])
    assert again.id == comm.id + 1
    weights = again.buffer("weights", 100, reuse=True)
    for rank in range(2):
        np.testing.assert_array_equal(weights.read(rank), x[rank])
    again.all_reduce(weights)
    pids = [device.info.pid for device in again.devices]
    second.kill()

    third = start(*options, "--json")
    assert json.loads(third.first)["devices"] == 2
    cluster = connect(json.loads(third.first)["coordinator"])
    members = cluster.status().devices
    assert [(member.device.device_id, member.state) for member in members] == [(1, "alive"), (2, "alive")]
    assert not {member.device.pid for member in members} & set(pids)
    comm = cluster.communicator([1, 2])
    weights = comm.buffer("weights", 100, reuse=True)
    for rank in range(2):
        np.testing.assert_array_equal(weights.read(rank), sum(x))
    works(comm)
