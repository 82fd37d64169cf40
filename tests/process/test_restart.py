"""A device, the coordinator or a whole cluster is restarted and recovers its state."""

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
from free_ports import free_port

import hoop
from hoop.errors import FailedPrecondition, PeerError
from hoop.wire.generated import gpu_sim_pb2 as lab

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]
    Wait = Callable[..., Any]

LONG_S = 240.0
"""Deadline of every wait. Devices reconnect to a restarted coordinator at least every second."""


def vectors(count: int, ranks: int) -> list[Any]:
    return [np.arange(count, dtype="float32") % 5 + rank for rank in range(ranks)]


def check_all_reduce(comm: hoop.Communicator) -> None:
    x = vectors(1000, comm.size)
    for rank, found in enumerate(comm.all_reduce(x)):
        np.testing.assert_array_equal(found, sum(x), err_msg=f"rank {rank}")


def test_a_device_is_restarted_on_its_arena(start: Start, connect: Connect, await_event: Wait, tmp_path: Path) -> None:
    """A killed device gets back its id, its buffers and their contents."""
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
    old_device = comm.devices[1]
    before = old_device.buffers()
    two.kill()
    dead = await_event(coordinator.address, "device_dead", LONG_S, device=two.id)
    restarted = device(2)
    assert restarted.id == two.id
    joined = await_event(coordinator.address, "device_joined", after=dead.sequence, device=two.id)
    assert "came back" in joined.text
    assert joined.fields["incarnation"] != old_device.info.incarnation

    new_device = cluster.device(restarted.id)
    assert (new_device.info.pid, new_device.info.incarnation) == (restarted.pid, joined.fields["incarnation"])
    assert new_device.buffers() == before
    np.testing.assert_array_equal(np.frombuffer(new_device.read("weights", 4000), "float32"), x[1])
    with pytest.raises(FailedPrecondition, match=rf"device {two.id} \(pid .* rebuild the communicator"):
        comm.barrier()
    new_comm = cluster.communicator([two.id, one.id])
    weights = new_comm.buffer("weights", 1000, reuse=True)
    new_comm.all_reduce(weights)
    for rank in range(2):
        np.testing.assert_array_equal(weights.read(rank), sum(x))
    assert comm.rebuild().size == 2  # the restarted device is a member again
    check_all_reduce(comm)


def test_the_coordinator_is_restarted_on_its_journal(
    start: Start,
    connect: Connect,
    await_event: Wait,
    comm_status: Callable[[str, int], lab.GetCommStatusResponse],
    tmp_path: Path,
) -> None:
    """Only the coordinator is killed and restarted: the devices reconnect and keep their state."""
    journal = tmp_path / "journal"
    first = start("coordinator", "--journal", journal)
    port = first.address.rpartition(":")[2]
    devices = [start("device", "--join", first.address, "--memory", "16MiB") for _ in range(3)]
    ids = [device.id for device in devices]
    cluster = connect(first.address)
    comm, destroyed, broken = (cluster.communicator(members) for members in (ids[::-1], ids[:1], ids[:2]))
    buffer = comm.buffer("x", 1000).fill(vectors(1000, 3))
    comm.all_reduce(buffer)
    comm.rebuild()
    destroyed.destroy()
    devices[0].signal(signal.SIGTERM)
    assert devices[0].wait() == 0
    last = cluster.communicator(ids[1:])
    first.kill()
    with open(journal, "ab") as file:
        file.write(b'1f3a5c77 {"kind":"communica')  # a torn last line

    second = start("coordinator", "--journal", journal, "--port", port, "--lab")
    assert second.address == first.address
    for device_id in ids[1:]:
        await_event(second.address, "device_recovered", LONG_S, device=device_id)
    status = cluster.status()  # over the existing connection
    assert status.pid == second.pid
    assert {member.device.device_id: member.state for member in status.devices} == {
        ids[0]: "left",
        ids[1]: "alive",
        ids[2]: "alive",
    }
    pids = {member.device.device_id: member.device.pid for member in status.devices}
    assert pids == {device.id: device.pid for device in devices}
    communicators = {record.id: record for record in status.communicators}
    assert sorted(communicators) == [comm.id, broken.id, last.id]
    assert [member.device_id for member in communicators[last.id].members] == ids[1:]
    assert [member.device_id for member in communicators[comm.id].members] == ids[::-1]
    assert communicators[comm.id].generation >= 2
    for failed in (comm, broken):
        assert comm_status(second.address, failed.id).status == lab.FAILED
        assert f"device {ids[0]}" in communicators[failed.id].reason
    check_all_reduce(last)
    check_all_reduce(comm.rebuild())
    assert comm.generation > communicators[comm.id].generation
    assert [device.id for device in comm.devices] == ids[:0:-1]
    found = comm.buffer("x", 1000, reuse=True)
    for rank in range(2):
        np.testing.assert_array_equal(found.read(rank), sum(vectors(1000, 3)))
    assert cluster.communicator(1).id == last.id + 1  # ids are not reused


