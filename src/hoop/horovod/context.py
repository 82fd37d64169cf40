"""This process's part in the run, from ``hvd.init`` to ``hvd.shutdown``: rank, group, store.

The processes of a run are found in the environment, in this order:

    hoop run --min-np              the launcher forms rounds of ranks (``launch.rendezvous_client``): elastic
    RANK, WORLD_SIZE, MASTER_…     hoop run, torchrun, and other programs that set PyTorch's variables
    srun, mpirun, Kubernetes       ``schedulers``
    none of them                   one process, size 1
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hoop.errors import FailedPrecondition, InvalidArgument, MembershipChanged
from hoop.horovod.errors import HorovodInternalError, peer_errors
from hoop.horovod.join_ledger import JoinLedger
from hoop.launch.rendezvous_client import RendezvousClient, RunEnded, is_elastic
from hoop.schedulers.catalog import find_placement
from hoop.topology import Address
from hoop.torch_backend import autoload

BACKEND = "hoop"
START_TIMEOUT_S, ELASTIC_TIMEOUT_S = 600.0, 600.0
OPERATION_TIMEOUT_S = 1800.0
"""Deadline of a collective in seconds, that of PyTorch; ``HOROVOD_GLOO_TIMEOUT_SECONDS`` sets another one."""
ROUND_TIMEOUT_S = 60.0
"""Seconds that the ranks of an elastic round, which have all started, may take to connect."""
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankInfo:
    """Rank and size of this process in the run and on its host (local), and of its host among all hosts (cross)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


