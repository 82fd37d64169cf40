"""Paper 4's softmax regression on a task-based engine: Ray, in the role of OmpCluster.

``python softmax_tasks.py FOLDER ENLARGE EPOCHS RATE NODES``, with NODES such as 1,2,4. As with OmpCluster, a head makes
tasks and the engine moves their data: in every epoch the head gives the weights and one task a node, each task returns
the gradient of its images, and the head sums them and updates the weights. The images are in the engine's memory from
the beginning. Prints one line of JSON for each number of nodes, as ``softmax_rank.py`` does.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from hoop.lab.papers.softmax_rank import Rank, read, share


def gradient(images: Any, labels: Any, weights: Any, enlarge: int) -> Any:
    """A task: the gradient of these images."""
    return Rank(images, labels, weights, enlarge).gradient()


def train(folder: pathlib.Path, enlarge: int, epochs: int, rate: float, nodes: int) -> dict[str, Any]:
    images, labels, weights = read(folder)
    parts = []
    for node in range(nodes):
        mine = share(len(images), node, nodes)
        parts.append((ray.put(images[mine].copy()), ray.put(labels[mine].copy())))
    task = ray.remote(gradient).options(num_cpus=1)
    seconds, losses, waiting = [], [], 0.0
    for _ in range(epochs):
        started = time.perf_counter()
        sent = ray.put(weights)
        gradients = ray.get([task.remote(*part, sent, enlarge) for part in parts])
        waiting += time.perf_counter() - started
        total = sum(gradients[1:], start=gradients[0].copy())
        weights = weights - weights.dtype.type(rate / len(images)) * total[:, :-1]
        losses.append(float(total[:, -1].sum()) / len(images))
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "loss": losses, "functions": {"tasks": waiting}}


def main() -> None:
    folder, enlarge, epochs, rate, nodes = sys.argv[1:]
    counts = [int(one) for one in nodes.split(",")]
    ray.init(address="local", num_cpus=max(counts), include_dashboard=False, log_to_driver=False)
    try:
        for count in counts:
            train(pathlib.Path(folder), int(enlarge), 1, float(rate), count)  # starts the processes of the tasks
            found = train(pathlib.Path(folder), int(enlarge), int(epochs), float(rate), count)
            sys.stdout.write(json.dumps(found) + "\n")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
