"""A GPU as a rank uses it: which one, how it is made to compute the same bits each time, and the way up to it.

cpu      none
cuda     the GPUs of the host, dealt out to the job's devices on it; several devices may share one
auto     cuda where every device of the job has it, else none: all ranks compute alike
mirror   all that is done for a GPU, with the copy in host memory: for tests where there is none
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.catalog import Operation
from hoop.engine.settings import Settings
from hoop.engine.world import World
from hoop.errors import FailedPrecondition
from hoop.memory.dtypes import dtype


class Accelerator:
    """Where a rank computes, if not on its cores."""

    def __init__(self, device: torch.device, tf32: bool = False) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(device)  # of this thread
            _be_deterministic(tf32)
            self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, tensor: Tensor) -> Tensor:
        """A copy there. The original may be written over at once, and nothing that is being computed is waited for."""
        if tensor.device == self.device:
            return tensor
        if not self.cuda:
            return tensor.to(self.device)
        with torch.cuda.stream(self._uploads):
            copy = tensor.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._uploads)
        copy.record_stream(computing)
        return copy

    def staging(self, count: int) -> Tensor:
        """Host memory that a GPU copies from and to without help."""
        return torch.zeros(count, pin_memory=self.cuda)

    def wait(self) -> None:
        """Until everything is computed and copied."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()


def accelerator_of(world: World, settings: Settings) -> Accelerator | None:
    """What this rank computes on; every rank must ask, and all get the same kind or the same error."""
    if settings.accelerator == "cpu":
        return None
    if settings.accelerator == "mirror":
        return Accelerator(torch.device("cpu"))
    problem = _problem()
    mine, seen = np.array([bool(problem)], np.int32), np.zeros(world.size, np.int32)
    world.communicator.run(Operation("all_gather", 1, dtype("int32")), mine, seen, settings.timeout_s)
    without = [rank for rank, lacks in enumerate(seen.tolist()) if lacks]
    if without and settings.accelerator == "auto":
        return None
    if without:
        raise FailedPrecondition(
            f"accelerator: cuda was asked for, and rank {', '.join(map(str, without))} of {world.size} has none"
            f"{f': {problem}' if problem else ''}; or use --accelerator auto or cpu"
        )
    index, _ = world.neighbours
    return Accelerator(torch.device("cuda", index % torch.cuda.device_count()), settings.tf32)


def _problem() -> str:
    """Why this process cannot use CUDA, with the remedy; empty if it can."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA; install one that is built with it (pytorch.org)"
    if torch.cuda._is_in_bad_fork():
        return "this program used CUDA before its devices were forked; train first, or in another process"
    if not torch.cuda.device_count():
        return "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"CUDA does not start ({error}); look at nvidia-smi"
    return ""


def _be_deterministic(tf32: bool) -> None:
    """The same kernels for the same shapes, none that add in the order of arrival; what has no such kernel warns."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
