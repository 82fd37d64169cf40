"""Reads trained weights from a run's folder or a checkpoint, exports them to other formats, and evaluates the model.

Weights need no code of the job; a model does.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from hoop.data.dataset import Dataset
from hoop.data.structured import structured
from hoop.engine.custom.evaluation import evaluate_chunks, summarise
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.evaluation import CHUNK
from hoop.engine.fault_tolerance.checkpoint_format import is_training_state
from hoop.engine.job import Job, build_model, is_given
from hoop.engine.loss_reduction import with_criterion
from hoop.engine.recipes import RECIPES
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import Criterion, num_correct
from hoop.engine.user_code import attribute_exceptions
from hoop.errors import FailedPrecondition, InvalidArgument, NotFound
from hoop.files import write_bytes
from hoop.runs.checkpoint_store import FoundCheckpoint, read, read_newest
from hoop.runs.job_follower import weights_digest
from hoop.runs.job_lookup import load_job, with_absolute_path
from hoop.runs.job_objects import load_into


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of a checkpoint, and what it says about its run. Reading them runs no code of the job."""

    found: FoundCheckpoint
    settings: Settings
    steps: int
    tensors: Mapping[str, Tensor]
    """All tensors of the checkpoint, by name."""
    weights_sha256: str

    def state(self) -> dict[str, Tensor]:
        """The model's weights and buffers under its names. One that two modules share is there once."""
        return {name: tensor for name, tensor in self.tensors.items() if not is_training_state(name)}


@dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a checkpoint."""

    weights: TrainedWeights
    job_name: str
    job: Job
    model: nn.Module

    @property
    def settings(self) -> Settings:
        return self.weights.settings


def load_weights(place: Path) -> TrainedWeights:
    """The weights of a checkpoint, or of the newest checkpoint of a run's folder whose checksum holds."""
    if not place.exists():
        raise NotFound(f"{place}: neither a run's folder (what --out named) nor a checkpoint")
    found, tensors, metadata = read_newest(place) if place.is_dir() else (FoundCheckpoint(place), *read(place))
    if "settings" not in metadata:
        raise FailedPrecondition(f"{found.path}: a checkpoint without settings; which model it is of is not known")
    settings, steps = Settings.from_json(json.dumps(metadata["settings"])), metadata.get("steps")
    if not isinstance(steps, int):
        raise FailedPrecondition(f"{found.path}: a checkpoint without its number of steps")
    return TrainedWeights(found, settings, steps, tensors, weights_digest(tensors))


def with_model(weights: TrainedWeights, job: str | None = None) -> TrainedModel:
    """The model of a checkpoint.

    A checkpoint names its job, and loading a job runs its code. So only a recipe is loaded by that name: the user must
    give any other ``job``.
    """
    name, path = weights.settings.job if job is None else with_absolute_path(job), weights.found.path
    if job is None and is_given(name):
        raise FailedPrecondition(
            f"{path}: this run was started by hoop.train with the objects of a program, which its folder has not got. "
            "Write the same model, data and loss as a hoop.Job into a file and name it: --job file.py:name. The "
            "weights alone need no code: hoop export FOLDER --to model.safetensors"
        )
    if job is None and name not in RECIPES:
        raise FailedPrecondition(
            f"{path}: it is of the job {name}, which is no recipe; a checkpoint must not choose the code that "
            "is run: name the job yourself, with --job file.py:name or --job module:name"
        )
    known = load_job(name, load=False)
    with attribute_exceptions(f"making the model of {name}"):
        model = build_model(known, weights.settings.seed)
    load_into(model, weights.tensors)
    return TrainedModel(weights, name, known, model)


def measure(one: TrainedModel) -> dict[str, Any]:
    """Loss and accuracy on the test data, computed in this process; on the training data if the job has no test data.

    ``split`` in the result says which.
    """
    weights = one.weights
    with attribute_exceptions(f"evaluating {one.job_name}"):
        splits = one.job.data()
        data = splits.test
        one.model.eval()
        job = with_criterion(one.job, splits.train, one.settings.seed, one.model)
        accuracy: float | None
        metrics: dict[str, float] = {}
        if isinstance(job.loss, CustomLoss):
            chunk_rows = max(1, -(-one.settings.batch_size // one.settings.num_microbatches))
            rows = evaluate_chunks(one.model, job.loss, structured(data), chunk_rows)
            loss, accuracy, metrics = summarise(job.loss, rows)
        else:
            assert job.criterion is not None, "with_criterion finds one, or raises"
            loss, accuracy = (value / len(data) for value in _figures(one, data, job.criterion))
    return {
        "job": one.job_name,
        "checkpoint": str(weights.found.path),
        "passed_over": list(weights.found.passed_over),
        "steps": weights.steps,
        "split": splits.evaluated_split,
        "samples": len(data),
        "accuracy": accuracy,
        "loss": loss,
        "metrics": metrics,
        "weights_sha256": weights.weights_sha256,
    }


def _figures(one: TrainedModel, data: Dataset, criterion: Criterion) -> tuple[float, float]:
    loss = right = 0.0
    half = one.settings.precision == "bfloat16"
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        for low in range(0, len(data), CHUNK):
            samples = np.arange(low, min(len(data), low + CHUNK), dtype=np.int64)
            inputs, targets = data.batch(samples, epoch=0, seed=0)
            outputs = one.model(inputs).float()
            value = float(criterion.value(outputs, targets))
            loss += criterion.weighted_value(value, len(samples), len(data))
            right += float(num_correct(outputs, targets))
    return loss, right


def export(weights: TrainedWeights, to: Path, job: str | None = None) -> None:
    """Writes the model in the format of the file name's suffix; InvalidArgument lists the known ones.

    Tensors need no code of the job. Where the code is known, a recipe's or the given ``job``'s, they are what the
    model's ``state_dict`` has; else what the checkpoint has.
    """
    if to.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({what})" for suffix, (what, _) in FORMATS.items())
        raise InvalidArgument(f"--to: {to.name!r} is of no kind that is known; name it {known}")
    write = FORMATS[to.suffix][1]
    if write is None:
        data = _program(with_model(weights, job))
    elif job is None and weights.settings.job not in RECIPES:
        data = write(weights.state())
    else:
        state = with_model(weights, job).model.state_dict()
        data = write({name: tensor.detach().clone() for name, tensor in state.items()})
    write_bytes(to, data)


def _safetensors(state: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save(dict(state))


def _npz(state: Mapping[str, Tensor]) -> bytes:
    file = io.BytesIO()
    # NumPy has no bfloat16, whose values are float32's.
    arrays = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in state.items()
    }
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _program(one: TrainedModel) -> bytes:
    """A ``torch.export`` program for any batch size, with the model's code."""
    data = one.job.data().test
    inputs = data.batch(np.arange(2, dtype=np.int64), epoch=0, seed=0)[0]
    one.model.eval()
    with attribute_exceptions(f"exporting {one.job_name}"):
        program = torch.export.export(
            one.model, (inputs,), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=False
        )
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Mapping[str, Tensor]], bytes] | None]] = {
    ".safetensors": ("a plain state_dict", _safetensors),
    ".npz": ("the same for NumPy", _npz),
    ".pt2": ("a torch.export program, code included", None),
}
"""Description and writer of each format, by suffix. The first two contain only tensors; the last, ``_program``, is an
archive of PyTorch's, and needs the job."""
