"""The command line: what commands print, how they end, and their errors for invalid options."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from background import START_S

import hoop

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from background import Running

    Start = Callable[..., Running]
    Run = Callable[..., CompletedProcess[str]]
    GetStatus = Callable[[str], dict[str, Any]]

UP = ("--devices", "2", "--memory", "64MiB")
COMMANDS = ("up", "coordinator", "device", "status", "events")


def arenas(pid: int) -> list[Path]:
    """The arena files of the device in this process."""
    folders = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    return [path for folder in folders for path in folder.glob(f"hoop-{pid}-*")]


def wait_until(condition: Callable[[], bool], within: float = START_S) -> None:
    """Polls, for conditions that emit no event."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s"
        threading.Event().wait(0.005)


# ---- up


def test_up_writes_its_address_once_all_devices_have_joined(
    start: Start, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    """Once the address file exists, it is complete and every device has joined."""
    file = tmp_path / "address"
    up = start("up", "--devices", 3, "--memory", "1MiB", "--address-file", file)
    wait_until(file.exists)
    address = file.read_text()
    assert address.endswith("\n")
    devices = connect(address.strip()).status().devices
    assert [(member.device.device_id, member.state) for member in devices] == [
        (1, "alive"),
        (2, "alive"),
        (3, "alive"),
    ]
    assert up.first_line == f"coordinator {address.strip()}"
    assert [path.name for path in tmp_path.iterdir() if "address" in path.name] == ["address"]
    up.wait_for_error("3 devices of 1 MiB are up; Ctrl-C ends them")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_ends_and_leaves_no_process_or_file(
    start: Start,
    connect: Callable[..., hoop.Cluster],
    wait_for_exit: Callable[..., None],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    file = tmp_path / "address"
    up = start("up", "--devices", 2, "--memory", "8MiB", "--json", "--address-file", file)
    output = json.loads(up.first_line)
    assert output == {"coordinator": file.read_text().strip(), "devices": 2}
    comm = connect(output["coordinator"]).communicator(2)  # links and a client connection are open
    comm.barrier()
    pids = [device.info.pid for device in comm.devices]
    up.signal(number)
    assert up.wait() == 0
    for pid in pids:
        wait_for_exit(pid, within=0.1)
        assert arenas(pid) == []
    assert not file.exists()


def test_up_can_be_interrupted_while_it_starts(start: Start, tmp_path: Path) -> None:
    up = start("up", "--devices", 2, "--address-file", tmp_path / "address")
    wait_until(lambda: "coordinator at" in up.errors)
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert "are up" not in up.errors
    assert not (tmp_path / "address").exists()


def test_devices_exit_when_up_is_killed(start: Start, status: GetStatus, wait_for_exit: Callable[..., None]) -> None:
    """By SIGKILL, which it cannot handle."""
    up = start("up", "--devices", 2, "--memory", "8MiB")
    pids = [device["pid"] for device in status(up.address)["devices"]]
    up.kill()
    for pid in pids:
        wait_for_exit(pid)
        assert arenas(pid) == []


def test_up_deletes_the_arena_of_a_killed_device(
    start: Start, connect: Callable[..., hoop.Cluster], send_signal: Callable[[int, int], None]
) -> None:
    """The device cannot do it itself (on Linux the arena has no name). A stopped device is killed by ``up``."""
    up = start("up", "--devices", 2, "--memory", "8MiB")
    killed, stopped = (member.device.pid for member in connect(up.address).status().devices)
    send_signal(killed, signal.SIGKILL)
    send_signal(stopped, signal.SIGSTOP)
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert arenas(killed) + arenas(stopped) == []


def test_up_without_devices(start: Start, status: GetStatus) -> None:
    up = start("up", "--devices", 0)
    assert status(up.address)["devices"] == []


# ---- status and events


def test_status_as_json(up: Running, status: GetStatus, cluster: hoop.Cluster) -> None:
    comm = cluster.communicator([2, 1])
    comm.barrier()
    found = status(up.address)
    assert found["coordinator"] == {"address": up.address, "pid": up.pid}
    assert [device["id"] for device in found["devices"]] == [1, 2]
    for device in found["devices"]:
        info = cluster.device(device["id"]).info
        assert (device["pid"], device["host"]) == (info.pid, info.host)
        assert (device["address"], device["data_address"]) == (str(info.address), str(info.data_address))
        assert (device["state"], device["reason"]) == ("alive", "")
        assert device["silent_s"] >= 0
        assert device["memory"]["capacity"] == 64 * 2**20
        assert device["max_address"] - device["min_address"] == 64 * 2**20
    (one,) = (each for each in found["communicators"] if each["id"] == comm.id)
    assert one == {"id": comm.id, "generation": 1, "devices": [2, 1], "status": "success", "reason": ""}
    comm.destroy()


def test_status_as_a_table(up: Running, run_hoop: Run, cluster: hoop.Cluster) -> None:
    """As wide as the terminal, with the memory in use."""
    comm = cluster.communicator(2)
    buffer = comm.buffer("x", 2**20, "uint8")
    pids = [str(device.info.pid) for device in comm.devices]
    wait_until(lambda: all(member.memory.used for member in cluster.status().devices))
    answer = run_hoop("status", "-c", up.address, environment={"COLUMNS": "160"})
    assert answer.returncode == 0, answer.stderr
    assert f"coordinator {up.address} (pid {up.pid})" in answer.stdout
    rows = [line.split() for line in answer.stdout.splitlines() if "alive" in line]
    assert len(rows) == 2
    for row, pid in zip(rows, pids, strict=True):
        text = " ".join(row)
        assert pid in text
        assert "1 MiB of 64 MiB" in text
    assert "success" in answer.stdout or "in_progress" in answer.stdout
    buffer.free()
    comm.destroy()
    answer = run_hoop("status", environment={"HOOP_COORDINATOR": up.address})
    assert "no communicators" in answer.stdout


def test_events(up: Running, run_hoop: Run) -> None:
    answer = run_hoop("events", "--coordinator", up.address)
    assert answer.returncode == 0, answer.stderr
    first, *others = answer.stdout.splitlines()
    assert first.split()[0] == "1"
    assert f"coordinator_started    coordinator at {up.address}, pid {up.pid}" in first
    assert len([line for line in others if "device_joined" in line]) == 2


def test_events_follow(up: Running, start: Start, cluster: hoop.Cluster) -> None:
    """Past events, then new ones as they happen; Ctrl-C ends it without a stack trace."""
    watch = start("events", "-c", up.address, "--follow", "--json", "--after", 1)
    past = [json.loads(watch.line()) for _ in list(cluster.events(after=1))]
    assert [event["kind"] for event in past[:2]] == ["device_joined"] * 2
    assert sorted(event["fields"]["device"] for event in past[:2]) == ["1", "2"]
    assert [event["sequence"] for event in past] == list(range(2, len(past) + 2))
    comm = cluster.communicator([2])
    event = json.loads(watch.line())
    assert event["kind"] == "communicator_created"
    assert event["fields"] == {"communicator": str(comm.id), "generation": "1"}
    assert abs(event["time"] - time.time()) < 60
    assert event["text"] == f"communicator {comm.id} created of devices [2]"
    comm.destroy()
    watch.signal(signal.SIGINT)
    assert watch.wait() == 130


# ---- a device


def test_an_arena_belongs_to_one_device(up: Running, start: Start, run_hoop: Run, tmp_path: Path) -> None:
    arena = tmp_path / "mine.arena"
    device = start("device", "--join", up.address, "--arena", arena, "--memory", "1MiB", "--json")
    output = json.loads(device.first_line)
    assert output["device"] > 2
    answer = run_hoop("device", "--join", up.address, "--arena", arena, "--memory", "1MiB")
    assert answer.returncode == 2
    assert f"hoop: arena {arena}: another process owns it" in answer.stderr
    device.signal(signal.SIGINT)
    assert device.wait() == 0
    assert arena.exists()
    answer = run_hoop("device", "--join", up.address, "--arena", arena, "--memory", "2MiB")
    assert answer.returncode == 2
    assert f"arena {arena}: it has capacity 1 MiB" in answer.stderr


def test_a_device_that_cannot_start_leaves_nothing_behind(up: Running, run_hoop: Run) -> None:
    """Not even its arena, which exists before its port, its id or its coordinator is refused."""
    port = up.address.rpartition(":")[2]
    joining = ("--join", up.address, "--memory", "1MiB")
    for arguments, code, says in (
        ((*joining, "--port", port), 2, f"cannot listen on 127.0.0.1:{port}"),
        ((*joining, "--data-port", port), 2, f"data address 127.0.0.1:{port}: cannot listen there"),
        ((*joining, "--id", 1), 2, "device id 1 is in use by device 1 (pid"),
        (("--join", "127.0.0.1:1", "--connect-timeout", "300ms"), 3, "127.0.0.1:1 did not answer within"),
    ):
        answer = run_hoop("device", *arguments)
        assert answer.returncode == code, answer.stderr
        assert says in answer.stderr
        assert "Traceback" not in answer.stderr


# ---- errors


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("up --memory 12XB", "--memory: '12XB' is not a size; write bytes or e.g. 256MiB"),
        ("up --devices -1", "--devices: -1 is negative"),
        ("up --count-unit words", "--count-unit: 'words' is not one of dialect, bytes, elements, auto"),
        ("up --lab-dialect welsh", "--lab-dialect: 'welsh' is not one of starter, nil-first, auto"),
        ("device --join 127.0.0.1:1 --lab-dialect welsh", "--lab-dialect: 'welsh' is not one of starter"),
        ("up --host 0.0.0.0", "0.0.0.0 can be reached from other machines"),
        ("up --lease 50ms", "below the lease, 0.05 s"),
        ("up --port 99999", "'--port'"),
        ("coordinator --timeout 0", "--timeout: an operation needs more than 0 s"),
        ("coordinator --address-file /nowhere/at/all", "/nowhere/at/"),
        ("coordinator --journal /dev", "/dev: Is a directory"),
        ("device --join nonsense", "--join: 'nonsense' is not host:port, e.g. 127.0.0.1:4021"),
        ("device --join 127.0.0.1:1 --host 0.0.0.0", "--insecure on a network you trust"),
        ("device --join 127.0.0.1:1 --arena /nowhere/a", "arena /nowhere/a: no such file or directory"),
        ("device --join 127.0.0.1:1 --memory 999TiB", "cannot reserve 999.0 TiB"),
        ("status -c nonsense", "'nonsense' is not host:port"),
        ("status", "--coordinator"),
        ("nonsense", "No such command 'nonsense'"),
    ],
)
def test_invalid_command_lines(run_hoop: Run, line: str, says: str) -> None:
    """Exit code 2 and a message that names the option and the value, without a stack trace."""
    answer = run_hoop(*line.split())
    assert answer.returncode == 2, answer.stderr
    assert says in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == "" or line.startswith("coordinator")


