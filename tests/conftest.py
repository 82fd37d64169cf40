"""Checks that every test releases its threads, processes, sockets, files and cores, and orders the tests.

The check compares before and after a test. A fixture of a wider scope (a cluster per module) exists before the test and
is not counted.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from gpus import has_gpu
from preload_server import read_at_import

GRACE_S = 30.0
"""How long threads, processes and files may take to disappear after a test."""

# A shell that runs the tests in the background (nohup, &) ignores these; tests send them to processes that inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Workers share the cores: a second thread of PyTorch in each would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HOOP_NO_REPORT"] = "1"  # 2 s a run; tests of reports set it to 0

ENVIRONMENT = read_at_import(os.environ)
"""A command with other values of these variables is not forked (tests/preloaded.py): no test may leave one changed."""

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""The cores this process may use; no test may leave it with others."""

MARK = "HOOP_TEST_SESSION"
"""An environment variable. Child processes inherit it, so that an orphan can be traced to its session."""
os.environ[MARK] = str(os.getpid())

# Each session, and each worker of pytest-xdist, gets its own temporary folder; otherwise they would report each other's
# files.
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# Tokens of the coordinators that tests start: not in the user's own runtime directory.
os.environ["XDG_RUNTIME_DIR"] = _runtime = tempfile.mkdtemp(prefix="tests-runtime-")
atexit.register(shutil.rmtree, _runtime, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Unpacks MNIST once for all workers: to decompress the package's file takes each process a second."""
    if getattr(config.option, "numprocesses", None) and "HOOP_DATA" not in os.environ:
        from hoop.data import mnist

        os.environ["HOOP_DATA"] = folder = tempfile.mkdtemp(prefix="tests-data-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (Path(folder) / "mnist").mkdir()
        for name, array in zip(mnist.NAMES, mnist._packaged(), strict=True):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)  # an IDX file of bytes
            (Path(folder) / "mnist" / name).write_bytes(header + array.tobytes())


# A forked child must not garbage-collect objects of its parent: a destructor of grpc.aio would wait for its poller
# thread, which does not exist in the child. (hoop.launch.forked.fork does the same.)
os.register_at_fork(after_in_child=gc.freeze)

# Closed channels and stopped servers of grpcio leave no thread and no socket. Only grpc.aio's poller thread and its
# socket pair live on until the last grpc.aio object is collected; a traceback may still reference one.
GRPC_POLLER = "(_poll_wrapper)"
UNIX_PAIR = "unix pair"
CUDA_SOCKET = "unix @cuda-uvmfd"
"""CUDA opens one a process, when it is first used, and keeps it."""

# Child processes that Python starts once per process and stops at its exit.
KERNEL_THREADS = 2
"""The parent of Linux's kernel threads, which have no environment."""
OTHERS: set[int] = set()
"""Processes that are not of this session: their environment is read once, as long as they exist."""
CLEAN_PROCESS = "hoop.runs.clean_process"
"""The module that keeps a process for the next ``hoop.train`` of this one, and ends it at the exit."""
PYTHON_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "tests/preload_server.py")


def read(path: str) -> str:
    """Reads a file of /proc; empty if it does not exist or its process has exited."""
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def threads() -> dict[Hashable, str]:
    """Python's threads, including daemons."""
    return {
        thread: f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if GRPC_POLLER not in thread.name
    }


def process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def kept_process() -> tuple[int, int]:
    """Pid of the process that waits for this one's next ``hoop.train``, and the descriptor of the socket to it; or -1.

    It is kept for all tests, as a program keeps it for all its trainings.
    """
    module = sys.modules.get(CLEAN_PROCESS)
    idle = None if module is None else module.idle_process()
    return (-1, -1) if idle is None else (idle.pid, idle.fileno())


def processes() -> dict[Hashable, str]:
    """Children of this process, including zombies, and every process that carries this session's MARK."""
    mark = f"{MARK}={os.getpid()}\0"
    found: dict[Hashable, str] = {}
    pids = set(process_ids()) - {os.getpid()}
    OTHERS.intersection_update(pids)
    for pid in pids - OTHERS:
        # The command name, in parentheses, may contain any character; the other fields follow the last parenthesis.
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if not fields:
            continue
        state, parent, started = fields[0], int(fields[1]), fields[19]
        is_child, environment = parent == os.getpid(), read(f"/proc/{pid}/environ")
        if is_child or mark in environment:
            command = read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or read(f"/proc/{pid}/comm").strip()
            if not (is_child and (pid == kept_process()[0] or any(helper in command for helper in PYTHON_HELPERS))):
                zombie = ", a zombie: nobody waited for it" if state == "Z" else ""
                found[pid, started] = f"process {pid} ({command[:80]}){zombie}"
        elif environment or parent in (0, KERNEL_THREADS):
            OTHERS.add(pid)
    return found


def socket_names() -> dict[str, str]:
    """Describes every socket by inode: protocol, port and state, or path."""
    names = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in read(f"/proc/self/net/{protocol}").splitlines()[1:]:
            fields = line.split()
            port, listens = int(fields[1].rpartition(":")[2], 16), fields[3] == "0A"
            names[fields[9]] = f"{protocol} port {port}{', listening' if listens else ''}"
    for line in read("/proc/self/net/unix").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        names[fields[6]] = f"unix {fields[7]}" if len(fields) > 7 else UNIX_PAIR
    return names


OURS = ("hoop-", "sem.hoop-")
"""How the names of Hoop's shared memory, named semaphores and temporary files begin."""
SOCKET_NAMES: dict[str, str] = {}
"""By inode, the names of sockets that are open: to read the kernel's tables takes 4 ms, and each test looks twice."""


