"""The collectives of ``hvd``: synchronous and asynchronous, in place and not, of one tensor and of groups.

``name`` is accepted everywhere and not used: ranks must call collectives in the same order, and an error at every rank
says so if they do not. The synchronous calls that return a new tensor are differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hoop.errors import InvalidArgument
from hoop.horovod import operations
from hoop.horovod.compression import Compression, Compressor
from hoop.horovod.context import OPERATION_TIMEOUT_S
from hoop.horovod.operations import Handle
from hoop.horovod.process_sets import ProcessSet, global_process_set
from hoop.horovod.reductions import Average, Reduction, Sum, chosen

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


# ---- allreduce


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to reduce a tensor in place. ``op`` is Average unless it is given."""
    return grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set, _one)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    _result: Any = list,
) -> Handle:
    """Begins to reduce tensors in place. Those of one type and device are one operation."""
    reduction = chosen(op, average)
    fused = [_Fused(group) for group in _by_type(tensors)]
    works = [one.start(process_set, reduction, prescale_factor) for one in fused]

    def finish() -> Any:
        for one in fused:
            one.finish(process_set, reduction, postscale_factor)
        return _result(tensors)

    return Handle(works, finish)


class _Fused:
    """Tensors of one type and device that are reduced as one."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0].detach() if alone else torch.cat([one.detach().reshape(-1) for one in tensors])
        self._copied = not alone

    def start(self, process_set: ProcessSet, reduction: Reduction, prescale: float) -> Any:
        if prescale != 1.0:
            _scale(self._flat, prescale)
        return operations.start_all_reduce(process_set, self._flat, reduction)

    def finish(self, process_set: ProcessSet, reduction: Reduction, postscale: float) -> None:
        _finish_average(self._flat, reduction, process_set)
        if postscale != 1.0:
            _scale(self._flat, postscale)
        if self._copied:
            sizes = [one.numel() for one in self._tensors]
            for tensor, part in zip(self._tensors, self._flat.split(sizes), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _by_type(tensors: Tensors) -> list[list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise InvalidArgument("allreduce: a sparse tensor; use hvd.sparse_allreduce_async, or hvd.allreduce")
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _scale(tensor: Tensor, factor: float) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor * factor)  # rounded towards zero


def _finish_average(tensor: Tensor, reduction: Reduction, process_set: ProcessSet) -> None:
    """Divides the sum of whole numbers, which the backend cannot average, towards zero."""
    if reduction is Average and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        tensor.copy_(torch.div(tensor, process_set.size(), rounding_mode="trunc"))


def _one(tensors: Tensors) -> Tensor:
    return tensors[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to reduce a tensor; ``synchronize`` returns a new one."""
    copy = _copy(tensor)
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to reduce tensors; ``synchronize`` returns new ones."""
    copies = [_copy(one) for one in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor in place and returns it."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()  # type: ignore[no-any-return]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces tensors in place and returns them."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()  # type: ignore[no-any-return]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A new tensor: the reduction of the tensors of all ranks. Sparse tensors can be summed and averaged."""
    reduction = chosen(op, average)
    if tensor.layout is torch.sparse_coo:
        return sparse_allreduce_async(tensor, name, reduction, process_set).wait()  # type: ignore[no-any-return]
    sent, context = compression.compress(tensor)
    result: Tensor = _AllReduce.apply(sent, reduction, prescale_factor, postscale_factor, process_set)
    return compression.decompress(result, context)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """New tensors: the reductions of the tensors of all ranks."""
    reduction = chosen(op, average)
    sent, contexts = zip(*(compression.compress(one) for one in tensors), strict=True)
    results = _GroupedAllReduce.apply(reduction, prescale_factor, postscale_factor, process_set, *sent)
    return [compression.decompress(one, context) for one, context in zip(results, contexts, strict=True)]


