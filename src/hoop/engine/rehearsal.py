"""What ranks cost each other, measured on the links of the job before its first step: for predictions.

Every rank does what a step has it do: it sends a tensor to the next rank and takes another's, and agrees with
all. Seconds are those of the calling thread, the least of a few: whoever comes late is no cost of the others'.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from hoop.collectives.communicator import Communicator
from hoop.engine.messages import Post
from hoop.engine.stages.evidence import Evidence
from hoop.engine.survival.word import vote
from hoop.plan.instructions import Instruction, Kind
from hoop.transport.base import SharedEndpoint

TURNS = 8
SMALL, LARGE = 16, 1 << 16
"""Elements of the tensors that travel."""


def rehearsed(communicator: Communicator, shards: int, timeout: float) -> dict[str, float]:
    """A message, its bytes, an agreement about a step of so many shards; all ranks must call it together."""
    if communicator.size == 1:
        return {}
    endpoint, deadline = communicator.endpoint, time.monotonic() + timeout
    post, evidence = Post(endpoint), Evidence(shards)
    following, before = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    agreed: list[float] = []
    small: list[float] = []
    large: list[float] = []

    def agree() -> None:
        told = np.zeros((1, 1 + evidence.places))
        told[:, 1:] = evidence.rows(0, 1)
        vote(communicator, False, told, timeout)
        evidence.adopt(0, told[:, 1:])

    for turn in range(TURNS):
        for elements, found in ((SMALL, small), (LARGE, large)):
            agreed.append(_seconds(agree))
            tensor = torch.zeros(elements)

            def exchange(turn: int = turn, tensor: torch.Tensor = tensor) -> None:
                post.send(Instruction(Kind.SEND_OUTPUT, 0, turn, following), tensor, deadline)
                post.receive(before, deadline)
                endpoint.flush(deadline)

            found.append(_seconds(exchange) / 2)  # half of it as who sends, half as who receives
    costs = {
        "message_s": min(small),
        "byte_s": max(0.0, min(large) - min(small)) / (4 * (LARGE - SMALL)),
        "agree_s": min(agreed),
    }
    if isinstance(endpoint, SharedEndpoint):
        costs["meeting_s"] = min(_seconds(lambda: endpoint.meet(deadline)) for _ in range(2 * TURNS))
    return costs


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started
