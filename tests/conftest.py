"""Every test leaves the machine as it found it: threads, processes, sockets and files are compared.

A fixture of a wider scope (a cluster for a module) is there before the test and so is no concern of it.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

GRACE_S = 2.0
"""How long after a test things that are on their way out may take."""

MARK = "HOOP_TEST_SESSION"
"""Set in the environment, which children inherit, so that an orphan still shows whose it is."""
os.environ[MARK] = str(os.getpid())

# Tests that run at the same time (pytest-xdist) must not take each other's temporary files for their own.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# A forked child must never collect garbage of this process: a destructor of grpc.aio would wait for its poller, a
# thread that was not forked. (hoop.launch.forked.fork does the same.)
os.register_at_fork(after_in_child=gc.freeze)

# Closed channels and stopped servers of grpcio leave no thread and no socket. Only grpc.aio's poller, with
# its pair of sockets, belongs to the process: it goes with the last grpc.aio object, in a traceback perhaps.
GRPC_POLLER = "(_poll_wrapper)"

# Children that Python itself starts once for a process and ends with it.
PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def read(path: str) -> str:
    """A file of /proc; empty where there is none, or where its process has gone meanwhile."""
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def threads() -> dict[Hashable, str]:
    """Python's threads, daemons too."""
    return {
        thread: f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if GRPC_POLLER not in thread.name
    }


def process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def processes() -> dict[Hashable, str]:
    """Children of this process, zombies too, and whatever carries the mark of this session."""
    mark = f"{MARK}={os.getpid()}\0"
    found: dict[Hashable, str] = {}
    for pid in process_ids():
        # The name, in parentheses, may hold anything; state and parent come after the last one.
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if not fields or pid == os.getpid():
            continue
        state, is_child = fields[0], int(fields[1]) == os.getpid()
        if is_child or mark in read(f"/proc/{pid}/environ"):
            command = read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or read(f"/proc/{pid}/comm").strip()
            if not (is_child and any(own in command for own in PYTHONS_OWN)):
                zombie = ", a zombie: nobody waited for it" if state == "Z" else ""
                found[pid, fields[19]] = f"process {pid} ({command[:80]}){zombie}"
    return found


def socket_names() -> dict[str, str]:
    """What is known of each socket, by inode: protocol, port and state, or path."""
    names = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in read(f"/proc/self/net/{protocol}").splitlines()[1:]:
            fields = line.split()
            port, listens = int(fields[1].rpartition(":")[2], 16), fields[3] == "0A"
            names[fields[9]] = f"{protocol} port {port}{', listening' if listens else ''}"
    for line in read("/proc/self/net/unix").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        names[fields[6]] = f"unix {fields[7]}" if len(fields) > 7 else "unix pair"
    return names


def sockets() -> dict[Hashable, str]:
    """Sockets that this process holds open."""
    inodes = set()
    for link in Path("/proc/self/fd").glob("*"):
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:  # the descriptor with which the folder is listed
            continue
    names = socket_names() if inodes else {}
    polled = any(GRPC_POLLER in thread.name for thread in threading.enumerate())
    return {
        f"socket {inode}": f"socket {names.get(inode, inode)}"
        for inode in inodes
        if not (polled and names.get(inode) == "unix pair")
    }


def files() -> dict[Hashable, str]:
    """Shared memory, named semaphores and temporary files of Hoop's."""
    folders = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    patterns = ("hoop-*", "sem.hoop-*")
    found = (path for folder in folders for pattern in patterns for path in folder.glob(pattern))
    return {str(path): f"file {path}" for path in found}


def is_foreign(path: str) -> bool:
    """Whether a process of someone else's (another session, a cluster in use) has the file open or mapped."""
    ours = {os.getpid(), *(key[0] for key in processes() if isinstance(key, tuple))}
    for pid in set(process_ids()) - ours:
        opened = (os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").glob("*"))
        try:
            if path in read(f"/proc/{pid}/maps") or any(name.startswith(path) for name in opened):
                return True
        except OSError:
            continue
    return False


def present() -> dict[Hashable, str]:
    """Everything that a test could leave behind, each with a description."""
    return {**threads(), **processes(), **sockets(), **files()}


def left_behind(before: dict[Hashable, str], grace_s: float = GRACE_S) -> list[str]:
    """What is there now, was not before, and does not go away within the grace."""
    deadline = time.monotonic() + grace_s
    while left := {key: name for key, name in present().items() if key not in before}:
        if time.monotonic() > deadline:
            return sorted(name for key, name in left.items() if not (name.startswith("file") and is_foreign(str(key))))
        gc.collect()  # what only a cycle or a traceback held is nobody's
        threading.Event().wait(0.02)
    return []


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, a process, a socket or a file, and names it."""
    before = present()
    yield
    if left := left_behind(before):
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


SLOW_FIRST = ("fault", "process", "torch", "engine", "model", "contract")
"""Folders whose files take longest. They begin first, so that both workers are busy until the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what ``slow_if`` says of its parameters, and puts the folders that take longest first.

    Tests that are marked as slow repeat at length what shorter ones show; ``make everything`` runs them.
    """
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if any(mark.kwargs["when"](params) for mark in item.iter_markers("slow_if")):
            item.add_marker(pytest.mark.slow)
    folders = {f"tests/{name}": place for place, name in enumerate(SLOW_FIRST)}
    items.sort(key=lambda item: folders.get("/".join(item.nodeid.split("/")[:2]), len(folders)))
