"""The run folder after failures of devices, processes, disks and files: the audit holds and the weights are correct."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import preloaded
import pytest
from fault_cluster import JOB as MNIST
from fault_cluster import LARGE_SLOWDOWN, running_cluster, wait_for_job, wait_for_step
from reported_rows import check_run
from typer.testing import CliRunner

from hoop.cli.commands import command_line
from hoop.runs.audit import audit
from hoop.runs.checkpoint_store import listed, step_of
from hoop.runs.ledger import NAME, lines

JOB = f"{Path(__file__).with_name('mortal_job.py')}:job"
TIMEOUT_S = 400.0
STEPS = 200
"""Of runs in which a device ends after the first checkpoint, which is that of step 26."""


def command(*arguments: object) -> list[str]:
    return [*preloaded.HOOP, *map(str, arguments)]


@contextlib.contextmanager
def training(out: Path, *options: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Starts ``hoop train``; kills it on exit."""
    with preloaded.Popen(
        command("train", JOB, "--out", out, *options, "--json"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as run:
        try:
            yield run
        finally:
            run.kill()


@contextlib.contextmanager
def mortal_training(out: Path, *options: object, error: str = "") -> Iterator[subprocess.Popen[str]]:
    """One of the devices ends after the first checkpoint (``mortal_job``); fails if none does."""
    mark = out.with_name("mark")
    mark.touch()
    with training(out, *options, MORTAL_RUN=str(out), MORTAL_MARK=str(mark), MORTAL_ERROR=error) as run:
        yield run
    assert mark.with_name("mark.fired").exists(), "no device ended"


def wait_until(condition: Callable[[], object], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline, "the condition did not become true in time"
        threading.Event().wait(0.01)


def result_of(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    result: dict[str, Any] = json.loads(out)
    return result


def undisturbed(*limit: object) -> str:
    """Returns the digest of the weights of a run on one device without faults."""
    with preloaded.Popen(command("train", JOB, "-n", 1, *limit, "--json"), text=True, stdout=subprocess.PIPE) as run:
        return str(result_of(run)["weights_sha256"])


@pytest.mark.slow
def test_the_shards_of_a_killed_device_are_taken_over_once_and_the_ledger_names_the_devices(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    limit = ("--set", f"max_steps={STEPS}", "--set", "balance=false")
    with mortal_training(out, "-n", 3, *limit) as run:
        weights = result_of(run)["weights_sha256"]
    assert weights == undisturbed(*limit)
    audited = check_run(out, STEPS)
    (takeover,) = audited.taken_over
    (dead,) = takeover["lost"]
    devices_of_step = {line.entry["step"]: line.entry["by"] for line in lines(out / NAME) if "step" in line.entry}
    step = takeover["step"]
    # Two steps before: the step before may be an epoch's last, with fewer samples than shards.
    lost_shards = [shard for shard, device in enumerate(devices_of_step[step - 2]) if device == dead]
    assert len(lost_shards) == 2
    assert takeover["by"] == {str(shard): devices_of_step[step][shard] for shard in lost_shards}
    assert {*takeover["by"].values()} <= {1, 2, 3} - {dead}
    assert not any(dead in devices for number, devices in devices_of_step.items() if number >= step)


@pytest.mark.parametrize("devices", [3, 1])
def test_an_error_of_a_gpu_ends_its_device_and_the_others_go_on(devices: int, tmp_path: Path) -> None:
    """The last device has nobody to go on: the job fails with the error's text."""
    out, text = tmp_path / "run", "CUDA out of memory. Tried to allocate 9.00 GiB."
    limit = ("--set", f"max_steps={STEPS}")
    with mortal_training(out, "-n", devices, *limit, error=text) as run:
        printed, errors = run.communicate(timeout=TIMEOUT_S)
    if devices == 1:
        assert (run.returncode, printed) == (2, "")
        assert text in errors
        assert "at once, 6 times the size of the model" in errors
        assert "Use fewer shards (--set shards=3), a smaller --batch-size" in errors
        assert "your code failed" not in errors
        return
    assert run.returncode == 0, errors
    assert json.loads(printed)["weights_sha256"] == undisturbed(*limit)
    assert f"ends, because it ran into: {text}" in errors
    check_run(out, STEPS)


ASSERTED = "ends, because it ran into: CUDA error: device-side assert triggered"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "strategy", "text"),
    [
        pytest.param("assert", "data", ASSERTED, id="assert"),
        pytest.param("assert", "pipeline:1f1b", ASSERTED, id="assert in a pipeline"),
        pytest.param("illegal", "data", "illegal memory access", id="illegal address"),
    ],
)
def test_a_cuda_error_does_not_change_the_weights(kind: str, strategy: str, text: str, tmp_path: Path) -> None:
    """An assert ends its device alone. An illegal address ends all that share the GPU through MPS: they start again."""
    out = tmp_path / "run"
    limit = ("--set", "max_steps=600", "--accelerator", "cuda", "--strategy", strategy)
    with mortal_training(out, "-n", 3, *limit, error=kind) as run:
        printed, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert text in errors
    assert json.loads(printed)["weights_sha256"] == undisturbed(*limit)
    check_run(out, 600)


def test_if_all_devices_are_lost_they_start_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    out, limit = tmp_path / "run", ("--set", "max_steps=100")
    faults = ("--fault", "kill@rank=0,step=60", "--fault", "kill@rank=1,step=60")
    with training(out, "-n", 2, *limit, *faults, MORTAL_RUN=str(out)) as run:
        printed, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert "The devices start again from the checkpoint of step 52" in errors
    assert json.loads(printed)["weights_sha256"] == undisturbed(*limit)
    check_run(out, 100)


def test_without_restarts_the_error_names_the_remedy(tmp_path: Path) -> None:
    out, limit = tmp_path / "run", ("--set", "max_steps=100", "--max-restarts", 0)
    with training(out, "-n", 1, *limit, "--fault", "kill@rank=0,step=60", MORTAL_RUN=str(out)) as run:
        _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 3
    assert f"hoop train --resume --out {out}" in " ".join(errors.split())


@pytest.mark.slow
def test_a_run_whose_head_was_killed_resumes_from_the_checkpoint_before_the_damaged_one(
    tmp_path: Path,
) -> None:
    out, address = tmp_path / "run", tmp_path / "address"
    with training(out, "-n", 1, "--address-file", address, "--max-restarts", 0) as run:
        wait_until(lambda: len(listed(out)) == 2, run)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        (head,) = (int(pid) for pid in children)
        os.kill(head, signal.SIGKILL)
        run.communicate(timeout=TIMEOUT_S)
        assert run.returncode == 3
    (out / "checkpoints" / ".torn.1-2.part").write_bytes(b"half")
    newest, previous = listed(out)
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    assert f"{newest}: damaged or tampered with" in (audit(out).violation or "")

    invoked = CliRunner().invoke(command_line(), ["evaluate", str(out), "--job", JOB, "--json"])
    assert f"warning: {newest}: damaged" in invoked.stderr
    assert json.loads(invoked.stdout)["steps"] == step_of(previous)
    refused = CliRunner().invoke(command_line(), ["export", str(newest), "--to", str(tmp_path / "x.npz")])
    assert str(newest) in str(refused.exception)

    limit = step_of(newest) + 100
    with training(out, "--resume", "--set", f"max_steps={limit}") as run:
        result = result_of(run)
    assert result["weights_sha256"] == undisturbed("--set", f"max_steps={limit}")
    assert not list(out.glob("checkpoints/.*")), "an incomplete file is left"
    assert newest.with_name(newest.name + ".damaged").exists()
    invoked = CliRunner().invoke(command_line(), ["audit", str(out), "--json"])
    report = json.loads(invoked.stdout)
    assert (invoked.exit_code, report["holds"]) == (0, True), report
    assert report["resumed"] == [step_of(previous)]
    assert report["repeated"] > 0
    assert report["steps"] == limit

    ledger = out / NAME
    ledger.write_bytes(ledger.read_bytes().replace(b'"step":2,', b'"step":3,'))
    invoked = CliRunner().invoke(command_line(), ["audit", str(out)])
    assert invoked.exit_code == 1
    assert "line 3: the chain is broken" in invoked.stdout


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second run, or one that resumes it, is refused; a run that was killed leaves no lock."""
    out, endless, writer = tmp_path / "run", ("--set", "max_steps=1000000"), 0
    for interrupt in (signal.SIGTERM, signal.SIGKILL):
        with training(out, *(("--resume",) if out.exists() else ("-n", 1)), *endless) as run:
            wait_until(partial(has_checkpoint_beside, out, listed(out)), run)
            with training(out, "--resume", *endless) as second:
                _, errors = second.communicate(timeout=TIMEOUT_S)
            assert second.returncode == 2, errors
            owner = re.search(r"process (\d+) on \S+ has it open; wait until that run has ended", errors)
            assert owner is not None, errors
            writer = int(owner[1])
            assert f" {run.pid} " in f" {_parents(writer)} ", "it is not of the run"
            run.send_signal(interrupt)
            run.communicate(timeout=TIMEOUT_S)
    wait_until_gone(writer)
    limit = step_of(listed(out)[0]) + 10
    with training(out, "--resume", "--set", f"max_steps={limit}") as run:
        result = result_of(run)
    assert not (out / ".lock").exists()
    assert result["lost_files"] == []
    assert result["weights_sha256"] == undisturbed("--set", f"max_steps={limit}")
    check_run(out, limit)


def has_checkpoint_beside(out: Path, known: list[Path]) -> bool:
    return listed(out)[:1] != known[:1]


def _parents(pid: int) -> str:
    """This process and those above it."""
    found = []
    while pid > 1:
        found.append(str(pid))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return " ".join(found)


def wait_until_gone(pid: int) -> None:
    """The process that writes a folder ends by itself when the command was killed."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        assert select.select([descriptor], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
        os.close(descriptor)


def test_of_two_runs_that_begin_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    out, limit = tmp_path / "run", ("-n", 1, "--set", "max_steps=60")
    with training(out, *limit) as first, training(out, *limit) as second:
        ends = [(*run.communicate(timeout=TIMEOUT_S), run.returncode) for run in (first, second)]
    (won,), (refused,) = ([one for one in ends if one[2] == code] for code in (0, 2))
    assert re.search("has it open|holds a run|another run has written", refused[1]), refused
    assert json.loads(won[0])["steps"] == 60
    check_run(out, 60)


def test_attach_does_not_write_into_the_folder_of_a_running_client(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running_cluster(1, tmp_path) as processes:
        there = ("--coordinator", processes.address)
        run = processes.start("train", *MNIST, *LARGE_SLOWDOWN, *there, "--out", str(out))
        wait_for_step(processes.cluster, wait_for_job(processes.cluster), 2)
        with preloaded.Popen(command("attach", *there, "--out", out), text=True, stderr=subprocess.PIPE) as second:
            _, errors = second.communicate(timeout=TIMEOUT_S)
        assert second.returncode == 2
        assert f"process {run.pid} on " in errors
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=TIMEOUT_S)
    assert audit(out).holds


@pytest.mark.parametrize("what", ["folder", NAME])
def test_a_folder_that_is_deleted_in_mid_run_is_noticed(tmp_path: Path, what: str) -> None:
    """Training goes on, the weights are kept, and the exit code says that the record is not."""
    out = tmp_path / "run"
    with training(out, "-n", 1, "--set", "max_steps=400", "--set", "slowdown=[5]") as run:
        wait_until(lambda: listed(out), run)
        os.rename(out if what == "folder" else out / what, tmp_path / "gone")
        printed, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 2, errors
    result = json.loads(printed)
    assert NAME in result["lost_files"]
    assert Path(result["checkpoint"]) == listed(out)[0]
    assert step_of(listed(out)[0]) == 400
    assert errors.count(f"warning: {out / NAME}: it was deleted, moved or replaced while it was being written") == 1
    assert f"the trained weights are kept in {result['checkpoint']}, and the record of the run is not whole" in errors


SMALL_DISK = 'mount -t tmpfs -o size=100k hoop "$1" || exit 77; shift; "$@"; code=$?; cp -r "$OUT" "$COPY"; exit $code'


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_training_and_the_saved_checkpoints_are_valid(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    out = disk / "run"
    train = command("train", JOB, "-n", 1, "--set", "max_steps=1000", "--out", out, "--json")
    if shutil.which("unshare") is None:
        pytest.skip("a small disk needs unshare")
    completed = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", SMALL_DISK, "sh", str(disk), *train],
        env={**os.environ, "OUT": str(out), "COPY": str(copy)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if completed.returncode in (1, 77) and "train" not in completed.stderr:
        pytest.skip(f"a small disk needs rights to mount one: {completed.stderr}")
    assert completed.returncode == 2, completed.stderr
    assert json.loads(completed.stdout)["steps"] == 1000, "the training ended when the disk was full"
    assert json.loads(completed.stdout)["checkpoint"] is None
    assert "No space left on device" in completed.stderr
    assert f"the trained weights are not kept in {out}" in completed.stderr
    assert "kept in" not in completed.stdout
    audited = audit(copy)
    assert audited.violation is None
    assert audited.checkpoints
    assert 0 < audited.steps < 1000
