"""Processes that run the ranks of a process group, forked from a forkserver that has loaded torch."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LONG_S = 240.0
"""Longer than any of these tests takes, even on a busy machine."""
PRELOADED = [
    "pytest",  # as the modules of the tests, which each rank imports
    "torch._dynamo",  # DistributedDataParallel imports it
    "torch.distributed.tensor",
    "torch.distributed.optim",
    "torch.distributed.fsdp",
    "hoop.torch_backend.process_group",
    "hoop.torch_versions",
    "hoop.horovod",
]


@dataclass
class World:
    """A number of ranks that run a function. Their rendezvous is a file."""

    folder: Path
    size: int
    backend: str = "hoop"
    timeout: float = LONG_S
    before: Callable[[int], None] | None = None
    """Called in each rank, with its number, before it joins the group."""
    joins: bool = True
    """False: ranks join no group; the function does it."""
    processes: list[BaseProcess] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Every rank joins the group, runs ``function(rank, *args)`` and leaves."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, self._init_options(), self.before, sender, function, args)
            )
            process.start()
            sender.close()
            self.processes.append(process)
            self._pipes.append(receiver)

    def _init_options(self) -> dict[str, Any] | None:
        if not self.joins:
            return None
        return {
            "backend": self.backend,
            "init_method": f"file://{self.folder / 'meet'}",
            "world_size": self.size,
            "timeout": timedelta(seconds=self.timeout),
        }

    def result(self, rank: int) -> Any:
        """Returns the result of a rank's function; fails with the traceback if it raised."""
        assert self._pipes[rank].poll(LONG_S), f"rank {rank} sent no result within {LONG_S:g} s"
        try:
            status, value = self._pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(LONG_S)
            raise AssertionError(f"rank {rank} ended with {self.processes[rank].exitcode}") from None
        assert status == "returned", f"rank {rank}:\n{value}"
        return value

    def results(self) -> list[Any]:
        """Returns the results of all ranks; fails unless all processes exit with 0."""
        values = [self.result(rank) for rank in range(self.size)]
        for rank, process in enumerate(self.processes):
            process.join(LONG_S)
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
        return values

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _run_rank(
    rank: int,
    init_options: dict[str, Any] | None,
    before: Callable[[int], None] | None,
    pipe: Connection,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    try:
        if before is not None:
            before(rank)
        if init_options is not None:
            dist.init_process_group(rank=rank, **init_options)
        value = function(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(("returned", value))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
        os._exit(1)
