"""Everybody's word at everybody: plain values of any size, as JSON; or yes or no."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.memory.dtypes import dtype


def all_gather_object(communicator: Communicator, mine: Any, timeout: float) -> list[Any]:
    """What every rank says, by rank; every rank must call it."""
    said = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    lengths = np.zeros(communicator.size, np.int64)
    each = Operation("all_gather", 1, dtype("int64"))
    communicator.run(each, np.array([said.size], np.int64), lengths, timeout)
    width = int(lengths.max())
    padded = np.zeros(width, np.uint8)
    padded[: said.size] = said
    heard = np.zeros(communicator.size * width, np.uint8)
    communicator.run(Operation("all_gather", width, dtype("uint8")), padded, heard, timeout)
    rows = heard.reshape(communicator.size, width)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]


def any_rank(communicator: Communicator, stop: bool, told: Array, timeout: float) -> bool:
    """All ranks meet: whether anybody wants to stop; ``told`` becomes what the one who knows had put there."""
    said = np.append(np.float64(stop), told)
    communicator.run(Operation("all_reduce", said.size, dtype("float64")), said, said, timeout)
    told[:] = said[1:].reshape(told.shape)
    return bool(said[0])
