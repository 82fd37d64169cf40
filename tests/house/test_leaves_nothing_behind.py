"""The leak check in ``tests/conftest.py`` finds every kind of resource that a test can leave behind."""

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
LONG_S = 60.0
"""Longer than the system takes, on a busy machine, to forget a thread or a process that has ended."""
CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.fixture(scope="module")
def leak_check() -> ModuleType:
    """The functions of tests/conftest.py, loaded as a separate module."""
    spec = importlib.util.spec_from_file_location("leaves_nothing_behind", CONFTEST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def leaks(leak_check: ModuleType) -> Callable[..., str]:
    """The resources that the test has left behind so far. ``leaks(LONG_S)`` waits until there are none."""
    before = leak_check.present()
    return lambda grace_s=0.05: "; ".join(leak_check.left_behind(before, grace_s=grace_s))


def test_no_leak(leaks: Callable[..., str]) -> None:
    assert leaks(LONG_S) == ""


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_is_found(leaks: Callable[..., str], daemon: bool) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,), name="heartbeat", daemon=daemon)
    thread.start()
    assert leaks() == ("thread 'heartbeat' (daemon)" if daemon else "thread 'heartbeat'")
    stop.set()
    thread.join()
    assert leaks(LONG_S) == ""


def test_a_thread_may_end_within_the_grace_period(leak_check: ModuleType) -> None:
    before = leak_check.present()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,))
    thread.start()
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    assert leak_check.left_behind(before, grace_s=10) == []
    assert not thread.is_alive()


def test_a_file_is_found(leaks: Callable[..., str]) -> None:
    with tempfile.NamedTemporaryFile(prefix="hoop-") as file:
        assert leaks() == f"file {file.name}"
    assert leaks(LONG_S) == ""


def test_a_variable_that_imports_read_is_found(leaks: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of later tests would inherit it, and would not be forked."""
    monkeypatch.setenv("HOOP_DATA", "/nowhere")
    assert leaks(LONG_S) == ""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert leaks() == "environment variable OPENBLAS_NUM_THREADS=1"
    monkeypatch.undo()
    assert leaks(LONG_S) == ""


if ON_LINUX:

    def test_a_named_semaphore_is_found(leaks: Callable[..., str]) -> None:
        """As a killed process leaves it."""
        name = f"/hoop-{os.getpid():08x}{os.urandom(12).hex()}-0"
        semaphore = _multiprocessing.SemLock(1, 0, 1, name, False)
        try:
            assert leaks() == f"file /dev/shm/sem.{name[1:]}"
        finally:
            _multiprocessing.sem_unlink(name)
        del semaphore
        assert leaks(LONG_S) == ""

    def test_a_child_process_and_a_zombie_are_found(leaks: Callable[..., str]) -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        assert leaks() == f"process {child.pid} (cat)"
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert leaks() == f"process {child.pid} (cat), a zombie: nobody waited for it"
        child.wait(10)
        assert leaks(LONG_S) == ""

    @contextmanager
    def orphan(path: str, **environment: str) -> Iterator[int]:
        """A process whose parent has exited and that has ``path`` open; it ends with the context."""
        reading, writing = os.pipe()
        command = ["sh", "-c", 'exec 3<&0 4<"$1"; cat <&3 >/dev/null & echo $!', "sh", path]
        done = subprocess.run(command, env=environment, stdin=reading, stdout=subprocess.PIPE, timeout=100)
        os.close(reading)
        try:
            yield int(done.stdout)
        finally:
            os.close(writing)

    def test_an_orphan_is_found(leaks: Callable[..., str]) -> None:
        with orphan(os.devnull, **os.environ) as pid:
            assert leaks().startswith(f"process {pid} (")

    def test_a_file_that_a_foreign_process_has_open_is_not_reported(leaks: Callable[..., str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="hoop-") as file:
            with orphan(file.name, PATH=os.environ["PATH"]):  # without the mark of this session
                assert leaks() == ""
            assert leaks() == f"file {file.name}"

    def test_a_listening_socket_is_found(leaks: Callable[..., str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert leaks() == f"socket tcp port {server.getsockname()[1]}, listening"
        assert leaks(LONG_S) == ""

    def test_a_socket_pair_is_found(leak_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(leak_check, "GRPC_POLLER", "no such thread")  # an earlier test may have left gRPC's
        before = leak_check.present()
        one, other = socket.socketpair()
        assert leak_check.left_behind(before, grace_s=0.05) == ["socket unix pair"] * 2
        one.close()
        other.close()
        assert leak_check.left_behind(before, LONG_S) == []

    def test_a_pair_from_before_is_not_reported_when_the_poller_of_grpc_has_ended(leak_check: ModuleType) -> None:
        one, other = socket.socketpair()
        with one, other:
            stop = threading.Event()
            poller = threading.Thread(target=stop.wait, args=(LONG_S,), name=f"Thread-1 {leak_check.GRPC_POLLER}")
            poller.start()
            before = leak_check.present()
            stop.set()
            poller.join()
            assert leak_check.left_behind(before, LONG_S) == []
