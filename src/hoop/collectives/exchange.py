"""Message i to rank i, each of its own length: an all_to_all whose counts differ between pairs of ranks.

What must agree is checked: rank i's message to rank j is as long as rank j's room for it. Ranks that share memory
compare all lengths when they meet; over links the receiver of a message of another length tells all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.link_executor import confirm, together
from hoop.collectives.reduction import Array
from hoop.errors import WrongLength
from hoop.transport.base import Endpoint, SharedEndpoint
from hoop.transport.calls import Call, wrong_length
from hoop.transport.shm_segment import SLOT_BYTES


def exchange(
    communicator: Communicator,
    call: Call,
    sources: Sequence[Array],
    destinations: Sequence[Array],
    deadline: float,
) -> None:
    """In round k to rank r+k and from r-k; vectors of bytes. Every rank must give the same ``call``."""
    endpoint, rank, size = communicator.endpoint, communicator.rank, communicator.size

    def run() -> None:
        if isinstance(endpoint, SharedEndpoint):
            _compare_lengths(endpoint, call, sources, destinations, deadline)
        else:
            endpoint.begin(call, deadline)
        if sources[rank].size != destinations[rank].size:
            raise wrong_length(call, rank, rank, destinations[rank].nbytes, str(sources[rank].nbytes))
        np.copyto(destinations[rank], sources[rank])
        for k in range(1, size):
            _swap(endpoint, call, sources, destinations, k, deadline)
        endpoint.flush(deadline)
        confirm(endpoint, deadline)  # empty messages are not sent: nobody has heard of everybody

    together(endpoint, run)


def _swap(
    endpoint: Endpoint,
    call: Call,
    sources: Sequence[Array],
    destinations: Sequence[Array],
    k: int,
    deadline: float,
) -> None:
    to, by = (endpoint.rank + k) % endpoint.size, (endpoint.rank - k) % endpoint.size
    if sources[to].size:
        endpoint.send(to, sources[to].data, deadline)
    if destinations[by].size:
        try:
            endpoint.recv_into(by, destinations[by].data, deadline)
        except WrongLength as error:
            size = destinations[by].nbytes
            raise wrong_length(call, endpoint.rank, by, size, str(error.came)) from error


def _compare_lengths(
    endpoint: SharedEndpoint,
    call: Call,
    sources: Sequence[Array],
    destinations: Sequence[Array],
    deadline: float,
) -> None:
    """A meeting, before which every rank lays its lengths open; every rank compares those of all."""
    size = endpoint.size
    if 2 * size * 8 > SLOT_BYTES:
        endpoint.begin(call, deadline)
        return
    endpoint.gather(deadline)  # from here on everybody's memory is there
    endpoint.publications = publication = endpoint.publications + 1
    slots = [
        box.slots[publication & 1].view(np.int64)[: 2 * size].reshape(2, size) for box in endpoint.mailboxes
    ]
    slots[endpoint.rank][:] = [[one.nbytes for one in vectors] for vectors in (sources, destinations)]
    endpoint.begin(call, deadline)
    sent = np.array([one[0] for one in slots])
    wanted = np.array([one[1] for one in slots]).T
    different = np.argwhere(sent != wanted)
    if len(different):
        giver, taker = (int(one) for one in different[0])
        names = endpoint.names
        error = wrong_length(
            call, names[taker], names[giver], int(wanted[giver, taker]), str(sent[giver, taker])
        )
        endpoint.abort(error)
        raise error
