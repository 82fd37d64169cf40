"""torch.distributed's collectives, each checked where it is called and run on the group's lane.

torch's C++ (DDP, functional collectives) and its Python call the same methods; lists of one are torch's habit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import ReduceOptions

from hoop.collectives.compression import compressor
from hoop.errors import InvalidArgument
from hoop.torch_backend import moves
from hoop.torch_backend.reductions import Reduce, reduce_by
from hoop.torch_backend.starting import AT_ONCE_BYTES, Starting
from hoop.torch_backend.tensors import check, check_alike, is_plain, only, split

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
_SUM = ReduceOptions().reduceOp


class CollectiveCalls(Starting):
    """What all ranks of a group do together."""

    def _how(self, title: str, options: Any, tensor: Tensor) -> Reduce:
        return reduce_by(title, getattr(options, "reduceOp", _SUM), tensor.dtype)

    # ---- reducing

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        listed = _listed(tensors)
        tensor: Tensor = only("all_reduce", listed)
        if tensor.layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensor, opts)
        check("all_reduce", tensor)
        how = self._how("all_reduce", opts, tensor)
        if (
            getattr(opts, "asyncOp", True)
            and how.as_is
            and tensor.nbytes <= AT_ONCE_BYTES
            and is_plain(tensor)
        ):
            work = self._at_once(tensor, how, opts, listed)
            if work is not None:
                return work
        job = partial(moves.all_reduce, self._links, tensor, how)
        return self._start("all_reduce", opts, job, listed, listed)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> Work:
        how = self._how("sparse_all_reduce", opts, tensor)
        if how.name != "sum":
            raise InvalidArgument(f"sparse_all_reduce: {how.name} of sparse tensors; only sum is possible")
        job = partial(moves.sparse_all_reduce, self._links, tensor)
        return self._start("sparse_all_reduce", opts, job, [tensor], [tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        check("all_reduce_coalesced", *tensors)
        check_alike("all_reduce_coalesced", tensors[0], tensors, sizes=False)
        how = self._how("all_reduce_coalesced", opts, tensors[0])
        job = partial(moves.all_reduce_coalesced, self._links, tensors, how)
        return self._start("all_reduce", opts, job, tensors, tensors)

    def allreduce_compressed(self, tensor: Tensor, compression: str, opts: Any = None) -> Work:
        """An all_reduce that loses a little; torch.distributed has no such call, a hook of DDP's makes it."""
        check("all_reduce", tensor)
        how = self._how("all_reduce", opts, tensor)
        if tensor.dtype is not torch.float32 or not is_plain(tensor) or how.name not in ("sum", "avg"):
            raise InvalidArgument(
                f"compression: only of sum and avg of a contiguous float32 tensor; this is {how.name} of {tensor.dtype}"
            )
        compressor(compression)  # raises if there is no such
        job = partial(moves.all_reduce_compressed, self._links, tensor, how, compression)
        return self._start("all_reduce", opts, job, [tensor], [tensor])

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("reduce", _listed(tensors))
        check("reduce", tensor)
        how, root = self._how("reduce", opts, tensor), self._root("reduce", opts)
        job = partial(moves.reduce, self._links, tensor, root, how)
        return self._start("reduce", opts, job, [tensor], [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output: Tensor = only("reduce_scatter", _listed(outputs))
        tensors: Tensors = only("reduce_scatter", inputs) if _nested(inputs) else inputs
        self._check_list("reduce_scatter", tensors)
        check("reduce_scatter", output, *tensors)
        check_alike("reduce_scatter", output, tensors, sizes=False)
        check_alike("reduce_scatter", output, [tensors[self._links.rank]])
        job = partial(
            moves.reduce_scatter, self._links, output, tensors, self._how("reduce_scatter", opts, output)
        )
        return self._start("reduce_scatter", opts, job, [output], tensors)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        self._check_blocks("reduce_scatter_tensor", output, tensor)
        how = self._how("reduce_scatter_tensor", opts, output)
        job = partial(moves.reduce_scatter_single, self._links, output, tensor, how)
        return self._start("_reduce_scatter_base", opts, job, [output], [tensor])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_blocks("reduce_scatter_tensor_coalesced", output, tensor)
        how = self._how("reduce_scatter_tensor_coalesced", opts, outputs[0])
        jobs = [
            partial(moves.reduce_scatter_single, self._links, output, tensor, how)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._start(
            "reduce_scatter_tensor_coalesced", opts, partial(_one_by_one, jobs), outputs, inputs
        )

    # ---- moving

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("broadcast", _listed(tensors))
        check("broadcast", tensor)
        job = partial(moves.broadcast, self._links, tensor, self._root("broadcast", opts))
        return self._start("broadcast", opts, job, [tensor], [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("all_gather", _listed(inputs))
        tensors: Tensors = only("all_gather", outputs) if _nested(outputs) else outputs
        self._check_list("all_gather", tensors)
        check("all_gather", tensor, *tensors)
        check_alike("all_gather", tensor, tensors, sizes=False)
        check_alike("all_gather", tensor, [tensors[self._links.rank]])
        job = partial(moves.all_gather, self._links, tensors, tensor)
        return self._start("all_gather", opts, job, tensors, [tensor])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        self._check_blocks("all_gather_into_tensor", tensor, output)
        job = partial(moves.all_gather_single, self._links, output, tensor)
        return self._start("_all_gather_base", opts, job, [output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_blocks("all_gather_into_tensor_coalesced", tensor, output)
        jobs = [
            partial(moves.all_gather_single, self._links, output, tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._start(
            "all_gather_into_tensor_coalesced", opts, partial(_one_by_one, jobs), outputs, inputs
        )

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Row r of the outputs is what rank r gave, tensor by tensor."""
        self._check_list("all_gather_coalesced", outputs)
        jobs = []
        for index, tensor in enumerate(inputs):
            column = [row[index] for row in outputs]
            check("all_gather_coalesced", tensor, *column)
            check_alike("all_gather_coalesced", tensor, column)
            jobs.append(partial(moves.all_gather, self._links, column, tensor))
        every = [tensor for row in outputs for tensor in row]
        return self._start("all_gather", opts, partial(_one_by_one, jobs), every, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("gather", _listed(inputs))
        root = self._root("gather", opts)
        tensors: Tensors = []
        if self._links.rank == root:
            tensors = only("gather", outputs) if _nested(outputs) else outputs
            self._check_list("gather", tensors)
            check_alike("gather", tensor, tensors)
        check("gather", tensor, *tensors)
        job = partial(moves.gather, self._links, tensors, tensor, root)
        return self._start("gather", opts, job, tensors, [tensor])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output: Tensor = only("scatter", _listed(outputs))
        root = self._root("scatter", opts)
        tensors: Tensors = []
        if self._links.rank == root:
            tensors = only("scatter", inputs) if _nested(inputs) else inputs
            self._check_list("scatter", tensors)
            check_alike("scatter", output, tensors)
        check("scatter", output, *tensors)
        job = partial(moves.scatter, self._links, output, tensors, root)
        return self._start("scatter", opts, job, [output], tensors)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        check("all_to_all", *outputs, *inputs)
        check_alike("all_to_all", inputs[0], [*inputs, *outputs], sizes=False)
        check_alike("all_to_all", inputs[self._links.rank], [outputs[self._links.rank]])
        job = partial(moves.all_to_all, self._links, outputs, inputs)
        return self._start("all_to_all", opts, job, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        check("all_to_all_single", output, tensor)
        check_alike("all_to_all_single", tensor, [output], sizes=False)
        if not output_splits and not input_splits:
            check_alike("all_to_all_single", tensor, [output])
            self._check_divides("all_to_all_single", tensor)
            job = partial(moves.all_to_all_single, self._links, output, tensor)
        else:
            sources = self._split("all_to_all_single", tensor, input_splits)
            targets = self._split("all_to_all_single", output, output_splits)
            check_alike("all_to_all_single", sources[self._links.rank], [targets[self._links.rank]])
            job = partial(moves.all_to_all, self._links, targets, sources)
        return self._start("all_to_all", opts, job, [output], [tensor])

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", opts, partial(moves.barrier, self._links), [], [])

    # ---- checking

    def _root(self, title: str, options: Any) -> int:
        root = getattr(options, "rootRank", 0)
        if not 0 <= root < self._links.size:
            raise InvalidArgument(f"{title}: root rank {root} is not in 0..{self._links.size - 1}")
        return int(root)

    def _check_list(self, title: str, items: Sequence[Any]) -> None:
        if len(items) != self._links.size:
            raise InvalidArgument(f"{title}: a list of {len(items)} tensors for {self._links.size} ranks")

    def _check_blocks(self, title: str, one: Tensor, all_of_them: Tensor) -> None:
        check(title, one, all_of_them)
        check_alike(title, one, [all_of_them], sizes=False)
        if all_of_them.numel() != one.numel() * self._links.size:
            raise InvalidArgument(
                f"{title}: {one.numel()} elements a rank and {self._links.size} ranks make "
                f"{one.numel() * self._links.size}, the large tensor has {all_of_them.numel()}"
            )

    def _check_divides(self, title: str, tensor: Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self._links.size:
            raise InvalidArgument(
                f"{title}: dimension 0 of {tuple(tensor.shape)} does not divide by {self._links.size} ranks"
            )

    def _split(self, title: str, tensor: Tensor, sizes: Sequence[int]) -> Tensors:
        if not sizes:
            self._check_divides(title, tensor)
            return tensor.detach().chunk(self._links.size) if tensor.numel() else [tensor] * self._links.size
        self._check_list(title, sizes)
        if sum(sizes) != tensor.shape[0]:
            raise InvalidArgument(
                f"{title}: split sizes {list(sizes)} do not sum up to dimension 0, {tensor.shape[0]}"
            )
        return split(tensor.detach(), sizes)

    # What torch called them before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _nested(lists: Any) -> bool:
    return bool(lists) and not isinstance(lists[0], torch.Tensor)


def _one_by_one(jobs: Sequence[Callable[[float], None]], timeout: float) -> None:
    for job in jobs:
        job(timeout)
