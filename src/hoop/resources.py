"""Admission control: do the devices that are about to start fit into the free resources of this machine?

Code that starts devices on this machine calls ``admit`` before it starts the first process. If the devices do not fit,
``admit`` raises an error with the arithmetic, because a machine that runs out of memory stops responding. The decision
(``admission_error``) is a pure function of a ``Request`` and of ``Resources``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hoop.config import format_size
from hoop.errors import ResourceExhausted

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is only measured
SPARE = 0.1
"""Fraction of the available memory that stays free for other processes."""


def available_cores() -> int:
    """The number of cores that this process may use: the affinity of its main thread."""
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_listen(host: str, port: int) -> bool:
    """Whether this process can open the port at an address of this machine. ``hoop doctor`` and servers with a range of
    ports ask it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class Footprint:
    """Resources of one device's process, without its arena."""

    memory: int
    """Private memory of the process in bytes."""
    tasks: int = 12
    """Number of processes and threads; both count against the process limit."""
    descriptors: int = 48
    descriptors_per_device: int = 4


# Measured with 4, 8 and 16 devices of the MNIST recipe on Linux, Python 3.11, torch 2.13: Private_Dirty of
# /proc/PID/smaps_rollup, entries of /proc/PID/task and /proc/PID/fd.
FORKED = Footprint(48 * MIB)
"""Footprint of a device forked from a process that has loaded PyTorch and the data: 45 to 55 MiB while it trains."""
STARTED = Footprint(38 * MIB)
"""Footprint of a device in a separate Python process that has not trained yet."""
TRAINING = Footprint(256 * MIB)
"""Footprint of a device in a separate Python process that has loaded PyTorch and the data: 263 MiB."""
LEADER = Footprint(64 * MIB, tasks=40, descriptors=64)
"""Footprint of the coordinator and the process that follows the job, together."""


LEAST_GROWING = 32 * MIB
"""Least number of bytes for an arena that grows with what its job needs."""
USUAL_ARENA = 256 * MIB
"""Such an arena is in /dev/shm if that has this many bytes for each device, else in the temporary directory."""
MAX_GROWING = 1 << 40
"""Most bytes of such an arena where the machine's memory is not known."""
ADDRESS_SHARE = 4
"""An arena may take a quarter of the address space that a process has for the arenas of all devices."""


@dataclass(frozen=True)
class Request:
    """Devices to be started on this machine."""

    devices: int
    memory: int
    """Size of one device's arena in bytes."""
    footprint: Footprint = FORKED
    folder: Path | None = None
    """Folder of the arenas; None: /dev/shm, and the temporary directory when /dev/shm is full."""
    existing: int = 0
    """Number of arenas that exist in the folder already."""
    options: tuple[str, str] = ("devices", "memory")
    """Names of the user's options for ``devices`` and ``memory``, for the error message."""


@dataclass(frozen=True)
class Resources:
    """Free resources for new processes. None: no limit is known."""

    memory: int | None = None
    """Available bytes: the minimum over the machine and the control groups of this process."""
    shared_memory: int | None = None
    """Free bytes in /dev/shm; 0 if there is no /dev/shm."""
    disk: int | None = None
    """Free bytes in the folder of arenas that are not in /dev/shm."""
    disk_is_memory: bool = False
    """Whether that folder is in memory too (tmpfs)."""
    tasks: int | None = None
    """Number of processes and threads that can still be started."""
    descriptors: int | None = None
    """Maximum number of open files and sockets of one process."""


@dataclass(frozen=True)
class _Need:
    """One resource: the needed and the available amount, and the arithmetic as text."""

    needed: int
    available: int | None
    text: str

    @property
    def satisfied(self) -> bool:
        return self.available is None or self.needed <= self.available


