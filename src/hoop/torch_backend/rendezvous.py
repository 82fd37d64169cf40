"""Rendezvous: the ranks of a new group exchange their addresses through torch's store and choose a transport.

They exchange two values in a ``GroupRound``:

    host         the host key of a rank: equal keys mean one host; the origin and fingerprint of its link key
    addresses    communicator number (rank 0's is used), addresses for collectives and for messages

All groups of a process share its listeners. A ``GroupRound`` is one round in the store: the ranks join, exchange
values, and all learn at once what is wrong.

Keys below ``hoop/`` (``<round>`` counts how often a rank has used this store, so a group that is made again has
keys of its own):

    round/<rank>                 the counter of this rank
    <round>/process/<rank>       the process that joined as this rank
    <round>/joined, left         how many ranks have joined, and how many of them have read an error
    <round>/members              the global ranks of the group, by the first rank that joined
    <round>/<exchange>/<rank>    the value of this rank: of "host", then of "addresses"
    <round>/<exchange>/count     how many ranks have published theirs
    <round>/<exchange>/outcome   COMPLETE when all have, or an error; the first one written stays, for all ranks

A rank waits for the outcome only, so an error ends its wait as the last value does.
Ranks that torchrun starts again, or that try again after a timeout, may be in different rounds: those behind follow.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hoop.collectives.communicator import Communicator
from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InvalidArgument, MembershipChanged
from hoop.topology import Address
from hoop.torch_backend.errors import torch_error
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.late_ranks import patience, warn_of_wait
from hoop.torch_backend.p2p import P2PEngine
from hoop.transport import Endpoint, Transport, open_transport
from hoop.transport.hybrid import HybridTransport
from hoop.transport.link_key import KeyOrigin, LinkKey, own_link_key
from hoop.transport.shm_endpoint import shared_memory_error

log = logging.getLogger("hoop.torch_backend")
SAME_HOST_TRANSPORT = "shm"
"""Transport of collectives whose ranks are all on one host, unless HOOP_TRANSPORT names another. Between hosts it is
tcp, or hybrid where some ranks share a host. Messages always use tcp."""
GENERATION = 1
LOOPBACK = "127.0.0.1"
HOST, ADDRESSES = "host", "addresses"
"""The exchanges of a round, in their order."""
COMPLETE = "complete"
LOOK_SECONDS = 0.5
"""Seconds after which a waiting rank checks whether another is in a newer round or makes this group with Gloo. The time
to each further check is twice that to the one before."""
LONGEST_LOOK_SECONDS = 10.0
"""Maximum seconds between two of these checks."""
_POLL_SHARE = 0.1
"""Share of the time that a rank has waited after which it polls the store again. It does not call ``Store.wait``: that
cannot wait for one of two events, and a TCPStore prints a warning whenever it times out."""
_LONGEST_POLL_SECONDS = 0.05
"""Maximum seconds between two polls of the store."""
_LEAVE_SECONDS = 2.0
_PROCESS_ID = secrets.token_hex(8)  # forked processes share it and differ in their pid


class GroupRound:
    """One rank's part in making one group."""

    def __init__(
        self, name: str, store: Any, rank: int, world: Sequence[int], timeout: timedelta, deadline: float | None = None
    ) -> None:
        """Joins the round; raises where this rank cannot be a rank of this group, and then fails it for all ranks.

        ``world``: the global rank of each rank of the group. ``deadline``: of the rounds for this group together; None:
        ``timeout`` from now.
        """
        self._store, self._rank, self._size, self._timeout = store, rank, len(world), timeout
        self._deadline = time.monotonic() + timeout.total_seconds() if deadline is None else deadline
        self._label = f"group {name!r} of {self._size}"
        self._joined = False
        self._process = f"{_PROCESS_ID} process {os.getpid()} on {socket.gethostname()}"
        if not 0 <= rank < self._size:
            self._number = self._round_of_others()
            raise self.fail(
                InvalidArgument,
                f"{_name(self._process)} has rank {rank}, which is not in 0..{self._size - 1}; give each process its "
                "own rank (RANK) below the number of ranks (WORLD_SIZE)",
            )
        self._number = store.add(f"hoop/round/{rank}", 1)
        self._check_rank_is_free()
        store.set(self._key("process", rank), self._process)
        store.add(self._key("joined"), 1)
        self._joined = True
        self._check_members([int(one) for one in world])

    def exchange(self, exchange: str, value: str) -> list[str]:
        """Publishes this rank's value, waits until all ranks have, and returns all values in rank order.

        Raises MembershipChanged if another rank is in a newer round: this rank must then join a new one too.
        """
        self._store.set(self._key(exchange, self._rank), value)
        if self._store.add(self._key(exchange, "count"), 1) == self._size:
            self._store.compare_set(self._key(exchange, "outcome"), "", COMPLETE)
        self._wait(exchange)
        outcome = self._store.get(self._key(exchange, "outcome")).decode()
        if outcome != COMPLETE:
            self._leave()
            raise torch_error(FailedPrecondition, f"rank {self._rank}: {self._label} cannot be made: {outcome}")
        return [self._store.get(self._key(exchange, peer)).decode() for peer in range(self._size)]

    def fail(self, kind: type[HoopError], reason: str) -> HoopError:
        """Makes the ranks that are in this round, or come to it, raise ``reason``; returns this rank's own error."""
        with contextlib.suppress(RuntimeError):  # the store is gone: this rank's own error says more
            # The last one first: ranks that read the error may end, and the store with them.
            for exchange in (ADDRESSES, HOST):
                self._store.compare_set(self._key(exchange, "outcome"), "", reason)
        self._leave()
        return torch_error(kind, f"rank {self._rank}: {self._label} cannot be made: {reason}")

    def _leave(self) -> None:
        """Waits until the other ranks have read the error too: the store may be in this process, and end with it."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):
            left = self._store.add(self._key("left"), int(self._joined))
            while left < self._store.add(self._key("joined"), 0) and time.monotonic() < deadline:
                time.sleep(_LONGEST_POLL_SECONDS)
                left = self._store.add(self._key("left"), 0)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("hoop", self._number, *parts)))

    def _is_decided(self) -> bool:
        return bool(self._store.check([self._key(HOST, "outcome")]))

    def _round_of_others(self) -> int:
        """The round in which the ranks of this group are, or which they will begin next."""
        self._number = max([1, *(self._store.add(f"hoop/round/{peer}", 0) for peer in range(self._size))])
        return self._number + self._is_decided()

    # ---- ranks that contradict each other

    def _check_rank_is_free(self) -> None:
        """Raises if another process is this rank in the previous round, which still waits for a rank.

        torchrun numbers its processes itself, and starts them again on the same store.
        """
        if self._number == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
            return
        self._number -= 1
        holder = self._store.get(self._key("process", self._rank)).decode()
        if holder != self._process and not self._is_decided():
            self._store.add(f"hoop/round/{self._rank}", -1)
            raise self.fail(
                InvalidArgument,
                f"{_name(holder)} and {_name(self._process)} both have rank {self._rank}; give each process its own "
                "rank (RANK), and each run a new store or file",
            )
        self._number += 1

    def _check_members(self, world: list[int]) -> None:
        """Raises if this rank and the first one that joined do not mean the same group."""
        own = json.dumps([self._rank, world])
        first_rank, first = json.loads(self._store.compare_set(self._key("members"), "", own))
        if first != world:
            raise self.fail(
                InvalidArgument,
                f"rank {first_rank} makes it of {_describe(first)}, rank {self._rank} of {_describe(world)}",
            )

    def _check_backends(self, missing: Sequence[int]) -> None:
        """Raises if a missing rank makes this group with Gloo: its keys are in the store, and none of this rank's."""
        if self._store.check([_gloo_key(self._rank)]):
            return  # this process had a Gloo group of this name before
        for peer in missing:
            if self._store.check([_gloo_key(peer)]):
                raise self.fail(
                    FailedPrecondition,
                    f"rank {peer} makes it with the backend gloo, rank {self._rank} with hoop; name one for all ranks",
                )

    # ---- waiting

    def _wait(self, exchange: str) -> None:
        """Waits for the outcome of an exchange."""
        start, look = time.monotonic(), LOOK_SECONDS
        next_look = start + look
        patient_s: float | None = patience(self._timeout.total_seconds())
        while not self._store.check([self._key(exchange, "outcome")]):
            now = time.monotonic()
            waited = now - start
            if now >= self._deadline:
                raise self._deadline_exceeded(self._missing(exchange))
            if start + waited >= next_look:
                self._check_newer_round(exchange)
                if exchange == HOST:
                    self._check_backends(self._missing(exchange))
                look = min(2 * look, LONGEST_LOOK_SECONDS)
                next_look = start + waited + look
            if patient_s is not None and waited >= patient_s and (missing := self._missing(exchange)):
                ranks = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
                warn_of_wait(f"rank {self._rank}: {self._label}: waiting for {ranks}", patient_s)
                patient_s = None
            time.sleep(min(0.001 + _POLL_SHARE * waited, _LONGEST_POLL_SECONDS))

    def _check_newer_round(self, exchange: str) -> None:
        """Raises MembershipChanged if another rank has left this round, which therefore will not be completed."""
        for peer in range(self._size):
            number = self._store.add(f"hoop/round/{peer}", 0)
            if peer == self._rank or number <= self._number or not self._store.check([f"hoop/{number}/process/{peer}"]):
                continue
            if not self._store.check(
                [self._key(exchange, "outcome")]
            ):  # else it has left after the round was completed
                raise MembershipChanged(f"rank {peer} is in round {number}, rank {self._rank} in {self._number}")

    def _missing(self, exchange: str) -> list[int]:
        return [peer for peer in range(self._size) if not self._store.check([self._key(exchange, peer)])]

    def _deadline_exceeded(self, missing: list[int]) -> HoopError:
        return torch_error(
            DeadlineExceeded,
            f"rank {self._rank}: {self._label}: rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))} "
            f"did not come within the timeout of {self._timeout.total_seconds():g} s",
        )