def test_more_memory_than_the_machine_has(run_hoop: Run) -> None:
    """Refused before a device is started, with exit code 2 for an invalid option."""
    answer = run_hoop("up", "--devices", 1, "--memory", "999TiB")
    assert answer.returncode == 2
    assert answer.stderr.startswith("hoop: --memory: 1 of 999 TiB cannot fit on this machine: ")
    assert "1 arena of 999 TiB on disk: 999 TiB in " in answer.stderr
    assert re.search(r"--memory \d+MiB fits 1$", answer.stderr.strip())
    assert answer.stdout == ""


def test_a_port_that_is_in_use(up: Running, run_hoop: Run) -> None:
    for command in ("coordinator", "up"):
        answer = run_hoop(command, "--port", up.address.rpartition(":")[2])
        assert answer.returncode == 2
        assert f"cannot listen on {up.address}: the port is in use" in answer.stderr
        assert answer.stdout == ""


def test_no_coordinator_at_the_address(run_hoop: Run) -> None:
    """Exit code 3 and a message with the address, the timeout, the number of tries and the cause."""
    answer = run_hoop("status", "--coordinator", "127.0.0.1:1", "--connect-timeout", "400ms")
    assert answer.returncode == 3
    pattern = r"hoop: the coordinator at 127\.0\.0\.1:1 did not answer within \d+\.\d s \(\d+ tries\): .*refused"
    assert re.match(pattern, answer.stderr), answer.stderr
    assert "failed to connect to all addresses" not in answer.stderr
    assert "Is a coordinator running there" in answer.stderr
    assert "hoop up" in answer.stderr


# ---- help


def test_help(run_hoop: Run) -> None:
    whole = run_hoop("--help")
    assert whole.returncode == 0
    assert all(command in whole.stdout for command in COMMANDS)
    assert run_hoop().stdout.strip() == whole.stdout.strip()
    assert run_hoop("--version").stdout == f"hoop {hoop.__version__}\n"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("up", "Start a coordinator and its devices here, until Ctrl-C."),
        ("coordinator", "Start a coordinator; devices join it with hoop device --join HOST:PORT."),
        ("device", "Start one device and join it to a coordinator"),
        ("status", "Show the devices, communicators and jobs of a running coordinator."),
        ("events", "Show a coordinator's events"),
    ],
)
def test_help_of_a_command(run_hoop: Run, command: str, says: str) -> None:
    answer = run_hoop(command, "--help", environment={"COLUMNS": "120"})
    assert answer.returncode == 0
    assert says in answer.stdout
    assert "--help" in answer.stdout
    assert "--json" in answer.stdout
