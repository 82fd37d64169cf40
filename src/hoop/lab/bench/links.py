"""Measured cost of messages and barriers between processes of this machine, and of contention between its cores."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from hoop.collectives.communicator import Communicator
from hoop.collectives.selection import measure_links
from hoop.errors import PeerLost
from hoop.topology import Address
from hoop.transport import open_transport
from hoop.transport.base import SharedEndpoint

T = TypeVar("T")
ExtraMeasurement = Callable[[Communicator], dict[str, float]]
TIMEOUT_S = 30.0
BARRIERS = 200


def link_seconds(kind: str = "shm", ranks: int = 2, more: ExtraMeasurement | None = None) -> dict[str, float]:
    """Seconds of a small message, of a byte, and (in shared memory) of a barrier, between ``ranks`` processes.

    ``more``: an additional measurement on each rank; its values replace those of the same name.
    """
    pairs = [socket.socketpair() for _ in range(ranks)]
    children = [
        fork_child(lambda rank=rank: _rank(pairs[rank][1], rank, kind, more))  # type: ignore[misc]
        for rank in range(ranks)
    ]
    try:
        files = []
        for ours, theirs in pairs:
            theirs.close()
            ours.settimeout(TIMEOUT_S)
            files.append(ours.makefile("rw"))
        addresses = [file.readline().strip() for file in files]
        for file in files:
            file.write(json.dumps(addresses) + "\n")
            file.flush()
        answer = files[0].readline()
        if not answer:
            raise PeerLost(f"{kind}: a process that measured its links ended without an answer")
        found: dict[str, float] = json.loads(answer)
        return found
    finally:
        for ours, _ in pairs:
            ours.shutdown(socket.SHUT_RDWR)  # close() would not do: the other children hold this end too
            ours.close()
        for child in children:
            os.waitpid(child, 0)


def _rank(connection: socket.socket, rank: int, kind: str, more: ExtraMeasurement | None) -> None:
    connection.settimeout(TIMEOUT_S)
    file = connection.makefile("rw")
    with open_transport(f"{kind}://127.0.0.1:0") as transport:
        file.write(f"{transport.address}\n")
        file.flush()
        peers = [Address.parse(one) for one in json.loads(file.readline())]
        endpoint = transport.endpoint(1, 1, rank, peers)
        deadline = time.monotonic() + TIMEOUT_S
        cost = measure_links(endpoint, deadline)
        found = {"message_s": cost.message_s / 2, "byte_s": cost.byte_s}  # half for each end
        if isinstance(endpoint, SharedEndpoint):
            endpoint.barrier(deadline)
            started = time.perf_counter()
            for _ in range(BARRIERS):
                endpoint.barrier(deadline)
            found["meeting_s"] = (time.perf_counter() - started) / BARRIERS
        if more is not None:
            found |= more(Communicator(endpoint))
        file.write(json.dumps(found) + "\n")
        file.flush()
        file.readline()  # EOF: the runner has the answer, so every rank is done
        endpoint.close()


def contention_factor(work: Callable[[], float], cores: int) -> float:
    """Factor by which ``work`` takes longer when all cores run it at once; ``work`` returns its seconds."""
    alone = min(run_in_parallel(work, 1))
    return max(1.0, sorted(run_in_parallel(work, cores))[cores // 2] / alone) if cores > 1 and alone else 1.0


def run_in_parallel(work: Callable[[], T], count: int) -> list[T]:
    """The results of ``work``, which must be JSON values, from ``count`` processes at once, each pinned to a core."""
    pipes = [os.pipe() for _ in range(count)]
    children = []
    for core, (_, writer) in enumerate(pipes):

        def run(core: int = core, writer: int = writer) -> None:
            if hasattr(os, "sched_setaffinity"):
                usable = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {usable[core % len(usable)]})
            with open(writer, "w") as file:
                json.dump(work(), file)

        children.append(fork_child(run))
    found = []
    for (reader, writer), child in zip(pipes, children, strict=True):
        os.close(writer)
        with open(reader) as file:
            answer = file.read()
        os.waitpid(child, 0)
        if not answer:
            raise PeerLost(f"one of {count} processes that measured ended without an answer")
        found.append(json.loads(answer))
    return found


def fork_child(run: Callable[[], None]) -> int:
    """Fork a child that calls ``run`` and exits; returns its pid."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return child
