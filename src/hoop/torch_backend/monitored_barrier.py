"""``monitored_barrier``: a barrier that names the ranks that did not arrive.

Every rank reports to rank 0. Rank 0 answers when all ranks have reported or its timeout has passed.

``torch.distributed.monitored_barrier`` works for Gloo groups only. ``install`` replaces it, when the first Hoop group
is made, by a function that also handles Hoop's groups and passes every other group to the original.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.torch_backend.errors import torch_error
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.p2p import MessageKind, P2PRequest
from hoop.torch_backend.tensor_views import Array

_ARRIVED, _FAILED = 1, 0
_ANSWER_SECONDS = 1.0
PendingMessage = tuple[threading.Event, list[HoopError]]
"""Event that is set when a message is sent or received, and its error if there was one."""


def monitored_barrier(links: GroupLinks, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """Runs the group's ``number``-th monitored barrier; rank 0 names the first missing rank, or all of them."""
    deadline = time.monotonic() + timeout
    if links.rank != 0:
        _report_to_rank_0(links, number, deadline)
        return
    arrivals = {rank: _receive(links, rank, number, deadline) for rank in range(1, links.size)}
    missing: list[int] = []
    for rank, (_, arrival) in arrivals.items():
        if not missing and time.monotonic() >= deadline:
            _answer_all(links, number, _FAILED)
            raise torch_error(DeadlineExceeded, f"Rank 0 timed out in monitoredBarrier after {timeout:g} s.")
        if _wait_for_error(arrival, deadline):
            missing.append(rank)
            if not wait_all_ranks:
                break
    _answer_all(links, number, _FAILED if missing else _ARRIVED)
    if missing:
        ranks = f"Rank{'s' * wait_all_ranks} {', '.join(map(str, missing))}"
        raise torch_error(
            DeadlineExceeded, f"{ranks} failed to pass monitoredBarrier in {timeout:g} s ({links.own_label})"
        )


def _report_to_rank_0(links: GroupLinks, number: int, deadline: float) -> None:
    # Rank 0 answers when its own timeout has passed, so its answer may come after this rank's deadline.
    answer, arrival = _receive(links, 0, number, deadline + _ANSWER_SECONDS)
    sent = _send(links, 0, number, _ARRIVED, deadline)
    error = _wait_for_error(sent, deadline) or _wait_for_error(arrival, deadline + _ANSWER_SECONDS)
    if error is None and answer[0] == _ARRIVED:
        return
    reason = error if error is not None else "not every rank came"
    raise torch_error(
        type(error) if error is not None else PeerLost,
        f"Rank {links.rank} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0: {reason}. Please check rank 0 logs for the failed rank.",
    )


def _answer_all(links: GroupLinks, number: int, status: int) -> None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    for sent in [_send(links, rank, number, status, deadline) for rank in range(1, links.size)]:
        _wait_for_error(sent, deadline)


def _receive(links: GroupLinks, peer: int, number: int, deadline: float) -> tuple[Array, PendingMessage]:
    status = np.zeros(1, np.uint8)
    return status, _submit(links, False, peer, number, status, deadline)


def _send(links: GroupLinks, peer: int, number: int, status: int, deadline: float) -> PendingMessage:
    return _submit(links, True, peer, number, np.full(1, status, np.uint8), deadline)


def _submit(links: GroupLinks, is_send: bool, peer: int, number: int, data: Array, deadline: float) -> PendingMessage:
    completed, errors = threading.Event(), list[HoopError]()

    def on_complete(error: HoopError | None, source: int) -> None:
        if error is not None:
            errors.append(error)
        completed.set()

    links.p2p.submit(
        P2PRequest(
            is_send=is_send,
            peer=peer,
            kind=MessageKind.BARRIER,
            tag=number,
            data=data,
            owner=data,
            deadline=deadline,
            on_complete=on_complete,
        )
    )
    return completed, errors


def _wait_for_error(message: PendingMessage, deadline: float) -> HoopError | None:
    completed, errors = message
    # The P2P engine fails the request at its deadline; wait a little longer, to get its reason.
    if not completed.wait(max(0.0, deadline - time.monotonic()) + _ANSWER_SECONDS):
        return DeadlineExceeded("the P2P engine did not complete the message")
    return errors[0] if errors else None


@functools.cache
def install(group_class: type) -> None:
    """Makes ``torch.distributed.monitored_barrier`` handle groups of this class; once in a process."""
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def wrapped(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        target = group if group is not None or not dist.is_initialized() else c10d._get_default_group()
        if isinstance(target, group_class):
            target.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            original(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = wrapped
    dist.monitored_barrier = wrapped
