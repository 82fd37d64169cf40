"""What a message and a meeting cost between two processes of this machine, and what cores cost each other."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from hoop.collectives.communicator import Communicator
from hoop.collectives.selection import measure
from hoop.errors import PeerLost
from hoop.topology import Address
from hoop.transport import open_transport
from hoop.transport.base import SharedEndpoint

Found = TypeVar("Found")
More = Callable[[Communicator], dict[str, float]]
TIMEOUT_S = 30.0
MEETINGS = 200


def link_seconds(kind: str = "shm", ranks: int = 2, more: More | None = None) -> dict[str, float]:
    """Seconds of a small message, of a byte, and (in shared memory) of a meeting, between so many processes.

    ``more``: what else is to be measured there, which replaces figures of the same name.
    """
    pairs = [socket.socketpair() for _ in range(ranks)]
    children = [forked(lambda rank=rank: _rank(pairs[rank][1], rank, kind, more)) for rank in range(ranks)]  # type: ignore[misc]
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
            ours.shutdown(socket.SHUT_RDWR)  # heard although the other child has this end too
            ours.close()
        for child in children:
            os.waitpid(child, 0)


def _rank(line: socket.socket, rank: int, kind: str, more: More | None) -> None:
    line.settimeout(TIMEOUT_S)
    file = line.makefile("rw")
    with open_transport(f"{kind}://127.0.0.1:0") as transport:
        file.write(f"{transport.address}\n")
        file.flush()
        peers = [Address.parse(one) for one in json.loads(file.readline())]
        endpoint = transport.endpoint(1, 1, rank, peers)
        deadline = time.monotonic() + TIMEOUT_S
        cost = measure(endpoint, deadline)
        found = {"message_s": cost.message_s / 2, "byte_s": cost.byte_s}  # half for each end
        if isinstance(endpoint, SharedEndpoint):
            endpoint.meet(deadline)
            started = time.perf_counter()
            for _ in range(MEETINGS):
                endpoint.meet(deadline)
            found["meeting_s"] = (time.perf_counter() - started) / MEETINGS
        if more is not None:
            found |= more(Communicator(endpoint))
        file.write(json.dumps(found) + "\n")
        file.flush()
        file.readline()  # until the other one is done as well: the runner hangs up
        endpoint.close()


def crowding(work: Callable[[], float], cores: int) -> float:
    """How many times longer work takes when all cores do it at once; ``work`` returns its own seconds."""
    alone = min(together(work, 1))
    return max(1.0, sorted(together(work, cores))[cores // 2] / alone) if cores > 1 and alone else 1.0


def together(work: Callable[[], Found], count: int) -> list[Found]:
    """What work finds, as plain values, that so many processes do at once, each on a core while there are enough."""
    pipes = [os.pipe() for _ in range(count)]
    children = []
    for core, (_, writer) in enumerate(pipes):

        def run(core: int = core, writer: int = writer) -> None:
            if hasattr(os, "sched_setaffinity"):
                usable = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {usable[core % len(usable)]})
            with open(writer, "w") as file:
                json.dump(work(), file)

        children.append(forked(run))
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


def forked(run: Callable[[], None]) -> int:
    """A child that does this and nothing else, however it ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return child
