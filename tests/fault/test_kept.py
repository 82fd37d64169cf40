"""What a run keeps, when devices, processes, disks and files fail: the ledger holds, and the model is the right one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reported_rows import check_run
from typer.testing import CliRunner

from hoop.cli.main import app
from hoop.runs.audit import audit
from hoop.runs.checkpoint_store import listed, step_of
from hoop.runs.ledger import NAME, lines

JOB = f"{Path(__file__).with_name('mortal_job.py')}:job"
PATIENCE_S = 100.0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hoop", *map(str, arguments)]


@contextlib.contextmanager
def training(out: Path, *more: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run with checkpoints all the time."""
    with subprocess.Popen(
        command("train", JOB, "--out", out, *more, "--json"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def until(happened: Callable[[], object], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline, "it does not come"
        threading.Event().wait(0.01)


def finished(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, errors
    found: dict[str, Any] = json.loads(out)
    return found


def undisturbed(*limit: object) -> str:
    """The weights of one device that nothing happens to."""
    with subprocess.Popen(command("train", JOB, "-n", 1, *limit, "--json"), text=True, stdout=subprocess.PIPE) as run:
        return str(finished(run)["weights_sha256"])


def test_the_shards_of_a_device_that_died_in_one_are_taken_over_once_and_the_ledger_says_by_whom(
    tmp_path: Path,
) -> None:
    out, mark = tmp_path / "run", tmp_path / "mark"
    limit = ("--set", "max_steps=600", "--set", "balance=false")
    with training(out, "-n", 3, *limit, MORTAL_MARK=str(mark)) as run:
        until(lambda: listed(out), run)
        mark.touch()
        weights = finished(run)["weights_sha256"]
    assert (tmp_path / "mark.fired").exists(), "nobody died"
    assert weights == undisturbed(*limit)
    found = check_run(out, 600)
    (taken,) = found.taken_over
    (dead,) = taken["lost"]
    by = {line.entry["step"]: line.entry["by"] for line in lines(out / NAME) if "step" in line.entry}
    step = taken["step"]
    mine = [shard for shard, device in enumerate(by[step - 1]) if device == dead]
    assert len(mine) == 2
    assert taken["by"] == {str(shard): by[step][shard] for shard in mine}
    assert {*taken["by"].values()} <= {1, 2, 3} - {dead}
    assert not any(dead in one for at, one in by.items() if at >= step)


@pytest.mark.slow
def test_a_run_whose_leader_was_killed_goes_on_from_the_checkpoint_before_the_damaged_one(
    tmp_path: Path,
) -> None:
    out, address = tmp_path / "run", tmp_path / "address"
    with training(out, "-n", 1, "--address-file", address) as run:
        until(lambda: len(listed(out)) == 2, run)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        (head,) = (int(one) for one in children)
        os.kill(head, signal.SIGKILL)
        run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 3
    (out / "checkpoints" / ".torn.1-2.part").write_bytes(b"half")
    newest, before = listed(out)
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    assert f"{newest}: damaged or tampered with" in (audit(out).violation or "")

    asked = CliRunner().invoke(app, ["evaluate", str(out), "--json"])
    assert f"warning: {newest}: damaged" in asked.stderr
    assert json.loads(asked.stdout)["steps"] == step_of(before)
    refused = CliRunner().invoke(app, ["export", str(newest), "--to", str(tmp_path / "x.npz")])
    assert str(newest) in str(refused.exception)

    limit = step_of(newest) + 100
    with training(out, "--resume", "--set", f"max_steps={limit}") as run:
        result = finished(run)
    assert result["weights_sha256"] == undisturbed("--set", f"max_steps={limit}")
    assert not list(out.glob("checkpoints/.*")), "something half written is left"
    assert newest.with_name(newest.name + ".damaged").exists()
    asked = CliRunner().invoke(app, ["audit", str(out), "--json"])
    found = json.loads(asked.stdout)
    assert (asked.exit_code, found["holds"]) == (0, True), found
    assert found["resumed"] == [step_of(before)]
    assert found["repeated"] > 0
    assert found["steps"] == limit

    ledger = out / NAME
    ledger.write_bytes(ledger.read_bytes().replace(b'"step":2,', b'"step":3,'))
    asked = CliRunner().invoke(app, ["audit", str(out)])
    assert asked.exit_code == 1
    assert "line 3: the chain is broken" in asked.stdout


SMALL = 'mount -t tmpfs -o size=100k hoop "$1" || exit 77; shift; "$@"; code=$?; cp -r "$OUT" "$COPY"; exit $code'


@pytest.mark.slow
def test_a_full_disk_ends_no_training_and_what_was_kept_is_whole(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    out = disk / "run"
    train = command("train", JOB, "-n", 1, "--set", "max_steps=1000", "--out", out, "--json")
    if shutil.which("unshare") is None:
        pytest.skip("a small disk needs unshare")
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", SMALL, "sh", str(disk), *train],
        env={**os.environ, "OUT": str(out), "COPY": str(copy)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode in (1, 77) and "train" not in done.stderr:
        pytest.skip(f"a small disk needs rights to mount one: {done.stderr}")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["steps"] == 1000, "the training ended with the disk"
    assert json.loads(done.stdout)["checkpoint"] is None
    assert "No space left on device" in done.stderr
    assert f"the trained weights are not kept in {out}" in done.stderr
    found = audit(copy)
    assert found.violation is None
    assert found.checkpoints
    assert 0 < found.steps < 1000