def admission_error(request: Request, resources: Resources) -> ResourceExhausted | None:
    """The error if the devices do not fit, with the arithmetic and the largest values that fit; else None."""
    missing = [need.text for need in _needs(request, resources) if not need.satisfied]
    if not missing:
        return None
    devices, memory = request.options
    most = _largest(request.devices, lambda count: _fits(replace(request, devices=count), resources))
    arena = _largest(request.memory // MIB, lambda mib: _fits(replace(request, memory=mib * MIB), resources))
    remedies = [f"{devices} {most} is the most that fits"] if most else []
    if arena:
        remedies.append(f"{memory} {arena}MiB fits {request.devices}")
    remedy = "; ".join(remedies) or f"not even one of {format_size(request.memory)} fits: choose a smaller {memory}"
    field = devices if most else memory  # if not even one device fits, fewer devices do not help
    what = f"{request.devices} of {format_size(request.memory)}"
    return ResourceExhausted(f"{field}: {what} cannot fit on this machine: {'; '.join(missing)}. {remedy}")


def largest_number(request: Request) -> int:
    """How many of the devices fit on this machine now; 0: not even one."""
    resources = measure_resources(request.folder)
    return _largest(request.devices, lambda count: _fits(replace(request, devices=count), resources))


def largest_arena(devices: int, footprint: Footprint = FORKED) -> int:
    """Bytes of memory that each of these devices can have on this machine now; ``LEAST_GROWING`` at least.

    In /dev/shm, if that is large enough for most jobs; else in the temporary directory.
    """
    return _largest_arena(devices, footprint, measure_resources(), _address_space_limit())


def _largest_arena(devices: int, footprint: Footprint, resources: Resources, address_space: int | None) -> int:
    limits = [limit for limit in (resources.memory, address_space) if limit is not None]
    if resources.shared_memory is not None and resources.shared_memory // devices >= USUAL_ARENA:
        limits.append(resources.shared_memory)
    elif resources.disk is not None:
        limits.append(resources.disk)
    most = min(limits, default=MAX_GROWING) // devices // MIB
    fitting = _largest(most, lambda mib: _fits(Request(devices, mib * MIB, footprint), resources))
    return max(fitting * MIB, LEAST_GROWING)


def admit(request: Request) -> None:
    """Raise ResourceExhausted if the devices do not fit. Increases the soft limit of open files if needed."""
    if error := admission_error(request, measure_resources(request.folder)):
        raise error
    raise_descriptor_limit(_descriptors(request))


def arena_shortage(size: int, folder: Path, available: int | None) -> str:
    """Why an arena of ``size`` bytes in ``folder`` is more than the machine has; empty if it is not, or unknown.

    ``available``: bytes of memory. A file on a disk may be larger than that, but training in it pages all the time.
    """
    if available is None or size <= available:
        return ""
    return (
        f"memory: an arena of {format_size(size)} in {folder}, and {format_size(available)} of memory is available on "
        "this machine; choose a smaller --memory"
    )


def in_memory(folder: Path) -> bool:
    """Whether the files of a folder are in memory (tmpfs)."""
    return _is_tmpfs(folder)


def available_memory() -> int | None:
    """Bytes of memory for new processes: the minimum over the machine and the control groups of this process."""
    return _minimum(_available_memory(), *_cgroup_memory())


def _needs(request: Request, resources: Resources) -> Iterator[_Need]:
    count, arena, each = request.devices, request.memory, request.footprint
    in_shared = 0
    if request.folder is None:
        free = resources.shared_memory
        in_shared = count if free is None else min(count, free // max(arena, 1))
    on_disk = count - in_shared
    in_memory = in_shared + (on_disk if resources.disk_is_memory else 0)
    needed = LEADER.memory + count * each.memory + in_memory * arena
    usable = None if resources.memory is None else int(resources.memory * (1 - SPARE))
    arenas = f" + {_arenas(in_memory)} of {format_size(arena)}" if in_memory else ""
    yield _Need(
        needed,
        usable,
        f"{count} x {format_size(each.memory)} for the processes{arenas} + {format_size(LEADER.memory)} are "
        f"{format_size(needed)} of memory, and {format_size(usable or 0)} can be used "
        f"({format_size(resources.memory or 0)} available, {SPARE:.0%} stay free)",
    )
    on_disk = max(0, on_disk - request.existing)
    yield _Need(
        on_disk * arena,
        resources.disk,
        f"{_arenas(on_disk)} of {format_size(arena)} on disk: {format_size(on_disk * arena)} in "
        f"{request.folder or tempfile.gettempdir()}"
        + (f" ({SHARED_MEMORY} takes {in_shared})" if request.folder is None else "")
        + f", and {format_size(resources.disk or 0)} are free",
    )
    tasks = LEADER.tasks + count * each.tasks
    yield _Need(
        tasks,
        resources.tasks,
        f"{count} x {each.tasks} + {LEADER.tasks} are {tasks} processes and threads, and {resources.tasks} can be "
        "started (ulimit -u, pids.max, kernel.threads-max)",
    )
    descriptors = _descriptors(request)
    yield _Need(
        descriptors,
        resources.descriptors,
        f"a process needs {descriptors} open files, and may have {resources.descriptors} (ulimit -Hn)",
    )


def _arenas(count: int) -> str:
    return "1 arena" if count == 1 else f"{count} arenas"


def _descriptors(request: Request) -> int:
    each = request.footprint
    return max(each.descriptors, LEADER.descriptors) + request.devices * each.descriptors_per_device


def _fits(request: Request, resources: Resources) -> bool:
    return all(need.satisfied for need in _needs(request, resources))


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Binary search: the largest number from 1 to ``limit`` that fits, 0 if none does. ``fits`` is monotonic."""
    if limit < 1 or not fits(1):
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ---- measuring


def measure_resources(folder: Path | None = None) -> Resources:
    """Measure the free resources now. ``folder``: folder of the arenas if not /dev/shm."""
    disk_folder = folder if folder is not None else Path(tempfile.gettempdir())
    shared = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return Resources(
        memory=available_memory(),
        shared_memory=_free_space(SHARED_MEMORY) if shared else 0,
        disk=_free_space(disk_folder),
        disk_is_memory=_is_tmpfs(disk_folder),
        tasks=_minimum(_machine_tasks_left(), _user_tasks_left(), *_cgroup_tasks()),
        descriptors=_hard_descriptor_limit(),
    )


def _minimum(*found: int | None) -> int | None:
    known = [max(0, one) for one in found if one is not None]
    return min(known, default=None)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it holds "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Parse ``name value`` lines, as in /proc/meminfo and memory.stat; empty if there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _free_space(folder: Path) -> int | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # the folder will be created
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # a tmpfs without a limit reports 0 of 0


def _is_tmpfs(folder: Path) -> bool:
    """Whether the file system of the folder, found by the longest matching mount point, is in memory."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    here = folder.resolve()
    mounts = [(Path(fields[1]), fields[2]) for fields in (line.split() for line in lines) if len(fields) > 2]
    above = [(point, kind) for point, kind in mounts if here.is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0].parts), default=(here, ""))[1] in ("tmpfs", "ramfs")


