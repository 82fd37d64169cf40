"""``--max-restarts`` and ``max_restarts``: refused where this process does not start the devices."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_environments import kubernetes, open_mpi, slurm, torchrun
from typer.testing import CliRunner

import hoop
from hoop.cli.commands import command_line
from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument
from hoop.launch.rank_processes import RunConfig
from hoop.runs.training import Launch, Training, check_restarts

JOB = "nothing.py:job"
"""Not there: an error that does not name it comes before the job is loaded."""
NO_EFFECT = "max_restarts (--max-restarts): 2 has no effect here, because"
CLUSTER = f"{NO_EFFECT} the devices are those of the cluster at n01:4021; leave it out"
RAY = f"{NO_EFFECT} the devices are actors of a Ray cluster; leave it out"


def refusal(*arguments: str) -> str:
    """The error of ``hoop train`` with these arguments."""
    error = CliRunner().invoke(command_line(["train"]), ["train", JOB, *arguments]).exception
    assert isinstance(error, InvalidArgument), error
    return str(error)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--on ray`` imports Ray, which may not be installed. The command sets the variable."""
    monkeypatch.setattr("hoop.launch.ray_cluster.import_ray", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--coordinator", "n01:4021"], CLUSTER),
        (["--coordinator", "n01:4021", "--detach"], CLUSTER),
        (["--on", "ray"], RAY),
    ],
)
def test_the_command_refuses_it_on_a_cluster(options: list[str], sentence: str) -> None:
    assert refusal("--max-restarts", "2", *options).startswith(sentence)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("environment", [slurm, open_mpi, torchrun, kubernetes], ids=lambda one: one.__name__)
def test_every_rank_of_a_scheduler_refuses_it(environment: Any, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(rank).items():
        monkeypatch.setenv(name, value)
    found = refusal("--max-restarts", "2")
    assert found.startswith(NO_EFFECT)
    assert "has started the " in found
    assert "; leave it out: " in found


@pytest.mark.parametrize(("on", "sentence"), [("n01:4021", CLUSTER), (hoop.Ray(devices=2), RAY)], ids=str)
def test_the_function_refuses_it_on_a_cluster(on: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        hoop.train(JOB, on=on, max_restarts=2)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("value", [-1, 1.5, "2"])
def test_a_wrong_number_is_named(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"max_restarts: .* is not a whole number of at least 0"):
        hoop.train(JOB, max_restarts=value)


def test_devices_of_this_machine_may_have_restarts() -> None:
    for given in (None, 0, 5):
        check_restarts(given, None)


def test_without_checkpoints_there_is_nothing_to_restart_from() -> None:
    launch = Launch(settings=Settings(), devices=1, max_restarts=2)
    with pytest.raises(InvalidArgument, match=r"max_restarts \(--max-restarts\): 2 .* with out \(--out\)"):
        Training(launch)


def test_hoop_run_refuses_restarts_that_no_process_would_wait_for() -> None:
    with pytest.raises(InvalidArgument, match=r"--max-restarts: 2 has no effect without --min-np"):
        RunConfig(("train.py",), 2, {}, max_restarts=2)
