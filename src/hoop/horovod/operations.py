"""Each collective once, as operations of the backend: on plain tensors, without scaling, compression or autograd.

``start_…`` begins a collective and returns what ``wait`` needs. A ``Handle`` is the result of several of them, which
may not be there yet. All ranks of a process set call the same collectives in the same order. Collectives whose sizes
differ between ranks exchange the sizes first, and wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hoop.errors import InvalidArgument
from hoop.horovod.context import current
from hoop.horovod.errors import peer_errors
from hoop.horovod.join_ledger import Call, Kind
from hoop.horovod.process_sets import ProcessSet, global_process_set
from hoop.horovod.reductions import Reduction

Tensor = torch.Tensor


def wait(work: Any) -> None:
    """Waits for an operation; HorovodInternalError if a rank was lost."""
    if work is not None:
        current().ledger.wait(work)


class Handle:
    """What ``…_async`` returns; ``hvd.synchronize`` waits for it and ``hvd.poll`` asks."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        """``works``: operations of the backend. ``finish``: makes the result of their outputs; called once."""
        self._works: Sequence[Any] | None = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    @classmethod
    def of_all(cls, handles: Sequence[Handle]) -> Handle:
        """Several handles as one, whose result is the list of their results."""
        works = [work for one in handles for work in one._works or ()]
        return cls(works, lambda: [one.wait() for one in handles])

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        if self._works is None or all(work is None or work.is_completed() for work in self._works):
            return True
        current().ledger.answer_joined()
        return False

    def wait(self) -> Any:
        """The result; HorovodInternalError if a rank was lost."""
        if self._works is not None:
            for work in self._works:
                wait(work)
            assert self._finish is not None
            self._result = self._finish()
            self._works, self._finish = None, None
        return self._result


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous collective and returns its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether an asynchronous collective has finished."""
    return handle.done()


def _record(process_set: ProcessSet, kind: Kind, tensor: Tensor | None = None, **fields: Any) -> None:
    """Takes note of a call on the global set, for ranks that have joined."""
    if process_set.is_global:
        if tensor is not None:
            fields |= {"dtype": str(tensor.dtype).removeprefix("torch."), "device": tensor.device.type}
        current().ledger.record(Call(kind, **fields))


def start_all_reduce(process_set: ProcessSet, tensor: Tensor, reduction: Reduction) -> Any:
    """Reduces a contiguous tensor in place. An average of whole numbers is their sum: see ``Reduction.torch_op``."""
    group = process_set.group
    _record(process_set, Kind.ALL_REDUCE, tensor, shape=tuple(tensor.shape), reduction=reduction.name)
    with peer_errors():
        return dist.all_reduce(tensor, reduction.torch_op(tensor.dtype), group=group, async_op=True)


def start_broadcast(process_set: ProcessSet, tensor: Tensor, root: int) -> Any:
    """Overwrites a contiguous tensor with that of the rank ``root``, a rank of the run."""
    group = process_set.group
    if root not in process_set._members():
        raise InvalidArgument(f"root_rank: {root} is not a rank of {process_set}")
    _record(process_set, Kind.BROADCAST, tensor, shape=tuple(tensor.shape), root=root)
    with peer_errors():
        return dist.broadcast(tensor, src=root, group=group, async_op=True)


def start_all_gather(process_set: ProcessSet, tensor: Tensor) -> tuple[Any, list[Tensor]]:
    """The tensors of all ranks, which may differ in their first dimension; waits until every rank has called it."""
    group, size = process_set.group, process_set.size()
    if tensor.dim() == 0:
        raise InvalidArgument("allgather: a tensor without dimensions; use tensor.reshape(1)")
    _record(process_set, Kind.ALL_GATHER, tensor, shape=tuple(tensor.shape))
    row = tensor.shape[1:]
    header = torch.tensor([tensor.shape[0], row.numel()], dtype=torch.int64)
    headers = [torch.empty_like(header) for _ in range(size)]
    with peer_errors():
        wait(dist.all_gather(headers, header, group=group, async_op=True))
        counts, widths = zip(*(one.tolist() for one in headers), strict=True)
        if len(set(widths)) > 1:
            raise InvalidArgument(
                f"allgather: rows of {', '.join(map(str, widths))} elements at ranks 0..{size - 1}; only the first "
                "dimension may differ"
            )
        outputs = [tensor.new_empty((count, *row)) for count in counts]
        return dist.all_gather(outputs, tensor, group=group, async_op=True), outputs


