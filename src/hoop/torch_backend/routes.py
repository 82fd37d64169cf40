"""Which code carries a call out: by the device that its tensors are on.

    tensors on                          carried out by
    the CPU               HostRoute     ``collectives``, over shared memory or links
    a CUDA GPU            DeviceRoute   ``device_collectives``, in the memory of the GPUs
    a device that init_process_group    that backend itself: ``OtherBackends``
    gives to another backend

A group for which torch.distributed was given several backends (``cpu:hoop,cuda:nccl``) consists of Hoop's group alone,
because Hoop's is a ProcessGroup written in Python, which torch puts in the place of its own. So Hoop's group makes the
others when the first call needs them, and hands them the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup

from hoop.errors import InvalidArgument
from hoop.torch_backend.device_collectives import DeviceCollectives
from hoop.torch_backend.device_links import DeviceLinks
from hoop.torch_backend.device_memory import MEMORIES, DeviceMemory, StreamOrder
from hoop.torch_backend.device_messages import DeviceMessages
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.tensor_views import ContiguousView, as_contiguous

Job = Callable[[float], None]
"""Function that runs one operation; it is called with a timeout in seconds."""


class HostRoute:
    """Tensors in host memory."""

    messages: DeviceMessages | None = None

    def __init__(self, links: GroupLinks) -> None:
        self._links = links

    def job(self, function: Callable[..., None], *arguments: Any) -> Job:
        """The job that runs a function of ``collectives``."""
        return partial(function, self._links, *arguments)

    def message(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes to send, contiguous and in host memory."""
        return as_contiguous(tensor)

    def message_buffer(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """A contiguous buffer in host memory for a message, and the function that copies it to the tensor."""
        view = ContiguousView(tensor)
        return view.flat, view.copy_back


class DeviceJob:
    """One collective on a GPU."""

    def __init__(self, on_device: Job, order: StreamOrder, links: GroupLinks) -> None:
        self._on_device, self._order, self._links = on_device, order, links
        self.before_queue = order.before_queue

    def __call__(self, timeout: float) -> None:
        with self._order:
            self._on_device(timeout)
        self._links.check_working()  # a rank that was lost meanwhile has left wrong results


class JobsInOrder:
    """Several jobs as one."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def __call__(self, timeout: float) -> None:
        for job in self._jobs:
            job(timeout)

    def before_queue(self) -> None:
        for job in self._jobs:
            prepare_for_queue(job)


def prepare_for_queue(job: Job) -> None:
    """Called in the thread of a call before its job is queued for another thread."""
    if isinstance(job, DeviceJob | JobsInOrder):
        job.before_queue()


class DeviceRoute:
    """Tensors in the memory of one GPU."""

    def __init__(self, links: GroupLinks, memory: DeviceMemory) -> None:
        self._links, self._memory = links, memory
        self._device_links = DeviceLinks(links, memory)
        self._collectives = DeviceCollectives(self._device_links)
        self.messages: DeviceMessages | None = DeviceMessages(self._device_links)
        """Route of the messages that it takes; the others are copied to the host."""

    def job(self, function: Callable[..., None], *arguments: Any) -> Job:
        """The job that runs the sibling of a function of ``collectives``, after what the current stream has to do."""
        on_device = partial(getattr(self._collectives, function.__name__), *arguments)
        return DeviceJob(on_device, self._memory.stream_order(), self._links)

    def message(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._memory.stream_order():
            host = self._device_links.host_copy(as_contiguous(tensor), {})
            self._memory.synchronize()
        return host

    def message_buffer(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        host, order = self._memory.host_buffer(tuple(tensor.shape), tensor.dtype), self._memory.stream_order()
        order.before_queue()

        def copy_back() -> None:
            with order:
                tensor.detach().copy_(host)
                self._memory.synchronize()

        return host, copy_back


Route = HostRoute | DeviceRoute


class Routes:
    """The routes of one group."""

    def __init__(self, links: GroupLinks) -> None:
        self.host = HostRoute(links)
        self._links = links
        self._lock = threading.Lock()
        self._by_type: dict[str, tuple[torch.device, Route]] = {}

    def find(self, title: str, tensors: Sequence[torch.Tensor]) -> Route:
        """The route of these tensors; raises InvalidArgument unless they are dense and on one device that has one."""
        for tensor in tensors:
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                break
        else:
            if "cpu" not in MEMORIES:
                return self.host
        device = tensors[0].device
        for tensor in tensors:
            known = tensor.device.type == "cpu" or tensor.device.type in MEMORIES
            if tensor.layout is not torch.strided or not known:
                what = tensor.layout if tensor.layout is not torch.strided else f"on {tensor.device}"
                raise InvalidArgument(f"{title}: a tensor is {what}; Hoop moves dense tensors on the CPU or a CUDA GPU")
            if tensor.device != device:
                raise InvalidArgument(f"{title}: tensors are on {device} and {tensor.device}; move them to one device")
        return self._device_route(title, device)

    def _device_route(self, title: str, device: torch.device) -> Route:
        with self._lock:
            if device.type not in self._by_type:
                self._by_type[device.type] = device, DeviceRoute(self._links, MEMORIES[device.type](device))
            first, route = self._by_type[device.type]
        if first != device:
            raise InvalidArgument(
                f"{title}: a tensor is on {device}, and this group has used {first}: one {device.type} device for each "
                "rank of a group; call torch.cuda.set_device first, or make another group"
            )
        return route


class OtherBackends:
    """The backends beside Hoop in one group, by device type; each is made when the first call needs it."""

    def __init__(self, configuration: str, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """``configuration``: as torch writes it, ``cpu:hoop,cuda:nccl``."""
        pairs = [pair.partition(":") for pair in configuration.split(",")]
        self.names = {device: name for device, _, name in pairs if name != "hoop"}
        """Names of the backends beside Hoop, by device type."""
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._groups: dict[str, Any] = {}

    def group_for(self, *arguments: Any) -> Any:
        """The group for the device of the first tensor (or device) among the arguments; None: Hoop's own."""
        device = _device_type(arguments)
        if device is None or device not in self.names:
            return None
        if device not in self._groups:
            self._groups[device] = self._make(device, self.names[device])
        return self._groups[device]

    def _make(self, device: str, name: str) -> Any:
        store = PrefixStore(f"beside-hoop/{device}/", self._store)
        options: Any
        if name == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend: Any = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            kind = ProcessGroup.BackendType.NCCL
        elif name == "gloo" and dist.is_gloo_available():
            backend = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
            kind = ProcessGroup.BackendType.GLOO
        else:
            raise InvalidArgument(
                f"backend: {device}:{name} beside hoop is not possible here; beside hoop a group can have gloo, or "
                "nccl where PyTorch is built with it"
            )
        backend._set_sequence_number_for_group()
        group: Any = ProcessGroup(store, self._rank, self._size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, backend)
        return group

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].shutdown()


def _device_type(arguments: Sequence[Any]) -> str | None:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if isinstance(argument, torch.device):
            return argument.type
        if isinstance(argument, list | tuple):
            found = _device_type(argument)
            if found is not None:
                return found
    return None
