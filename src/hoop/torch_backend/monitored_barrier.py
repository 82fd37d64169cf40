"""The barrier that says who did not come: everybody reports to rank 0, which answers when all have or time is up.

``torch.distributed.monitored_barrier`` asks for Gloo by name. With the first group of Hoop's it is replaced by one that
also knows Hoop's groups and passes every other to the original.
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
from hoop.torch_backend.errors import for_torch
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.p2p import MessageKind, P2PRequest
from hoop.torch_backend.tensor_views import Array

_COME, _FAILED = 1, 0
_ANSWER_SECONDS = 1.0
Outcome = tuple[threading.Event, list[HoopError]]


def monitored_barrier(links: GroupLinks, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """The group's ``number``-th; rank 0 names the first rank that failed to come, or all of them."""
    deadline = time.monotonic() + timeout
    if links.rank != 0:
        _report(links, number, deadline)
        return
    arrivals = {rank: _ask(links, rank, number, deadline) for rank in range(1, links.size)}
    missing: list[int] = []
    for rank, (_, arrival) in arrivals.items():
        if not missing and time.monotonic() >= deadline:
            _answer(links, number, _FAILED)
            raise for_torch(DeadlineExceeded, f"Rank 0 timed out in monitoredBarrier after {timeout:g} s.")
        if _failed(arrival, deadline):
            missing.append(rank)
            if not wait_all_ranks:
                break
    _answer(links, number, _FAILED if missing else _COME)
    if missing:
        who = f"Rank{'s' * wait_all_ranks} {', '.join(map(str, missing))}"
        raise for_torch(
            DeadlineExceeded, f"{who} failed to pass monitoredBarrier in {timeout:g} s ({links.who})"
        )


def _report(links: GroupLinks, number: int, deadline: float) -> None:
    # Rank 0 answers when its own time is up: a little patience, to hear its reason.
    answer, arrival = _ask(links, 0, number, deadline + _ANSWER_SECONDS)
    sent = _tell(links, 0, number, _COME, deadline)
    error = _failed(sent, deadline) or _failed(arrival, deadline + _ANSWER_SECONDS)
    if error is None and answer[0] == _COME:
        return
    why = error if error is not None else "not every rank came"
    raise for_torch(
        type(error) if error is not None else PeerLost,
        f"Rank {links.rank} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0: {why}. Please check rank 0 logs for the failed rank.",
    )


def _answer(links: GroupLinks, number: int, word: int) -> None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    for outcome in [_tell(links, rank, number, word, deadline) for rank in range(1, links.size)]:
        _failed(outcome, deadline)


def _ask(links: GroupLinks, peer: int, number: int, deadline: float) -> tuple[Array, Outcome]:
    word = np.zeros(1, np.uint8)
    return word, _request(links, False, peer, number, word, deadline)


def _tell(links: GroupLinks, peer: int, number: int, word: int, deadline: float) -> Outcome:
    return _request(links, True, peer, number, np.full(1, word, np.uint8), deadline)


def _request(links: GroupLinks, sends: bool, peer: int, number: int, data: Array, deadline: float) -> Outcome:
    over, errors = threading.Event(), list[HoopError]()

    def ended(error: HoopError | None, source: int) -> None:
        if error is not None:
            errors.append(error)
        over.set()

    links.post.request(P2PRequest(sends, peer, MessageKind.BARRIER, number, data, data, deadline, ended))
    return over, errors


def _failed(outcome: Outcome, deadline: float) -> HoopError | None:
    over, errors = outcome
    # The post ends it at the deadline; a little more, so that its reason is heard.
    if not over.wait(max(0.0, deadline - time.monotonic()) + _ANSWER_SECONDS):
        return DeadlineExceeded("no word from the post")
    return errors[0] if errors else None


@functools.cache
def install(kind: type) -> None:
    """Makes ``torch.distributed.monitored_barrier`` know groups of this kind."""
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def wrapped(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        known = group if group is not None or not dist.is_initialized() else c10d._get_default_group()
        if isinstance(known, kind):
            known.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            original(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = wrapped
    dist.monitored_barrier = wrapped
