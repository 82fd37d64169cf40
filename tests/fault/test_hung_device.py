"""A device that lives and hangs is named with its stack, and replaced: the others go on to the same weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import preloaded
import pytest
from trainings import ENV, HOOP, TIMEOUT_S

from hoop.runs.audit import audit

JOB = Path(__file__).with_name("hung_job.py")
HANG_S = "4"


def train(out: Path, devices: int, strategy: str, mark: Path | None = None, kind: str = "") -> tuple[str, str]:
    """Runs the job; returns the hash of its weights, and what it says on standard error."""
    limits = ["--memory", "64MiB", "--set", "max_steps=60", "--set", f"hang_s={HANG_S}"]
    command = [*HOOP, "train", f"{JOB}:job", "--devices", str(devices), "--strategy", strategy, *limits]
    run = preloaded.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**ENV, "HANG_MARK": str(mark or ""), "HANG_KIND": kind, "HANG_RUN": str(out) if mark else ""},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads((out / "result.json").read_text())
    return str(result["weights_sha256"]), run.stderr


@functools.cache
def undisturbed(folder: Path) -> str:
    return train(folder / "undisturbed", 1, "data")[0]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("sleep", "data", id="sleep"),
        pytest.param("loop", "pipeline:1f1b", id="endless loop, pipeline"),
        pytest.param("interpreter", "data", id="interpreter's lock held"),
        pytest.param("lock", "data", id="lock", marks=pytest.mark.slow),
        pytest.param("sleep", "data:sharded", id="sleep, sharded", marks=pytest.mark.slow),
        pytest.param("sleep", "ps:bsp", id="sleep, ps", marks=pytest.mark.slow),
    ],
)
def test_a_device_that_hangs_is_named_and_replaced(
    kind: str, strategy: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    weights, said = train(tmp_path / "out", 3, strategy, mark, kind)
    assert mark.with_name("mark.fired").exists()
    assert weights == undisturbed(tmp_path_factory.getbasetemp())
    assert "was lost: device" in said
    assert f"{JOB}" in said, "the stack is shown"
    if kind != "interpreter":
        assert "has made no progress for" in said
        assert "it is in forward of" in said
        assert "If it goes on like this, it is replaced after 4 s" in said, "there was a warning before"
    audited = audit(tmp_path / "out")
    assert audited.holds, audited
