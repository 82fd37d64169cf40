"""Starts a gRPC server at an address, refuses to expose one without authentication, and reports refused lab calls.

A server that ends by itself listens again at its port. Where that fails, its owner learns it and ends its
process: no process lives on without its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.files import write_text
from hoop.resources import can_listen, descriptor_limit, raise_descriptor_limit
from hoop.texts import printable
from hoop.topology import Address, Addresses, PortRange
from hoop.wire.auth import LAB_SERVICES, Credentials, Guard
from hoop.wire.channels import server_options
from hoop.wire.local_sockets import LocalSocket, remove_stale
from hoop.wire.service import OnRefused

log = logging.getLogger("hoop.servers")
OPEN_FILES = 65536
"""Minimum soft limit of open files: a server raises a lower one."""
LISTEN_AGAIN_S = 10.0
"""Seconds for which a server that ended by itself tries to get its port back."""
LISTEN_AGAIN_PAUSE_S = 0.1
END_CHECK_S = 0.25
"""Seconds between the looks whether a server has ended."""
WINDOW_S = 10.0
MAX_REPORTS = 20
REPEAT_S = 60.0
MAX_TEXT_BYTES = 1024
"""Maximum bytes of a report; longer ones are shortened."""


def check_exposure(address: Address, credentials: Credentials, insecure: bool, lab: bool = False) -> None:
    """Raises if other hosts could call without authentication, unless ``insecure`` allows it (then it warns).

    ``lab``: the lab's calls need no authentication.
    """
    if lab and credentials.encrypted:
        raise InvalidArgument(
            "--lab: with a token or certificates no caller connects without them, and the lab's programs have none; "
            "leave out --lab, or --tls, --token-file, HOOP_TOKEN, HOOP_TOKEN_FILE and HOOP_TLS (beyond 127.0.0.1 with "
            "--insecure, on a network you trust)"
        )
    if address.is_loopback or credentials.encrypted:
        return
    where = f"{address.host} can be reached from other machines"
    if not insecure:
        raise InvalidArgument(
            f"host: {where}, and any caller can run jobs here; authenticate callers with a token "
            "(hoop token FILE, then --token-file FILE everywhere) or certificates (hoop certs DIR, then --tls DIR); "
            "or use 127.0.0.1, or --insecure on a network you trust"
        )
    log.warning("insecure: %s, and callers are not authenticated (SECURITY.md)", where)


@dataclass(frozen=True)
class CallerCheck:
    """How a server authenticates the callers of its services."""

    credentials: Credentials
    lab: bool
    """The lab's calls need no authentication."""
    on_lab_refused: OnRefused
    """Called for the lab's calls that are refused for want of it."""

    def interceptors(self) -> tuple[Guard, ...]:
        return self.credentials.interceptors(LAB_SERVICES if self.lab else frozenset[str](), self.on_lab_refused)


class Server:
    """A running gRPC server. If it ends by itself, another one takes its place at the same port."""

    def __init__(
        self,
        start: Callable[[Address], Awaitable[grpc.aio.Server]],
        first: grpc.aio.Server,
        address: Address,
        on_stopped: Callable[[], None],
    ) -> None:
        """``start`` starts a server at this address, ``first`` is the one that runs."""
        self.address = address
        self.restarts = 0
        """How often the server has ended by itself, and listened again."""
        self._start, self._server, self._on_stopped = start, first, on_stopped
        self._failure: asyncio.Future[HoopError] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.ensure_future(self._listen_again_at_each_end())

    async def wait_failed(self) -> HoopError:
        """Waits until this process has no server any more, and cannot get one; returns the reason."""
        return await asyncio.shield(self._failure)

    async def stop(self, grace: float | None) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._server.stop(grace)
        self._on_stopped()

    async def _listen_again_at_each_end(self) -> None:
        while True:
            reason = "it was shut down"
            try:
                # gRPC raises the error that ended its loop only when this time is over.
                while await self._server.wait_for_termination(END_CHECK_S):
                    pass
            except Exception as error:  # whatever ended gRPC's loop
                reason = f"{type(error).__name__}: {error}"
            reason = printable(reason, MAX_TEXT_BYTES)
            log.error("the server at %s ended (%s); calls in progress are lost, it listens again", self.address, reason)
            try:
                self._server = await self._replacement()
            except HoopError as error:
                log.critical("no server at %s any more: %s", self.address, error)
                text = f"the server at {self.address} ended ({reason}), and cannot start again: {error}"
                self._failure.set_result(FailedPrecondition(text))
                return
            self.restarts += 1

    async def _replacement(self) -> grpc.aio.Server:
        with contextlib.suppress(Exception):  # releases the port, if the end has not
            await asyncio.wait_for(self._server.stop(None), LISTEN_AGAIN_S)
        until = time.monotonic() + LISTEN_AGAIN_S
        while True:
            try:
                return await self._start(self.address)
            except FailedPrecondition:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(LISTEN_AGAIN_PAUSE_S)