def _name(process: str) -> str:
    return process.partition(" ")[2]


def _describe(world: list[int]) -> str:
    if world == list(range(len(world))):
        return f"{len(world)} rank{'s' * (len(world) != 1)}"
    return f"the global ranks {', '.join(map(str, world))}"


def _gloo_key(rank: int) -> str:
    """The key under which Gloo publishes the address of a rank."""
    return f"0/{rank}"


def connect_group(
    name: str, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta
) -> tuple[GroupLinks, list[Transport]]:
    """Connects this rank to a new group; returns when every rank has published its address.

    ``world``: the global rank of each rank of the group. ``timeout``: of all rounds together. The caller must pass the
    returned transports to ``release_transports`` after closing the links.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return _connect_in_round(name, store, rank, size, world, timeout, deadline)
        except MembershipChanged as error:
            log.debug("group %s: %s; joining a new round", name, error)


def _connect_in_round(
    name: str, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta, deadline: float
) -> tuple[GroupLinks, list[Transport]]:
    group_round = GroupRound(name, store, rank, world, timeout, deadline)
    key = _own_key(group_round, rank, size)
    own_identity = json.dumps([_host_key(), key.origin, key.fingerprint])
    hosts, origins, fingerprints = zip(*map(json.loads, group_round.exchange(HOST, own_identity)), strict=True)
    _check_tokens(group_round, origins)
    on_one_host = len(set(hosts)) == 1
    log.debug("group %s: rank %d of %d, %d hosts", name, rank, size, len(set(hosts)))
    scheme = "inproc" if size == 1 else _same_host_scheme() if on_one_host else _multi_host_scheme(hosts)
    on_one_machine = len({host.rpartition("/")[0] for host in hosts}) == 1
    own_host = LOOPBACK if on_one_machine else _address_towards(store)
    p2p_scheme = "inproc" if size == 1 else "tcp"
    try:
        if size > 1:
            _check_exposure(own_host, key)
            _check_fingerprints(rank, fingerprints)
        uris = [f"{transport}://{Address(own_host, 0)}" for transport in (scheme, p2p_scheme)]
        transports = _acquire_transports(uris, key.secret)
    except (HoopError, OSError) as error:
        kind = type(error) if isinstance(error, HoopError) else FailedPrecondition
        raise group_round.fail(kind, f"rank {rank} cannot open its links: {error}") from error
    try:
        own = " ".join([str(secrets.randbits(62)), *(str(transport.address) for transport in transports)])
        published = [text.split() for text in group_round.exchange(ADDRESSES, own)]
        communicator = 2 * int(published[0][0])
        endpoints: list[Endpoint] = []
        for index, transport in enumerate(transports):
            peers = [Address.parse(one[1 + index]) for one in published]
            if isinstance(transport, HybridTransport):
                shared = [host if _shares_memory(host) else None for host in hosts]
                endpoints.append(transport.endpoint(communicator + index, GENERATION, rank, peers, shared))
            else:
                endpoints.append(transport.endpoint(communicator + index, GENERATION, rank, peers))
    except BaseException:
        release_transports(transports)
        raise
    seconds = timeout.total_seconds()
    p2p = P2PEngine(endpoints[1], f"hoop-{name}", seconds)
    return GroupLinks(name, Communicator(endpoints[0]), p2p, world, seconds), transports


# ---- hosts and schemes


def _same_host_scheme() -> str:
    """The transport that this rank supports between ranks of one host.

    It is part of the host key. Ranks whose schemes differ therefore count as on different hosts: all ranks come to the
    same decision, and a rank that cannot share memory is reached by tcp.
    """
    return os.environ.get("HOOP_TRANSPORT") or (SAME_HOST_TRANSPORT if shared_memory_error() is None else "tcp")


def _multi_host_scheme(hosts: Sequence[str]) -> str:
    """Hybrid if some ranks share a host and memory, else tcp. Every rank decides from the same list."""
    return "hybrid" if any(hosts.count(host) > 1 and _shares_memory(host) for host in hosts) else "tcp"


def _shares_memory(host: str) -> bool:
    return host.endswith(f"/{SAME_HOST_TRANSPORT}")


def _host_key() -> str:
    """Equal for two processes exactly if they can, and should, communicate as processes of one host."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    machine = boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
    namespace = network.stat().st_ino if network.exists() else 0
    return f"{machine}/{namespace}/{os.getuid()}/{_same_host_scheme()}"


