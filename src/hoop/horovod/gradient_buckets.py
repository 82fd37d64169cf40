"""Gradients in buckets: each bucket is reduced as one tensor, in the background, while backward goes on.

All ranks fill the same buckets and begin them in the same order, whatever the order of their gradients: a bucket begins
when its gradients and all earlier buckets are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hoop.horovod import operations
from hoop.horovod.collectives import _finish_average, sparse_allreduce_async
from hoop.horovod.compression import Compressor
from hoop.horovod.process_sets import ProcessSet
from hoop.horovod.reductions import Average, Reduction, Sum

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""Bytes of the first bucket. It is small, so that the reduction begins early."""
Parameter = torch.Tensor


class Bucket:
    """Parameters of one type and device, and the buffer that their gradients are reduced in."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.missing = set(self.parameters)
        """Parameters whose gradient is not complete in this step."""
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._sent: torch.Tensor | None = None
        self._context: Any = None
        self._work: Any = None

    def remove(self, parameter: Parameter) -> None:
        """For a parameter with sparse gradients, which are reduced alone."""
        self.parameters = [one for one in self.parameters if one is not parameter]
        self.missing.discard(parameter)
        self._flat = None

    def start(
        self, process_set: ProcessSet, reduction: Reduction, compression: type[Compressor], prescale: float
    ) -> None:
        if not self.parameters:
            return
        if self._flat is None:
            sizes = [one.numel() for one in self.parameters]
            self._flat = self.parameters[0].new_empty(sum(sizes))
            self._views = [
                part.view(one.shape) for part, one in zip(self._flat.split(sizes), self.parameters, strict=True)
            ]
        for one in self.parameters:
            if one.grad is None:  # not used in this step
                one.grad = torch.zeros_like(one)
        torch._foreach_copy_(self._views, [one.grad.detach() for one in self.parameters if one.grad is not None])
        if prescale != 1.0:
            self._flat.mul_(prescale)
        self._sent, self._context = compression.compress(self._flat)
        self._work = operations.start_all_reduce(process_set, self._sent, reduction)

    def finish(
        self, process_set: ProcessSet, reduction: Reduction, compression: type[Compressor], postscale: float
    ) -> None:
        """Waits, and writes the reduced gradients to the parameters."""
        if not self.parameters:
            return
        assert self._flat is not None
        assert self._sent is not None
        operations.wait(self._work)
        _finish_average(self._sent, reduction, process_set)
        if self._sent is not self._flat:
            self._flat.copy_(compression.decompress(self._sent, self._context))
        if postscale != 1.0:
            self._flat.mul_(postscale)
        torch._foreach_copy_([one.grad.detach() for one in self.parameters if one.grad is not None], self._views)
        self._sent = self._work = self._context = None


class GradientBuckets:
    """The buckets of an optimizer's parameters, and how far the current step is."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        groups: Sequence[Sequence[Parameter]] | int | None,
        process_set: ProcessSet,
        op: Reduction,
        compression: type[Compressor],
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        """``groups``: lists of parameters that are one bucket each, or the number of buckets; None: by size."""
        self._process_set, self._compression, self._op = process_set, compression, op
        self._predivide, self._sparse_as_dense = predivide, sparse_as_dense
        self.buckets = [Bucket(one) for one in _divide(list(parameters), groups)]
        self._bucket_of = {one: bucket for bucket in self.buckets for one in bucket.parameters}
        self._sparse: list[Parameter] = []
        """Parameters with sparse gradients, in the order of their buckets."""
        self._started = 0

    @property
    def in_progress(self) -> bool:
        """Whether reductions have begun that ``synchronize`` has not waited for."""
        return self._started > 0

    def on_gradient_ready(self, parameter: Parameter) -> None:
        """Called once in a step for each parameter, when backward has computed its gradient."""
        self._take_sparse(parameter)
        bucket = self._bucket_of[parameter]
        bucket.missing.discard(parameter)
        if self._process_set.size() > 1:
            while self._started < len(self.buckets) and not self.buckets[self._started].missing:
                self._start_next()

    def _take_sparse(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return
        if self._sparse_as_dense:
            parameter.grad = gradient.to_dense()
        elif not any(parameter is one for one in self._sparse):
            self._bucket_of[parameter].remove(parameter)
            order = {id(one): index for index, one in enumerate(self._bucket_of)}
            self._sparse.append(parameter)
            self._sparse.sort(key=lambda one: order[id(one)])

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        self._started += 1
        averages = self._op is Average
        divided = averages and self._predivide != 1.0
        prescale = 1.0 / self._predivide if divided else 1.0
        bucket.start(self._process_set, Sum if divided else self._op, self._compression, prescale)

    def synchronize(self) -> None:
        """Reduces what has not begun, waits for all, and begins a new step."""
        if self._process_set.size() > 1:
            while self._started < len(self.buckets):
                self._start_next()
            handles = [self._start_sparse(one) for one in self._sparse]
            divided = self._op is Average and self._predivide != 1.0
            postscale = self._predivide / self._process_set.size() if divided else 1.0
            for bucket in self.buckets:
                bucket.finish(self._process_set, Sum if divided else self._op, self._compression, postscale)
            for parameter, handle in zip(self._sparse, handles, strict=True):
                parameter.grad = handle.wait()
        self.reset()

    def _start_sparse(self, parameter: Parameter) -> Any:
        if parameter.grad is None:
            shape = parameter.shape
            none = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(none, parameter.new_zeros((0, *shape[1:])), shape)
        return sparse_allreduce_async(parameter.grad, None, self._op, self._process_set)

    def reset(self) -> None:
        """Begins a new step, whatever the last one has reached: its reductions are dropped."""
        self._started = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)


def _divide(
    parameters: list[Parameter], groups: Sequence[Sequence[Parameter]] | int | None
) -> Iterable[list[Parameter]]:
    """Backward computes gradients from the last layer to the first: the last parameters come first."""
    backwards = parameters[::-1]
    if isinstance(groups, int) and groups > 0:
        share = -(-len(backwards) // groups)
        lists = [backwards[start : start + share] for start in range(0, len(backwards), share)]
        return [part for one in lists for part in _by_type(one)]
    if groups and not isinstance(groups, int):
        listed = {id(one) for group in groups for one in group}
        lists = [*map(list, groups), *([one] for one in backwards if id(one) not in listed)]
        position = {id(one): index for index, one in enumerate(backwards)}
        lists = [[one for one in group if id(one) in position] for group in lists]
        lists.sort(key=lambda group: max((position[id(one)] for one in group), default=0))
        return [part for one in lists if one for part in _by_type(one)]
    buckets: list[list[Parameter]] = []
    for one in _by_type(backwards):
        buckets += _by_size(one)
    return buckets


def _by_type(parameters: list[Parameter]) -> list[list[Parameter]]:
    kinds: dict[Any, list[Parameter]] = {}
    for one in parameters:
        kinds.setdefault((one.dtype, one.device), []).append(one)
    return list(kinds.values())


def _by_size(parameters: list[Parameter]) -> Iterable[list[Parameter]]:
    bucket: list[Parameter] = []
    limit = FIRST_BUCKET_BYTES
    for one in parameters:
        bucket.append(one)
        if sum(each.nbytes for each in bucket) >= limit:
            yield bucket
            bucket, limit = [], BUCKET_BYTES
    if bucket:
        yield bucket
