"""Every collective of torch.distributed as operations of Hoop's communicator.

Each function runs on the group's lane, with every rank doing the same. Data that is only moved travels as bytes, so
every type can. Where ranks have different amounts, plain messages take the place of the planned operation.

Every operation is described as the call that torch's user made (``Described``): that is what ranks compare.

A vector owns nothing: whatever tensor it lies in is held by a variable of the function until all has moved.
"""

from __future__ import annotations

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
    bytes_of,
    elements_of,
    is_plain,
    sized,
    split,
    to_send,
)

BYTES = dtype("uint8")
Tensors = Sequence[torch.Tensor]


# ---- moving


def broadcast(links: GroupLinks, tensor: torch.Tensor, root: int, timeout: float) -> None:
    landing = ContiguousView(tensor)
    if links.rank == root:
        landing.fill()
    data = bytes_of(landing.flat)
    what = Described("broadcast", tensor.dtype, tensor.numel(), root=f"from {root}")
    links.run("broadcast", data.size, BYTES, data, data, timeout, root=root, what=what)
    if links.rank != root:
        landing.settle()


def all_gather(links: GroupLinks, outputs: Tensors, tensor: torch.Tensor, timeout: float) -> None:
    source, sizes = to_send(tensor), [output.numel() for output in outputs]
    if len(set(sizes)) == 1:
        row, what = FlatTensors(outputs, filled=False), Described("all_gather", tensor.dtype, tensor.numel())
        given, into = bytes_of(source), bytes_of(row.flat)
        links.run("all_gather", source.nbytes, BYTES, given, into, timeout, what=what)
        row.settle()
        return
    landings = [ContiguousView(output) for output in outputs]
    targets = [bytes_of(landing.flat) for landing in landings]
    what = Described("all_gather", tensor.dtype, tuple(sizes))
    links.exchange([bytes_of(source)] * links.size, targets, what, timeout)
    for landing in landings:
        landing.settle()


