"""The GPU that a rank computes on: its selection, and deterministic kernels.

The setting ``accelerator`` selects it:

    cpu      none
    cuda     the GPUs of the host, distributed over the job's devices on it; several devices may share a GPU
    auto     cuda if every device of the job has it, otherwise none: all ranks compute on the same kind
    emulated the same code path as for a GPU, with the device copy in host memory: for tests without a GPU
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hoop.collectives.rank_context import RankContext
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.engine.settings import Settings
from hoop.engine.stage.kept_gpu_memory import KeptGpuMemory, host_tensor, kept_bytes
from hoop.engine.stage.state import StateVectors
from hoop.errors import FailedPrecondition, HoopError
from hoop.memory.cuda_arena import CudaArena, SharedBlock
from hoop.memory.dtypes import dtype
from hoop.memory.gpu_driver import CudaGpu, EmulatedGpu
from hoop.memory.gpu_keeper import can_keep

log = logging.getLogger("hoop.engine")
OUT_OF_MEMORY = torch.OutOfMemoryError
DEVICE_ERRORS: tuple[type[Exception], ...] = (
    OUT_OF_MEMORY,
    # Since PyTorch 2.8; before, other CUDA errors have the class of any error, and fail the job.
    getattr(torch, "AcceleratorError", OUT_OF_MEMORY),
)
"""Errors of one GPU: out of memory, a device-side assert, an illegal address."""


class _CudaVector:
    """Memory on a GPU in the form that PyTorch makes a tensor of, without a copy."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (address if count else 0, False),
            "strides": None,
            "version": 3,
        }


