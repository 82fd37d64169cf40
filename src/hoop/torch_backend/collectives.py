"""Every collective of torch.distributed, carried out as operations of Hoop's communicator.

``HoopProcessGroup`` makes a job of each function; a job runs in the thread that holds the work queue, and every rank
runs the same job. Data that is only moved travels as bytes, so every dtype is possible. Where ranks contribute
different numbers of elements, ``GroupLinks.exchange`` replaces the planned collective.

Ranks compare the user's call, not the operations it is made of: a ``Described`` goes with each operation.

The arrays passed to ``links`` do not own their memory. A local variable of each function holds the tensor until all
bytes have moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hoop.memory.dtypes import dtype
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.tensor_views import (
    ContiguousView,
    Described,
    FlatTensors,
    TorchReduction,
    as_contiguous,
    bytes_of,
    elements_of,
    empty_array,
    is_plain,
    split,
)

BYTES = dtype("uint8")
Tensors = Sequence[torch.Tensor]


# ---- collectives that only move data


def broadcast(links: GroupLinks, tensor: torch.Tensor, root: int, timeout: float) -> None:
    view = ContiguousView(tensor)
    if links.rank == root:
        view.copy_in()
    data = bytes_of(view.flat)
    description = Described("broadcast", tensor.dtype, tensor.numel(), root=f"from {root}")
    run = links.prepared("broadcast", data.size, BYTES, root=root, description=description)
    run(data, data, time.monotonic() + timeout)
    if links.rank != root:
        view.copy_back()


def all_gather(links: GroupLinks, outputs: Tensors, tensor: torch.Tensor, timeout: float) -> None:
    source, sizes = as_contiguous(tensor), [output.numel() for output in outputs]
    if len(set(sizes)) == 1:
        target = FlatTensors(outputs, copy_in=False)
        description = Described("all_gather", tensor.dtype, tensor.numel())
        sent, received = bytes_of(source), bytes_of(target.flat)
        run = links.prepared("all_gather", source.nbytes, BYTES, description=description)
        run(sent, received, time.monotonic() + timeout)
        target.copy_back()
        return
    views = [ContiguousView(output) for output in outputs]
    targets = [bytes_of(view.flat) for view in views]
    description = Described("all_gather", tensor.dtype, tuple(sizes))
    links.exchange([bytes_of(source)] * links.size, targets, description, timeout)
    for view in views:
        view.copy_back()


def all_gather_single(links: GroupLinks, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> None:
    view, source = ContiguousView(output), as_contiguous(tensor)
    description = Described("all_gather", tensor.dtype, tensor.numel())
    sent, received = bytes_of(source), bytes_of(view.flat)
    run = links.prepared("all_gather", source.nbytes, BYTES, description=description)
    run(sent, received, time.monotonic() + timeout)
    view.copy_back()


def gather(links: GroupLinks, outputs: Tensors, tensor: torch.Tensor, root: int, timeout: float) -> None:
    source = as_contiguous(tensor)
    target = FlatTensors(outputs, copy_in=False) if links.rank == root else None
    received = bytes_of(target.flat) if target is not None else empty_array(0)
    description = Described("gather", tensor.dtype, tensor.numel(), root=f"to {root}")
    run = links.prepared("gather", source.nbytes, BYTES, root=root, description=description)
    run(bytes_of(source), received, time.monotonic() + timeout)
    if target is not None:
        target.copy_back()


def scatter(links: GroupLinks, output: torch.Tensor, tensors: Tensors, root: int, timeout: float) -> None:
    view = ContiguousView(output)
    blocks = FlatTensors(tensors, copy_in=True) if links.rank == root else None
    sent = bytes_of(blocks.flat) if blocks is not None else empty_array(0)
    received = bytes_of(view.flat)
    description = Described("scatter", output.dtype, output.numel(), root=f"from {root}")
    run = links.prepared("scatter", received.size, BYTES, root=root, description=description)
    run(sent, received, time.monotonic() + timeout)
    view.copy_back()


def all_to_all(
    links: GroupLinks, outputs: Tensors, tensors: Tensors, timeout: float, description: Described | None = None
) -> None:
    """``description``: the call that it is part of; None: an all_to_all itself."""
    description = description or Described("all_to_all with splits", tensors[0].dtype)
    views = [ContiguousView(output) for output in outputs]
    sources = [as_contiguous(tensor) for tensor in tensors]
    targets = [bytes_of(view.flat) for view in views]
    links.exchange([bytes_of(source) for source in sources], targets, description, timeout)
    for view in views:
        view.copy_back()


def all_to_all_single(
    links: GroupLinks, output: torch.Tensor, tensor: torch.Tensor, timeout: float, description: Described | None = None
) -> None:
    """``description``: the call that it is part of; None: an all_to_all itself."""
    view, source = ContiguousView(output), as_contiguous(tensor)
    block = source.nbytes // links.size
    description = description or Described("all_to_all", tensor.dtype, tensor.numel())
    sent, received = bytes_of(source), bytes_of(view.flat)
    links.prepared("all_to_all", block, BYTES, description=description)(sent, received, time.monotonic() + timeout)
    view.copy_back()


def barrier(links: GroupLinks, timeout: float) -> None:
    links.prepared("barrier", 0, BYTES)(empty_array(0), empty_array(0), time.monotonic() + timeout)


# ---- collectives that reduce


def all_reduce(
    links: GroupLinks,
    tensor: torch.Tensor,
    reduction: TorchReduction,
    timeout: float,
    description: Described | None = None,
) -> None:
    """``description``: the call that it is part of; None: an all_reduce itself."""
    if reduction.in_place and reduction.element is not None and is_plain(tensor):
        data = elements_of(tensor)
        run = links.prepared("all_reduce", data.size, reduction.element, reduction.op, description=description)
        run(data, data, time.monotonic() + timeout)
        return
    source = as_contiguous(reduction.prescale(tensor))
    view = ContiguousView(tensor)
    # The same text as that of the operation above: the tensor may be contiguous on other ranks.
    description = description or Described("all_reduce", tensor.dtype, tensor.numel(), reduction.name)
    if not reduction.native or reduction.element is None:
        view.flat.copy_(reduction.fold(_all_gather_list(links, source, description, timeout)))
    else:
        sent = elements_of(reduction.native_view(source))
        received = elements_of(reduction.native_view(view.flat))
        run = links.prepared("all_reduce", received.size, reduction.element, reduction.op, description=description)
        run(sent, received, time.monotonic() + timeout)
    view.copy_back()


def all_reduce_compressed(
    links: GroupLinks, tensor: torch.Tensor, reduction: TorchReduction, compression: str, timeout: float
) -> None:
    """A lossy all_reduce of a plain float32 tensor."""
    assert reduction.element is not None, "float32 has an element type"
    data = elements_of(tensor)
    run = links.prepared("all_reduce", data.size, reduction.element, reduction.op, compression=compression)
    run(data, data, time.monotonic() + timeout)


def try_all_reduce(
    links: GroupLinks, tensor: torch.Tensor, reduction: TorchReduction, timeout: float
) -> Callable[[float], None] | None:
    """``all_reduce`` of a plain tensor within 2 ms: None if it is done, else the job that finishes it."""
    assert reduction.element is not None, "a reduction in place has an element type"
    resume = links.try_all_reduce(elements_of(tensor), reduction.element, reduction.op, timeout)
    return None if resume is None else partial(_resume, resume, tensor)


def _resume(resume: Callable[[], None], tensor: torch.Tensor, timeout: float) -> None:
    """Keeps ``tensor`` alive until all bytes have moved. Its timeout has counted since ``try_all_reduce``."""
    resume()


def all_reduce_coalesced(links: GroupLinks, tensors: Tensors, reduction: TorchReduction, timeout: float) -> None:
    joined = FlatTensors(tensors, copy_in=True)
    sizes = tuple(tensor.numel() for tensor in tensors)
    description = Described("all_reduce_coalesced", tensors[0].dtype, sizes, reduction.name)
    all_reduce(links, joined.flat, reduction, timeout, description)
    joined.copy_back()


def reduce(
    links: GroupLinks,
    tensor: torch.Tensor,
    root: int,
    reduction: TorchReduction,
    timeout: float,
    description: Described | None = None,
) -> None:
    """``description``: the call that it is part of; None: a reduce itself."""
    source = as_contiguous(reduction.prescale(tensor))
    result = ContiguousView(tensor) if links.rank == root else None
    description = description or Described("reduce", tensor.dtype, tensor.numel(), reduction.name, f"to {root}")
    if not reduction.native or reduction.element is None:
        tensors = _all_gather_list(links, source, description, timeout)
        if result is not None:
            result.flat.copy_(reduction.fold(tensors))
    else:
        sent = elements_of(reduction.native_view(source))
        received = elements_of(reduction.native_view(result.flat)) if result is not None else sent[:0]
        run = links.prepared("reduce", sent.size, reduction.element, reduction.op, root, description=description)
        run(sent, received, time.monotonic() + timeout)
    if result is not None:
        result.copy_back()


def reduce_scatter(
    links: GroupLinks, output: torch.Tensor, tensors: Tensors, reduction: TorchReduction, timeout: float
) -> None:
    if len({tensor.numel() for tensor in tensors}) == 1:
        joined = FlatTensors(tensors, copy_in=True)
        reduce_scatter_single(links, output, joined.flat, reduction, timeout)
        return
    sizes = tuple(tensor.numel() for tensor in tensors)
    description = Described("reduce_scatter", output.dtype, sizes, reduction.name)
    for root, tensor in enumerate(tensors):
        own = as_contiguous(tensor).clone()
        reduce(links, own, root, reduction, timeout, description)
        if root == links.rank:
            output.detach().copy_(own.view(output.shape))


def reduce_scatter_single(
    links: GroupLinks, output: torch.Tensor, tensor: torch.Tensor, reduction: TorchReduction, timeout: float
) -> None:
    view, source = ContiguousView(output), as_contiguous(reduction.prescale(tensor))
    description = Described("reduce_scatter", output.dtype, output.numel(), reduction.name)
    if not reduction.native or reduction.element is None:
        blocks = torch.empty_like(source)
        all_to_all_single(links, blocks, source, timeout, description)
        total = reduction.fold(split(blocks.reshape(-1), [output.numel()] * links.size))
        view.flat.copy_(total.view(output.shape))
    else:
        received = elements_of(reduction.native_view(view.flat))
        sent = elements_of(reduction.native_view(source))
        run = links.prepared("reduce_scatter", received.size, reduction.element, reduction.op, description=description)
        run(sent, received, time.monotonic() + timeout)
    view.copy_back()


def sparse_all_reduce(links: GroupLinks, tensor: torch.Tensor, timeout: float) -> None:
    """Sums sparse tensors: gathers the indices and values of all ranks and adds them."""
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    description = Described("sparse_all_reduce", tensor.dtype, tuple(tensor.shape), "sum")
    own_length = torch.tensor([values.shape[0]], device="cpu")
    lengths = [int(count) for count in _all_gather_list(links, own_length, description, timeout)]
    all_indices = [indices.new_empty(indices.shape[0], length) for length in lengths]
    all_values = [values.new_empty(length, *values.shape[1:]) for length in lengths]
    all_to_all(links, all_indices, [indices] * links.size, timeout, description)
    all_to_all(links, all_values, [values] * links.size, timeout, description)
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape)
    with torch.no_grad():  # copying to a detached sparse tensor would not change the original
        tensor.copy_(total.coalesce())


def _all_gather_list(
    links: GroupLinks, tensor: torch.Tensor, description: Described, timeout: float
) -> list[torch.Tensor]:
    """The tensors of all ranks, which have the same shape, in rank order."""
    gathered = tensor.new_empty(links.size, *tensor.shape)
    sent, received = bytes_of(tensor), bytes_of(gathered)
    run = links.prepared("all_gather", tensor.nbytes, BYTES, description=description)
    run(sent, received, time.monotonic() + timeout)
    return list(gathered)
