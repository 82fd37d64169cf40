"""Fixtures for tests that run real ``python -m hoop …`` processes.

``up`` is a cluster shared by a module whose tests break nothing; ``start`` starts processes for one test.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import preloaded
import pytest
from background import END_S, HOOP, START_S, Running, background_processes
from descriptor_stub import Stub

import hoop
from hoop.events import Event
from hoop.lab.chaos import network
from hoop.wire.channels import LEASE_S, channel_options
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

LAB = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts ``hoop …`` in the background for one test."""
    with background_processes(tmp_path) as start_process:
        yield start_process


@contextlib.contextmanager
def chromium(executable: Path | str | None = None) -> Iterator[Any]:
    """Headless Chromium, driven by Playwright. ``executable``: a program that starts it; default: it itself."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium on the PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=executable or found, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    """A browser on this host."""
    with chromium() as started:
        yield started


@pytest.fixture
def browser_elsewhere(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """A browser on another host, in a network namespace of its own, and the address by which it reaches this host."""
    if reason := network.unavailable_reason():
        pytest.skip(reason)
    with network.private_network(1) as private:
        script = tmp_path / "chromium-elsewhere"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(private.exec_prefix(1))} chromium "$@"\n')
        script.chmod(0o755)
        with chromium(script) as started:
            yield started, private.gateway


@pytest.fixture(scope="module")
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """``hoop up`` with the options in the module's ``UP``, shared by all its tests."""
    with background_processes(tmp_path_factory.mktemp("up")) as start_process:
        running = start_process("up", *request.module.UP)
        assert running.first_line.startswith("coordinator ")
        yield running


@pytest.fixture
def cluster(up: Running) -> Iterator[hoop.Cluster]:
    """A connection to the module's cluster for one test."""
    with hoop.connect(up.address, connect_timeout=START_S) as connected:
        yield connected


@pytest.fixture
def connect() -> Iterator[Callable[..., hoop.Cluster]]:
    """Opens connections for one test."""
    with ExitStack() as stack:
        yield lambda address, **options: stack.enter_context(
            hoop.connect(address, **{"connect_timeout": START_S, **options})
        )


@pytest.fixture
def run_hoop() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``hoop …`` and waits for it to exit."""

    def run(
        *arguments: object, environment: Mapping[str, str] | None = None, within: float = START_S
    ) -> subprocess.CompletedProcess[str]:
        return preloaded.run(
            [*HOOP, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
            env={**os.environ, **(environment or {})},
            check=False,
        )

    return run


@pytest.fixture
def status(run_hoop: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[[str], dict[str, Any]]:
    """The output of ``hoop status --json``."""

    def query(address: str) -> dict[str, Any]:
        answer = run_hoop("status", "--coordinator", address, "--json")
        assert answer.returncode == 0, answer.stderr
        reported: dict[str, Any] = json.loads(answer.stdout)
        return reported

    return query


@pytest.fixture
def await_event() -> Callable[..., Event]:
    """Waits up to ``within`` seconds for a past or future event of this kind and with these fields."""

    def wait(address: str, kind: str, within: float = END_S, after: int = 0, **fields: object) -> Event:
        wanted = {name: str(value) for name, value in fields.items()}
        seen = []
        with hoop.connect(address, connect_timeout=within) as cluster:
            request = pb.WatchEventsRequest(after=after, follow=True)
            try:
                for event in cluster._stub.WatchEvents(request, timeout=within, wait_for_ready=True):
                    seen.append(f"{event.sequence} {event.kind}: {event.text}")
                    if event.kind == kind and wanted.items() <= dict(event.fields).items():
                        return Event(event.sequence, event.time, event.kind, event.text, dict(event.fields))
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
        raise AssertionError(f"no {kind} {wanted or ''} within {within:g} s; there were {seen}")

    return wait


@pytest.fixture
def comm_status() -> Callable[[str, int], lab.GetCommStatusResponse]:
    """The answer of the lab's GetCommStatus, which the coordinator has opened with ``--lab``."""

    def query(address: str, communicator_id: int) -> lab.GetCommStatusResponse:
        with grpc.insecure_channel(address, options=channel_options(LEASE_S)) as channel:
            answer: lab.GetCommStatusResponse = Stub(channel, LAB).GetCommStatus(
                lab.GetCommStatusRequest(commId=communicator_id), timeout=END_S
            )
            return answer

    return query


@pytest.fixture
def wait_for_exit() -> Callable[..., None]:
    """Waits until a process that is not a child of this one has exited."""

    def wait(pid: int, within: float = END_S) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ended, _, _ = select.select([descriptor], [], [], within)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} is still there after {within:g} s"

    return wait


@pytest.fixture
def send_signal() -> Iterator[Callable[[int, int], None]]:
    """Sends a signal to a process; stopped processes are continued at the end of the test."""
    stopped = []

    def send(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:
            stopped.append(pid)
        os.kill(pid, number)

    yield send
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
