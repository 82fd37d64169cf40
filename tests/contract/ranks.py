"""Ranks as threads: each has a transport, a communicator and a thread that runs what it is given.

    with Ranks("tcp", 3) as ranks:
        sums = ranks.run(lambda one: …)     # on every rank at once; the results in rank order

A new transport is entered in ``URIS``; then every suite of this folder runs over it.
What is left open in a failed run is closed, and ``renew`` begins the next generation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

from hoop.collectives.communicator import Communicator
from hoop.errors import HoopError, PeerLost
from hoop.transport import Endpoint, Transport, open_transport

URIS = {
    "hybrid": "hybrid://127.0.0.1:0",
    "inproc": "inproc://test:0",
    "shm": "shm://127.0.0.1:0",
    "tcp": "tcp://127.0.0.1:0",
}
LOOPBACKS = ("127.0.0.1", "127.0.1", "127.1")
"""One address by three names: to a hybrid transport three hosts."""
SHARED = ("shm",)
"""Those whose ranks see each other's memory, where there are more algorithms."""
COMMUNICATOR = 7
LONG_S = 60.0
"""What nobody waits for unless something is wrong."""
PROMPT_S = 10.0
"""Well under LONG_S: whoever is back by then was woken and did not wait for its deadline."""

T = TypeVar("T")


def soon(seconds: float = LONG_S) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def endpoints_of(transports: list[Transport], communicator: int = COMMUNICATOR, generation: int = 1) -> list[Endpoint]:
    """One endpoint a transport, in rank order."""
    peers = [transport.address for transport in transports]
    return [transport.endpoint(communicator, generation, rank, peers) for rank, transport in enumerate(transports)]


def uri_of(scheme: str, rank: int, hosts: Sequence[int] = ()) -> str:
    """Where a rank listens; where hosts matter, every other rank is on the second unless ``hosts`` says otherwise."""
    host = LOOPBACKS[hosts[rank] if hosts else rank % 2]
    return URIS[scheme].replace(LOOPBACKS[0], host) if scheme == "hybrid" else URIS[scheme]


class Ranks:
    """The ranks of one communicator."""

    def __init__(self, scheme: str, size: int, hosts: Sequence[int] = ()) -> None:
        self.scheme = scheme
        self.hosts = tuple(hosts)
        self.size = size
        self.broken = False
        self._generation = 0
        self.communicators: list[Communicator] = []
        with contextlib.ExitStack() as opened:
            self.transports = [
                opened.enter_context(open_transport(uri_of(scheme, rank, hosts))) for rank in range(size)
            ]
            self._threads = [opened.enter_context(ThreadPoolExecutor(1, f"rank-{rank}")) for rank in range(size)]
            self.renew()
            self._opened = opened.pop_all()

    def renew(self) -> None:
        """The next generation, with every link dialled: from here on no socket and no thread is new."""
        self.leave()
        self.broken = False
        self._generation += 1
        self.communicators = [
            Communicator(endpoint) for endpoint in endpoints_of(self.transports, generation=self._generation)
        ]
        for future in self.start(_greet_everyone):
            future.result(LONG_S)

    def start(self, job: Callable[[Communicator], T]) -> list[Future[T]]:
        """Runs a job on every rank, each in its own thread."""
        return [
            thread.submit(job, communicator)
            for thread, communicator in zip(self._threads, self.communicators, strict=True)
        ]

    def run(self, job: Callable[[Communicator], T]) -> list[T]:
        """The results in rank order; when one rank fails, the others are aborted and its error is raised."""
        futures = self.start(job)
        done, hanging = wait(futures, timeout=LONG_S, return_when=FIRST_EXCEPTION)
        if not hanging and not any(future.exception() for future in futures):
            return [future.result() for future in futures]
        for communicator in self.communicators:
            communicator.endpoint.abort(PeerLost("another rank failed"))
        wait(futures)
        self.leave()
        for future in done:
            future.result()
        raise AssertionError(f"{len(hanging)} ranks were not done within {LONG_S:g} s, and none had failed")

    def leave(self) -> None:
        """Closes the communicators; ``renew`` makes others."""
        self.broken = True
        for communicator in self.communicators:
            communicator.close()

    def close(self) -> None:
        self.leave()
        self._opened.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def outcomes(futures: Iterable[Future[T]], timeout: float = PROMPT_S) -> list[T | HoopError]:
    """What each came to: a result or one of Hoop's errors. Raises TimeoutError when one hangs."""
    deadline = soon(timeout)
    found: list[T | HoopError] = []
    for future in futures:
        try:
            found.append(future.result(max(0.0, deadline - time.monotonic())))
        except HoopError as error:
            found.append(error)
    return found


def _greet_everyone(one: Communicator) -> None:
    others = [peer for peer in range(one.size) if peer != one.rank]
    for peer in others:
        one.endpoint.send(peer, memoryview(b"!"), soon())
    while others and not one.endpoint.wait_readable(others, soon()):
        pass  # for some transports the first wait for several starts a thread
    for peer in others:
        one.endpoint.recv_into(peer, memoryview(bytearray(1)), soon())