class _AllReduce(torch.autograd.Function):
    """The gradient is reduced as the tensor was."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Reduction, prescale: float, postscale: float, ranks: ProcessSet) -> Any:
        ctx.options = (op, prescale, postscale, ranks)
        return allreduce_async(tensor, None, None, op, prescale, postscale, ranks).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale, ranks = ctx.options
        return allreduce_async(gradients[0], None, None, op, prescale, postscale, ranks).wait(), None, None, None, None


class _GroupedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Reduction, prescale: float, postscale: float, ranks: ProcessSet, *tensors: Tensor) -> Any:
        ctx.options = (op, prescale, postscale, ranks)
        return tuple(grouped_allreduce_async(tensors, None, None, op, prescale, postscale, ranks).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale, ranks = ctx.options
        reduced = grouped_allreduce_async(gradients, None, None, op, prescale, postscale, ranks).wait()
        return None, None, None, None, *reduced


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: Reduction | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins the sum or the average of sparse (COO) tensors: every rank gets the entries of all."""
    reduction = chosen(op)
    if reduction not in (Sum, Average):
        raise InvalidArgument(f"op: {reduction.value} of sparse tensors; only Sum and Average are possible")
    entries = tensor.detach().coalesce()
    indices = entries.indices().t().contiguous()
    works, gathered = zip(
        operations.start_all_gather(process_set, indices),
        operations.start_all_gather(process_set, entries.values().contiguous()),
        strict=True,
    )

    def finish() -> Tensor:
        everyones_indices, everyones_values = (torch.cat(one) for one in gathered)
        total = torch.sparse_coo_tensor(everyones_indices.t(), everyones_values, tensor.shape).coalesce()
        return total / process_set.size() if reduction is Average else total

    return Handle(works, finish)


# ---- allgather


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begins to gather tensors that may differ in their first dimension; waits until every rank has called it."""
    work, outputs = operations.start_all_gather(process_set, tensor.detach().contiguous())
    return Handle([work], lambda: torch.cat(outputs))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins to gather several tensors."""
    handles = [allgather_async(one, name, process_set) for one in tensors]
    return Handle.of_all(handles)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, one after the other along the first dimension."""
    result: Tensor = _AllGather.apply(tensor, process_set)
    return result


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """``allgather`` of several tensors."""
    if any(one.requires_grad for one in tensors):
        return [allgather(one, name, process_set) for one in tensors]
    return grouped_allgather_async(tensors, name, process_set).wait()  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    """The gradient of a rank's tensor is the sum of all ranks' gradients for its rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: ProcessSet) -> Any:
        work, outputs = operations.start_all_gather(ranks, tensor.detach().contiguous())
        operations.wait(work)
        ctx.ranks, ctx.counts = ranks, [len(one) for one in outputs]
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = allreduce_async(gradients[0], op=Sum, process_set=ctx.ranks).wait()
        return total.split(ctx.counts)[ctx.ranks.rank()], None


# ---- broadcast


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins to overwrite a tensor with that of ``root_rank``, a rank of the run."""
    whole = tensor.detach()
    flat = whole if whole.is_contiguous() else whole.contiguous()
    work = operations.start_broadcast(process_set, flat, root_rank)

    def finish() -> Tensor:
        if flat is not whole:
            whole.copy_(flat)
        return tensor

    return Handle([work], finish)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins a broadcast; ``synchronize`` returns a new tensor."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites a tensor with that of ``root_rank`` and returns it."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor: that of ``root_rank``."""
    result: Tensor = _Broadcast.apply(tensor, root_rank, process_set)
    return result


