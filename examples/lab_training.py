"""The lab's training in six steps, by a client that knows only its protocol (gpu_sim).

    python examples/lab_training.py                            starts a cluster here, uses it, ends it
    python examples/lab_training.py --coordinator HOST:PORT    uses one that is running (hoop up --lab)

    (1) load        images, a batch for each device
    (2) Memcpy      the weights into every device's memory
    (3) forward and backward of each device's batch, by the client: the lab's devices have memory and links
        Memcpy      each device's gradient into its memory
    (4) AllReduceRing   SUM over the devices
    (5) update      from the sum, and the new weights into memory
    (6) evaluate    on images that were not trained on

The client does the computation of the GPUs; data moves between the devices. Vectors are float64.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from itertools import pairwise

import gpu_sim_messages as lab  # beside this file
import grpc
import numpy as np
from lab_client import LabClient, own_cluster

from hoop.data import load

SIZES = (784, 32, 10)
Weights = list[np.ndarray]


def initial_weights(seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    pairs = pairwise(SIZES)
    return [part for n, m in pairs for part in (rng.normal(0, np.sqrt(2 / n), (n, m)), np.zeros(m))]


def flatten(weights: Weights) -> np.ndarray:
    return np.concatenate([part.ravel() for part in weights])


def unflatten(vector: np.ndarray) -> Weights:
    """The inverse of ``flatten``."""
    shapes = [shape for n, m in pairwise(SIZES) for shape in ((n, m), (m,))]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(vector, ends[:-1]), shapes, strict=True)]


def forward(weights: Weights, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The activations of the hidden layer, and the probability of each class."""
    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    scores = hidden @ weights[2] + weights[3]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def backward(
    weights: Weights, images: np.ndarray, hidden: np.ndarray, probabilities: np.ndarray, labels: np.ndarray
) -> Weights:
    """The gradient of the summed cross-entropy."""
    scores = probabilities.copy()
    scores[np.arange(len(labels)), labels] -= 1
    hidden_gradient = (scores @ weights[2].T) * (hidden > 0)
    return [images.T @ hidden_gradient, hidden_gradient.sum(axis=0), hidden.T @ scores, scores.sum(axis=0)]


def train(channel: grpc.Channel, devices: int, steps: int, batch: int, rate: float, count_unit: str) -> float:
    """Train, and return the accuracy on the test images."""
    data = load("mnist")  # (1)
    images, labels = (tensor.numpy() for tensor in data.train.batch(np.arange(20_000), epoch=0, seed=0))
    images = images.reshape(len(images), -1).astype(np.float64)
    rng = np.random.default_rng(seed=3)

    comm = LabClient(channel, devices, count_unit)
    vector = flatten(initial_weights(seed=0))
    count = len(vector)
    weights_at = [comm.address(rank) for rank in range(devices)]
    gradients_at = [comm.address(rank, 8 * count) for rank in range(devices)]
    for rank in range(devices):
        comm.write(rank, weights_at[rank], vector)  # (2)
    for step in range(steps):
        loss = 0.0
        for rank in range(devices):
            samples = rng.integers(len(images), size=batch)
            weights = unflatten(comm.read(rank, weights_at[rank], count))
            hidden, probabilities = forward(weights, images[samples])  # (3)
            loss -= np.log(probabilities[np.arange(batch), labels[samples]] + 1e-12).sum()
            gradient = backward(weights, images[samples], hidden, probabilities, labels[samples])
            comm.write(rank, gradients_at[rank], flatten(gradient))
        comm.all_reduce(lab.SUM, gradients_at, count)  # (4)
        for rank in range(devices):  # (5) every device uses its own copy of the sum
            total = comm.read(rank, gradients_at[rank], count)
            vector = comm.read(rank, weights_at[rank], count) - rate / (devices * batch) * total
            comm.write(rank, weights_at[rank], vector)
        if step % 50 == 0 or step + 1 == steps:
            print(f"  step {step + 1:>4}  loss {loss / (devices * batch):.4f}")

    held = [comm.read(rank, weights_at[rank], count) for rank in range(devices)]
    if not all((one == held[0]).all() for one in held):
        raise RuntimeError("the devices do not hold the same weights")
    images, labels = (tensor.numpy() for tensor in data.test.batch(np.arange(len(data.test)), epoch=0, seed=0))
    _, probabilities = forward(unflatten(held[0]), images.reshape(len(images), -1).astype(np.float64))  # (6)
    comm.on_all("CommDestroy")
    return float((probabilities.argmax(axis=1) == labels).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description="The lab's training in six steps.")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="use this one instead of starting a cluster")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="samples a device and step")
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--count-unit", choices=["bytes", "elements"], default="bytes")
    options = parser.parse_args()
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        try:
            count = 2 * len(flatten(initial_weights(0)))
            coordinator = options.coordinator or stack.enter_context(
                own_cluster(options.devices, count, options.count_unit)
            )
            channel = stack.enter_context(
                grpc.insecure_channel(coordinator, options=[("grpc.max_receive_message_length", 64 << 20)])
            )
            print(f"{options.devices} devices at {coordinator}")
            started = time.perf_counter()
            accuracy = train(channel, options.devices, options.steps, options.batch, options.rate, options.count_unit)
        except grpc.RpcError as error:
            print(f"lab_training: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(f"accuracy {accuracy:.2%} after {options.steps} steps, {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
