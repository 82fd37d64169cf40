"""Tensors on the accelerators of one host, from rank to rank, without host memory (``stage/peer_memory.py``).

    sender      copies the tensor to a slot of its own memory | waits for its GPU | sends the place, in a header
    receiver    copies the tensor out of the slot, on its GPU | when that is done, counts the message as read

The header goes over the link, in order with all other messages (``tensor_channel.py``). A slot is free again when the
receiver has counted its message: receivers count in their arenas, which senders have mapped. No rank waits for a slot,
because two ranks that send to each other would wait for ever. A sender without a free slot allocates one, so there are
as many as the schedule has messages in flight. At ``MAX_SLOTS``, and if its memory is full, it sends through the host.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.engine.stage.peer_memory import PeerMemory, place_in
from hoop.engine.stage.state import padded
from hoop.errors import OutOfMemory
from hoop.memory.dtypes import dtype

log = logging.getLogger("hoop.engine")
MAX_SLOTS = 64
"""Maximum number of slots of a rank for messages to one peer."""
Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class _Slot:
    """Memory of this rank for one message."""

    name: str
    data: Tensor
    """Bytes of the slot, on the accelerator."""
    place: int
    message: int = 0
    """Number of the last message to the peer that was written to this slot."""


class PeerTensors:
    """Sends tensors of this rank's accelerator, and receives them. Only the rank's training thread uses it."""

    def __init__(self, memory: PeerMemory, communicator: Communicator, timeout: float) -> None:
        """Collective."""
        self._memory, rank = memory, communicator.rank
        self._read: Counts = memory.vectors.new("peer.read", communicator.size, dtype("int64")).view(np.int64)
        """Number of messages from each rank that this rank has read."""
        own = place_in(memory.arenas[rank], self._read.ctypes.data) if memory.peers else 0
        places = all_gather_object(communicator, own, timeout)
        self._read_by_peer: dict[int, Counts] = {
            peer: memory.arenas[peer][places[peer] + 8 * rank : places[peer] + 8 * rank + 8].view(np.int64)
            for peer in memory.peers
        }
        """Number of this rank's messages that each receiver has read, in the receiver's memory."""
        self._sent = dict.fromkeys(memory.peers, 0)
        self._slots: dict[int, list[_Slot]] = {peer: [] for peer in memory.peers}
        self._slots_made = 0
        self._reading: deque[tuple[int, torch.cuda.Event | None]] = deque()
        """Senders of the messages that the GPU is still copying, in order."""
        self._views: dict[tuple[int, int, int], Tensor] = {}
        """Bytes in the memory of peers, by rank, place and size."""

    def write(self, peer: int, tensor: Tensor) -> int | None:
        """Write a tensor where ``peer`` can read it, and wait until it is there; returns its place.

        None if that is not possible: the caller sends it through the host.
        """
        self.acknowledge()
        slot = self._free_slot(peer, tensor.nbytes) if peer in self._slots else None
        if slot is None:
            return None
        slot.data[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._memory.accelerator.synchronize()
        self._sent[peer] += 1
        slot.message = self._sent[peer]
        return slot.place

    def read(
        self, peer: int, place: int, shape: Sequence[int], kind: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Return a copy of the tensor that a peer has written at a place: in ``into``, if it is given."""
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        key = peer, place, size
        if key not in self._views:
            self._views[key] = self._memory.at(peer, place, -(-size // 4)).view(torch.uint8)[:size]
        source = self._views[key].view(kind).view(list(shape))
        found = source.clone() if into is None else into.copy_(source)
        self._reading.append((peer, self._memory.accelerator.mark()))
        self.acknowledge()
        return found

    def upload(self, into: Tensor, host: Tensor) -> None:
        """Copy a tensor that came through the host to the GPU."""
        self._memory.accelerator.copy_in(into, host)

    def acknowledge(self) -> None:
        """Count the messages whose copies are done, without waiting."""
        while self._reading and self._memory.accelerator.reached(self._reading[0][1]):
            self._read[self._reading.popleft()[0]] += 1

    def close(self) -> None:
        """Drop the memory of other ranks."""
        self._read_by_peer, self._slots = {}, {}
        self._reading.clear()
        self._views.clear()

    def _free_slot(self, peer: int, size: int) -> _Slot | None:
        """Return a slot that the peer has read, of at least ``size`` bytes; None if there can be no more."""
        slots, read = self._slots[peer], int(self._read_by_peer[peer][0])
        free = [slot for slot in slots if slot.message <= read]
        if fitting := [slot for slot in free if slot.data.nbytes >= size]:
            return min(fitting, key=lambda slot: slot.data.nbytes)
        if free:
            name = free[0].name
            slots.remove(free[0])  # its memory is allocated again, with the new size
        elif len(slots) < MAX_SLOTS:
            name = f"sent{self._slots_made}"
            self._slots_made += 1
        else:
            return None
        try:
            vector = self._memory.vector(name, padded(-(-size // 4)))
        except OutOfMemory as error:
            log.info("a tensor of %d bytes for rank %d goes through the host: %s", size, peer, error)
            return None
        slots.append(_Slot(name, vector.view(torch.uint8), self._memory.place(vector)))
        return slots[-1]
