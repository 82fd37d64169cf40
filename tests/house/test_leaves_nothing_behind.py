"""The fixture that watches every test sees each kind of thing that a test can leave behind."""

from __future__ import annotations

import _multiprocessing
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ON_LINUX = sys.platform == "linux"
CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.fixture(scope="module")
def watch() -> ModuleType:
    """The functions of tests/conftest.py, under a name of their own."""
    spec = importlib.util.spec_from_file_location("leaves_nothing_behind", CONFTEST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def left(watch: ModuleType) -> Callable[[], str]:
    """What the test left behind so far."""
    before = watch.present()
    return lambda: "; ".join(watch.left_behind(before, grace_s=0.05))


def test_nothing_left(left: Callable[[], str]) -> None:
    assert left() == ""


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_is_seen(left: Callable[[], str], daemon: bool) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,), name="heartbeat", daemon=daemon)
    thread.start()
    assert left() == ("thread 'heartbeat' (daemon)" if daemon else "thread 'heartbeat'")
    stop.set()
    thread.join()
    assert left() == ""


def test_a_thread_on_its_way_out_gets_the_grace(watch: ModuleType) -> None:
    before = watch.present()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,))
    thread.start()
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    assert watch.left_behind(before, grace_s=10) == []
    assert not thread.is_alive()


def test_a_file_is_seen(left: Callable[[], str]) -> None:
    with tempfile.NamedTemporaryFile(prefix="hoop-") as file:
        assert left() == f"file {file.name}"
    assert left() == ""


if ON_LINUX:

    def test_a_named_semaphore_is_seen(left: Callable[[], str]) -> None:
        """As a process that is killed leaves it."""
        name = f"/hoop-{os.getpid():08x}{os.urandom(12).hex()}-0"
        semaphore = _multiprocessing.SemLock(1, 0, 1, name, False)
        try:
            assert left() == f"file /dev/shm/sem.{name[1:]}"
        finally:
            _multiprocessing.sem_unlink(name)
        del semaphore
        assert left() == ""

    def test_a_child_is_seen_and_a_zombie(left: Callable[[], str]) -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        assert left() == f"process {child.pid} (cat)"
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert left() == f"process {child.pid} (cat), a zombie: nobody waited for it"
        child.wait(10)
        assert left() == ""

    @contextmanager
    def orphan(opens: str, **environment: str) -> Iterator[int]:
        """A process whose parent is gone and that has a file open; it ends with the context."""
        reading, writing = os.pipe()
        command = ["sh", "-c", 'exec 3<&0 4<"$1"; cat <&3 >/dev/null & echo $!', "sh", opens]
        done = subprocess.run(command, env=environment, stdin=reading, stdout=subprocess.PIPE, timeout=10)
        os.close(reading)
        try:
            yield int(done.stdout)
        finally:
            os.close(writing)

    def test_an_orphan_is_seen(left: Callable[[], str]) -> None:
        with orphan(os.devnull, **os.environ) as pid:
            assert left().startswith(f"process {pid} (")

    def test_a_file_that_someone_else_has_open_is_not_ours(left: Callable[[], str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="hoop-") as file:
            with orphan(file.name, PATH=os.environ["PATH"]):  # without our mark
                assert left() == ""
            assert left() == f"file {file.name}"

    def test_a_listening_socket_is_seen(left: Callable[[], str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert left() == f"socket tcp port {server.getsockname()[1]}, listening"
        assert left() == ""

    def test_a_socket_pair_is_seen(left: Callable[[], str]) -> None:
        one, other = socket.socketpair()
        assert left() == "socket unix pair; socket unix pair"
        one.close()
        other.close()
        assert left() == ""
