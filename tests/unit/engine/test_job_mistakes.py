"""What a user may mistake in a job: its name, its fields, its data, its targets. Errors say what to write."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hoop
from hoop.engine.job import Job, find_job
from hoop.engine.job_names import RECIPE_NAMES, check_job_name
from hoop.engine.loss_reduction import with_criterion
from hoop.engine.recipes import RECIPES
from hoop.engine.stage.autograd import Criterion, Objective, cross_entropy
from hoop.errors import InvalidArgument, NotFound

X, Y = torch.randn(12, 2), torch.arange(12) % 3


def test_the_names_of_recipes_are_known_without_pytorch() -> None:
    assert tuple(RECIPES) == RECIPE_NAMES


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mnits", "job: 'mnits' is no recipe; do you mean mnist? There are softmax, mnist"),
        ("vgg16", "job: 'vgg16' is no recipe; there are softmax, mnist"),
        ("{}/jobs.py", "job: '{0}/jobs.py' names no job in the file; write {0}/jobs.py:job or {0}/jobs.py:make"),
        ("{}/none.py", "job: '{0}/none.py' names no job in the file; write {0}/none.py:NAME, with NAME = hoop.Job("),
        ("{}/gone.py", "job: '{0}/gone.py' names no job in the file; write {0}/gone.py:NAME, and there is no file"),
        ("{}/gone.py:job", "job: {0}/gone.py is not a file on this machine"),
    ],
)
def test_a_wrong_name_says_what_to_write(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "jobs.py").write_text("import hoop\njob = hoop.Job(1, 2)\ndef make() -> hoop.Job: ...\n")
    (tmp_path / "none.py").write_text("x = 1\n")
    for check in (check_job_name, lambda given: find_job(given, RECIPES)):
        with pytest.raises(NotFound) as caught:
            check(name.format(tmp_path))
        assert str(caught.value).startswith(sentence.format(tmp_path))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"batch_size": 32},
            r"Job: it has no batch_size, which is a setting: hoop.Job\(…, settings={'batch_size': 32}",
        ),
        ({"losses": "mse"}, "Job: it has no losses; there are model, data, loss, settings, about, reduction"),
        ({"data": (X, Y)}, "data: tuple is not a function; a Job takes one that loads the data: lambda: …"),
    ],
)
def test_a_wrong_field_of_a_job_says_where_it_belongs(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        Job(**{"model": nn.Linear, "data": list, **given})


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        {"x": X, "y": Y},
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), 256, shuffle=True),
        ((X, Y), (X, Y)),
    ],
)
def test_the_data_of_a_job_has_every_form_that_hoop_train_takes(data: Any) -> None:
    splits = Job(lambda seed: nn.Linear(2, 3), lambda: data).data()
    assert (len(splits.train), len(splits.test)) == (12, 12)


def test_a_loader_that_a_job_contradicts_says_what_to_write() -> None:
    job = Job(lambda seed: nn.Linear(2, 3), lambda: DataLoader(TensorDataset(X, Y), 4))
    with pytest.raises(InvalidArgument, match=r"the DataLoader has .*'batch_size': 4.* write hoop.Job\(…, settings={"):
        job.data()
    with pytest.raises(InvalidArgument, match="data: int is neither arrays nor a dataset"):
        Job(lambda seed: nn.Linear(2, 3), lambda: 7).data()


def test_an_optimizer_object_says_how_a_job_makes_one() -> None:
    optimizer: Any = torch.optim.AdamW(nn.Linear(2, 1).parameters())
    with pytest.raises(InvalidArgument, match=r"optimizer=functools.partial\(torch.optim.AdamW, lr=0.001\)"):
        hoop.train(nn.Linear(2, 3), (X, Y), optimizer=optimizer)


WRONG = "data: the target 5 is not one of the 3 classes that the model returns, 0 to 2; number the classes from 0"


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, lambda o, t: F.cross_entropy(o, t)])
@pytest.mark.parametrize("own", [{}, {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}])
def test_a_target_that_is_no_class_is_named(loss: Any, own: dict[str, Any]) -> None:
    job = Job(lambda seed: nn.Linear(2, 3), lambda: (X, torch.full((12,), 5)), loss, **own)
    with pytest.raises(InvalidArgument, match=WRONG):
        with_criterion(job, job.data().train, 0)


@pytest.mark.parametrize("minimised", ["mean", "sum"])
def test_a_target_that_is_no_class_is_named_by_hoops_loss(minimised: str) -> None:
    objective = Objective(Criterion(cross_entropy, "sum", minimised))
    with pytest.raises(InvalidArgument, match=WRONG):
        objective(torch.randn(4, 3), torch.full((4,), 5), 4)


def test_trained_float16_is_refused() -> None:
    job = Job(lambda seed: nn.Linear(2, 3).half(), lambda: (X.half(), Y))
    with pytest.raises(InvalidArgument, match=r"model: weight is float16, .* model.bfloat16\(\)"):
        with_criterion(job, job.data().train, 0, job.model(0))


class Counted(nn.Module):
    """A loss of (sum, count), as a module."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)


def test_a_module_may_return_sum_and_count() -> None:
    job = Job(lambda seed: nn.Linear(2, 3), lambda: (X, Y), Counted())
    assert not isinstance(with_criterion(job, job.data().train, 0).loss, Criterion)