class Accelerator:
    """The GPU that a rank computes on; sets up deterministic kernels when it is made."""

    def __init__(
        self,
        device: torch.device,
        tf32: bool = False,
        capacity: int = 0,
        compiled_kernels: bool = False,
        opened: list[CudaArena] | None = None,
        keeps_state: bool = False,
    ) -> None:
        """``capacity``: bytes of the arena on a GPU, which is allocated when it is first used.

        ``keeps_state``: a restarted device finds this one's memory again.

        ``compiled_kernels``: cuDNN compiles kernels for each shape, for seconds: ``select_kernels`` avoids it.
        ``opened``: the device's list of such arenas, for its status.
        """
        self._opened = [] if opened is None else opened
        self.device = device
        self.arena: CudaArena | None = None
        """The device's memory on the GPU; None before it is used."""
        self.kept: KeptGpuMemory | None = None
        """Memory for the state that outlives this process; None: it ends with the process."""
        self.keeps_state = keeps_state and can_keep()
        """Whether ``keep_state`` may keep a state."""
        self._attached: list[CudaArena] = []
        """Arenas of other processes that this process has mapped."""
        self.capacity = capacity
        self._compiled_kernels = compiled_kernels
        self.usual_kernels = True
        """False while the computations have another number of samples than usual: see ``select_kernels``."""
        self.bytes_uploaded = 0
        """Number of bytes that ``upload`` and ``copy_in`` have copied to the GPU."""
        self.bytes_downloaded = 0
        """Number of bytes that ``download`` and ``copy_out`` have copied from the GPU."""
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(device)  # for this thread
            _enable_determinism(tf32)
            self._upload_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a copy on the GPU. The caller may overwrite the original at once; does not wait for computations."""
        if tensor.device == self.device:
            return tensor
        self.bytes_uploaded += tensor.nbytes
        with torch.cuda.stream(self._upload_stream):
            copy = tensor.to(self.device)
        compute_stream = torch.cuda.current_stream(self.device)
        compute_stream.wait_stream(self._upload_stream)
        copy.record_stream(compute_stream)
        return copy

    def download(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the GPU in host memory, after the computations that make it; itself, if it is emulated."""
        if self.cuda and tensor.device == torch.device("cpu"):
            return tensor
        self.bytes_downloaded += tensor.nbytes
        return tensor.cpu()

    def copy_in(self, into: Tensor, host: Tensor, wait: bool = True) -> None:
        """Copy a vector to the GPU. ``wait``: until the copy is done; False only from pinned memory."""
        self.bytes_uploaded += host.nbytes
        into.copy_(host, non_blocking=not wait)

    def copy_out(self, into: Tensor, device: Tensor) -> None:
        """Copy a vector of the GPU to host memory, after the computations that make it."""
        self.bytes_downloaded += device.nbytes
        into.copy_(device)

    def pinned_buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate pinned host memory, which the GPU copies from and to asynchronously."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.cuda)

    def vector(self, name: str, count: int) -> Tensor:
        """Allocate a float32 vector of zeros on the device: on a GPU a named buffer of its arena.

        An earlier vector of that name is freed.
        """
        if not self.cuda:
            return torch.zeros(count)
        arena = self.open_arena()
        if name in arena:
            arena.free(name)
        buffer = arena.allocate(name, 4 * max(count, 1))
        return self.tensor_at(buffer.address, count).zero_()

    def keep_state(self, *counts: int) -> bool:
        """Let ``state_vector`` allocate vectors of these sizes where a restarted device finds them, if it can be.

        Called before the arena is used, which has the rest of the device's memory. Returns whether they are kept.
        """
        size = kept_bytes(*counts)
        if not self.keeps_state or (self.cuda and size > self.capacity):
            return False
        if self.cuda:
            torch.cuda.synchronize(self.device)  # gives this thread a CUDA context
        gpu = CudaGpu(self.device.index) if self.cuda else EmulatedGpu()
        try:
            self.kept = KeptGpuMemory(gpu, size)
        except HoopError as error:
            log.warning("the state on the GPU is lost if this process is killed: %s", error)
            gpu.close()
            return False
        self.capacity -= size
        self._opened.append(self.kept.arena)
        return True

    def state_vector(self, name: str, count: int) -> Tensor:
        """``vector`` for a part of the state, in the memory of ``keep_state`` if there is one."""
        if self.kept is None:
            return self.vector(name, count)
        address = self.kept.allocate(name, count)
        return (self.tensor_at(address, count) if self.cuda else host_tensor(address, count)).zero_()

    def shared_vector(self, vectors: StateVectors, name: str, count: int) -> Tensor:
        """``vector``, in memory that other ranks of the host can map: emulated, a vector of the arena."""
        return self.vector(name, count) if self.cuda else torch.from_numpy(vectors.new(f"gpu.{name}", count))

    def open_arena(self) -> CudaArena:
        """Return the device's memory on the GPU; it is allocated when it is first used."""
        if self.arena is None:
            torch.cuda.synchronize(self.device)  # gives this thread a CUDA context
            self.arena = CudaArena.create(self.capacity, CudaGpu(self.device.index))
            self._opened.append(self.arena)
        return self.arena

    def attach(self, block: SharedBlock) -> CudaArena:
        """Map the memory of another process of the host until ``close``. Raises if tensors here cannot use it."""
        self._attached.append(CudaArena.attach(block))
        self.tensor_at(self._attached[-1].min_address, 1)
        return self._attached[-1]

    def tensor_at(self, address: int, count: int) -> Tensor:
        """A float32 vector at an address of a ``CudaArena``, which must stay open while it is used."""
        found = torch.as_tensor(_CudaVector(address, count), device=self.device)
        if count and found.data_ptr() != address:
            raise FailedPrecondition(
                f"CUDA: memory at {address:#x} is on another GPU than {self.device}: it was copied"
            )
        return found

    def close(self) -> None:
        """Unmap the memory of other processes, and free the arena. Tensors in them must not be used afterwards."""
        attached, self._attached = self._attached, []
        arena, self.arena = self.arena, None
        kept, self.kept = self.kept, None
        for mine in (arena, kept.arena if kept is not None else None):
            if mine is not None:
                self._opened.remove(mine)
        with contextlib.suppress(RuntimeError, HoopError):  # after a CUDA error every call fails with it
            self.synchronize()
            for one in attached:
                one.close()
            if arena is not None:
                arena.close()
                arena.gpu.close()
            if kept is not None:
                kept.close()
                kept.gpu.close()

    @property
    def name(self) -> str:
        """Name for users."""
        return str(torch.cuda.get_device_name(self.device)) if self.cuda else EmulatedGpu.name

    @property
    def identity(self) -> str:
        """Names the GPU among those of the host, whatever its number is in this process."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.cuda else "emulated"

    @property
    def count(self) -> int:
        """GPUs of this host that processes like this one can use."""
        return torch.cuda.device_count() if self.cuda else 1

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU that no process has allocated, and in all; emulated, those of the host."""
        if not self.cuda:
            return EmulatedGpu().memory()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def free_bytes(self) -> int:
        """Memory of the GPU that no process has allocated; emulated, that of the host."""
        return self.memory()[0]

    def mark(self) -> torch.cuda.Event | None:
        """Mark the end of what was launched so far, for ``reached``, or ``reading`` in another thread."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def reached(self, mark: torch.cuda.Event | None) -> bool:
        """Whether what was launched before a mark is done."""
        return mark is None or bool(mark.query())  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def reading(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, another thread than the one that trains copies to the host what was computed before the mark.

        Such copies do not wait for what was launched after it.
        """
        if mark is None:
            yield
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def select_kernels(self, usual: bool) -> None:
        """Select the kernels of the next computations, which have the usual number of samples, or another.

        For depthwise convolutions in bfloat16 cuDNN compiles a kernel for each shape: 6 s for the batch at the end of
        an epoch of MobileNetV2, which has fewer samples and is one step of hundreds. PyTorch's own kernels are slower
        and compiled already, so such a batch is computed with them, by every strategy.
        """
        if self.cuda and self._compiled_kernels:
            torch.backends.cudnn.enabled = self.usual_kernels = usual

    @contextlib.contextmanager
    def no_compilation(self, modules: nn.Module) -> Iterator[None]:
        """Inside, the forward of these modules compiles no kernel: depthwise convolutions use PyTorch's own.

        Evaluations have another number of samples than training, and few of them are made.
        """
        hooks: list[RemovableHandle] = []
        if self.cuda and self._compiled_kernels:
            for one in modules.modules():
                if isinstance(one, nn.Conv2d) and one.groups > 1:
                    hooks.append(one.register_forward_pre_hook(lambda *_: self.select_kernels(False)))
                    hooks.append(one.register_forward_hook(lambda *_: self.select_kernels(True)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def allow_nondeterministic(self) -> None:
        """Let operations run that have no deterministic kernel; PyTorch warns of each."""
        use_deterministic_algorithms(warn_only=True)

    def synchronize(self) -> None:
        """Wait until all computations and copies are done."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()


class Staging:
    """Pinned host memory through which vectors are copied between the arena and the GPU, one at a time.

    Copies from and to pinned memory are faster, and an upload does not wait for the GPU. Used by one thread.
    """

    def __init__(self, accelerator: Accelerator, count: int) -> None:
        """``count``: elements of the longest vector."""
        self._accelerator, self._pinned = accelerator, accelerator.pinned_buffer(count)
        self._array: Array = self._pinned.numpy()
        self._sending = False

    @property
    def array(self) -> Array:
        """The memory, for the caller to fill before ``send``. Waits until the last upload has read it."""
        if self._sending:
            self._accelerator.synchronize()
            self._sending = False
        return self._array

    def send(self, into: Tensor) -> None:
        """Copy the first elements of ``array`` to a vector on the GPU; returns before the copy is done."""
        self._accelerator.copy_in(into, self._pinned[: len(into)], wait=False)
        self._sending = True

    def upload(self, into: Tensor, host: Array) -> None:
        """Copy a vector to the GPU. The caller may overwrite it at once."""
        np.copyto(self.array[: len(host)], host)
        self.send(into)

    def download(self, into: Array, device: Tensor) -> None:
        """Copy a vector of the GPU to host memory, after the computations that make it."""
        self._accelerator.copy_out(self._pinned[: len(device)], device)
        np.copyto(into, self._array[: len(device)])


def may_use_gpu(settings: Settings) -> bool:
    """Whether this process may compute on a GPU. Its thread launches kernels then, on any core that is free."""
    return (
        settings.accelerator in ("auto", "cuda") and torch.version.cuda is not None and bool(torch.cuda.device_count())
    )


def select_accelerator(context: RankContext, settings: Settings) -> Accelerator | None:
    """Select the accelerator of this rank. Collective: all ranks get the same kind, or the same error."""
    if settings.accelerator == "cpu":
        return None
    if settings.accelerator == "emulated":
        keeps = context.persistent_memory
        return Accelerator(torch.device("cpu"), capacity=context.arena.capacity, keeps_state=keeps)
    problem = _cuda_problem()
    mine, gathered = np.array([bool(problem)], np.int32), np.zeros(context.size, np.int32)
    context.communicator.run(Operation("all_gather", 1, dtype("int32")), mine, gathered, settings.timeout_s)
    without = [rank for rank, has_problem in enumerate(gathered.tolist()) if has_problem]
    if without and settings.accelerator == "auto":
        if problem and torch.version.cuda is not None and torch.cuda.device_count():
            log.warning("trains on the CPU, although there is a GPU: %s", problem)
        return None
    if without:
        raise FailedPrecondition(
            f"accelerator: cuda was asked for, and rank {', '.join(map(str, without))} of {context.size} has none"
            f"{f': {problem}' if problem else ''}; or use --accelerator auto or cpu"
        )
    index, _ = context.local_rank_and_size
    return Accelerator(
        torch.device("cuda", index % torch.cuda.device_count()),
        settings.tf32,
        context.arena.capacity,
        compiled_kernels=settings.channels_last or settings.precision == "bfloat16",
        opened=context.gpu_arenas,
        keeps_state=context.persistent_memory,
    )


def _cuda_problem() -> str:
    """Return why this process cannot use CUDA, with a remedy; empty if it can."""
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


def _enable_determinism(tf32: bool) -> None:
    """Select deterministic kernels: the same for the same shapes, without atomic sums. Others raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before cuBLAS is initialised
    use_deterministic_algorithms()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


def use_deterministic_algorithms(warn_only: bool = False) -> None:
    """``torch.use_deterministic_algorithms(True)`` without its import of ``torch._inductor``, which takes 3 s.

    Inductor, which only a model that is compiled imports, finds the same setting in its environment variable.
    """
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.deterministic = True  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("warn" if warn_only else "error")
