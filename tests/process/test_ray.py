"""Trainings on a real Ray cluster of several nodes on this machine, which loses and gains nodes in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RAY = importlib.util.find_spec("ray")
if RAY is None or RAY.origin is None:  # examples/ray, on the path, is a namespace of that name
    pytest.skip("ray is not installed; pip install 'hoop[ray]'", allow_module_level=True)

FOLDER = Path(__file__).parent
JOB = f"{FOLDER / 'train_driver.py'}:job"
HOOP = (sys.executable, "-m", "hoop")
START_S, TIMEOUT_S = 500.0, 1_500.0
"""Ray starts four processes a node; with a busy machine each takes long."""
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@contextmanager
def running(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own. At the end its standard input closes; it is killed if it does not end then,
    or if it lives longer than a test may take."""
    process = subprocess.Popen(
        command,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        yield process
    finally:
        try:
            process.communicate(timeout=START_S)
        finally:
            limit.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass
class Nodes:
    """The cluster of ``ray_nodes.py``."""

    process: subprocess.Popen[str]
    address: str

    def change(self, word: str) -> None:
        """``add`` or ``remove`` a node; returns when it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == word


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with running([sys.executable, str(FOLDER / "ray_nodes.py"), "2"]) as process:
        assert process.stdout is not None
        yield Nodes(process, process.stdout.readline().strip())


def coordinator_pid() -> int:
    """The process of the coordinator's actor, of this session of tests: Ray names a worker by its actor's class."""
    mark = f"HOOP_TEST_SESSION={os.environ['HOOP_TEST_SESSION']}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            named = (path / "cmdline").read_bytes().startswith(b"ray::CoordinatorActor")
            if named and mark in (path / "environ").read_bytes():
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("there is no coordinator's actor")


def train_disturbed(
    nodes: Nodes, tmp_path: Path, script: list[str], devices: int, elastic: tuple[int, int]
) -> list[dict[str, Any]]:
    """Trains, and follows a script: a kind of event to wait for, and what to do then, and so on. Returns the events."""
    hurry = tmp_path / "hurry"
    command = [sys.executable, str(FOLDER / "ray_driver.py"), nodes.address, str(devices), *map(str, elastic)]
    seen: list[dict[str, Any]] = []
    with running([*command, str(tmp_path / "run")], HOOP_TEST_HURRY=str(hurry)) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if not line.startswith("{"):  # Ray prints there too, that a node was lost
                continue
            seen.append(json.loads(line))
            if script and seen[-1]["kind"] == script[0]:
                _, action, *script = script
                if action == "hurry":
                    hurry.touch()
                elif action == "kill_coordinator":
                    os.kill(coordinator_pid(), signal.SIGKILL)
                else:
                    nodes.change(action)
    assert not script, seen[-20:]
    assert seen[-1]["kind"] == "trained", seen[-5:]
    assert seen[-1]["steps"] == 60
    assert seen[-1]["weights_sha256"] == seen[-1]["alone"]
    return seen


def test_a_node_is_lost_and_one_is_added(nodes: Nodes, tmp_path: Path) -> None:
    """The job goes on without the lost node's device. Ray starts it again on the new node, and the job takes it in."""
    script = ["steps", "remove", "recovered", "add", "resized", "hurry"]
    seen = train_disturbed(nodes, tmp_path, script, devices=2, elastic=(2, 2))
    assert "lost" in {one["kind"] for one in seen}
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "ledger.jsonl", "result.json", "checkpoints"} <= files


@pytest.mark.slow
def test_an_elastic_job_takes_what_comes(nodes: Nodes, tmp_path: Path) -> None:
    """It starts with one device; the second has room at once, the third on a node that is added."""
    seen = train_disturbed(nodes, tmp_path, ["resized", "add", "resized", "hurry"], devices=1, elastic=(1, 3))
    assert max(len(one.get("devices", ())) for one in seen if one["kind"] == "reassigned") == 3


@pytest.mark.slow
def test_a_coordinator_that_is_killed_comes_back(nodes: Nodes, tmp_path: Path) -> None:
    script = ["steps", "kill_coordinator", "coordinator_back", "hurry"]
    train_disturbed(nodes, tmp_path, script, devices=2, elastic=(2, 2))


def hoop_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*HOOP, "train", *arguments, "--memory", "16MiB", "--json"]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def weights(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return str(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])


@pytest.mark.slow
def test_the_command_brings_the_job_s_file(nodes: Nodes, tmp_path: Path) -> None:
    on_ray = hoop_train(JOB, "--on", "ray", "-n", "2", "--ray-address", nodes.address, "--out", str(tmp_path / "run"))
    assert weights(on_ray) == weights(hoop_train(JOB, "-n", "2"))
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_no_room_is_an_error_with_what_is_free(nodes: Nodes) -> None:
    options = ("--ray-address", nodes.address, "--meet-timeout", "3s", "--ray-cpus", "2")
    done = hoop_train("mnist", "--on", "ray", "-n", "2", *options)
    assert done.returncode == 3, done.stderr
    text = " ".join(done.stderr.split())
    assert "0 of 2 devices were there after 3 s; a device needs 2 CPU; free in Ray's cluster: " in text


@pytest.mark.slow
def test_a_program_outside_of_the_cluster_is_refused() -> None:
    done = hoop_train(JOB, "--on", "ray", "-n", "2", "--ray-address", "ray://127.0.0.1:1")
    assert done.returncode == 2, done.stderr
    assert "ray job submit" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pip install 'ray[train]'")
def test_ray_train_with_hoop_as_its_backend(nodes: Nodes, tmp_path: Path) -> None:
    example = FOLDER.parents[1] / "examples" / "ray" / "torch_trainer.py"
    options = ["--address", nodes.address, "--epochs", "3", "--storage", str(tmp_path / "ray")]
    with running([sys.executable, str(example), *options]) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    last = output.splitlines()[-1]
    assert last.endswith("2 workers, backend hoop"), output
    assert float(last.split()[1].rstrip("%")) > 90
    assert list((tmp_path / "ray").rglob("model.pt"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pip install 'ray[train]'")
def test_a_loop_of_one_s_own_in_the_workers_of_ray_train(nodes: Nodes, tmp_path: Path) -> None:
    with running([sys.executable, str(FOLDER / "ray_own_loop.py"), nodes.address, str(tmp_path)]) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    alone = output.splitlines()[-1]
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == [alone, alone]
