"""``KeptGpuMemory``: the state of a data parallel rank on a GPU, in memory that a restarted device finds again.

It is a block of its own beside the device's arena on the GPU, which another process keeps alive if this one is killed
(``memory/gpu_keeper.py``). ``StateCommit`` says, in that memory, which step the state is of. The block is read by
``fault_tolerance/gpu_persistence.py``, in the process that is started again.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hoop.engine.stage.provenance import ELEMENTS_PER_SHARD
from hoop.engine.stage.state import TAIL, padded
from hoop.errors import HoopError
from hoop.memory.cuda_arena import GRANULE, CudaArena, granules
from hoop.memory.gpu_driver import Gpu
from hoop.memory.gpu_keeper import GpuKeeper

if TYPE_CHECKING:
    from hoop.memory.commit_record import CommitRecord

MAX_STRIDE = 64
"""Maximum number of steps that are launched before the host reads their losses."""
BUFFER_ALIGNMENT = 256
BEGUN, ENDED, STRIDE_BEGAN = range(3)
COMMIT_WORDS = 4
ANY_STEP = 1 << 62
_NEVER = (-(1 << 40), -(1 << 41))
"""Values of ``BEGUN`` and ``ENDED`` that stay negative and different while updates count them up."""


def kept_bytes(*counts: int) -> int:
    """Bytes of a block for vectors with these numbers of float32 elements."""
    return granules(sum(4 * max(count, 1) + BUFFER_ALIGNMENT for count in counts))


def kept_overhead(shards: int) -> int:
    """Bytes of a block beside the state: the tails of a stride's totals, and what rounding up to granules takes."""
    return GRANULE + 4 * MAX_STRIDE * (TAIL + padded(ELEMENTS_PER_SHARD * shards)) + 8 * BUFFER_ALIGNMENT


def host_tensor(address: int, count: int) -> Tensor:
    """A float32 vector at an address of an emulated GPU, whose memory must stay mapped while it is used."""
    return torch.frombuffer((ctypes.c_char * (4 * max(count, 1))).from_address(address), dtype=torch.float32)[:count]


class KeptGpuMemory:
    """A block of GPU memory with named vectors, and the process that keeps it if this one is killed."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu = gpu
        self.arena, descriptor = CudaArena.create_described(size, gpu)
        try:
            self._keeper = GpuKeeper(descriptor)
        except HoopError:
            self.arena.close()
            raise
        finally:
            os.close(descriptor)

    @property
    def path(self) -> str:
        """Where a restarted device gets the block: see ``take_descriptor``."""
        return self._keeper.path

    def allocate(self, name: str, count: int) -> int:
        """Allocate a vector of float32 elements; returns its address. An earlier vector of that name is freed."""
        if name in self.arena:
            self.arena.free(name)
        return self.arena.allocate(name, 4 * max(count, 1), BUFFER_ALIGNMENT).address

    def offset(self, vector: Tensor) -> int:
        """The position of a vector in the block, which is the same in every process that maps it."""
        return self.arena.offset(vector.data_ptr()) if vector.numel() else 0

    def end_keeper(self) -> None:
        """End the process that would keep the block, which ends with this process then."""
        self._keeper.close()

    def close(self) -> None:
        """Free the block, and end the process that would keep it."""
        self.end_keeper()
        self.arena.close()


class StateCommit:
    """Which step the state in a ``KeptGpuMemory`` is of: words there, which the GPU counts up in each update.

        BEGUN        updates that have begun      the state is complete where both are equal: it is that after this step
        ENDED        updates that have ended
        STRIDE_BEGAN ENDED when the stride under way began, in which the host has not read the losses

    An update may be wrong although it is complete, if a rank has left while this one read its gradients. So ``record``,
    in host memory, has the newest step for which that was excluded.
    """

    def __init__(self, words: Tensor) -> None:
        """``words``: ``COMMIT_WORDS`` numbers of 64 bits in the block."""
        self.words = words
        self.record: CommitRecord | None = None
        """Set when the state was described for a restarted device; until then no state is found."""
        self.enabled = True
        """False in a rehearsal, whose steps are not those of the run."""
        self.current = False
        """Whether the words count the steps of the run."""
        self.invalidate()

    def invalidate(self) -> None:
        """The state on the GPU is about to be overwritten, or is not that of the run."""
        self.words[BEGUN].fill_(_NEVER[0])
        self.words[ENDED].fill_(_NEVER[1])
        self.current = False

    def begin_stride(self, done: int, trusted: bool) -> None:
        """Steps follow on the state after ``done`` steps. ``trusted``: updates read no memory of other ranks."""
        if not self.current and self.enabled:
            self.words[ENDED].fill_(done)
            self.words[BEGUN].fill_(done)
            self.current = True
        self.words[STRIDE_BEGAN].copy_(self.words[ENDED])
        self.verified(ANY_STEP if trusted else done)

    def begin_update(self) -> None:
        """The GPU changes the state from here on. A CUDA graph can record it."""
        self.words[BEGUN].add_(1)

    def end_update(self) -> None:
        """The state is complete. A CUDA graph can record it."""
        self.words[ENDED].add_(1)

    def verified(self, step: int) -> None:
        """The states up to that after ``step`` steps are right, if they are complete."""
        if self.record is not None and self.current:
            self.record.step = step
