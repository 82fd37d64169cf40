"""Admission control: whether devices fit the machine's limits, and how those limits are read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hoop.errors import UserError
from hoop.resources import (
    FORKED,
    LEADER,
    LEAST_GROWING,
    STARTED,
    Request,
    Resources,
    _largest_arena,
    admission_error,
    cgroup_folders,
    cgroup_memory_left,
    measure_resources,
)

MIB, GIB = 1 << 20, 1 << 30
LAPTOP = Resources(memory=23 * GIB, shared_memory=24 * GIB, disk=60 * GIB, tasks=32_000, descriptors=1_048_576)
"""24 GiB of memory, most of it free, and /dev/shm as large as the memory."""
CONTAINER = Resources(memory=GIB, shared_memory=64 * MIB, disk=20 * GIB, tasks=500, descriptors=1_048_576)
"""A Docker container with the default 64 MiB of /dev/shm."""


@pytest.mark.parametrize(
    ("devices", "memory", "machine"),
    [
        (4, 256 * MIB, LAPTOP),
        (16, 256 * MIB, LAPTOP),
        (64, 16 * MIB, LAPTOP),
        (200, MIB, LAPTOP),
        (4, 256 * MIB, CONTAINER),  # arenas too large for /dev/shm are placed on disk
        (16, 16 * MIB, CONTAINER),
        (500, 256 * MIB, Resources()),  # unknown limits reject nothing
        (0, 256 * MIB, CONTAINER),
    ],
)
def test_requests_that_fit_are_admitted(devices: int, memory: int, machine: Resources) -> None:
    assert admission_error(Request(devices, memory), machine) is None


@pytest.mark.parametrize("memory", [MIB, 16 * MIB, 256 * MIB])
def test_five_hundred_devices_do_not_fit_on_a_laptop(memory: int) -> None:
    error = admission_error(Request(500, memory, options=("--devices", "--memory")), LAPTOP)
    assert isinstance(error, UserError), "exit code 2"
    assert str(error).startswith("--devices: 500 of ")


def test_the_error_shows_the_arithmetic_and_the_remedy() -> None:
    error = admission_error(Request(500, 256 * MIB, options=("--devices", "--memory")), LAPTOP)
    assert str(error) == (
        "--devices: 500 of 256 MiB cannot fit on this machine: 500 x 48 MiB for the processes + 96 arenas of 256 MiB "
        "+ 64 MiB are 47.5 GiB of memory, and 20.7 GiB can be used (23 GiB available, 10% stay free); 404 arenas of "
        f"256 MiB on disk: 101 GiB in {tempfile.gettempdir()} (/dev/shm takes 96), and 60 GiB are free. "
        "--devices 69 is the most that fits"
    )


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Resources(memory=GIB), "are 3.0 GiB of memory, and 921.6 MiB can be used"),
        (Resources(shared_memory=0, disk=GIB), "10 arenas of 256 MiB on disk: 2.5 GiB in"),
        (Resources(tasks=100), "10 x 12 + 40 are 160 processes and threads, and 100 can be started"),
        (Resources(descriptors=80), "a process needs 104 open files, and may have 80"),
        (Resources(memory=2 * GIB, shared_memory=0, disk=9 * GIB, disk_is_memory=True), "GiB of memory"),
    ],
    ids=["memory", "disk", "processes", "files", "a tmpfs for temporary files"],
)
def test_each_limit_is_enforced(machine: Resources, message: str) -> None:
    error = admission_error(Request(10, 256 * MIB), machine)
    assert message in str(error)


@pytest.mark.parametrize("devices", [10, 500, 100_000])
@pytest.mark.parametrize("machine", [LAPTOP, CONTAINER, Resources(tasks=100), Resources(descriptors=80)])
def test_the_suggested_device_count_fits_and_one_more_does_not(devices: int, machine: Resources) -> None:
    error = admission_error(Request(devices, 256 * MIB), machine)
    if error is None:
        return
    suggested = int(str(error).rpartition("devices ")[2].split()[0])
    assert admission_error(Request(suggested, 256 * MIB), machine) is None
    assert admission_error(Request(suggested + 1, 256 * MIB), machine) is not None


def test_the_suggested_memory_fits() -> None:
    error = admission_error(Request(40, GIB, options=("--devices", "--memory")), LAPTOP)
    mib = int(str(error).rpartition("--memory ")[2].partition("MiB")[0])
    assert admission_error(Request(40, mib * MIB), LAPTOP) is None


def test_the_error_says_when_not_even_one_device_fits() -> None:
    machine = Resources(memory=LEADER.memory + FORKED.memory)
    error = str(admission_error(Request(4, 256 * MIB), machine))
    assert error.startswith("memory: 4 of 256 MiB cannot fit on this machine")
    assert error.endswith("not even one of 256 MiB fits: choose a smaller memory")


def test_existing_arenas_need_no_extra_disk(tmp_path: Path) -> None:
    machine = Resources(disk=GIB)
    assert admission_error(Request(8, 256 * MIB, STARTED, tmp_path), machine) is not None
    assert admission_error(Request(8, 256 * MIB, STARTED, tmp_path, existing=8), machine) is None


@pytest.mark.parametrize("devices", [1, 2, 4, 16])
@pytest.mark.parametrize(
    ("machine", "most"),
    [
        (LAPTOP, 23 * GIB),
        (CONTAINER, GIB),  # on disk, and paged where it is larger than memory
        (Resources(memory=64 * GIB, shared_memory=8 * GIB, disk=90 * GIB), 8 * GIB),
        (Resources(), 1 << 40),
    ],
)
def test_an_arena_may_grow_up_to_its_share_of_the_machine(devices: int, machine: Resources, most: int) -> None:
    arena = _largest_arena(devices, FORKED, machine, None)
    assert LEAST_GROWING <= arena <= most // devices
    assert admission_error(Request(devices, arena), machine) is None
    assert arena > 0.7 * most // devices or machine is CONTAINER


def test_an_arena_that_grows_respects_the_limit_of_address_space() -> None:
    assert _largest_arena(2, FORKED, LAPTOP, GIB) == 512 * MIB


def test_where_nothing_fits_an_arena_that_grows_is_small_and_refused() -> None:
    machine = Resources(memory=100 * MIB)
    assert _largest_arena(2, FORKED, machine, None) == LEAST_GROWING
    assert admission_error(Request(2, LEAST_GROWING), machine) is not None


# ---- reading limits


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def test_memory_left_in_a_cgroup(tmp_path: Path) -> None:
    stat = "anon 100\ninactive_file 30\nactive_file 20"
    new = write(tmp_path / "2", memory__max=1000, memory__current=900, memory__stat=stat)
    assert cgroup_memory_left(new) == 150
    old = write(
        tmp_path / "1",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=900,
        memory__stat="inactive_file 1\ntotal_inactive_file 40\ntotal_active_file 5",
    )
    assert cgroup_memory_left(old) == 145
    assert cgroup_memory_left(write(tmp_path / "none", memory__max="max", memory__current=5)) is None
    assert cgroup_memory_left(tmp_path / "not there") is None


def test_cgroup_folders_of_both_versions_include_their_parents(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for folder in ("memory/a/b", "pids", "user.slice/job", "cpu,cpuacct/x"):
        (root / folder).mkdir(parents=True)
    groups = tmp_path / "groups"
    groups.write_text("4:memory:/a/b\n3:pids:/elsewhere/on/the/host\n1:cpu,cpuacct:/x\n0::/user.slice/job\n")
    unified = [root / "user.slice/job", root / "user.slice", root]
    found = cgroup_folders("memory", groups, root)
    assert found == [root / "memory/a/b", root / "memory/a", root / "memory", *unified]
    assert cgroup_folders("pids", groups, root) == [root / "pids", *unified]
    assert cgroup_folders("memory", tmp_path / "no such file", root) == []


def test_this_machine_can_be_measured() -> None:
    found = measure_resources()
    assert found.memory is None or found.memory > 0
    assert found.descriptors is None or found.descriptors > 0
    assert admission_error(Request(1, MIB), found) is None
