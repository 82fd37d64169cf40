"""Loads a trained model from a run's folder or a checkpoint, evaluates it, and exports it to other formats."""

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
from hoop.engine.job import Job, build_model
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
class TrainedModel:
    """A model with the weights of a checkpoint."""

    found: FoundCheckpoint
    settings: Settings
    steps: int
    job: Job
    model: nn.Module
    weights_sha256: str


def load_trained(place: Path, job: str | None = None) -> TrainedModel:
    """The model of a checkpoint, or of the newest checkpoint of a run's folder whose checksum holds.

    A checkpoint names its job, and loading a job runs its code. So only a recipe is loaded by that name: the user must
    give any other ``job``.
    """
    if not place.exists():
        raise NotFound(f"{place}: neither a run's folder (what --out named) nor a checkpoint")
    found, tensors, metadata = read_newest(place) if place.is_dir() else (FoundCheckpoint(place), *read(place))
    path = found.path
    if "settings" not in metadata:
        raise FailedPrecondition(f"{path}: a checkpoint without settings; which model it is of is not known")
    settings, steps = Settings.from_json(json.dumps(metadata["settings"])), metadata.get("steps")
    if not isinstance(steps, int):
        raise FailedPrecondition(f"{path}: a checkpoint without its number of steps")
    if job is not None:
        settings = settings.replaced({"job": with_absolute_path(job)})
    elif settings.job.startswith("inherited:"):
        raise FailedPrecondition(
            f"{path}: this run was started by hoop.train with live objects, which only that program has; "
            "there, result.model holds the weights"
        )
    elif settings.job not in RECIPES:
        raise FailedPrecondition(
            f"{path}: it is of the job {settings.job}, which is no recipe; a checkpoint must not choose the code that "
            "is run: name the job yourself, with --job file.py:name or --job module:name"
        )
    known = load_job(settings.job, load=False)
    with attribute_exceptions(f"making the model of {settings.job}"):
        model = build_model(known, settings.seed)
    load_into(model, tensors)
    return TrainedModel(found, settings, steps, known, model, weights_digest(tensors))


def measure(one: TrainedModel) -> dict[str, Any]:
    """Loss and accuracy on the test data, computed in this process; on the training data if the job has no test data.

    ``split`` in the result says which.
    """
    with attribute_exceptions(f"evaluating {one.settings.job}"):
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
        "job": one.settings.job,
        "checkpoint": str(one.found.path),
        "passed_over": list(one.found.passed_over),
        "steps": one.steps,
        "split": splits.evaluated_split,
        "samples": len(data),
        "accuracy": accuracy,
        "loss": loss,
        "metrics": metrics,
        "weights_sha256": one.weights_sha256,
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


def export(one: TrainedModel, to: Path) -> None:
    """Writes the model in the format of the file name's suffix; InvalidArgument lists the known ones."""
    if to.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({what})" for suffix, (what, _) in FORMATS.items())
        raise InvalidArgument(f"--to: {to.name!r} is of no kind that is known; name it {known}")
    write_bytes(to, FORMATS[to.suffix][1](one))


def _state(one: TrainedModel) -> Mapping[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in one.model.state_dict().items()}


def _safetensors(one: TrainedModel) -> bytes:
    return safetensors.torch.save(dict(_state(one)))


def _npz(one: TrainedModel) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{name: tensor.numpy() for name, tensor in _state(one).items()})  # type: ignore[arg-type]
    return file.getvalue()


def _program(one: TrainedModel) -> bytes:
    """A ``torch.export`` program for any batch size, with the model's code."""
    data = one.job.data().test
    inputs = data.batch(np.arange(2, dtype=np.int64), epoch=0, seed=0)[0]
    one.model.eval()
    with attribute_exceptions(f"exporting {one.settings.job}"):
        program = torch.export.export(
            one.model, (inputs,), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=False
        )
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


FORMATS: dict[str, tuple[str, Callable[[TrainedModel], bytes]]] = {
    ".safetensors": ("a plain state_dict", _safetensors),
    ".npz": ("the same for NumPy", _npz),
    ".pt2": ("a torch.export program, code included", _program),
}
"""Description and writer of each format, by suffix. The first two contain only tensors; the last is an archive of
PyTorch's."""
