"""``hvd.elastic``: a rank is killed in the middle of a training, the others go on, and its replacement is taken in."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from world import LONG_S, PRELOADED

from hoop.launch.rendezvous_server import RendezvousServer

KILLED_AT, STEPS_AFTER = 5, 3
RATE = 0.1


def train_rank(slot: int, variables: dict[str, str], pipe: Connection) -> None:
    """What a script does. Rank 1 of the first round kills itself in step ``KILLED_AT``."""
    os.environ.update(variables, LOCAL_RANK=str(slot), HOOP_ELASTIC_TIMEOUT=str(LONG_S))
    torch.set_num_threads(1)
    import hoop.horovod as hvd

    hvd.init()
    model = torch.nn.Linear(3, 1)
    if hvd.rank() == 0:
        torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), named_parameters=model.named_parameters()
    )
    is_first = variables["FIRST"] == "1"
    resets: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left:
            if is_first and slot == 1 and state.step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            # The loss is 1 * (rank + 1) for each weight: the gradient of the average depends on the number of ranks.
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
            state.step += 1
            state.sizes = [*state.sizes, hvd.size()]
            if state.step > KILLED_AT and hvd.size() == 3:
                state.left -= 1
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, left=STEPS_AFTER, sizes=[])
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    pipe.send({"rank": hvd.rank(), "step": state.step, "sizes": state.sizes, "weights": weights, "resets": resets})
    hvd.shutdown()


class Processes:
    """The launcher's part: starts processes, and says to the server when one has ended."""

    def __init__(self, size: int, min_size: int) -> None:
        self.server = RendezvousServer(size, min_size)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, "hoop.horovod"])
        self._all: list[tuple[BaseProcess, Connection]] = []

    def start(self, slot: int, first: bool) -> tuple[BaseProcess, Connection]:
        receiver, sender = self._context.Pipe(duplex=False)
        variables = {**self.server.variables, "FIRST": str(int(first))}
        process = self._context.Process(target=train_rank, args=(slot, variables, sender))
        process.start()
        sender.close()
        self._all.append((process, receiver))
        return process, receiver

    def close(self) -> None:
        for process, pipe in self._all:
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self.server.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes(3, 2)
    yield made
    made.close()


def result(process: BaseProcess, pipe: Connection) -> dict[str, Any]:
    assert pipe.poll(LONG_S), f"no result within {LONG_S:g} s"
    found: dict[str, Any] = pipe.recv()
    process.join(LONG_S)
    assert process.exitcode == 0
    return found


def expected_weights(sizes: list[int]) -> dict[str, Any]:
    """The same steps in one process: the gradient of each weight is the average of rank + 1."""
    weight = torch.nn.Parameter(torch.ones(1, 3))
    optimizer = torch.optim.SGD([weight], lr=RATE, momentum=0.9)
    for size in sizes:
        weight.grad = torch.full((1, 3), sum(range(1, size + 1)) / size)
        optimizer.step()
    return {"weight": weight.tolist()}


def test_a_killed_rank_is_replaced(processes: Processes) -> None:
    first, killed, last = (processes.start(slot, True) for slot in range(3))
    killed[0].join(LONG_S)
    assert killed[0].exitcode == -signal.SIGKILL
    processes.server.process_ended(replaced=True)
    deadline = time.monotonic() + LONG_S
    while processes.server.rounds < 2:  # the others go on before it is replaced
        assert time.monotonic() < deadline, "no round of two ranks"
        time.sleep(0.01)
    replacement = processes.start(1, False)
    results = [result(*one) for one in (first, last, replacement)]
    assert sorted(one["rank"] for one in results) == [0, 1, 2]
    sizes = results[0]["sizes"]
    # The step of the kill was not finished; the others made it again with two ranks.
    assert sizes[:KILLED_AT] == [3] * KILLED_AT
    assert sizes[-STEPS_AFTER:] == [3] * STEPS_AFTER
    middle = sizes[KILLED_AT:-STEPS_AFTER]
    assert middle == [2] * len(middle)
    for one in results:
        assert one["sizes"] == sizes
        assert one["step"] == len(sizes)
        torch.testing.assert_close(
            torch.tensor(one["weights"]["weight"]), torch.tensor(expected_weights(sizes)["weight"])
        )
        assert one["weights"] == results[0]["weights"]
    assert [one["resets"] for one in results] == [[2, 3], [2, 3], []]
    assert processes.server.rounds == 3