def _address_towards(store: Any) -> str:
    """This machine's address as other machines see it: HOOP_HOST, or the one that routes to the store's machine."""
    if chosen := os.environ.get("HOOP_HOST"):
        return chosen
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    store_host = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
    try:
        family, kind, _, _, address = socket.getaddrinfo(store_host or socket.gethostname(), 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


# ---- authentication


def _own_key(group_round: GroupRound, rank: int, size: int) -> LinkKey:
    """This rank's key of links. A rank that is alone has no links, and needs none."""
    if size == 1:
        return LinkKey(b"", KeyOrigin.NONE)
    try:
        return own_link_key()
    except (HoopError, OSError) as error:
        kind = type(error) if isinstance(error, HoopError) else FailedPrecondition
        raise group_round.fail(kind, f"rank {rank}: {error}") from error


def _check_tokens(group_round: GroupRound, origins: Sequence[str]) -> None:
    """Raises if only some ranks have a token, or a key at all: those would refuse the links of the others."""
    for origin, has, remedy in (
        (KeyOrigin.GIVEN, "a token", "start all with the same HOOP_TOKEN or HOOP_TOKEN_FILE, or all without"),
        (KeyOrigin.USER, "a key of links", "set HOOP_INSECURE=1 for all, or for none"),
    ):
        without = [rank for rank, other in enumerate(origins) if other != origin]
        if without and len(without) < len(origins):
            ranks = f"rank{'s' * (len(without) != 1)} {', '.join(map(str, without))}"
            reason = f"{ranks} of it started without {has} and the others with one; {remedy}"
            raise group_round.fail(FailedPrecondition, reason)


def _check_fingerprints(rank: int, fingerprints: Sequence[str]) -> None:
    """Raises if another rank has another key of links."""
    for peer, other in enumerate(fingerprints):
        if other != fingerprints[rank]:
            raise FailedPrecondition(
                f"rank {peer} has another token than rank {rank}; start all ranks with the same HOOP_TOKEN or "
                "HOOP_TOKEN_FILE (hoop token FILE makes one). Without one, ranks of a machine must be one user's, with "
                "the same XDG_RUNTIME_DIR and folder for temporary files"
            )


def _check_exposure(host: str, key: LinkKey) -> None:
    """Raises if other machines could open links here and the ranks have no key for that; without any it warns."""
    beyond = not Address(host, 0).is_loopback
    if key.origin is KeyOrigin.USER and beyond:
        raise InvalidArgument(
            f"{host} can be reached from other machines, and any of them could join the group; authenticate its links "
            "with a join or device token (hoop token FILE, then HOOP_TOKEN_FILE=FILE for every rank), or set "
            "HOOP_INSECURE=1 for every rank on a network you trust"
        )
    if key.origin is KeyOrigin.NONE:
        _warn_of_exposure(host, "other machines" if beyond else "other users of this machine")


@functools.cache
def _warn_of_exposure(host: str, by: str) -> None:
    log.warning("insecure: %s can be reached by %s, and links are not authenticated (SECURITY.md)", host, by)


# ---- one listener for each URI, key and process

_lock = threading.Lock()
_open: dict[tuple[str, bytes], tuple[Transport, int]] = {}
"""Open transports by URI and key, each with the number of its users."""


def acquire_transport(uri: str, key: bytes) -> Transport:
    """This process's transport for a URI (scheme and host) and a key, opened by its first user."""
    with _lock:
        transport, users = _open.get((uri, key)) or (open_transport(uri, key), 0)
        _open[uri, key] = (transport, users + 1)
        return transport


def _acquire_transports(uris: Sequence[str], key: bytes) -> list[Transport]:
    """The transports of all URIs, or of none if one cannot be opened."""
    transports: list[Transport] = []
    try:
        for uri in uris:
            transports.append(acquire_transport(uri, key))
    except BaseException:
        release_transports(transports)
        raise
    return transports


def release_transports(transports: Sequence[Transport]) -> None:
    """Closes each transport whose last user this was."""
    with _lock:
        for transport in transports:
            name = next(name for name, (opened, _) in _open.items() if opened is transport)
            users = _open[name][1] - 1
            _open[name] = (transport, users)
            if not users:
                del _open[name]
                transport.close()


def _close_inherited_sockets(item: Any, seen: set[int]) -> None:
    """Closes a forked child's copies of the parent's sockets, found by walking through transport objects.

    While a copy is open, peers would not see the parent die.
    """
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, socket.socket):
        item.close()
    elif isinstance(item, dict | list | tuple):
        for part in list(item.values() if isinstance(item, dict) else item):
            _close_inherited_sockets(part, seen)
    elif type(item).__module__.startswith("hoop.transport"):
        _close_inherited_sockets(vars(item) if hasattr(item, "__dict__") else [], seen)


def _after_fork() -> None:
    _close_inherited_sockets(dict(_open), set())
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