def start_all_to_all(process_set: ProcessSet, tensor: Tensor, splits: Sequence[int]) -> tuple[Any, Tensor, list[int]]:
    """Sends ``splits[r]`` rows to each rank r; waits until every rank has called it.

    Returns the received rows and how many came from each rank.
    """
    group, size = process_set.group, process_set.size()
    if len(splits) != size or min(splits) < 0 or sum(splits) != tensor.shape[0]:
        raise InvalidArgument(
            f"splits: {list(splits)} are not {size} counts that add up to the first dimension, {tensor.shape[0]}"
        )
    _record(process_set, Kind.ALL_TO_ALL, tensor, shape=tuple(tensor.shape))
    sent = torch.tensor(splits, dtype=torch.int64)
    counts = torch.empty_like(sent)
    with peer_errors():
        wait(dist.all_to_all_single(counts, sent, group=group, async_op=True))
        received = [int(one) for one in counts.tolist()]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        work = dist.all_to_all_single(output, tensor, received, list(splits), group=group, async_op=True)
    return work, output, received


def start_reduce_scatter(process_set: ProcessSet, tensor: Tensor, reduction: Reduction) -> tuple[Any, Tensor]:
    """The sum of this rank's rows: the first ``rows % size`` ranks get one row more."""
    group, size = process_set.group, process_set.size()
    if tensor.dim() == 0:
        raise InvalidArgument("reducescatter: a tensor without dimensions")
    _record(process_set, Kind.REDUCE_SCATTER, tensor, shape=tuple(tensor.shape), reduction=reduction.name)
    inputs = list(tensor.split(row_counts(tensor.shape[0], size)))
    output = torch.empty_like(inputs[process_set.rank()])
    with peer_errors():
        work = dist.reduce_scatter(output, inputs, reduction.torch_op(tensor.dtype), group=group, async_op=True)
    return work, output


def row_counts(rows: int, size: int) -> list[int]:
    """How ``rows`` rows are shared out by reducescatter."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def run_barrier(process_set: ProcessSet) -> None:
    """Returns when every rank has called it."""
    group = process_set.group
    _record(process_set, Kind.BARRIER)
    with peer_errors():
        wait(dist.barrier(group=group, async_op=True))


def run_broadcast_object(process_set: ProcessSet, value: Any, root: int) -> Any:
    """PyTorch's broadcast of an object, which pickles it. In the barrier a rank notices that another has joined."""
    group = process_set.group
    _record(process_set, Kind.BROADCAST_OBJECT, root=root)
    with peer_errors():
        wait(dist.barrier(group=group, async_op=True))
        values = [value]
        dist.broadcast_object_list(values, src=root, group=group)
    return values[0]


def run_all_gather_object(process_set: ProcessSet, value: Any) -> list[Any]:
    """PyTorch's all_gather of objects, which pickles them."""
    group = process_set.group
    _record(process_set, Kind.ALL_GATHER_OBJECT)
    values: list[Any] = [None] * process_set.size()
    with peer_errors():
        wait(dist.barrier(group=group, async_op=True))
        dist.all_gather_object(values, value, group=group)
    return values


# ---- a rank that has joined


def take_part(call: Call) -> None:
    """Makes a call of the other ranks with values that change none of their results."""
    everyone = global_process_set
    match call.kind:
        case Kind.ALL_REDUCE:
            reduction = Reduction[call.reduction]
            wait(start_all_reduce(everyone, _neutral(call, reduction), reduction))
        case Kind.REDUCE_SCATTER:
            reduction = Reduction[call.reduction]
            wait(start_reduce_scatter(everyone, _neutral(call, reduction), reduction)[0])
        case Kind.BROADCAST:
            if call.root == current().rank_info.rank:
                raise InvalidArgument(f"broadcast from rank {call.root}, which has joined (hvd.join)")
            wait(start_broadcast(everyone, _neutral(call), call.root))
        case Kind.ALL_GATHER:
            wait(start_all_gather(everyone, _neutral(call)[:0])[0])
        case Kind.ALL_TO_ALL:
            wait(start_all_to_all(everyone, _neutral(call)[:0], [0] * everyone.size())[0])
        case Kind.BARRIER:
            run_barrier(everyone)
        case Kind.BROADCAST_OBJECT:
            run_broadcast_object(everyone, None, call.root)
        case Kind.ALL_GATHER_OBJECT:
            run_all_gather_object(everyone, None)


def _neutral(call: Call, reduction: Reduction = Reduction.SUM) -> Tensor:
    dtype: torch.dtype = getattr(torch, call.dtype)
    return torch.full(call.shape, reduction.neutral(dtype), dtype=dtype, device=call.device)


def run_join(timeout_s: float) -> int:
    """Takes part in the collectives of the others until all have joined; returns the rank that joined last."""
    with peer_errors():
        last = current().ledger.join(take_part, timeout_s)
        wait(dist.barrier(async_op=True))  # the store, which may be in another rank, is not needed any more
    return last
