"""The process group that torch.distributed creates for ``backend="hoop"``.

torch's Python code and its C++ code (DDP's reducer, functional collectives) call the same methods of the group. Each
method checks its tensors in the caller's thread, so a wrong argument raises before any byte has moved. It then turns
the call into one job. A job runs in one of three ways:

    synchronous call, work queue idle            (1) in the caller's thread
    asynchronous all_reduce of at most 1 MiB,    (2) in the caller's thread for up to 2 ms; if the other ranks have not
    work queue idle                                  arrived by then, the rest runs on the work queue
    every other call                             (3) on the work queue; a synchronous caller waits for it

An operation on CUDA tensors that the caller's thread runs (1) returns when it is ordered on the current stream; one on
the work queue (3) runs on a stream of its own and is finished when the GPU has done it.

Point-to-point messages (send, recv) do not use the work queue: they are requests to the group's ``P2PEngine``.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.distributed_c10d import ReduceOptions, _world

from hoop.collectives.communicator import PreparedOperation
from hoop.collectives.compression import compressor
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument
from hoop.torch_backend import c10d_backend, collectives, monitored_barrier, rendezvous
from hoop.torch_backend.device_memory import MEMORIES
from hoop.torch_backend.dynamo import never_compiled
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.p2p import MessageKind, P2PRequest
from hoop.torch_backend.routes import JobsInOrder, OtherBackends, Route, Routes, prepare_for_queue
from hoop.torch_backend.tensor_views import (
    TorchReduction,
    bytes_of,
    check_same,
    is_plain,
    only,
    reduction_for,
    split,
)
from hoop.torch_backend.work import DONE, CoalescedWork, HoopWork, profiler_enabled, record_in_profiler
from hoop.transport import Transport

INLINE_ALL_REDUCE_BYTES = 1 << 20
"""Maximum bytes of an asynchronous all_reduce that runs in the caller's thread, where that costs less than a thread
hand-over."""
NATIVE_SUMS = 4096
"""Maximum number of sums that a group remembers; when there are more it forgets them all."""
Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
_SUM = ReduceOptions().reduceOp
_ProcessGroup: Any = ProcessGroup  # its type stub does not describe the constructor of a Python subclass


class HoopProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank of a torch.distributed process group whose operations run over Hoop's links.

    Arguments that torch passes as lists of one tensor are accepted as a list or as the tensor itself.
    """

    _links: GroupLinks
    _coalesced: list[Work] | None = None
    """Works started since ``_start_coalescing``; None outside a coalescing block."""
    _operations_started = 0

    # ---- construction

    def __init__(self, name: str, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta) -> None:
        """``world``: the global rank of each rank of the group. Returns when every rank has published its address."""
        super().__init__(rank, size)
        self._registered = c10d_backend.register(self, rank, size)
        self._name, self._description = name, "undefined"
        self._store = store
        self._links, transports = rendezvous.connect_group(name, store, rank, size, world, timeout)
        self._routes = Routes(self._links)
        self._others: OtherBackends | None = None
        """The other backends of this group; None before the first call."""
        self._timeout = timeout
        self._native_sums: dict[tuple[int, torch.dtype], tuple[PreparedOperation, Callable[[int], int]]] = {}
        """Sums of CPU tensors that have run before in the native core, by number of elements and dtype, each with the
        function that runs it at an address."""
        self._barrier_numbers = itertools.count()
        # Runs when the group is destroyed or garbage-collected, or the process ends (also a multiprocessing child).
        self._close = Finalize(self, _close, (self._links, transports), exitpriority=10)
        monitored_barrier.install(HoopProcessGroup)

    @classmethod
    def create(cls, options: Any) -> HoopProcessGroup:
        """Creates a group from the options that torch.distributed passes to a registered backend."""
        if getattr(options, "enable_reconfigure", False):  # since torch 2.15
            raise InvalidArgument(
                "enable_reconfigure: True, and a group of backend hoop cannot take in other ranks; leave it out, and "
                "after a loss destroy the group and create it again"
            )
        world = options.global_ranks_in_group or range(options.group_size)
        rank, size = options.group_rank, options.group_size
        return cls(options.group_id, options.store, rank, size, world, options.timeout)

    # ---- dispatch: in the caller's thread or on the work queue

    def _dispatch(
        self, title: str, options: Any, job: Callable[[float], None], results: Any, inputs: Sequence[torch.Tensor]
    ) -> HoopWork:
        """Runs ``job(timeout)`` in the caller's thread (1) or on the work queue (3), and returns its work.

        ``results``: the tensors that the work's future holds. ``inputs``: the tensors that the profiler records.
        """
        self._operations_started += 1
        asynchronous, profiled = getattr(options, "asyncOp", True), profiler_enabled()
        timeout = self._timeout_of(options)
        if not asynchronous and not profiled and self._links.work_queue.try_acquire():
            try:
                self._links.run_guarded(title, job, timeout)
            finally:
                self._links.work_queue.release()
            return DONE
        prepare_for_queue(job)
        work = HoopWork(title, results)
        end_event = record_in_profiler(work, title, inputs) if profiled else None
        try:
            self._links.submit(work, job, timeout)
            if not asynchronous:
                work.wait()
        finally:
            if end_event is not None:
                end_event()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _try_inline_all_reduce(
        self, tensor: torch.Tensor, reduction: TorchReduction, options: Any, results: Any
    ) -> Work | None:
        """Tries to finish an asynchronous all_reduce in the caller's thread (2); None if it must be queued.

        If the other ranks do not arrive within 2 ms, the work queue runs the rest, ahead of all queued jobs.
        """
        links = self._links
        if profiler_enabled() or not links.work_queue.try_acquire():
            return None
        self._operations_started += 1
        work = HoopWork("all_reduce", results)
        timeout, error, resume = self._timeout_of(options), None, None
        try:
            resume = links.run_guarded(
                "all_reduce", partial(collectives.try_all_reduce, links, tensor, reduction), timeout
            )
        except Exception as raised:
            error = raised
        except BaseException:
            links.work_queue.release()
            raise
        if resume is None:
            links.work_queue.release()
            work.finish(error)
        else:
            links.submit(work, resume, timeout, acquired=True)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _timeout_of(self, options: Any) -> float:
        """The timeout of a call in seconds; without one, the timeout of the group."""
        own = getattr(options, "timeout", None)
        seconds = own.total_seconds() if own is not None else -1.0
        return seconds if seconds > 0 else self._links.timeout

    def _reduction(self, title: str, options: Any, tensor: Tensor) -> TorchReduction:
        return reduction_for(title, getattr(options, "reduceOp", _SUM), tensor.dtype)

    # ---- collectives that reduce

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        listed = _as_list(tensors)
        tensor: Tensor = only("all_reduce", listed)
        if not getattr(opts, "asyncOp", True) and self._sum_at_once(tensor, opts):
            return DONE
        if tensor.layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensor, opts)
        route = self._routes.find("all_reduce", listed)
        reduction = self._reduction("all_reduce", opts, tensor)
        if (
            getattr(opts, "asyncOp", True)
            and route is self._routes.host
            and reduction.in_place
            and tensor.nbytes <= INLINE_ALL_REDUCE_BYTES
            and is_plain(tensor)
        ):
            work = self._try_inline_all_reduce(tensor, reduction, opts, listed)
            if work is not None:
                return work
        job = route.job(collectives.all_reduce, tensor, reduction)
        work = self._dispatch("all_reduce", opts, job, listed, listed)
        if work is DONE and route is self._routes.host and reduction.name == "sum" and reduction.in_place:
            self._remember_sum(tensor, reduction)
        return work

    def _remember_sum(self, tensor: Tensor, reduction: TorchReduction) -> None:
        """Lets ``_sum_at_once`` run the next sum of this shape."""
        assert reduction.element is not None, "a reduction in place has an element type"
        prepared = self._links.native_sum(tensor.numel(), reduction.element)
        if prepared is not None and prepared.native is not None and tensor.numel():
            if len(self._native_sums) >= NATIVE_SUMS:
                self._native_sums.clear()
            self._native_sums[tensor.numel(), tensor.dtype] = prepared, prepared.native.run_at

    def _sum_at_once(self, tensor: Tensor, options: Any) -> bool:
        """Runs a synchronous sum of an ordinary CPU tensor like one that has run before, in the caller's thread (1).

        This is ``_dispatch`` and ``collectives.all_reduce`` without the steps that such a sum does not need; they take
        longer than the sum of a small tensor. Returns False if the call has to go the ordinary way.
        """
        known, links = self._native_sums.get((tensor.numel(), tensor.dtype)), self._links
        if known is None or not tensor.is_cpu or tensor.layout is not torch.strided or not is_plain(tensor):
            return False
        if options.reduceOp != ReduceOp.SUM or profiler_enabled() or links.broken:
            return False
        if "cpu" in MEMORIES or not links.work_queue.try_acquire():
            return False
        self._operations_started += 1
        prepared, run_at = known
        try:
            if code := run_at(tensor.data_ptr()):
                timeout = self._timeout_of(options)
                links.run_guarded("all_reduce", partial(prepared.finish_native, code), timeout)
        finally:
            links.work_queue.release()
        return True

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> Work:
        reduction = self._reduction("sparse_all_reduce", opts, tensor)
        if reduction.name != "sum":
            raise InvalidArgument(f"sparse_all_reduce: {reduction.name} of sparse tensors; only sum is possible")
        if not tensor.is_cpu:
            raise InvalidArgument(
                f"sparse_all_reduce: a tensor is on {tensor.device}; Hoop sums sparse tensors on the CPU"
            )
        job = self._routes.host.job(collectives.sparse_all_reduce, tensor)
        return self._dispatch("sparse_all_reduce", opts, job, [tensor], [tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        route = self._routes.find("all_reduce_coalesced", tensors)
        check_same("all_reduce_coalesced", tensors[0], tensors, sizes=False)
        reduction = self._reduction("all_reduce_coalesced", opts, tensors[0])
        job = route.job(collectives.all_reduce_coalesced, tensors, reduction)
        return self._dispatch("all_reduce", opts, job, tensors, tensors)

    def allreduce_compressed(self, tensor: Tensor, compression: str, opts: Any = None) -> Work:
        """A lossy all_reduce. torch.distributed has no such call; ``ddp_hooks.compressed`` calls it."""
        route = self._routes.find("all_reduce", [tensor])
        reduction = self._reduction("all_reduce", opts, tensor)
        plain = route is self._routes.host and tensor.dtype is torch.float32 and is_plain(tensor)
        if not plain or reduction.name not in ("sum", "avg"):
            raise InvalidArgument(
                "compression: only of sum and avg of a contiguous float32 tensor on the CPU; "
                f"this is {reduction.name} of {tensor.dtype} on {tensor.device}"
            )
        compressor(compression)  # raises if the name is unknown
        job = route.job(collectives.all_reduce_compressed, tensor, reduction, compression)
        return self._dispatch("all_reduce", opts, job, [tensor], [tensor])

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("reduce", _as_list(tensors))
        route = self._routes.find("reduce", [tensor])
        reduction, root = self._reduction("reduce", opts, tensor), self._root("reduce", opts)
        job = route.job(collectives.reduce, tensor, root, reduction)
        return self._dispatch("reduce", opts, job, [tensor], [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output: Tensor = only("reduce_scatter", _as_list(outputs))
        tensors: Tensors = only("reduce_scatter", inputs) if _is_nested(inputs) else inputs
        self._check_one_per_rank("reduce_scatter", tensors)
        route = self._routes.find("reduce_scatter", [output, *tensors])
        check_same("reduce_scatter", output, tensors, sizes=False)
        check_same("reduce_scatter", output, [tensors[self._links.rank]])
        reduction = self._reduction("reduce_scatter", opts, output)
        job = route.job(collectives.reduce_scatter, output, tensors, reduction)
        return self._dispatch("reduce_scatter", opts, job, [output], tensors)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        route = self._check_blocks("reduce_scatter_tensor", output, tensor)
        reduction = self._reduction("reduce_scatter_tensor", opts, output)
        job = route.job(collectives.reduce_scatter_single, output, tensor, reduction)
        return self._dispatch("_reduce_scatter_base", opts, job, [output], [tensor])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        pairs = list(zip(outputs, inputs, strict=True))
        routes = [self._check_blocks("reduce_scatter_tensor_coalesced", *pair) for pair in pairs]
        reduction = self._reduction("reduce_scatter_tensor_coalesced", opts, outputs[0])
        jobs = [
            route.job(collectives.reduce_scatter_single, *pair, reduction)
            for route, pair in zip(routes, pairs, strict=True)
        ]
        return self._dispatch("reduce_scatter_tensor_coalesced", opts, JobsInOrder(jobs), outputs, inputs)

    # ---- collectives that only move data

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("broadcast", _as_list(tensors))
        route = self._routes.find("broadcast", [tensor])
        job = route.job(collectives.broadcast, tensor, self._root("broadcast", opts))
        return self._dispatch("broadcast", opts, job, [tensor], [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("all_gather", _as_list(inputs))
        tensors: Tensors = only("all_gather", outputs) if _is_nested(outputs) else outputs
        self._check_one_per_rank("all_gather", tensors)
        route = self._routes.find("all_gather", [tensor, *tensors])
        check_same("all_gather", tensor, tensors, sizes=False)
        check_same("all_gather", tensor, [tensors[self._links.rank]])
        job = route.job(collectives.all_gather, tensors, tensor)
        return self._dispatch("all_gather", opts, job, tensors, [tensor])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        route = self._check_blocks("all_gather_into_tensor", tensor, output)
        job = route.job(collectives.all_gather_single, output, tensor)
        return self._dispatch("_all_gather_base", opts, job, [output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        jobs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            route = self._check_blocks("all_gather_into_tensor_coalesced", tensor, output)
            jobs.append(route.job(collectives.all_gather_single, output, tensor))
        return self._dispatch("all_gather_into_tensor_coalesced", opts, JobsInOrder(jobs), outputs, inputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """``outputs[r][i]`` receives tensor i of rank r."""
        self._check_one_per_rank("all_gather_coalesced", outputs)
        jobs = []
        for index, tensor in enumerate(inputs):
            column = [row[index] for row in outputs]
            route = self._routes.find("all_gather_coalesced", [tensor, *column])
            check_same("all_gather_coalesced", tensor, column)
            jobs.append(route.job(collectives.all_gather, column, tensor))
        results = [tensor for row in outputs for tensor in row]
        return self._dispatch("all_gather", opts, JobsInOrder(jobs), results, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("gather", _as_list(inputs))
        root = self._root("gather", opts)
        tensors: Tensors = []
        if self._links.rank == root:
            tensors = only("gather", outputs) if _is_nested(outputs) else outputs
            self._check_one_per_rank("gather", tensors)
            check_same("gather", tensor, tensors)
        route = self._routes.find("gather", [tensor, *tensors])
        job = route.job(collectives.gather, tensors, tensor, root)
        return self._dispatch("gather", opts, job, tensors, [tensor])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output: Tensor = only("scatter", _as_list(outputs))
        root = self._root("scatter", opts)
        tensors: Tensors = []
        if self._links.rank == root:
            tensors = only("scatter", inputs) if _is_nested(inputs) else inputs
            self._check_one_per_rank("scatter", tensors)
            check_same("scatter", output, tensors)
        route = self._routes.find("scatter", [output, *tensors])
        job = route.job(collectives.scatter, output, tensors, root)
        return self._dispatch("scatter", opts, job, [output], tensors)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._check_one_per_rank("all_to_all", outputs)
        self._check_one_per_rank("all_to_all", inputs)
        route = self._routes.find("all_to_all", [*outputs, *inputs])
        check_same("all_to_all", inputs[0], [*inputs, *outputs], sizes=False)
        check_same("all_to_all", inputs[self._links.rank], [outputs[self._links.rank]])
        job = route.job(collectives.all_to_all, outputs, inputs)
        return self._dispatch("all_to_all", opts, job, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        route = self._routes.find("all_to_all_single", [output, tensor])
        check_same("all_to_all_single", tensor, [output], sizes=False)
        if not output_splits and not input_splits:
            check_same("all_to_all_single", tensor, [output])
            self._check_divisible("all_to_all_single", tensor)
            job = route.job(collectives.all_to_all_single, output, tensor)
        else:
            sources = self._split("all_to_all_single", tensor, input_splits)
            targets = self._split("all_to_all_single", output, output_splits)
            check_same("all_to_all_single", sources[self._links.rank], [targets[self._links.rank]])
            job = route.job(collectives.all_to_all, targets, sources)
        return self._dispatch("all_to_all", opts, job, [output], [tensor])

    def barrier(self, opts: Any = None) -> Work:
        return self._dispatch("barrier", opts, partial(collectives.barrier, self._links), [], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that, if ranks are late, raises on every rank and names the late ranks on rank 0."""
        seconds = self._links.timeout
        if timeout is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        monitored_barrier.monitored_barrier(self._links, next(self._barrier_numbers), seconds, wait_all_ranks)

    # Names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- argument checks

    def _root(self, title: str, options: Any) -> int:
        root = getattr(options, "rootRank", 0)
        if not 0 <= root < self._links.size:
            raise InvalidArgument(f"{title}: root rank {root} is not in 0..{self._links.size - 1}")
        return int(root)

    def _check_one_per_rank(self, title: str, items: Sequence[Any]) -> None:
        if len(items) != self._links.size:
            raise InvalidArgument(f"{title}: a list of {len(items)} tensors for {self._links.size} ranks")

    def _check_blocks(self, title: str, block: Tensor, whole: Tensor) -> Route:
        """Checks that ``whole`` is as large as one ``block`` for each rank; returns their route."""
        route = self._routes.find(title, [block, whole])
        check_same(title, block, [whole], sizes=False)
        if whole.numel() != block.numel() * self._links.size:
            raise InvalidArgument(
                f"{title}: {block.numel()} elements a rank and {self._links.size} ranks make "
                f"{block.numel() * self._links.size}, the large tensor has {whole.numel()}"
            )
        return route

    def _check_divisible(self, title: str, tensor: Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self._links.size:
            raise InvalidArgument(
                f"{title}: dimension 0 of {tuple(tensor.shape)} does not divide by {self._links.size} ranks"
            )

    def _split(self, title: str, tensor: Tensor, sizes: Sequence[int]) -> Tensors:
        """Splits dimension 0 by ``sizes``; without sizes, equally among the ranks."""
        if not sizes:
            self._check_divisible(title, tensor)
            return tensor.detach().chunk(self._links.size) if tensor.numel() else [tensor] * self._links.size
        self._check_one_per_rank(title, sizes)
        if sum(sizes) != tensor.shape[0]:
            raise InvalidArgument(f"{title}: split sizes {list(sizes)} do not sum up to dimension 0, {tensor.shape[0]}")
        return split(tensor.detach(), sizes)

    # ---- point-to-point messages

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        tensor = only("send", tensors)
        route = self._routes.find("send", [tensor])
        work = HoopWork("send", [tensor], future_thread=True)
        if route.messages is not None and route.messages.takes(tensor):
            return self._start_p2p(work, peer, tensors, partial(route.messages.send, work, tensor, peer, tag))
        start = partial(self._submit_p2p, work, True, peer, tag, route.message(tensor), _no_copy_back)
        return self._start_p2p(work, peer, tensors, start)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        return self._receive("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, title: str, tensors: Tensors, peer: int | None, tag: int) -> Work:
        tensor = only(title, tensors)
        route = self._routes.find(title, [tensor])
        work = HoopWork(title, [tensor], future_thread=True)
        if route.messages is not None and route.messages.takes(tensor):
            return self._start_p2p(work, peer, tensors, partial(route.messages.receive, work, tensor, peer, tag))
        start = partial(self._submit_p2p, work, False, peer, tag, *route.message_buffer(tensor))
        return self._start_p2p(work, peer, tensors, start)

    def _start_p2p(self, work: HoopWork, peer: int | None, tensors: Tensors, start: Callable[[float], None]) -> Work:
        """Calls ``start(timeout)``, which submits a send or a receive that finishes ``work``.

        ``peer``: None receives from any rank. ``tensors``: those that the profiler records.
        """
        if peer is not None and not 0 <= peer < self._links.size:
            raise InvalidArgument(f"{work.title}: rank {peer} is not in 0..{self._links.size - 1}")
        end_event = record_in_profiler(work, work.title, tensors) if profiler_enabled() else None
        start(self._links.timeout)
        if end_event is not None:
            end_event()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _submit_p2p(
        self,
        work: HoopWork,
        is_send: bool,
        peer: int | None,
        tag: int,
        flat: torch.Tensor,
        copy_back: Callable[[], None],
        timeout: float,
    ) -> None:
        """Submits a send or a receive of ``flat`` to the P2P engine; its thread finishes ``work``.

        ``copy_back``: copies received bytes from ``flat`` to the user's tensor.
        """
        links = self._links

        def on_complete(error: HoopError | None, source: int) -> None:
            if error is None:
                copy_back()
                work.finish(None, source)
            else:
                work.finish(links.user_error(work.title, error, timeout))

        deadline = time.monotonic() + timeout
        links.p2p.submit(
            P2PRequest(
                is_send=is_send,
                peer=peer,
                kind=MessageKind.MESSAGE,
                tag=tag,
                data=bytes_of(flat),
                owner=flat,
                deadline=deadline,
                on_complete=on_complete,
            )
        )

    # ---- several calls as one work

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork("coalesced", works)

    # The names that C++ calls since torch 2.15.
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # ---- other backends of the group

    def _other_backends(self) -> OtherBackends:
        """Known from the first call on: torch writes down a group's backends after it was made."""
        if self._others is None:
            configuration = _world.pg_backend_config.get(self)
            if configuration is None:
                return OtherBackends("cpu:hoop", None, 0, 1, self._timeout)
            rank, size = self._links.rank, self._links.size
            self._others = OtherBackends(str(configuration), self._store, rank, size, self._timeout)
            self._links.on_close.append(self._others.close)
        return self._others

    # ---- closing

    def shutdown(self) -> None:
        """Leaves the group; peers receive a goodbye, so they do not count this rank as dead."""
        self._close()

    def abort(self) -> None:
        self._close()

    # ---- properties that torch reads or sets

    def get_error(self) -> ErrorType:
        """Why the group cannot be used any more; SUCCESS while it works."""
        error = self._links.error
        if error is None:
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if isinstance(error, DeadlineExceeded) else ErrorType.COMM_ERROR

    def set_timeout(self, timeout: timedelta) -> None:
        self._links.timeout = timeout.total_seconds()

    def name(self) -> str:
        return "hoop"

    def _get_backend_name(self) -> str:
        return "hoop"

    getBackendName = _get_backend_name  # noqa: N815 - torch's C++ name

    @property
    def _device_types(self) -> list[torch.device]:
        types = dict.fromkeys(["cpu", "cuda", *self._other_backends().names])
        return [torch.device(one) for one in types]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        other = self._other_backends().group_for(device)
        if other is not None:
            return other._get_backend(device)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"No backend type associated with device type {device}; Hoop has cpu and cuda")
        return self

    get_backend = _get_backend  # the name since torch 2.15

    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802 - torch's C++ name
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's C++ name
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815 - torch's C++ names

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._operations_started

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the group counts its operations from the first one."""

    def __repr__(self) -> str:
        return f"<hoop group {self._name!r}: rank {self._links.rank} of {self._links.size}>"


def _as_list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _is_nested(lists: Any) -> bool:
    return bool(lists) and not isinstance(lists[0], torch.Tensor)


def _no_copy_back() -> None:
    """For a send, which receives nothing."""


def _close(links: GroupLinks, transports: Sequence[Transport]) -> None:
    """Not a method: the finalizer must not keep the group alive."""
    links.close()
    rendezvous.release_transports(transports)


def _with_other_backends(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, for a group that may have another backend for the device of the call."""

    @functools.wraps(method)
    def call(self: HoopProcessGroup, *arguments: Any, **options: Any) -> Any:
        others = self._others if self._others is not None else self._other_backends()
        if others.names:
            group = others.group_for(*arguments, *options.values())
            if group is not None:
                return getattr(group, name)(*arguments, **options)
        return method(self, *arguments, **options)

    return call


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "alltoall", "allgather"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "_allgather_base"),
    *("allgather_into_tensor_coalesced", "allgather_coalesced", "all_to_all_single", "alltoall_base"),
    *("send", "recv", "recv_anysource", "_start_coalescing", "_end_coalescing", "start_coalescing", "end_coalescing"),
):
    setattr(HoopProcessGroup, _name, _with_other_backends(_name, getattr(HoopProcessGroup, _name)))
never_compiled(HoopProcessGroup)