def all_gather_single(links: GroupLinks, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> None:
    landing, source = ContiguousView(output), to_send(tensor)
    what = Described("all_gather", tensor.dtype, tensor.numel())
    given, into = bytes_of(source), bytes_of(landing.flat)
    links.run("all_gather", source.nbytes, BYTES, given, into, timeout, what=what)
    landing.settle()


def gather(links: GroupLinks, outputs: Tensors, tensor: torch.Tensor, root: int, timeout: float) -> None:
    source = to_send(tensor)
    row = FlatTensors(outputs, filled=False) if links.rank == root else None
    into = bytes_of(row.flat) if row is not None else sized(0)
    what = Described("gather", tensor.dtype, tensor.numel(), root=f"to {root}")
    links.run("gather", source.nbytes, BYTES, bytes_of(source), into, timeout, root=root, what=what)
    if row is not None:
        row.settle()


def scatter(links: GroupLinks, output: torch.Tensor, tensors: Tensors, root: int, timeout: float) -> None:
    landing = ContiguousView(output)
    row = FlatTensors(tensors, filled=True) if links.rank == root else None
    source = bytes_of(row.flat) if row is not None else sized(0)
    into = bytes_of(landing.flat)
    what = Described("scatter", output.dtype, output.numel(), root=f"from {root}")
    links.run("scatter", into.size, BYTES, source, into, timeout, root=root, what=what)
    landing.settle()


def all_to_all(
    links: GroupLinks, outputs: Tensors, tensors: Tensors, timeout: float, what: Described | None = None
) -> None:
    """``what``: the call that it is part of."""
    what = what or Described("all_to_all with splits", tensors[0].dtype)
    landings = [ContiguousView(output) for output in outputs]
    sources = [to_send(tensor) for tensor in tensors]
    targets = [bytes_of(landing.flat) for landing in landings]
    links.exchange([bytes_of(source) for source in sources], targets, what, timeout)
    for landing in landings:
        landing.settle()


def all_to_all_single(
    links: GroupLinks,
    output: torch.Tensor,
    tensor: torch.Tensor,
    timeout: float,
    what: Described | None = None,
) -> None:
    """``what``: the call that it is part of."""
    landing, source = ContiguousView(output), to_send(tensor)
    block = source.nbytes // links.size
    what = what or Described("all_to_all", tensor.dtype, tensor.numel())
    links.run("all_to_all", block, BYTES, bytes_of(source), bytes_of(landing.flat), timeout, what=what)
    landing.settle()


def barrier(links: GroupLinks, timeout: float) -> None:
    links.run("barrier", 0, BYTES, sized(0), sized(0), timeout)


# ---- reducing


def all_reduce(
    links: GroupLinks,
    tensor: torch.Tensor,
    how: TorchReduction,
    timeout: float,
    what: Described | None = None,
) -> None:
    """``what``: the call that it is part of."""
    if how.as_is and how.element is not None and is_plain(tensor):
        where = elements_of(tensor)
        links.run("all_reduce", where.size, how.element, where, where, timeout, op=how.op, what=what)
        return
    source = to_send(how.scaled(tensor))
    landing = ContiguousView(tensor)
    # Of a tensor that is not contiguous this is the text of the operation itself: other ranks' may be.
    what = what or Described("all_reduce", tensor.dtype, tensor.numel(), how.name)
    if not how.by_links or how.element is None:
        landing.flat.copy_(how.fold(_gathered(links, source, what, timeout)))
    else:
        given, into = elements_of(how.plain(source)), elements_of(how.plain(landing.flat))
        links.run("all_reduce", into.size, how.element, given, into, timeout, op=how.op, what=what)
    landing.settle()


def all_reduce_compressed(
    links: GroupLinks, tensor: torch.Tensor, how: TorchReduction, name: str, timeout: float
) -> None:
    """Of a plain tensor of float32, which loses a little."""
    assert how.element is not None, "what may be compressed has an element type"
    where = elements_of(tensor)
    links.run("all_reduce", where.size, how.element, where, where, timeout, op=how.op, compression=name)


def begin_all_reduce(
    links: GroupLinks, tensor: torch.Tensor, how: TorchReduction, timeout: float
) -> Callable[[float], None] | None:
    """``all_reduce`` of a plain tensor, for whoever may not wait: None if it is done, else how to go on."""
    assert how.element is not None, "what is reduced as it is has an element type"
    rest = links.begin_all_reduce(elements_of(tensor), how.element, how.op, timeout)
    return None if rest is None else partial(_go_on, rest, tensor)


def _go_on(rest: Callable[[], None], tensor: torch.Tensor, timeout: float) -> None:
    """With the tensor held until all has moved; the time has run since the beginning."""
    rest()


def all_reduce_coalesced(links: GroupLinks, tensors: Tensors, how: TorchReduction, timeout: float) -> None:
    row = FlatTensors(tensors, filled=True)
    sizes = tuple(tensor.numel() for tensor in tensors)
    what = Described("all_reduce_coalesced", tensors[0].dtype, sizes, how.name)
    all_reduce(links, row.flat, how, timeout, what)
    row.settle()


def reduce(
    links: GroupLinks,
    tensor: torch.Tensor,
    root: int,
    how: TorchReduction,
    timeout: float,
    what: Described | None = None,
) -> None:
    """``what``: the call that it is part of."""
    source = to_send(how.scaled(tensor))
    result = ContiguousView(tensor) if links.rank == root else None
    what = what or Described("reduce", tensor.dtype, tensor.numel(), how.name, f"to {root}")
    if not how.by_links or how.element is None:
        every = _gathered(links, source, what, timeout)
        if result is not None:
            result.flat.copy_(how.fold(every))
    else:
        given = elements_of(how.plain(source))
        into = elements_of(how.plain(result.flat)) if result is not None else given[:0]
        links.run("reduce", given.size, how.element, given, into, timeout, op=how.op, root=root, what=what)
    if result is not None:
        result.settle()


def reduce_scatter(
    links: GroupLinks, output: torch.Tensor, tensors: Tensors, how: TorchReduction, timeout: float
) -> None:
    if len({tensor.numel() for tensor in tensors}) == 1:
        row = FlatTensors(tensors, filled=True)
        reduce_scatter_single(links, output, row.flat, how, timeout)
        return
    sizes = tuple(tensor.numel() for tensor in tensors)
    what = Described("reduce_scatter", output.dtype, sizes, how.name)
    for root, tensor in enumerate(tensors):
        own = to_send(tensor).clone()
        reduce(links, own, root, how, timeout, what)
        if root == links.rank:
            output.detach().copy_(own.view(output.shape))


def reduce_scatter_single(
    links: GroupLinks, output: torch.Tensor, tensor: torch.Tensor, how: TorchReduction, timeout: float
) -> None:
    landing, source = ContiguousView(output), to_send(how.scaled(tensor))
    what = Described("reduce_scatter", output.dtype, output.numel(), how.name)
    if not how.by_links or how.element is None:
        blocks = torch.empty_like(source)
        all_to_all_single(links, blocks, source, timeout, what)
        total = how.fold(split(blocks.reshape(-1), [output.numel()] * links.size))
        landing.flat.copy_(total.view(output.shape))
    else:
        into, given = elements_of(how.plain(landing.flat)), elements_of(how.plain(source))
        links.run("reduce_scatter", into.size, how.element, given, into, timeout, op=how.op, what=what)
    landing.settle()


def sparse_all_reduce(links: GroupLinks, tensor: torch.Tensor, timeout: float) -> None:
    """Sums sparse tensors: everybody's indices and values, gathered and added."""
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    what = Described("sparse_all_reduce", tensor.dtype, tuple(tensor.shape), "sum")
    lengths = [int(count) for count in _gathered(links, torch.tensor([values.shape[0]]), what, timeout)]
    every_index = [torch.empty(indices.shape[0], length, dtype=torch.int64) for length in lengths]
    every_value = [torch.empty(length, *values.shape[1:], dtype=values.dtype) for length in lengths]
    all_to_all(links, every_index, [indices] * links.size, timeout, what)
    all_to_all(links, every_value, [values] * links.size, timeout, what)
    total = torch.sparse_coo_tensor(torch.cat(every_index, 1), torch.cat(every_value), tensor.shape)
    with torch.no_grad():  # a detached sparse tensor would get the result for itself
        tensor.copy_(total.coalesce())


def _gathered(links: GroupLinks, tensor: torch.Tensor, what: Described, timeout: float) -> list[torch.Tensor]:
    every = torch.empty(links.size, *tensor.shape, dtype=tensor.dtype)
    given, into = bytes_of(tensor), bytes_of(every)
    links.run("all_gather", tensor.nbytes, BYTES, given, into, timeout, what=what)
    return list(every)