def _available_memory() -> int | None:
    kib = _fields(Path("/proc/meminfo")).get("MemAvailable")
    return None if kib is None else 1024 * kib


def cgroup_folders(
    controller: str, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[Path]:
    """The control groups of this process for one controller, v1 or v2, each with its ancestors."""
    found: list[Path] = []
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        tops = [root / names, root / controller] if names else [root, root / "unified"]
        for top in (one for one in tops if one.is_dir()):
            group = top / path.lstrip("/")
            # In a container the path may be the host's; then the top folder is the group itself.
            found += [one for one in (group, *group.parents) if one.is_relative_to(top) and one.is_dir()]
    return list(dict.fromkeys(found))


def _cgroup_memory() -> Iterator[int | None]:
    for group in cgroup_folders("memory"):
        yield cgroup_memory_left(group)


def cgroup_memory_left(group: Path) -> int | None:
    """Bytes that a control group still allows. Page cache counts as free because the kernel can drop it."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, current = _number(group / most), _number(group / used)
        if limit is not None and current is not None:
            stat = _fields(group / "memory.stat")
            files = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            return limit - current + files
    return None


def _cgroup_tasks() -> Iterator[int | None]:
    for group in cgroup_folders("pids"):
        limit, current = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and current is not None:
            yield limit - current


def _machine_tasks_left() -> int | None:
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return None
    kernel = Path("/proc/sys/kernel")
    most = _minimum(_number(kernel / "threads-max"), _number(kernel / "pid_max"))
    return None if most is None else most - running


def _user_tasks_left() -> int | None:
    """Tasks left under RLIMIT_NPROC, which does not apply to root."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:
        return None
    used = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid():
                used += _fields(process / "status").get("Threads", 0)
    return limit - used


def _address_space_limit() -> int | None:
    """Bytes of address space that arenas may take in a process, which maps those of all devices (ulimit -v)."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit // ADDRESS_SHARE


def _hard_descriptor_limit() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def descriptor_limit() -> int | None:
    """How many files and sockets this process may open (the soft limit); None: no limit is known."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit(needed: int) -> None:
    """Raise the soft limit of open files to the hard limit if it is below ``needed``; children inherit it."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        target = needed if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