def test_a_device_that_died_with_the_coordinator_is_detected(
    start: Start, connect: Connect, await_event: Wait, tmp_path: Path
) -> None:
    """The restarted coordinator detects the death; a communicator without that device works."""
    options = ("--journal", tmp_path / "journal")
    first = start("coordinator", *options)
    devices = [start("device", "--join", first.address, "--memory", "16MiB") for _ in range(2)]
    ids = [device.id for device in devices]
    cluster = connect(first.address)
    both, survivor = cluster.communicator(ids), cluster.communicator(ids[:1])
    first.kill()
    devices[1].kill()
    second = start("coordinator", *options, "--port", first.address.rpartition(":")[2])
    await_event(second.address, "device_dead", LONG_S, device=ids[1])
    await_event(second.address, "device_recovered", LONG_S, device=ids[0])
    check_all_reduce(survivor)
    with pytest.raises(FailedPrecondition, match=rf"device {ids[1]} \(pid {devices[1].pid}.* rebuild"):
        both.barrier()
    check_all_reduce(both.rebuild())


def test_operations_of_the_killed_coordinator_do_not_mix_with_new_ones(
    start: Start, connect: Connect, await_event: Wait, tmp_path: Path
) -> None:
    """Devices still run a group of the killed coordinator when its successor launches new operations."""
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

        def run_long_group() -> None:
            with comm.group():
                for _ in range(1000):
                    comm.all_reduce(large)

        comm.barrier()
        work = thread.submit(run_long_group)
        deadline = time.monotonic() + LONG_S
        while comm.status().status == "success":  # the barrier's status: wait until the group has started
            assert time.monotonic() < deadline
        first.kill()
        with pytest.raises(PeerError):
            work.result(LONG_S)
    second = start("coordinator", *options, "--port", first.address.rpartition(":")[2])
    for device_id in ids:
        await_event(second.address, "device_recovered", LONG_S, device=device_id)
    for value in range(1, 6):
        buffer.fill([np.full(count, value, "float32")] * 2)
        comm.all_reduce(buffer, timeout=LONG_S)
        for rank in range(2):
            np.testing.assert_array_equal(buffer.read(rank), np.full(count, 2 * value, "float32"))


def test_devices_live_on_over_a_coordinator_that_ends_in_order(
    start: Start, connect: Connect, await_event: Wait, tmp_path: Path
) -> None:
    """SIGTERM, and a restart on the same port: the devices have the token of the first, and so has the second."""
    options = ("--journal", tmp_path / "journal")
    for more in ((), options):
        first = start("coordinator", *more)
        device = start("device", "--join", first.address, "--memory", "1MiB", "--id", 7)
        assert device.id == 7
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        second = start("coordinator", *more, "--port", first.address.rpartition(":")[2])
        await_event(second.address, "device_recovered" if more else "device_joined", LONG_S, device=7)
        check_all_reduce(connect(second.address).communicator([7]))
        device.signal(signal.SIGTERM)
        assert device.wait() == 0


def test_a_device_with_two_addresses_is_accepted_by_the_coordinator_at_the_second(
    start: Start, connect: Connect, await_event: Wait, tmp_path: Path
) -> None:
    """As with a standby. No token is given: they use the user's."""
    first = start("coordinator", "--journal", tmp_path / "journal")
    port = free_port()
    device = start("device", "--join", f"{first.address},127.0.0.1:{port}", "--memory", "1MiB", "--id", 7)
    assert device.id == 7
    first.kill()
    second = start("coordinator", "--journal", tmp_path / "journal", "--port", port)
    await_event(second.address, "device_recovered", LONG_S, device=7)
    check_all_reduce(connect(second.address).communicator([7]))