def descriptors() -> Iterator[str]:
    """What this process's descriptors refer to."""
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor that lists the folder
            continue


def sockets() -> dict[Hashable, str]:
    """Sockets that this process has open."""
    inodes = {link[len("socket:[") : -1] for link in descriptors() if link.startswith("socket:[")}
    kept = kept_process()[1]
    if kept >= 0:
        inodes.discard(str(os.fstat(kept).st_ino))
    for closed in SOCKET_NAMES.keys() - inodes:
        del SOCKET_NAMES[closed]
    if unnamed := inodes - SOCKET_NAMES.keys():
        SOCKET_NAMES.update((inode, name) for inode, name in socket_names().items() if inode in unnamed)
    return {
        f"socket {inode}": f"socket {SOCKET_NAMES.get(inode, inode)}"
        for inode in inodes
        if not SOCKET_NAMES.get(inode, "").startswith(CUDA_SOCKET) and inode != preloaded.SERVER.inode
    }


def without_poller(left: dict[Hashable, str]) -> dict[Hashable, str]:
    """Without the socket pair of grpc.aio's poller, which looks like any other pair, as long as its thread lives.

    Only of what is left after a test: before it, every pair is noted. One of another owner that was not, because there
    was a poller, would be new when the poller has ended.
    """
    if any(GRPC_POLLER in thread.name for thread in threading.enumerate()):
        return {key: name for key, name in left.items() if name != f"socket {UNIX_PAIR}"}
    return left


def files() -> dict[Hashable, str]:
    """Shared memory, named semaphores and temporary files of Hoop."""
    folders = [folder for folder in {"/dev/shm", tempfile.gettempdir()} if os.path.isdir(folder)]
    found = (f"{folder}/{name}" for folder in folders for name in os.listdir(folder) if name.startswith(OURS))
    return {path: f"file {path}" for path in found}


def is_foreign(path: str) -> bool:
    """Whether a process of another session has the file open or mapped."""
    ours = {os.getpid(), *(key[0] for key in processes() if isinstance(key, tuple))}
    for pid in set(process_ids()) - ours:
        opened = (os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").glob("*"))
        try:
            if path in read(f"/proc/{pid}/maps") or any(name.startswith(path) for name in opened):
                return True
        except OSError:
            continue
    return False


def variables() -> dict[Hashable, str]:
    """Changed variables of the environment that commands inherit and that imports read."""
    return {
        ("variable", name, text): f"environment variable {name}={text}"
        for name, text in read_at_import(os.environ).items()
        if ENVIRONMENT.get(name) != text
    }


def cores() -> dict[Hashable, str]:
    """A binding of this process to some of its cores: every later test and command would run on these."""
    now = os.sched_getaffinity(0) if CORES else CORES
    return {} if now == CORES else {"cores": f"a binding to the cores {sorted(now)}"}


def arithmetic() -> dict[Hashable, str]:
    """Denormal numbers count as zero in this thread (``torch.set_flush_denormal``): later tests would inherit it."""
    return {"arithmetic": "denormal numbers count as zero"} if math.ulp(0.0) * 1.0 == 0.0 else {}


def present() -> dict[Hashable, str]:
    """Everything that a test could leave behind, each with a description."""
    return {**threads(), **processes(), **sockets(), **files(), **variables(), **cores(), **arithmetic()}


def left_behind(before: dict[Hashable, str], grace_s: float = GRACE_S) -> list[str]:
    """Descriptions of everything that is new since ``before`` and does not disappear within ``grace_s``."""
    deadline = time.monotonic() + grace_s
    while left := without_poller({key: name for key, name in present().items() if key not in before}):
        if time.monotonic() > deadline:
            return sorted(name for key, name in left.items() if not (name.startswith("file") and is_foreign(str(key))))
        gc.collect()  # objects that only a cycle or a traceback references do not count
        threading.Event().wait(0.02)
    return []


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, process, socket, file or binding to cores behind, and names it."""
    before = present()
    yield
    if left := left_behind(before):
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


def pytest_collection() -> None:
    """Nothing is garbage-collected until all tests are collected: nearly all that imports and parameters make stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Excludes all that exists before the first test from garbage collection, of which a full one took 0.1 s."""
    if changed := variables():
        raise pytest.UsageError(f"set by an import of a test: {', '.join(changed.values())}; import it in the test")
    gc.collect()
    gc.freeze()
    gc.enable()


ONE_WORKER = "tests/torch/"
"""The tests of this folder run in one worker of pytest-xdist: the forkserver of their ranks takes 6 s to start."""
SLOW_FIRST = (
    "tests/house/test_lint.py",
    ONE_WORKER,
    *(f"tests/{name}/" for name in ("fault", "process", "engine", "model")),
)
"""The slowest files and folders. They start first, so that all workers are busy until the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist: the scheduler of ``--dist loadfile``, which knows ``ONE_WORKER`` too."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class FilesAndFolder(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return ONE_WORKER if nodeid.startswith(ONE_WORKER) else str(super()._split_scope(nodeid))

    return FilesAndFolder(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests as slow where their ``slow_if`` condition holds, and puts the slowest folders first.

    A slow test repeats at length what a shorter one shows; ``make everything`` runs it.
    """
    for item in items:
        if item.get_closest_marker("gpu") is not None and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if any(mark.kwargs["when"](params) for mark in item.iter_markers("slow_if")):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: [not item.nodeid.startswith(prefix) for prefix in SLOW_FIRST])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A new folder whose path leaves room for the name of a socket, unlike that of ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
