"""Every collective of torch.distributed on tensors of a GPU, for ranks of one host.

``DeviceCollectives`` has the functions of ``collectives``; ``HoopProcessGroup`` makes a job of either. Each is a round
of ``DeviceLinks``: ranks map each other's windows, and kernels move or combine the elements. No element passes through
the host, unless the ranks cannot map each other's memory: then each function runs its sibling in ``collectives`` on
copies in pinned host memory.

Data that is only moved is pulled: every rank copies what it receives, from the windows of the others. A reduction is
cut into one slice a rank: each rank combines its slice of all windows, in rank order, and writes the result to the
windows of all ranks that receive it. So all ranks get the same bits, those of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce as fold_left
from typing import Any

import torch

from hoop.errors import InvalidArgument
from hoop.torch_backend import collectives
from hoop.torch_backend.device_links import DeviceLinks, Windows
from hoop.torch_backend.tensor_views import Described, TorchReduction, is_plain

Tensors = Sequence[torch.Tensor]
CHUNK_BYTES = 128 << 20
"""Bytes of each window that a reduction combines at a time; bounds its scratch memory where there are three ranks."""
_MOST_PARTS = 256
_SLICE_ELEMENTS = 128
"""Number of elements of which every slice's begin is a multiple, so that kernels read whole vectors."""