async def serve(
    address: Address,
    services: Sequence[Any],
    max_message: int,
    check: CallerCheck,
    ports: PortRange | None = None,
) -> Server:
    """Starts a server. Its ``address`` has the port; port 0 picks a free one.

    ``ports``: in place of the port in ``address``; the first that is free.

    Its connections take at most half of the open files of this process, so that callers cannot use up what devices,
    links and files need. With local credentials it listens at this user's socket for the port too.
    """
    raise_descriptor_limit(OPEN_FILES)
    limit = descriptor_limit()
    options = server_options(max_message, None if limit is None else limit // 2)
    interceptors = check.interceptors()
    bound, local = address, LocalSocket() if check.credentials.local else None

    def on_stopped() -> None:
        if local is not None:
            local.withdraw()

    async def start(at: Address, ports: PortRange | None = None) -> grpc.aio.Server:
        nonlocal bound, local
        server = grpc.aio.server(options=options, interceptors=interceptors)
        server.add_generic_rpc_handlers(tuple(services))
        try:
            bound = _listen(server, at, ports or PortRange(at.port, at.port), check.credentials)
            if local is not None:
                local = LocalSocket()
                server.add_insecure_port(local.target)
                local.publish(bound.port)
            elif bound.is_loopback or bound.is_wildcard:
                remove_stale([bound.port])
        except BaseException:
            await server.stop(None)
            on_stopped()
            raise
        await server.start()
        return server

    first = await start(address, ports)
    return Server(start, first, bound, on_stopped)


def _listen(server: grpc.aio.Server, address: Address, ports: PortRange, credentials: Credentials) -> Address:
    """Opens the first of these ports that is free; returns the address."""
    several = len(ports.ports) > 1
    for port in ports.ports:
        if several and not can_listen(address.host, port):  # gRPC logs every port that it cannot open
            continue
        try:
            return replace(address, port=credentials.add_port(server, replace(address, port=port)))
        except RuntimeError:
            continue
    if not several:
        where = replace(address, port=ports.low)
        raise FailedPrecondition(
            f"cannot listen on {where}: the port is in use or not ours; choose another, or 0 for any"
        )
    raise FailedPrecondition(f"cannot listen on {address.host}: no port of {ports} is free; give a larger range")


def write_address_file(path: Path, address: Address | Addresses) -> None:
    """Writes ``host:port`` atomically: a process that waits for the file never reads half of it."""
    if not path.parent.is_dir():
        raise FailedPrecondition(f"address file {path}: there is no folder {path.parent}; make it first")
    write_text(path, f"{address}\n")


class ClientReports:
    """Reports refused calls of the lab's clients to the operator: such clients often print no errors.

    It passes texts on to ``report``. The number is bounded, so that a client that polls, or a hostile one, cannot flood
    the log: the same text is reported once a minute, and at most ``MAX_REPORTS`` texts in ``WINDOW_S`` seconds.
    """

    def __init__(self, report: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._reported: OrderedDict[str, float] = OrderedDict()
        """Time when each text was last reported; the oldest first."""
        self._window_began = clock()
        self._in_window = 0

    def refused(self, method: str, caller: str, status: str, text: str) -> None:
        """A call was refused (``wire.service.OnRefused``)."""
        self.add(f"{method} of the client at {caller or 'an unknown address'} was refused: {status}: {text}")

    def add(self, text: str) -> None:
        now, text = self._clock(), printable(text, MAX_TEXT_BYTES)
        while self._reported and next(iter(self._reported.values())) <= now - REPEAT_S:
            self._reported.popitem(last=False)
        if text in self._reported:
            return
        if now - self._window_began >= WINDOW_S:
            self._window_began, self._in_window = now, 0
        self._in_window += 1
        if self._in_window == MAX_REPORTS:
            self._report(f"more calls of the lab's clients were refused; the rest of {WINDOW_S:g} s is not reported")
        elif self._in_window < MAX_REPORTS:
            self._reported[text] = now
            self._report(text)
