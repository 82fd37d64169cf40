"""Tensors that travel between ranks: a short header that says what comes, then the elements.

The header is checked against what the receiver expects, so a plan that two ranks understand differently fails with both
sides named instead of computing nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hoop.errors import InternalError, LinkCorrupted
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.transport.base import Endpoint, PendingSend

_DIMENSIONS = 8
_KINDS = list(InstructionKind)
_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.float16, torch.uint8, torch.int32]
_MOST_ELEMENTS = 1 << 40
TensorReceiver = Callable[[Instruction], Tensor | None]
"""Where a message is put; None: in memory of its own."""


class TensorChannel:
    """Sends and receives tensors over an endpoint; used by one thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._early: dict[Instruction, Tensor] = {}
        self.meanwhile: Callable[[], None] | None = None
        """What can be done while nothing has come; once."""

    def send(self, instruction: Instruction, tensor: Tensor, deadline: float) -> PendingSend | None:
        """Starts a message; the tensor must stay as it is until the links are flushed, or what this returns is done."""
        if tensor.dim() > _DIMENSIONS or tensor.dtype not in _DTYPES:
            raise InternalError(
                f"{instruction}: a tensor of {tensor.dtype} {list(tensor.shape)} cannot travel"
            )
        tensor = tensor.detach().cpu().contiguous()
        arriving = instruction.mirrored(self.endpoint.rank)
        header = np.zeros(5 + _DIMENSIONS, np.int64)
        header[:5] = (
            _KINDS.index(arriving.kind),
            arriving.stage,
            arriving.micro,
            _DTYPES.index(tensor.dtype),
            tensor.dim(),
        )
        header[5 : 5 + tensor.dim()] = tensor.shape
        self.endpoint.send(instruction.peer, header.view(np.uint8).data, deadline)
        return self.endpoint.send(instruction.peer, _bytes(tensor), deadline) if tensor.numel() else None

    def receive(
        self, peer: int, deadline: float, landing: TensorReceiver | None = None
    ) -> tuple[Instruction, Tensor]:
        """The next message from a peer, as this rank calls it; ``landing`` may have a place for it."""
        if self.meanwhile is not None and not self.ready([peer]):
            self.idle()
        header = np.empty(5 + _DIMENSIONS, np.int64)
        self.endpoint.recv_into(peer, header.view(np.uint8).data, deadline)
        kind, stage, micro, dtype, dimensions = (int(number) for number in header[:5])
        shape = [int(number) for number in header[5 : 5 + max(0, dimensions)]]
        known = 0 <= kind < len(_KINDS) and 0 <= dtype < len(_DTYPES) and 0 <= dimensions <= _DIMENSIONS
        if not known or any(not 0 <= one < _MOST_ELEMENTS for one in shape):
            raise LinkCorrupted(
                f"a header from {self.endpoint.describe(peer)} makes no sense: {header.tolist()}"
            )
        message = Instruction(_KINDS[kind], stage, micro, peer)
        tensor = landing(message) if landing is not None else None
        if tensor is None:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        elif list(tensor.shape) != shape or tensor.dtype != _DTYPES[dtype]:
            raise InternalError(
                f"rank {self.endpoint.rank}: {message} is {_DTYPES[dtype]} {shape}, and its place is {tensor.dtype} "
                f"{list(tensor.shape)}: the ranks do not hold the same model"
            )
        if tensor.numel():
            self.endpoint.recv_into(peer, _bytes(tensor), deadline)
        return message, tensor

    def idle(self) -> None:
        """There is nothing else to do, or no time left to wait for such a moment."""
        work, self.meanwhile = self.meanwhile, None
        if work is not None:
            work()

    def ready(self, peers: Sequence[int]) -> list[int]:
        """Which of these peers have sent something, without waiting; pending messages have their turn."""
        self.endpoint.wake()
        return self.endpoint.senders(peers, 0.0)

    def keep(self, message: Instruction, tensor: Tensor) -> None:
        """A message that came before it is expected."""
        if message in self._early:
            raise InternalError(f"rank {self.endpoint.rank}: {message} came twice")
        self._early[message] = tensor

    def expect(self, instruction: Instruction, deadline: float, into: Tensor | None = None) -> Tensor:
        """The tensor of this receive, which is kept already or must be the peer's next message."""
        if (early := self._early.pop(instruction, None)) is not None:
            return early
        came, tensor = self.receive(instruction.peer, deadline, lambda _: into)
        if came != instruction:
            raise InternalError(
                f"rank {self.endpoint.rank} waited for {instruction} and got {came}: "
                "the ranks do not run the same plan"
            )
        return tensor


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