def test_without_a_journal_devices_join_again(start: Start, connect: Connect, await_event: Wait) -> None:
    """A coordinator without a journal gets its devices back with their ids, but no communicators."""
    first = start("coordinator")
    device = start("device", "--join", first.address, "--memory", "1MiB", "--id", 7)
    assert device.id == 7
    first.kill()
    second = start("coordinator", "--port", first.address.rpartition(":")[2])
    await_event(second.address, "device_joined", LONG_S, device=7)
    check_all_reduce(connect(second.address).communicator([7]))


def test_a_damaged_journal_is_refused(run_hoop: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    """An invalid whole line is not a torn tail: the coordinator refuses the file and leaves it unchanged."""
    journal = tmp_path / "journal"
    damaged = b"00000000 {}\n00000000 {}\n"
    journal.write_bytes(damaged)
    completed = run_hoop("coordinator", "--journal", journal)
    assert completed.returncode == 2
    assert (
        f"journal {journal}, line 1: the checksum does not hold: the line was changed; move the file away"
        in completed.stderr
    )
    assert journal.read_bytes() == damaged


def test_a_second_coordinator_on_the_same_journal_is_refused(
    start: Start, run_hoop: Callable[..., CompletedProcess[str]], status: Callable[[str], Any], tmp_path: Path
) -> None:
    """It names the process that has the journal, and leaves the journal and the address file of that one alone."""
    file = tmp_path / "address"
    first = start("up", "--devices", 0, "--state", tmp_path, "--address-file", file)
    address, journal = first.address, (tmp_path / "journal").stat().st_ino
    for command in (("up", "--devices", 0, "--state", tmp_path), ("coordinator", "--journal", tmp_path / "journal")):
        refused = run_hoop(*command, "--address-file", file)
        assert refused.returncode == 2, refused.stderr
        assert f"{tmp_path / 'journal'}: process {first.pid} on " in refused.stderr
        assert "has it open; stop that coordinator" in refused.stderr
        assert (file.read_text(), (tmp_path / "journal").stat().st_ino) == (f"{address}\n", journal)
    assert status(address)["devices"] == []


def test_hoop_up_recovers_from_its_state_folder(start: Start, connect: Connect, tmp_path: Path) -> None:
    """The first cluster ends by Ctrl-C, the second by SIGKILL; the third still has the data."""
    state = tmp_path / "state"
    options = ("up", "--devices", 2, "--memory", "8MiB", "--state", state)
    x = vectors(100, 2)
    first = start(*options)
    cluster = connect(first.address)
    comm = cluster.communicator([2, 1])
    comm.buffer("weights", 100).fill(x)
    first.signal(signal.SIGINT)
    assert first.wait() == 0
    assert sorted(path.name for path in state.iterdir()) == [
        "device-1.arena",
        "device-2.arena",
        "journal",
    ]
    assert [oct(path.stat().st_mode & 0o077) for path in (state, *state.iterdir())] == ["0o0"] * 4

    second = start(*options)
    cluster = connect(second.address)
    assert [member.state for member in cluster.status().devices] == ["alive"] * 2
    (known,) = cluster.status().communicators
    assert (known.id, known.status) == (comm.id, "failed")
    second_comm = cluster.communicator([2, 1])
    assert second_comm.id == comm.id + 1
    weights = second_comm.buffer("weights", 100, reuse=True)
    for rank in range(2):
        np.testing.assert_array_equal(weights.read(rank), x[rank])
    second_comm.all_reduce(weights)
    pids = [device.info.pid for device in second_comm.devices]
    second.kill()

    third = start(*options, "--json")
    assert json.loads(third.first_line)["devices"] == 2
    cluster = connect(json.loads(third.first_line)["coordinator"])
    members = cluster.status().devices
    assert [(member.device.device_id, member.state) for member in members] == [(1, "alive"), (2, "alive")]
    assert not {member.device.pid for member in members} & set(pids)
    comm = cluster.communicator([1, 2])
    weights = comm.buffer("weights", 100, reuse=True)
    for rank in range(2):
        np.testing.assert_array_equal(weights.read(rank), sum(x))
    check_all_reduce(comm)
