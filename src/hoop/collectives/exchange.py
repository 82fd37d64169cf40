"""An all_to_all in which every pair of ranks may have its own message length.

The lengths are checked: rank i's message to rank j must be as long as rank j's buffer for it. Ranks that share memory
compare all lengths at their first barrier. Over links, the receiver of a message of another length informs all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.link_executor import confirm_all_started, run_collective
from hoop.collectives.reduction import Array
from hoop.errors import WrongLength
from hoop.transport.base import Endpoint, SharedEndpoint
from hoop.transport.call_check import Call, length_mismatch_error
from hoop.transport.shm_segment import SLOT_BYTES


def exchange(
    communicator: Communicator, call: Call, sources: Sequence[Array], destinations: Sequence[Array], deadline: float
) -> None:
    """Collective. Sends the bytes ``sources[i]`` to rank i and receives ``destinations[i]`` from it.

    In round k rank r sends to r+k and receives from r-k. Every rank must pass the same ``call``.
    """
    endpoint, rank, size = communicator.endpoint, communicator.rank, communicator.size

    def run() -> None:
        if isinstance(endpoint, SharedEndpoint):
            _compare_lengths(endpoint, call, sources, destinations, deadline)
        else:
            endpoint.begin_collective(call, deadline)
        if sources[rank].size != destinations[rank].size:
            raise length_mismatch_error(call, rank, rank, destinations[rank].nbytes, str(sources[rank].nbytes))
        np.copyto(destinations[rank], sources[rank])
        for k in range(1, size):
            _exchange_round(endpoint, call, sources, destinations, k, deadline)
        endpoint.flush(deadline)
        # Empty messages are not sent, so a rank may not have received from every other rank.
        confirm_all_started(endpoint, deadline)

    run_collective(endpoint, run)


def _exchange_round(
    endpoint: Endpoint, call: Call, sources: Sequence[Array], destinations: Sequence[Array], k: int, deadline: float
) -> None:
    to, by = (endpoint.rank + k) % endpoint.size, (endpoint.rank - k) % endpoint.size
    if sources[to].size:
        endpoint.send(to, sources[to].data, deadline)
    if destinations[by].size:
        try:
            endpoint.recv_into(by, destinations[by].data, deadline)
        except WrongLength as error:
            size = destinations[by].nbytes
            raise length_mismatch_error(call, endpoint.rank, by, size, str(error.received_bytes)) from error


def _compare_lengths(
    endpoint: SharedEndpoint, call: Call, sources: Sequence[Array], destinations: Sequence[Array], deadline: float
) -> None:
    """Begins the collective: every rank publishes its lengths before the barrier and compares all lengths after it."""
    size = endpoint.size
    if 2 * size * 8 > SLOT_BYTES:
        endpoint.begin_collective(call, deadline)
        return
    endpoint.wait_for_peers(deadline)  # the segments of all ranks are mapped from here on
    endpoint.publish_count = publication = endpoint.publish_count + 1
    lengths = [
        segment.slots[publication & 1].view(np.int64)[: 2 * size].reshape(2, size) for segment in endpoint.segments
    ]
    lengths[endpoint.rank][:] = [[one.nbytes for one in vectors] for vectors in (sources, destinations)]
    endpoint.begin_collective(call, deadline)
    sent = np.array([one[0] for one in lengths])
    expected = np.array([one[1] for one in lengths]).T
    different = np.argwhere(sent != expected)
    if len(different):
        sender, receiver = (int(one) for one in different[0])
        names = endpoint.global_ranks
        error = length_mismatch_error(
            call, names[receiver], names[sender], int(expected[sender, receiver]), str(sent[sender, receiver])
        )
        endpoint.abort(error)
        raise error
