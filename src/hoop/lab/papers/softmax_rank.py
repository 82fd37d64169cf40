"""Paper 4's job by hand: one rank of softmax regression on MNIST, alone or under mpirun, with a profile.

``python softmax_rank.py FOLDER ENLARGE EPOCHS RATE`` or ``mpirun -n 2 python softmax_rank.py …``, by any Python with
NumPy (and mpi4py, where there are several ranks). FOLDER has images.npy, labels.npy and weights.npy; an image is
enlarged so many times each way as it is read. Rank 0 prints one line of JSON: seconds and loss of each epoch, seconds
in each function.

As in the paper, every rank computes the gradient of its images; MPI_Reduce adds them up at the root, which updates and
sends the weights to all by MPI_Bcast.
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
"""Images at a time: they, as floats, stay in the cache of one core, or nearly."""


class Rank:
    """Some of the images, all of the weights."""

    def __init__(self, folder: pathlib.Path, enlarge: int, rate: float, world: Any) -> None:
        import numpy as np

        self.np, self.world, self.enlarge, self.rate = np, world, enlarge, rate
        rank, size = (world.rank, world.size) if world else (0, 1)
        images, labels = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("images", "labels")
        )
        self.total = len(images)
        mine = slice(self.total * rank // size, self.total * (rank + 1) // size)
        self.images, self.labels = np.array(images[mine]), np.array(labels[mine])
        self.weights = np.load(folder / "weights.npy", allow_pickle=False)  # a row a class, the bias last
        self.seconds: dict[str, float] = defaultdict(float)

    def epoch(self) -> float:
        """The mean loss of the epoch."""
        np = self.np
        gradient = np.zeros(
            (len(self.weights), self.weights.shape[1] + 1), np.float32
        )  # and one column for the loss
        for low in range(0, len(self.images), CHUNK):
            pixels = self.timed("load", self.load, low)
            logits = self.timed("hypothesis", self.hypothesis, pixels)
            chances = self.timed("softmax", self.softmax, logits)
            self.timed("gradient_update", self.gradient_update, gradient, pixels, chances, low)
        if self.world:
            self.timed("communicate", self.reduce, gradient)
        self.timed("training_step", self.step, gradient)
        if self.world:
            self.timed("communicate", self.world.Bcast, self.weights)
        return float(gradient[:, -1].sum()) / self.total

    def timed(self, name: str, call: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self.seconds[name] += time.perf_counter() - started
        return result

    def load(self, low: int) -> Any:
        """Normalised, enlarged, flat, with a one at the end for the bias."""
        np = self.np
        some = self.images[low : low + CHUNK]
        for axis in (1, 2):
            some = np.repeat(some, self.enlarge, axis=axis) if self.enlarge > 1 else some
        flat = np.ones((len(some), some.shape[1] * some.shape[2] + 1), np.float32)
        np.subtract(some.reshape(len(some), -1), np.float32(255 * 0.1307), out=flat[:, :-1])
        flat[:, :-1] *= np.float32(1 / (255 * 0.3081))
        return flat

    def hypothesis(self, pixels: Any) -> Any:
        return pixels @ self.weights.T

    def softmax(self, logits: Any) -> Any:
        np = self.np
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        return raised / raised.sum(axis=1, keepdims=True)

    def gradient_update(self, gradient: Any, pixels: Any, chances: Any, low: int) -> None:
        np = self.np
        labels = self.labels[low : low + CHUNK]
        right = np.arange(len(labels))
        gradient[0, -1] -= np.log(chances[right, labels]).sum()
        chances[right, labels] -= 1
        gradient[:, :-1] += chances.T @ pixels

    def reduce(self, gradient: Any) -> None:
        whole = self.np.empty_like(gradient)
        self.world.Reduce(gradient, whole)
        if self.world.rank == 0:
            gradient[:] = whole

    def step(self, gradient: Any) -> None:
        if not self.world or self.world.rank == 0:
            self.weights -= self.np.float32(self.rate / self.total) * gradient[:, :-1]


def main() -> None:
    world = None
    if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    folder, enlarge, epochs, rate = sys.argv[1:]
    rank = Rank(pathlib.Path(folder), int(enlarge), float(rate), world)
    seconds, losses = [], []
    for _ in range(int(epochs)):
        started = time.perf_counter()
        losses.append(rank.epoch())
        seconds.append(time.perf_counter() - started)
    if world is None or world.rank == 0:
        told = {"seconds": seconds, "loss": losses, "functions": rank.seconds}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
