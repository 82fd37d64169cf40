"""The hand-written baseline of paper 4: one rank of softmax regression on MNIST, serial or under mpirun, profiled.

``python softmax_rank.py FOLDER ENLARGE EPOCHS RATE`` or ``mpirun -n 2 python softmax_rank.py …``, with any Python that
has NumPy (and mpi4py for several ranks). FOLDER has images.npy, labels.npy and weights.npy. Each image is enlarged by
the factor ENLARGE in both directions when it is read. Rank 0 prints one line of JSON: seconds and loss of each epoch,
seconds in each function.

As in the paper, every rank computes the gradient of its images. MPI_Reduce sums the gradients at the root, which
updates the weights and sends them to all ranks with MPI_Bcast.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections import defaultdict
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

CHUNK = 500
"""Number of images that are computed at a time: as floats they nearly fit into the cache of one core."""


class Rank:
    """One rank: its share of the images, and all weights (one row per class, the bias last)."""

    def __init__(self, images: Any, labels: Any, weights: Any, enlarge: int) -> None:
        import numpy as np

        self.np, self.enlarge = np, enlarge
        self.images, self.labels, self.weights = images, labels, weights
        self.world: Any = None
        self.rate, self.total = 0.0, len(images)
        self.seconds: dict[str, float] = defaultdict(float)

    @classmethod
    def read(cls, folder: pathlib.Path, enlarge: int, rate: float, world: Any) -> Rank:
        """The rank ``world.rank`` of ``world.size``, with its share of the images in the folder."""
        rank, size = (world.rank, world.size) if world else (0, 1)
        images, labels, weights = read(folder)
        mine = share(len(images), rank, size)
        one = cls(images[mine].copy(), labels[mine].copy(), weights, enlarge)
        one.world, one.rate, one.total = world, rate, len(images)
        return one

    def epoch(self) -> float:
        """Train one epoch; returns its mean loss."""
        gradient = self.gradient()
        if self.world:
            self.timed("communicate", self.reduce, gradient)
        self.timed("training_step", self.step, gradient)
        if self.world:
            self.timed("communicate", self.world.Bcast, self.weights)
        return float(gradient[:, -1].sum()) / self.total

    def gradient(self) -> Any:
        """The sum over this rank's images, with one more column for the loss."""
        np = self.np
        gradient = np.zeros((len(self.weights), self.weights.shape[1] + 1), np.float32)
        for low in range(0, len(self.images), CHUNK):
            pixels = self.timed("load", self.load, low)
            logits = self.timed("hypothesis", self.hypothesis, pixels)
            probabilities = self.timed("softmax", self.softmax, logits)
            self.timed("gradient_update", self.gradient_update, gradient, pixels, probabilities, low)
        return gradient

    def timed(self, name: str, call: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self.seconds[name] += time.perf_counter() - started
        return result

    def load(self, low: int) -> Any:
        """CHUNK images from ``low`` on: enlarged, flattened, normalised, with a one at the end for the bias."""
        np = self.np
        chunk = self.images[low : low + CHUNK]
        for axis in (1, 2):
            chunk = np.repeat(chunk, self.enlarge, axis=axis) if self.enlarge > 1 else chunk
        flat = np.ones((len(chunk), chunk.shape[1] * chunk.shape[2] + 1), np.float32)
        np.subtract(chunk.reshape(len(chunk), -1), np.float32(255 * 0.1307), out=flat[:, :-1])
        flat[:, :-1] *= np.float32(1 / (255 * 0.3081))
        return flat

    def hypothesis(self, pixels: Any) -> Any:
        return pixels @ self.weights.T

    def softmax(self, logits: Any) -> Any:
        np = self.np
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def gradient_update(self, gradient: Any, pixels: Any, probabilities: Any, low: int) -> None:
        np = self.np
        labels = self.labels[low : low + CHUNK]
        samples = np.arange(len(labels))
        gradient[0, -1] -= np.log(probabilities[samples, labels]).sum()
        probabilities[samples, labels] -= 1
        gradient[:, :-1] += probabilities.T @ pixels

    def reduce(self, gradient: Any) -> None:
        total = self.np.empty_like(gradient)
        self.world.Reduce(gradient, total)
        if self.world.rank == 0:
            gradient[:] = total

    def step(self, gradient: Any) -> None:
        if not self.world or self.world.rank == 0:
            self.weights -= self.np.float32(self.rate / self.total) * gradient[:, :-1]


def read(folder: pathlib.Path) -> tuple[Any, Any, Any]:
    """Images and labels, which are mapped, and the initial weights."""
    import numpy as np

    images, labels = (
        np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("images", "labels")
    )
    return images, labels, np.load(folder / "weights.npy", allow_pickle=False)


def share(total: int, rank: int, size: int) -> slice:
    """The images of a rank."""
    return slice(total * rank // size, total * (rank + 1) // size)


def main() -> None:
    world = None
    if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    folder, enlarge, epochs, rate = sys.argv[1:]
    rank = Rank.read(pathlib.Path(folder), int(enlarge), float(rate), world)
    seconds, losses = [], []
    for _ in range(int(epochs)):
        started = time.perf_counter()
        losses.append(rank.epoch())
        seconds.append(time.perf_counter() - started)
    if world is None or world.rank == 0:
        result = {"seconds": seconds, "loss": losses, "functions": rank.seconds}
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
