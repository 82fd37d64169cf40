"""The process group: how one begins and ends, its messages between two ranks, and what torch asks of it.

Collectives are in ``collective_calls``; both turn a call into one job on the group's lane or one request to its post.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.distributed import Work

from hoop.errors import HoopError, InvalidArgument
from hoop.torch_backend import c10d_backend, monitored, profile, rendezvous
from hoop.torch_backend.collective_calls import CollectiveCalls
from hoop.torch_backend.links import Links
from hoop.torch_backend.matching import Kind, Request
from hoop.torch_backend.tensors import Landing, bytes_of, check, only, to_send
from hoop.torch_backend.work import HoopWork, Together
from hoop.transport import Transport

Tensors = Sequence[torch.Tensor]


class HoopGroup(CollectiveCalls):
    """Ranks that work together over Hoop's links."""

    def __init__(
        self, name: str, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._registered = c10d_backend.register(self, rank, size)
        self._name, self._description = name, "undefined"
        self._store = store
        self._links, transports = rendezvous.meet(name, store, rank, size, world, timeout)
        self._barriers = itertools.count()
        # Runs when the group is destroyed or forgotten, or the process ends; in children of multiprocessing too.
        self._close = Finalize(self, _close, (self._links, transports), exitpriority=10)
        monitored.install(HoopGroup)

    @classmethod
    def create(cls, options: Any) -> HoopGroup:
        """From what torch.distributed tells a backend."""
        world = options.global_ranks_in_group or range(options.group_size)
        rank, size = options.group_rank, options.group_size
        return cls(options.group_id, options.store, rank, size, world, options.timeout)

    # ---- messages

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        tensor = only("send", tensors)
        check("send", tensor)
        work = HoopWork("send", [tensor], apart=True)
        return self._post(work, True, peer, tag, to_send(tensor), _nothing, tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        return self._receive("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, title: str, tensors: Tensors, peer: int | None, tag: int) -> Work:
        tensor = only(title, tensors)
        check(title, tensor)
        landing = Landing(tensor)
        work = HoopWork(title, [tensor], apart=True)
        return self._post(work, False, peer, tag, landing.flat, landing.settle, tensors)

    def _post(
        self,
        work: HoopWork,
        sends: bool,
        peer: int | None,
        tag: int,
        flat: torch.Tensor,
        settle: Callable[[], None],
        tensors: Tensors,
    ) -> Work:
        if peer is not None and not 0 <= peer < self._links.size:
            raise InvalidArgument(f"{work.title}: rank {peer} is not in 0..{self._links.size - 1}")
        links, timeout = self._links, self._links.timeout
        end_event = profile.record(work, work.title, tensors) if profile.enabled() else None

        def ended(error: HoopError | None, source: int) -> None:
            if error is None:
                settle()
                work.finish(None, source)
            else:
                work.finish(links.told(work.title, error, timeout))

        deadline = time.monotonic() + timeout
        links.post.request(Request(sends, peer, Kind.MESSAGE, tag, bytes_of(flat), flat, deadline, ended))
        if end_event is not None:
            end_event()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which did not come in time; raises on every rank then."""
        seconds = self._links.timeout
        if timeout is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        monitored.monitored_barrier(self._links, next(self._barriers), seconds, wait_all_ranks)

    # ---- several calls as one

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Together("coalesced", works)

    start_coalescing, end_coalescing = (
        _start_coalescing,
        _end_coalescing,
    )  # as C++ calls them since torch 2.15

    # ---- ending

    def shutdown(self) -> None:
        """Leaves the group; the others are told."""
        self._close()

    def abort(self) -> None:
        self._close()

    # ---- what torch asks

    def set_timeout(self, timeout: timedelta) -> None:
        self._links.timeout = timeout.total_seconds()

    def name(self) -> str:
        return "hoop"

    def _get_backend_name(self) -> str:
        return "hoop"

    getBackendName = _get_backend_name  # noqa: N815 - torch's C++ name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HoopGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}; Hoop has cpu")
        return self

    get_backend = _get_backend  # the name since torch 2.15

    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802 - torch's C++ name
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's C++ name
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815 - torch's C++ names

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def _set_sequence_number_for_group(self) -> None:
        """Counted from the first operation on."""

    def __repr__(self) -> str:
        return f"<hoop group {self._name!r}: rank {self._links.rank} of {self._links.size}>"


def _nothing() -> None:
    """A send has nothing to put anywhere."""


def _close(links: Links, transports: Sequence[Transport]) -> None:
    links.close()
    rendezvous.give_back(transports)
