"""Paper 4's job by hand, in processes of its own: alone, and under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hoop.data.mnist import mnist
from hoop.errors import FailedPrecondition, PeerLost
from hoop.models.softmax import softmax
from hoop.papers.lab import end

SCRIPT = Path(__file__).with_name("softmax_rank.py")
PATIENCE_S = 3600.0


@dataclass(frozen=True)
class ByHand:
    """What a run of it told."""

    seconds: list[float]
    loss: list[float]
    functions: dict[str, float]

    @property
    def epoch(self) -> float:
        """The median time of an epoch, the first left out where there are more."""
        settled = sorted(self.seconds[1:] or self.seconds)
        return settled[len(settled) // 2]


@contextmanager
def laid_out(images: int, side: int) -> Iterator[Path]:
    """A folder with the images, their labels and the first weights, the very ones that Hoop begins with."""
    train: Any = mnist().train
    model: Any = softmax(0, inputs=side * side)
    weights = np.hstack([model[1].weight.detach().numpy(), model[1].bias.detach().numpy()[:, None]])
    with tempfile.TemporaryDirectory(prefix="hoop-") as name:
        folder = Path(name)
        np.save(folder / "images.npy", train.images[:images, 0])
        np.save(folder / "labels.npy", train.labels[:images])
        np.save(folder / "weights.npy", weights.astype(np.float32))
        yield folder


def alone(folder: Path, side: int, epochs: int, rate: float) -> ByHand:
    """One process, one core."""
    return _run([sys.executable], folder, side, epochs, rate)


def under_mpi(mpirun: Path, ranks: int, folder: Path, side: int, epochs: int, rate: float) -> ByHand:
    """So many ranks of MPI."""
    python = next((one for one in (str(mpirun.parent / "python"), sys.executable) if _has_mpi(one)), "")
    if not python:
        raise FailedPrecondition(
            f"mpirun: neither the Python beside {mpirun} nor this one has mpi4py and numpy"
        )
    options = ["--oversubscribe", "--bind-to", "none"]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    return _run([str(mpirun), "-n", str(ranks), *options, python], folder, side, epochs, rate)


def _has_mpi(python: str) -> bool:
    command = [python, "-c", "import mpi4py, numpy"]
    return Path(python).exists() and not subprocess.run(command, stderr=subprocess.DEVNULL).returncode


def _run(start: list[str], folder: Path, side: int, epochs: int, rate: float) -> ByHand:
    command = [*start, str(SCRIPT), str(folder), str(side // 28), str(epochs), repr(rate)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            end(process)
    if process.returncode:
        raise PeerLost(f"{' '.join(start)} ended with code {process.returncode}; what it printed is above")
    return ByHand(**json.loads(out.strip().splitlines()[-1]))
