"""Collectives of small Python values: all-gather of any JSON value, and OR of a flag."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.memory.dtypes import dtype


def all_gather_object(communicator: Communicator, own: Any, timeout: float) -> list[Any]:
    """Collective. The values of all ranks, in rank order; each must be serializable as JSON."""
    encoded = np.frombuffer(json.dumps(own).encode(), np.uint8)
    lengths = np.zeros(communicator.size, np.int64)
    gather_lengths = Operation("all_gather", 1, dtype("int64"))
    communicator.run(gather_lengths, np.array([encoded.size], np.int64), lengths, timeout)
    width = int(lengths.max())
    padded = np.zeros(width, np.uint8)
    padded[: encoded.size] = encoded
    gathered = np.zeros(communicator.size * width, np.uint8)
    communicator.run(Operation("all_gather", width, dtype("uint8")), padded, gathered, timeout)
    rows = gathered.reshape(communicator.size, width)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]


def any_rank(communicator: Communicator, flag: bool, values: Array, timeout: float) -> bool:
    """Collective. Returns whether ``flag`` is set on any rank.

    Also sums ``values`` in place. If only one rank fills them and the others pass zeros, this broadcasts them.
    """
    vector = np.append(np.float64(flag), values)
    communicator.run(Operation("all_reduce", vector.size, dtype("float64")), vector, vector, timeout)
    values[:] = vector[1:].reshape(values.shape)
    return bool(vector[0])