class DeviceCollectives:
    """The collectives of one rank in one group, on one device. Called by the thread that holds the work queue."""

    def __init__(self, links: DeviceLinks) -> None:
        self._links = links
        self.rank, self.size = links.rank, links.size
        self._place = links.memory.device.type
        self._divisors: dict[torch.dtype, torch.Tensor] = {}
        self._kept_parts: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._supported: set[tuple[str, torch.dtype]] = set()
        """Reductions for which this device has kernels."""

    def _described(self, title: str, kind: torch.dtype, elements: Any = (), **details: str) -> Described:
        return Described(title, kind, elements, place=self._place, **details)

    # ---- collectives that only move data

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float) -> None:
        links = self._links
        description = self._described("broadcast", tensor.dtype, tensor.numel(), root=f"from {root}")
        if links.uses_host(description, timeout):
            links.through_host(collectives.broadcast, [tensor], tensor, root, timeout=timeout)
            return
        window = links.window([tensor]) if self.rank == root else None
        with links.round(description, timeout, window) as windows:
            if self.rank != root:
                _copy(windows[root], tensor)

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, timeout: float) -> None:
        links, sizes = self._links, [output.numel() for output in outputs]
        elements = tensor.numel() if len(set(sizes)) == 1 else tuple(sizes)
        description = self._described("all_gather", tensor.dtype, elements)
        if links.uses_host(description, timeout):
            links.through_host(collectives.all_gather, outputs, outputs, tensor, timeout=timeout)
            return
        with links.round(description, timeout, links.window([tensor])) as windows:
            for window, output in zip(windows, outputs, strict=True):
                _copy(window, output)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> None:
        links = self._links
        description = self._described("all_gather", tensor.dtype, tensor.numel())
        if links.uses_host(description, timeout):
            links.through_host(collectives.all_gather_single, [output], output, tensor, timeout=timeout)
            return
        target = _Target(output)
        with links.round(description, timeout, links.window([tensor])) as windows:
            for window, part in zip(windows, target.parts([tensor.numel()] * self.size), strict=True):
                _copy(window, part)
            target.copy_back()

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, timeout: float) -> None:
        links = self._links
        description = self._described("gather", tensor.dtype, tensor.numel(), root=f"to {root}")
        if links.uses_host(description, timeout):
            links.through_host(collectives.gather, outputs, outputs, tensor, root, timeout=timeout)
            return
        with links.round(description, timeout, links.window([tensor])) as windows:
            for window, output in zip(windows if self.rank == root else (), outputs, strict=True):
                _copy(window, output)

    def scatter(self, output: torch.Tensor, tensors: Tensors, root: int, timeout: float) -> None:
        links = self._links
        description = self._described("scatter", output.dtype, output.numel(), root=f"from {root}")
        if links.uses_host(description, timeout):
            links.through_host(collectives.scatter, [output], output, tensors, root, timeout=timeout)
            return
        with links.round(description, timeout, links.window(tensors) if self.rank == root else None) as windows:
            _copy(_block(windows[root], self.rank, output.nbytes), output)

    def all_to_all(self, outputs: Tensors, tensors: Tensors, timeout: float) -> None:
        links = self._links
        description = self._described("all_to_all with splits", tensors[0].dtype)
        if links.uses_host(description, timeout):
            links.through_host(collectives.all_to_all, outputs, outputs, tensors, timeout=timeout)
            return
        sent, received = ([tensor.nbytes for tensor in side] for side in (tensors, outputs))
        offsets = links.exchange_sizes(description, sent, received, timeout)
        with links.round(description, timeout, links.window(tensors)) as windows:
            for window, offset, output in zip(windows, offsets, outputs, strict=True):
                _copy(window[offset : offset + output.nbytes], output)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> None:
        links = self._links
        description = self._described("all_to_all", tensor.dtype, tensor.numel())
        if links.uses_host(description, timeout):
            links.through_host(collectives.all_to_all_single, [output], output, tensor, timeout=timeout)
            return
        target, block = _Target(output), tensor.nbytes // self.size
        with links.round(description, timeout, links.window([tensor])) as windows:
            for window, part in zip(windows, target.parts([output.numel() // self.size] * self.size), strict=True):
                _copy(_block(window, self.rank, block), part)
            target.copy_back()

    # ---- collectives that reduce

    def all_reduce(
        self, tensor: torch.Tensor, reduction: TorchReduction, timeout: float, description: Described | None = None
    ) -> None:
        """``description``: the call that it is part of; None: an all_reduce itself."""
        links = self._links
        description = description or self._described(
            "all_reduce", tensor.dtype, tensor.numel(), reduction=reduction.name
        )
        if links.uses_host(description, timeout):
            links.through_host(collectives.all_reduce, [tensor], tensor, reduction, timeout=timeout)
            return
        self._reduce_in_place([tensor], reduction, description, timeout, receivers=range(self.size))

    def all_reduce_coalesced(self, tensors: Tensors, reduction: TorchReduction, timeout: float) -> None:
        links, sizes = self._links, tuple(tensor.numel() for tensor in tensors)
        description = self._described("all_reduce_coalesced", tensors[0].dtype, sizes, reduction=reduction.name)
        if links.uses_host(description, timeout):
            links.through_host(collectives.all_reduce_coalesced, tensors, tensors, reduction, timeout=timeout)
            return
        self._reduce_in_place(tensors, reduction, description, timeout, receivers=range(self.size))

    def reduce(self, tensor: torch.Tensor, root: int, reduction: TorchReduction, timeout: float) -> None:
        links = self._links
        description = self._described(
            "reduce", tensor.dtype, tensor.numel(), reduction=reduction.name, root=f"to {root}"
        )
        if links.uses_host(description, timeout):
            outputs = [tensor] if self.rank == root else []
            links.through_host(collectives.reduce, outputs, tensor, root, reduction, timeout=timeout)
            return
        self._reduce_in_place([tensor], reduction, description, timeout, receivers=[root])

    def _reduce_in_place(
        self,
        tensors: Tensors,
        reduction: TorchReduction,
        description: Described,
        timeout: float,
        receivers: Sequence[int],
    ) -> None:
        """Reduces the tensors of all ranks; those of the ``receivers`` become the result, the others stay."""
        window = self._links.window(tensors, factor=reduction.factor)
        self._check_supported(reduction, description)
        low, high = _slice(window.flat.numel(), self.rank, self.size)
        with self._links.round(description, timeout, window) as windows:
            if low < high:
                parts = self._parts(windows, reduction.kind, low, high)
                mine = self.rank if self.rank in receivers else receivers[0]
                others = [parts[rank] for rank in receivers if rank != mine]
                self._fold(reduction, parts, [parts[mine], *others])
        if self.rank in receivers:
            window.copy_back()

    def reduce_scatter(self, output: torch.Tensor, tensors: Tensors, reduction: TorchReduction, timeout: float) -> None:
        links, sizes = self._links, tuple(tensor.numel() for tensor in tensors)
        elements = output.numel() if len(set(sizes)) == 1 else sizes
        description = self._described("reduce_scatter", output.dtype, elements, reduction=reduction.name)
        if links.uses_host(description, timeout):
            links.through_host(collectives.reduce_scatter, [output], output, tensors, reduction, timeout=timeout)
            return
        window = links.window(tensors, factor=reduction.factor)
        low = sum(sizes[: self.rank])
        self._reduce_block(output, window, low, reduction, description, timeout)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, reduction: TorchReduction, timeout: float
    ) -> None:
        links = self._links
        description = self._described("reduce_scatter", output.dtype, output.numel(), reduction=reduction.name)
        if links.uses_host(description, timeout):
            links.through_host(collectives.reduce_scatter_single, [output], output, tensor, reduction, timeout=timeout)
            return
        window = links.window([tensor], factor=reduction.factor)
        self._reduce_block(output, window, self.rank * output.numel(), reduction, description, timeout)

    def _reduce_block(
        self,
        output: torch.Tensor,
        window: Any,
        low: int,
        reduction: TorchReduction,
        description: Described,
        timeout: float,
    ) -> None:
        """Reduces the elements from ``low`` on of all windows into ``output``."""
        self._check_supported(reduction, description)
        target = _Target(output)
        with self._links.round(description, timeout, window) as windows:
            if output.numel():
                parts = self._parts(windows, reduction.kind, low, low + output.numel())
                self._fold(reduction, parts, [target.flat])
                target.copy_back()

    def _parts(self, windows: Windows, kind: torch.dtype, low: int, high: int) -> list[torch.Tensor]:
        """The elements from ``low`` to ``high`` of all windows; kept for the next round with the same windows."""
        key = windows.addresses, kind, low, high, self._links.generation
        parts = self._kept_parts.get(key) if windows.addresses else None
        if parts is None:
            parts = [window.view(kind)[low:high] for window in windows]
            if len(self._kept_parts) >= _MOST_PARTS:
                self._kept_parts.clear()
            if windows.addresses:
                self._kept_parts[key] = parts
        return parts

    def _check_supported(self, reduction: TorchReduction, description: Described) -> None:
        """Raises InvalidArgument if PyTorch has no such kernel for this device; before ranks meet, at all ranks."""
        if (reduction.name, reduction.kind) in self._supported:
            return
        try:
            one = torch.zeros(1, device=self._links.memory.device).to(reduction.kind)
            reduction.combine(one, one, one)
        except RuntimeError as error:
            raise InvalidArgument(f"{description}: {error}") from None
        self._supported.add((reduction.name, reduction.kind))

    def _fold(self, reduction: TorchReduction, parts: Tensors, targets: Tensors) -> None:
        """Combines the parts in their order and writes the result to every target.

        Targets may be parts: a target is written with the last combination, after all other parts were read.
        """
        count, step = parts[0].numel(), CHUNK_BYTES // parts[0].element_size()
        if count <= step and len(parts) == 2:
            self._fold_piece(reduction, parts, targets[0], None)
            for other in targets[1:]:
                other.copy_(targets[0])
            return
        scratch = torch.empty_like(parts[0][:step]) if len(parts) > 2 else None
        for low in range(0, count, step):
            pieces = [part[low : low + step] for part in parts]
            first, *others = (target[low : low + step] for target in targets)
            self._fold_piece(reduction, pieces, first, scratch)
            for other in others:
                other.copy_(first)

    def _fold_piece(
        self, reduction: TorchReduction, pieces: Tensors, into: torch.Tensor, scratch: torch.Tensor | None
    ) -> None:
        if len(pieces) == 1:
            into.copy_(pieces[0])
        else:
            between = scratch[: into.numel()] if scratch is not None else into
            total = fold_left(lambda left, right: reduction.combine(left, right, between), pieces[:-1])
            reduction.combine(total, pieces[-1], into)
        if reduction.name == "avg":
            reduction.divide(into, self._divisor(into))

    def _divisor(self, like: torch.Tensor) -> torch.Tensor:
        """The number of ranks on the device: PyTorch would multiply by the reciprocal of a number of the host."""
        if like.dtype not in self._divisors:
            self._divisors[like.dtype] = torch.tensor(self.size, dtype=like.dtype, device=like.device)
        return self._divisors[like.dtype]


class _Target:
    """A contiguous vector for results: the output tensor itself, or a buffer that is copied to it."""

    def __init__(self, output: torch.Tensor) -> None:
        self._output = output.detach()
        self._is_copy = not is_plain(self._output)
        self.flat = self._output.new_empty(self._output.numel()) if self._is_copy else self._output.view(-1)

    def parts(self, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
        start = 0
        for length in lengths:
            yield self.flat[start : start + length]
            start += length

    def copy_back(self) -> None:
        if self._is_copy:
            self._output.copy_(self.flat.view(self._output.shape))


def _copy(window: torch.Tensor, output: torch.Tensor) -> None:
    """Copies bytes of a window to a tensor of as many bytes, unless they are the same memory."""
    output = output.detach()
    if output.numel() and window.data_ptr() != output.data_ptr():
        output.copy_(window.view(output.dtype).view(output.shape))


def _block(window: torch.Tensor, index: int, size: int) -> torch.Tensor:
    return window[index * size : (index + 1) * size]


def _slice(count: int, rank: int, size: int) -> tuple[int, int]:
    """The elements that a rank reduces for all ranks."""
    step = -(-count // (size * _SLICE_ELEMENTS)) * _SLICE_ELEMENTS
    return min(rank * step, count), min((rank + 1) * step, count)
