"""Point-to-point tensors between ranks. A message is a fixed-size header, then the elements of the tensor.

The header names the instruction, the dtype and the shape. The receiver checks it against the instruction that it
executes. If two ranks run different plans, the job fails with an error that names both, instead of computing with the
wrong tensor.

A tensor on a GPU can stay there, if the receiver has mapped the sender's memory: then the header has its place, and no
elements follow (``peer_tensors.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hoop.engine.peer_tensors import PeerTensors
from hoop.errors import InternalError, LinkCorrupted
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.transport.base import Endpoint, PendingSend

_MAX_DIMENSIONS = 8
_KINDS = list(InstructionKind)
_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.float16, torch.uint8, torch.int32]
_MAX_ELEMENTS = 1 << 40
_FIXED = 6
"""Number of words of a header before the shape: kind, stage, micro-batch, dtype, dimensions, place."""
_NO_PLACE = -1
"""Value of the header's word ``place`` if the elements follow the header."""
TensorReceiver = Callable[[Instruction], Tensor | None]
"""Function that returns the tensor into which a message is received, or None to allocate one."""


class TensorChannel:
    """Sends and receives tensors over an endpoint. Not thread-safe: only the rank's training thread uses it."""

    def __init__(self, endpoint: Endpoint, peer_tensors: PeerTensors | None = None) -> None:
        """``peer_tensors``: tensors on this rank's GPU can go to the ranks of its host directly."""
        self.endpoint, self._peer_tensors = endpoint, peer_tensors
        self.bytes_shared = 0
        """Number of bytes of tensors that other ranks read in this rank's memory."""
        self._early: dict[Instruction, Tensor] = {}
        self.idle_work: Callable[[], None] | None = None
        """Function that is called once, when a receive would otherwise wait: work that overlaps with communication."""

    def send(self, instruction: Instruction, tensor: Tensor, deadline: float) -> PendingSend | None:
        """Start sending a tensor to ``instruction.peer``.

        The caller must not write to the tensor until the endpoint is flushed, or the returned send is done.
        """
        tensor = tensor.detach().cpu().contiguous()
        self._send_header(instruction, tensor, _NO_PLACE, deadline)
        return self.endpoint.send(instruction.peer, _bytes(tensor), deadline) if tensor.numel() else None

    def send_from_device(self, instruction: Instruction, tensor: Tensor, deadline: float) -> bool:
        """Send a tensor that is on the GPU, where ``instruction.peer`` reads it; the caller may overwrite it at once.

        False: the peer cannot read it there, and nothing was sent.
        """
        tensor = tensor.detach()
        place = self._peer_tensors.write(instruction.peer, tensor) if self._peer_tensors and tensor.numel() else None
        if place is None:
            return False
        self._send_header(instruction, tensor, place, deadline)
        self.bytes_shared += tensor.nbytes
        return True

    def send_or_copy(
        self, instruction: Instruction, on_device: Tensor | None, host: Callable[[], Tensor], deadline: float
    ) -> PendingSend | None:
        """Send a tensor from the GPU, if ``instruction.peer`` can read it there; else ``host()``, its host copy.

        ``on_device``: None: it is only on the host. For the copy the rule of ``send`` holds.
        """
        if on_device is not None and self.send_from_device(instruction, on_device, deadline):
            return None
        return self.send(instruction, host(), deadline)

    def _send_header(self, instruction: Instruction, tensor: Tensor, place: int, deadline: float) -> None:
        if tensor.dim() > _MAX_DIMENSIONS or tensor.dtype not in _DTYPES:
            raise InternalError(f"{instruction}: a tensor of {tensor.dtype} {list(tensor.shape)} cannot be sent")
        arriving = instruction.counterpart(self.endpoint.rank)
        header = np.zeros(_FIXED + _MAX_DIMENSIONS, np.int64)
        header[:_FIXED] = (
            _KINDS.index(arriving.kind),
            arriving.stage,
            arriving.micro,
            _DTYPES.index(tensor.dtype),
            tensor.dim(),
            place,
        )
        header[_FIXED : _FIXED + tensor.dim()] = tensor.shape
        self.endpoint.send(instruction.peer, header.view(np.uint8).data, deadline)

    def receive(self, peer: int, deadline: float, receiver: TensorReceiver | None = None) -> tuple[Instruction, Tensor]:
        """Receive the next message from ``peer``; returns it as the receiving instruction of this rank, and its tensor.

        ``receiver`` may provide the tensor to receive into, also on the GPU. Raises if its shape or dtype differs from
        the message's.
        """
        if self._peer_tensors is not None:
            self._peer_tensors.acknowledge()
        if self.idle_work is not None and not self.ready_peers([peer]):
            self.run_idle_work()
        header = np.empty(_FIXED + _MAX_DIMENSIONS, np.int64)
        self.endpoint.recv_into(peer, header.view(np.uint8).data, deadline)
        kind, stage, micro, dtype, dimensions, place = (int(number) for number in header[:_FIXED])
        shape = [int(number) for number in header[_FIXED : _FIXED + max(0, dimensions)]]
        known = 0 <= kind < len(_KINDS) and 0 <= dtype < len(_DTYPES) and 0 <= dimensions <= _MAX_DIMENSIONS
        placed = place >= 0 and self._peer_tensors is not None
        if not known or any(not 0 <= one < _MAX_ELEMENTS for one in shape) or not (placed or place == _NO_PLACE):
            raise LinkCorrupted(f"invalid tensor header from {self.endpoint.describe(peer)}: {header.tolist()}")
        message = Instruction(_KINDS[kind], stage, micro, peer)
        tensor = receiver(message) if receiver is not None else None
        if self._peer_tensors is not None and placed and tensor is None:
            return message, self._peer_tensors.read(peer, place, shape, _DTYPES[dtype])
        if tensor is None:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        elif list(tensor.shape) != shape or tensor.dtype != _DTYPES[dtype]:
            raise InternalError(
                f"rank {self.endpoint.rank}: {message} is {_DTYPES[dtype]} {shape}, expected {tensor.dtype} "
                f"{list(tensor.shape)}: the ranks do not hold the same model"
            )
        if self._peer_tensors is not None and placed:
            self._peer_tensors.read(peer, place, shape, _DTYPES[dtype], tensor)
        elif tensor.numel():
            host = torch.empty(shape, dtype=tensor.dtype) if tensor.is_cuda else tensor
            self.endpoint.recv_into(peer, _bytes(host), deadline)
            if self._peer_tensors is not None and tensor.is_cuda:
                self._peer_tensors.upload(tensor, host)
        return message, tensor

    def close(self) -> None:
        """Drop the memory of other ranks. The endpoint stays open."""
        if self._peer_tensors is not None:
            self._peer_tensors.close()
            self._peer_tensors = None

    def run_idle_work(self) -> None:
        """Run ``idle_work``, if there is any; it runs once."""
        work, self.idle_work = self.idle_work, None
        if work is not None:
            work()

    def ready_peers(self, peers: Sequence[int]) -> list[int]:
        """Return the peers that have sent something, without waiting. Also makes progress on pending sends."""
        self.endpoint.wake()
        return self.endpoint.wait_readable(peers, 0.0)

    def store_early(self, message: Instruction, tensor: Tensor) -> None:
        """Store a message that arrived before its receive instruction is executed."""
        if message in self._early:
            raise InternalError(f"rank {self.endpoint.rank}: {message} was received twice")
        self._early[message] = tensor

    def expect(self, instruction: Instruction, deadline: float, into: Tensor | None = None) -> Tensor:
        """Return the tensor of this receive instruction: one that was stored early, or the peer's next message."""
        if (early := self._early.pop(instruction, None)) is not None:
            return early
        received, tensor = self.receive(instruction.peer, deadline, lambda _: into)
        if received != instruction:
            raise InternalError(
                f"rank {self.endpoint.rank} expected {instruction} and received {received}: "
                "the ranks do not run the same plan"
            )
        return tensor


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
