"""Ranks as threads: each has a transport, a communicator and a thread that runs a function.

    with Ranks("tcp", 3) as ranks:
        sums = ranks.run(lambda comm: …)     # on every rank at once; the results in rank order

To test a new transport with every module of this folder, add it to ``URIS``.
A failed run closes the communicators; ``next_generation`` creates new ones.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

from hoop.collectives.communicator import Communicator
from hoop.errors import HoopError, PeerLost
from hoop.transport import Endpoint, Transport, open_transport

NUMPY = "shm-numpy"
"""Shared memory without the native core; the tests run over it as over a transport of its own."""
URIS = {
    "hybrid": "hybrid://127.0.0.1:0",
    "inproc": "inproc://test:0",
    "shm": "shm://127.0.0.1:0",
    NUMPY: "shm://127.0.0.1:0",
    "tcp": "tcp://127.0.0.1:0",
}
LOOPBACKS = ("127.0.0.1", "127.0.1", "127.1")
"""Three names of one address; a hybrid transport takes them for three hosts."""
SHARED_MEMORY = ("shm", NUMPY)
"""Transports over shared memory, for which the catalog has additional algorithms."""
COMMUNICATOR = 7
LONG_S = 240.0
"""A timeout that expires only in a failing test."""
PROMPT_S = 60.0
"""Well below LONG_S: a call that returns within it was woken and did not run into its deadline."""

T = TypeVar("T")


@contextlib.contextmanager
def native_core(wanted: bool) -> Iterator[None]:
    """Endpoints made in this block use the native core, if it is built, or do not use it."""
    before = os.environ.get("HOOP_NATIVE")
    os.environ["HOOP_NATIVE"] = "1" if wanted else "0"
    try:
        yield
    finally:
        del os.environ["HOOP_NATIVE"]
        if before is not None:
            os.environ["HOOP_NATIVE"] = before


def deadline_in(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


def endpoints_of(transports: list[Transport], communicator: int = COMMUNICATOR, generation: int = 1) -> list[Endpoint]:
    """One endpoint per transport, in rank order."""
    peers = [transport.address for transport in transports]
    return [transport.endpoint(communicator, generation, rank, peers) for rank, transport in enumerate(transports)]


def uri_of(scheme: str, rank: int, hosts: Sequence[int] = ()) -> str:
    """Where a rank listens. Only hybrid has several hosts; without ``hosts`` ranks alternate between the first two."""
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
            self.next_generation()
            self._opened = opened.pop_all()

    def next_generation(self) -> None:
        """Creates new communicators and connects every link, so that later runs open no socket and no thread."""
        self.close_communicators()
        self.broken = False
        self._generation += 1
        with native_core(self.scheme != NUMPY):
            self.communicators = [
                Communicator(endpoint) for endpoint in endpoints_of(self.transports, generation=self._generation)
            ]
        for future in self.start(_connect_to_peers):
            future.result(LONG_S)

    def start(self, function: Callable[[Communicator], T]) -> list[Future[T]]:
        """Runs a function on every rank, each in its own thread."""
        return [
            thread.submit(function, communicator)
            for thread, communicator in zip(self._threads, self.communicators, strict=True)
        ]

    def run(self, function: Callable[[Communicator], T]) -> list[T]:
        """Returns the results in rank order; if a rank fails, aborts the others and raises its error."""
        futures = self.start(function)
        done, running = wait(futures, timeout=LONG_S, return_when=FIRST_EXCEPTION)
        if not running and not any(future.exception() for future in futures):
            return [future.result() for future in futures]
        for communicator in self.communicators:
            communicator.endpoint.abort(PeerLost("another rank failed"))
        wait(futures)
        self.close_communicators()
        for future in done:
            future.result()
        raise AssertionError(f"{len(running)} ranks were not done within {LONG_S:g} s, and none had failed")

    def close_communicators(self) -> None:
        """Closes them; ``next_generation`` creates new ones."""
        self.broken = True
        for communicator in self.communicators:
            communicator.close()

    def close(self) -> None:
        self.close_communicators()
        self._opened.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def outcomes(futures: Iterable[Future[T]], timeout: float = PROMPT_S) -> list[T | HoopError]:
    """The result or the HoopError of each future. Raises TimeoutError if one does not finish in time."""
    deadline = deadline_in(timeout)
    found: list[T | HoopError] = []
    for future in futures:
        try:
            found.append(future.result(max(0.0, deadline - time.monotonic())))
        except HoopError as error:
            found.append(error)
    return found


def _connect_to_peers(comm: Communicator) -> None:
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    for peer in others:
        comm.endpoint.send(peer, memoryview(b"!"), deadline_in())
    while others and not comm.endpoint.wait_readable(others, deadline_in()):
        pass  # in some transports the first wait_readable starts a thread
    for peer in others:
        comm.endpoint.recv_into(peer, memoryview(bytearray(1)), deadline_in())