class Context:
    """The process group and what belongs to it. An elastic run makes its group again, with other ranks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.rendezvous: RendezvousClient | None = None
        """Connection to the launcher of an elastic run; None in other runs."""
        self.rank_info = RankInfo()
        self.generation = 0
        """Number of times that the group was made again."""
        self._owns_group = not dist.is_initialized()
        if not self._owns_group:
            self._adopt_group()
        else:
            if BACKEND not in dist.Backend.backend_list:  # PyTorch's autoloading of backends is off
                autoload.register()
            self._connect()
        self.ledger = JoinLedger(self.store, self.rank_info.rank, self.rank_info.size)

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    # ---- making the group

    def _connect(self) -> None:
        environ = self._environ
        if is_elastic(environ):
            self.rendezvous = RendezvousClient(environ, _seconds(environ, "HOOP_ELASTIC_TIMEOUT", ELASTIC_TIMEOUT_S))
            self._join_round(has_state=False)
        elif all(environ.get(name) for name in _TORCH_VARIABLES):
            rank, size = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE")
            self._make_group(None, rank, size)
            local_size = _whole(environ, "LOCAL_WORLD_SIZE", size)
            self.rank_info = _rank_info(rank, size, _whole(environ, "LOCAL_RANK", rank % local_size), local_size)
        else:
            meet = environ.get("HOOP_MEET")
            try:
                found = find_placement(environ, meet=None if meet is None else Address.parse(meet, "HOOP_MEET"))
            except InvalidArgument as error:  # the option of hoop train is a variable here
                raise InvalidArgument(
                    str(error).replace("--meet ", "HOOP_MEET=").replace("--meet", "HOOP_MEET")
                ) from None
            if found is None:
                self._make_group(dist.HashStore(), 0, 1)
            else:
                assert found.meeting_point is not None
                point = found.meeting_point
                store = _tcp_store(point.host, point.port, found.rank == 0, self._start_timeout())
                self._make_group(store, found.rank, found.world_size)
                self.rank_info = _rank_info(found.rank, found.world_size, found.local_rank, found.local_world_size)

    def _join_round(self, has_state: bool) -> None:
        """Waits for a round of the launcher and makes its group; again, if a rank is lost meanwhile."""
        assert self.rendezvous is not None
        while True:
            try:
                found = self.rendezvous.next_round(has_state)
                if found.rank == 0:
                    store = _tcp_store("127.0.0.1", 0, True, ROUND_TIMEOUT_S)
                    self.rendezvous.announce_store(store.port)
                else:
                    store = _tcp_store("127.0.0.1", self.rendezvous.store_port(), False, ROUND_TIMEOUT_S)
                with peer_errors():
                    self._make_group(store, found.rank, found.size, ROUND_TIMEOUT_S)
            except (MembershipChanged, HorovodInternalError, dist.DistError):
                self._destroy_group()
                continue
            except RunEnded:
                raise SystemExit(0) from None  # the other ranks have finished the work
            self.rank_info = _rank_info(found.rank, found.size, found.rank, found.size)
            return

    def _make_group(self, store: Any, rank: int, size: int, timeout_s: float | None = None) -> None:
        timeout = timedelta(seconds=timeout_s or self._start_timeout())
        given = {} if store is None else {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group(BACKEND, timeout=timeout, **given)
        seconds = _seconds(self._environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", OPERATION_TIMEOUT_S)
        group: Any = dist.group.WORLD
        group.set_timeout(timedelta(seconds=seconds))

    def _start_timeout(self) -> float:
        return _seconds(self._environ, "HOOP_START_TIMEOUT", START_TIMEOUT_S)

    def _adopt_group(self) -> None:
        """Uses the group that the program has made itself."""
        if BACKEND not in dist.get_backend():
            raise FailedPrecondition(
                f"hvd.init: torch.distributed has a group of the backend {dist.get_backend()}; make it with "
                "dist.init_process_group('hoop'), or leave it to hvd.init()"
            )
        rank, size = dist.get_rank(), dist.get_world_size()
        local_size = _whole(self._environ, "LOCAL_WORLD_SIZE", size)
        self.rank_info = _rank_info(rank, size, _whole(self._environ, "LOCAL_RANK", rank % local_size), local_size)

    # ---- ending it

    def reset(self) -> None:
        """Elastic: leaves the group and joins the next round."""
        if self.rendezvous is None:
            raise FailedPrecondition(
                "a rank was lost, and this run cannot go on without it: start it with hoop run --min-np N"
            )
        self._destroy_group()
        self._join_round(has_state=True)
        self.generation += 1
        self.ledger = JoinLedger(self.store, self.rank_info.rank, self.rank_info.size)

    def _destroy_group(self) -> None:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the links of a lost rank
                dist.destroy_process_group()

    def close(self) -> None:
        if self._owns_group:
            self._destroy_group()
        if self.rendezvous is not None:
            with contextlib.suppress(OSError):
                self.rendezvous.close()


def _tcp_store(host: str, port: int, is_server: bool, timeout_s: float) -> Any:
    return dist.TCPStore(host, port, is_master=is_server, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _rank_info(rank: int, size: int, local_rank: int, local_size: int) -> RankInfo:
    """Hosts are taken to have equally many ranks, numbered host by host, as launchers do."""
    hosts = -(-size // local_size)
    return RankInfo(rank, size, local_rank, local_size, min(rank // local_size, hosts - 1), hosts)


def _whole(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name) or ("" if default is None else str(default))
    if not text.isdigit():
        raise InvalidArgument(f"{name}: {text!r} is not a whole number")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InvalidArgument(f"{name}: {text!r} is not a time in seconds")
    return seconds


# ---- the context of this process

_context: Context | None = None


def open_context() -> Context:
    """Makes the context if there is none."""
    global _context
    if _context is None:
        _context = Context(os.environ)
        atexit.register(close_context)
    return _context


def close_context() -> None:
    """Leaves the run; does nothing if there is no context."""
    global _context
    if _context is not None:
        context, _context = _context, None
        atexit.unregister(close_context)
        context.close()


def has_context() -> bool:
    return _context is not None


def current() -> Context:
    """The context; raises before ``hvd.init()``."""
    if _context is None:
        raise FailedPrecondition("hvd is not initialized; call hvd.init() first")
    return _context