class _Broadcast(torch.autograd.Function):
    """The gradient of the root's tensor is the sum of all ranks' gradients; the others' is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, ranks: ProcessSet) -> Any:
        ctx.root, ctx.ranks = root, ranks
        return broadcast_async(tensor, root, None, ranks).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = allreduce_async(gradients[0], op=Sum, process_set=ctx.ranks).wait()
        is_root = ctx.ranks._members()[ctx.ranks.rank()] == ctx.root
        return total if is_root else torch.zeros_like(total), None, None


# ---- alltoall


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to send ``splits[r]`` rows to each rank r; waits until every rank has called it."""
    counts = _splits(tensor, splits, process_set)
    work, output, received = operations.start_all_to_all(process_set, tensor.detach().contiguous(), counts)
    return Handle([work], lambda: output if splits is None else (output, torch.tensor(received)))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends ``splits[r]`` rows to each rank r, without splits equally many.

    Returns the received rows, in rank order; with splits also how many came from each rank.
    """
    counts = _splits(tensor, splits, process_set)
    output, received = _AllToAll.apply(tensor, counts, process_set)
    return output if splits is None else (output, received)


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    size = process_set.size()
    if tensor.dim() == 0:
        raise InvalidArgument("alltoall: a tensor without dimensions")
    if splits is not None:
        return [int(one) for one in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if tensor.shape[0] % size:
        raise InvalidArgument(f"alltoall: {tensor.shape[0]} rows do not divide by {size} ranks; give splits")
    return [tensor.shape[0] // size] * size


class _AllToAll(torch.autograd.Function):
    """The gradients go back to the ranks that the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: list[int], ranks: ProcessSet) -> Any:
        work, output, received = operations.start_all_to_all(ranks, tensor.detach().contiguous(), splits)
        operations.wait(work)
        ctx.ranks, ctx.received = ranks, received
        counts = torch.tensor(received)
        ctx.mark_non_differentiable(counts)
        return output, counts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        work, output, _ = operations.start_all_to_all(ctx.ranks, gradients[0].contiguous(), ctx.received)
        operations.wait(work)
        return output, None, None


# ---- reducescatter


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Reduction | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins to reduce tensors and to share out the rows of the result."""
    reduction = chosen(op)
    sent = _copy(tensor) if prescale_factor != 1.0 else tensor.detach().contiguous()
    if prescale_factor != 1.0:
        _scale(sent, prescale_factor)
    work, output = operations.start_reduce_scatter(process_set, sent, reduction)

    def finish() -> Tensor:
        _finish_average(output, reduction, process_set)
        if postscale_factor != 1.0:
            _scale(output, postscale_factor)
        return output

    return Handle([work], finish)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Reduction | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins ``reducescatter`` of several tensors."""
    handles = [reducescatter_async(one, name, op, process_set, prescale_factor, postscale_factor) for one in tensors]
    return Handle.of_all(handles)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduced tensor; the first ``rows % size`` ranks get one row more."""
    sent, context = compression.compress(tensor)
    result: Tensor = _ReduceScatter.apply(sent, chosen(op), process_set, prescale_factor, postscale_factor)
    return compression.decompress(result, context)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of several tensors."""
    return [
        reducescatter(one, name, compression, op, process_set, prescale_factor, postscale_factor) for one in tensors
    ]


class _ReduceScatter(torch.autograd.Function):
    """The gradient of a tensor is every rank's gradient for its rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Reduction, ranks: ProcessSet, prescale: float, postscale: float) -> Any:
        ctx.ranks, ctx.factor = ranks, prescale * postscale / (ranks.size() if op is Average else 1)
        return reducescatter_async(tensor, None, op, ranks, prescale, postscale).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        work, outputs = operations.start_all_gather(ctx.ranks, gradients[0].contiguous())
        operations.wait(work)
        return torch.cat(outputs) * ctx.factor, None, None, None, None


# ---- barrier, join


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    operations.run_barrier(process_set)


def join(device: int = -1) -> int:
    """Signals that this rank has no more batches. Blocks until all ranks have; returns the rank that called last.

    Until then this rank takes part in the collectives of the others with zeros (with values that change nothing, for
    minimum, maximum and product). ``device`` is accepted and not used.
    """
    return operations.run_join(OPERATION_TIMEOUT_S)
