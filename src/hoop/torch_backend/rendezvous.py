"""How the ranks of a group find each other through torch's store, and by which transport they then talk.

    hoop/round/<rank>            how often this rank has come with this store: a group made again starts anew
    hoop/<round>/host/<rank>     what machine and network it is on: all on one host, or not
    hoop/<round>/place/<rank>    communicator's number (rank 0's counts), where its collectives and its post listen

A process listens once for all its groups.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hoop.collectives.communicator import Communicator
from hoop.errors import DeadlineExceeded
from hoop.topology import Address
from hoop.torch_backend.errors import for_torch
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.p2p import P2PEngine
from hoop.transport import Endpoint, Transport, open_transport
from hoop.transport.hybrid import HybridTransport
from hoop.transport.registry import key_of_environment
from hoop.transport.semaphore import SEMAPHORE_BYTES, Semaphore
from hoop.transport.shm_endpoint import bell_name
from hoop.transport.shm_segment import PAGE, map_bytes, new_memory

ON_ONE_HOST = "shm"
"""The transport of collectives whose ranks are all on one host, unless HOOP_TRANSPORT names another; for messages it is
tcp, and between hosts as well, or hybrid where some ranks share one."""
GENERATION = 1
LOOPBACK = "127.0.0.1"


def meet(
    name: str, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta
) -> tuple[GroupLinks, list[Transport]]:
    """This rank's links in a new group, and the transports they are on; returns when every rank has come."""
    turn = store.add(f"hoop/round/{rank}", 1)
    hosts = _tell(name, store, f"hoop/{turn}/host", rank, size, _host(), timeout)
    together = len(set(hosts)) == 1
    scheme = "inproc" if size == 1 else _on_one_host() if together else _between(hosts)
    on_one_machine = len({host.rpartition("/")[0] for host in hosts}) == 1
    here = LOOPBACK if on_one_machine else _address_towards(store)
    messages = "inproc" if size == 1 else "tcp"
    transports = [borrow(f"{one}://{Address(here, 0)}") for one in (scheme, messages)]
    try:
        place = " ".join([str(secrets.randbits(62)), *(str(transport.address) for transport in transports)])
        places = [
            text.split() for text in _tell(name, store, f"hoop/{turn}/place", rank, size, place, timeout)
        ]
        number = 2 * int(places[0][0])
        endpoints: list[Endpoint] = []
        for index, transport in enumerate(transports):
            peers = [Address.parse(place[1 + index]) for place in places]
            seat = (number + index, GENERATION, rank, peers)
            if isinstance(transport, HybridTransport):
                endpoints.append(
                    transport.endpoint(*seat, [host if _shares(host) else None for host in hosts])
                )
            else:
                endpoints.append(transport.endpoint(*seat))
    except BaseException:
        give_back(transports)
        raise
    seconds = timeout.total_seconds()
    post = P2PEngine(endpoints[1], f"hoop-{name}", seconds)
    return GroupLinks(name, Communicator(endpoints[0]), post, world, seconds), transports


def _tell(name: str, store: Any, key: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    """Everybody's value, once everybody has told theirs."""
    store.set(f"{key}/{rank}", value)
    keys = [f"{key}/{peer}" for peer in range(size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [peer for peer, theirs in enumerate(keys) if not store.check([theirs])]
        raise for_torch(
            DeadlineExceeded,
            f"rank {rank}: group {name!r} of {size}: rank{'s' * (len(missing) != 1)} "
            f"{', '.join(map(str, missing))} did not come within the timeout of {timeout.total_seconds():g} s",
        ) from error
    return [store.get(theirs).decode() for theirs in keys]


# ---- where this process is


def _on_one_host() -> str:
    """What this rank would talk by with others of its host. It is told with the host: ranks that differ in it count as
    on different ones, so that all come to the same, and where one cannot share memory it is spoken to by tcp."""
    return os.environ.get("HOOP_TRANSPORT") or (ON_ONE_HOST if sharing_works() else "tcp")


def sharing_works() -> bool:
    """Whether this process can make what ranks share: memory, and a semaphore."""
    try:
        descriptor = new_memory(PAGE)
        try:
            place = map_bytes(descriptor, 0, PAGE)[:SEMAPHORE_BYTES]
            Semaphore.create(place, bell_name(f"{os.getpid():08x}{secrets.token_hex(12)}", 0)).unlink()
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _between(hosts: list[str]) -> str:
    """Between hosts: with shared memory inside those that have several ranks, by which every rank must abide."""
    return "hybrid" if any(hosts.count(host) > 1 and _shares(host) for host in hosts) else "tcp"


def _shares(host: str) -> bool:
    return host.endswith(f"/{ON_ONE_HOST}")


def _host() -> str:
    """The same for two processes exactly if they can, and are to, talk as processes of one host do."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    number = network.stat().st_ino if network.exists() else 0
    return f"{machine}/{number}/{os.getuid()}/{_on_one_host()}"


def _address_towards(store: Any) -> str:
    """This machine's address as seen by the others: HOOP_HOST, or the one that leads to the store's machine."""
    if chosen := os.environ.get("HOOP_HOST"):
        return chosen
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    there = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            there or socket.gethostname(), 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


# ---- one listener a process

_lock = threading.Lock()
_open: dict[str, tuple[Transport, int]] = {}


def borrow(uri: str) -> Transport:
    """This process's transport for a scheme and host."""
    with _lock:
        transport, users = _open.get(uri) or (open_transport(uri, key_of_environment()), 0)
        _open[uri] = (transport, users + 1)
        return transport


def give_back(transports: Sequence[Transport]) -> None:
    """Closes those that nobody uses any more."""
    with _lock:
        for transport in transports:
            uri = next(uri for uri, (held, _) in _open.items() if held is transport)
            users = _open[uri][1] - 1
            _open[uri] = (transport, users)
            if not users:
                del _open[uri]
                transport.close()


def _let_go(thing: Any, seen: set[int]) -> None:
    """Closes a fork's copies of our sockets: while a copy is open, peers would not see this rank die."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, socket.socket):
        thing.close()
    elif isinstance(thing, dict | list | tuple):
        for part in list(thing.values() if isinstance(thing, dict) else thing):
            _let_go(part, seen)
    elif type(thing).__module__.startswith("hoop.transport"):
        _let_go(vars(thing) if hasattr(thing, "__dict__") else [], seen)


def _after_fork() -> None:
    _let_go(dict(_open), set())
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
