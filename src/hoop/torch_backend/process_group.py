"""How an operation of a group is started: in the caller's thread where that is possible, else on the lane.

synchronous     in the caller's thread, if it is its turn (1); else on the lane, and the caller waits
asynchronous    on the lane (2); a small all_reduce in the caller's thread, as long as the others come soon (3)

torch.distributed's collectives, each checked where it is called and run on the group's lane.

torch's C++ (DDP, functional collectives) and its Python call the same methods; lists of one are torch's habit.

The process group: how one begins and ends, its messages between two ranks, and what torch asks of it.

Collectives are in ``collective_calls``; both turn a call into one job on the group's lane or one request to its post.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import ReduceOptions

from hoop.collectives.compression import compressor
from hoop.errors import HoopError, InvalidArgument
from hoop.torch_backend import c10d_backend, collectives, monitored_barrier, profile, rendezvous
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.p2p import MessageKind, P2PRequest
from hoop.torch_backend.tensor_views import (
    ContiguousView,
    TorchReduction,
    bytes_of,
    check,
    check_alike,
    is_plain,
    only,
    reduce_by,
    split,
    to_send,
)
from hoop.torch_backend.work import DONE, CoalescedWork, HoopWork
from hoop.transport import Transport

AT_ONCE_BYTES = 1 << 20
"""Up to here an asynchronous all_reduce costs less than to hand it over to a thread."""
_ProcessGroup: Any = ProcessGroup  # its stub does not describe what a subclass in Python is called with


class Starting(_ProcessGroup):  # type: ignore[misc]
    """What every operation of a group goes through."""

    _links: GroupLinks
    _coalesced: list[Work] | None = None
    _started = 0

    def _start(
        self,
        title: str,
        options: Any,
        job: Callable[[float], None],
        results: Any,
        given: Sequence[torch.Tensor],
    ) -> HoopWork:
        """Runs a job now, if the caller waits for it anyway and it is its turn; else on the lane."""
        self._started += 1
        asynchronous, recorded = getattr(options, "asyncOp", True), profile.enabled()
        timeout = self._seconds(options)
        if not asynchronous and not recorded and self._links.lane.enter():
            try:
                self._links.attempt(title, job, timeout)
            finally:
                self._links.lane.leave()
            return DONE
        work = HoopWork(title, results)
        end_event = profile.record(work, title, given) if recorded else None
        try:
            self._links.start(work, job, timeout)
            if not asynchronous:
                work.wait()
        finally:
            if end_event is not None:
                end_event()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _seconds(self, options: Any) -> float:
        """A call's own time limit, or the group's."""
        own = getattr(options, "timeout", None)
        seconds = own.total_seconds() if own is not None else -1.0
        return seconds if seconds > 0 else self._links.timeout

    def _at_once(self, tensor: torch.Tensor, how: TorchReduction, opts: Any, results: Any) -> Work | None:
        """An asynchronous all_reduce in the caller's thread, if it is its turn; what is left when others do not come
        soon goes to the lane."""
        links = self._links
        if profile.enabled() or not links.lane.enter():
            return None
        self._started += 1
        work = HoopWork("all_reduce", results)
        timeout, error, rest = self._seconds(opts), None, None
        try:
            rest = links.attempt(
                "all_reduce", partial(collectives.begin_all_reduce, links, tensor, how), timeout
            )
        except Exception as raised:
            error = raised
        except BaseException:
            links.lane.leave()
            raise
        if rest is None:
            links.lane.leave()
            work.finish(error)
        else:
            links.start(work, rest, timeout, entered=True)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
_SUM = ReduceOptions().reduceOp


class CollectiveCalls(Starting):
    """What all ranks of a group do together."""

    def _how(self, title: str, options: Any, tensor: Tensor) -> TorchReduction:
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
        job = partial(collectives.all_reduce, self._links, tensor, how)
        return self._start("all_reduce", opts, job, listed, listed)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> Work:
        how = self._how("sparse_all_reduce", opts, tensor)
        if how.name != "sum":
            raise InvalidArgument(f"sparse_all_reduce: {how.name} of sparse tensors; only sum is possible")
        job = partial(collectives.sparse_all_reduce, self._links, tensor)
        return self._start("sparse_all_reduce", opts, job, [tensor], [tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        check("all_reduce_coalesced", *tensors)
        check_alike("all_reduce_coalesced", tensors[0], tensors, sizes=False)
        how = self._how("all_reduce_coalesced", opts, tensors[0])
        job = partial(collectives.all_reduce_coalesced, self._links, tensors, how)
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
        job = partial(collectives.all_reduce_compressed, self._links, tensor, how, compression)
        return self._start("all_reduce", opts, job, [tensor], [tensor])

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("reduce", _listed(tensors))
        check("reduce", tensor)
        how, root = self._how("reduce", opts, tensor), self._root("reduce", opts)
        job = partial(collectives.reduce, self._links, tensor, root, how)
        return self._start("reduce", opts, job, [tensor], [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output: Tensor = only("reduce_scatter", _listed(outputs))
        tensors: Tensors = only("reduce_scatter", inputs) if _nested(inputs) else inputs
        self._check_list("reduce_scatter", tensors)
        check("reduce_scatter", output, *tensors)
        check_alike("reduce_scatter", output, tensors, sizes=False)
        check_alike("reduce_scatter", output, [tensors[self._links.rank]])
        job = partial(
            collectives.reduce_scatter,
            self._links,
            output,
            tensors,
            self._how("reduce_scatter", opts, output),
        )
        return self._start("reduce_scatter", opts, job, [output], tensors)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        self._check_blocks("reduce_scatter_tensor", output, tensor)
        how = self._how("reduce_scatter_tensor", opts, output)
        job = partial(collectives.reduce_scatter_single, self._links, output, tensor, how)
        return self._start("_reduce_scatter_base", opts, job, [output], [tensor])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_blocks("reduce_scatter_tensor_coalesced", output, tensor)
        how = self._how("reduce_scatter_tensor_coalesced", opts, outputs[0])
        jobs = [
            partial(collectives.reduce_scatter_single, self._links, output, tensor, how)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._start(
            "reduce_scatter_tensor_coalesced", opts, partial(_one_by_one, jobs), outputs, inputs
        )

    # ---- moving

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("broadcast", _listed(tensors))
        check("broadcast", tensor)
        job = partial(collectives.broadcast, self._links, tensor, self._root("broadcast", opts))
        return self._start("broadcast", opts, job, [tensor], [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        tensor: Tensor = only("all_gather", _listed(inputs))
        tensors: Tensors = only("all_gather", outputs) if _nested(outputs) else outputs
        self._check_list("all_gather", tensors)
        check("all_gather", tensor, *tensors)
        check_alike("all_gather", tensor, tensors, sizes=False)
        check_alike("all_gather", tensor, [tensors[self._links.rank]])
        job = partial(collectives.all_gather, self._links, tensors, tensor)
        return self._start("all_gather", opts, job, tensors, [tensor])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        self._check_blocks("all_gather_into_tensor", tensor, output)
        job = partial(collectives.all_gather_single, self._links, output, tensor)
        return self._start("_all_gather_base", opts, job, [output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_blocks("all_gather_into_tensor_coalesced", tensor, output)
        jobs = [
            partial(collectives.all_gather_single, self._links, output, tensor)
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
            jobs.append(partial(collectives.all_gather, self._links, column, tensor))
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
        job = partial(collectives.gather, self._links, tensors, tensor, root)
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
        job = partial(collectives.scatter, self._links, output, tensors, root)
        return self._start("scatter", opts, job, [output], tensors)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        check("all_to_all", *outputs, *inputs)
        check_alike("all_to_all", inputs[0], [*inputs, *outputs], sizes=False)
        check_alike("all_to_all", inputs[self._links.rank], [outputs[self._links.rank]])
        job = partial(collectives.all_to_all, self._links, outputs, inputs)
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
            job = partial(collectives.all_to_all_single, self._links, output, tensor)
        else:
            sources = self._split("all_to_all_single", tensor, input_splits)
            targets = self._split("all_to_all_single", output, output_splits)
            check_alike("all_to_all_single", sources[self._links.rank], [targets[self._links.rank]])
            job = partial(collectives.all_to_all, self._links, targets, sources)
        return self._start("all_to_all", opts, job, [output], [tensor])

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", opts, partial(collectives.barrier, self._links), [], [])

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


class HoopProcessGroup(CollectiveCalls):
    """Ranks that work together over Hoop's links."""

    def __init__(
        self, name: str, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._registered = c10d_backend.register(self, rank, size)
        self._name, self._description = name, "undefined"
        self._store = store
        self._links, transports = rendezvous.meet(name, store, rank, size, world, timeout)
        self._barriers = itertools.count()
        # Runs when the group is destroyed or forgotten, or the process ends; in children of multiprocessing too.
        self._close = Finalize(self, _close, (self._links, transports), exitpriority=10)
        monitored_barrier.install(HoopProcessGroup)

    @classmethod
    def create(cls, options: Any) -> HoopProcessGroup:
        """From what torch.distributed tells a backend."""
        world = options.global_ranks_in_group or range(options.group_size)
        rank, size = options.group_rank, options.group_size
        return cls(options.group_id, options.store, rank, size, world, options.timeout)

    # ---- messages

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        tensor = only("send", tensors)
        check("send", tensor)
        work = HoopWork("send", [tensor], apart=True)
        return self._post(work, True, peer, tag, to_send(tensor), _nothing, tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        return self._receive("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, title: str, tensors: Tensors, peer: int | None, tag: int) -> Work:
        tensor = only(title, tensors)
        check(title, tensor)
        landing = ContiguousView(tensor)
        work = HoopWork(title, [tensor], apart=True)
        return self._post(work, False, peer, tag, landing.flat, landing.settle, tensors)

    def _post(
        self,
        work: HoopWork,
        sends: bool,
        peer: int | None,
        tag: int,
        flat: torch.Tensor,
        settle: Callable[[], None],
        tensors: Tensors,
    ) -> Work:
        if peer is not None and not 0 <= peer < self._links.size:
            raise InvalidArgument(f"{work.title}: rank {peer} is not in 0..{self._links.size - 1}")
        links, timeout = self._links, self._links.timeout
        end_event = profile.record(work, work.title, tensors) if profile.enabled() else None

        def ended(error: HoopError | None, source: int) -> None:
            if error is None:
                settle()
                work.finish(None, source)
            else:
                work.finish(links.told(work.title, error, timeout))

        deadline = time.monotonic() + timeout
        links.post.request(
            P2PRequest(sends, peer, MessageKind.MESSAGE, tag, bytes_of(flat), flat, deadline, ended)
        )
        if end_event is not None:
            end_event()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which did not come in time; raises on every rank then."""
        seconds = self._links.timeout
        if timeout is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        monitored_barrier.monitored_barrier(self._links, next(self._barriers), seconds, wait_all_ranks)

    # ---- several calls as one

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork("coalesced", works)

    start_coalescing, end_coalescing = (
        _start_coalescing,
        _end_coalescing,
    )  # as C++ calls them since torch 2.15

    # ---- ending

    def shutdown(self) -> None:
        """Leaves the group; the others are told."""
        self._close()

    def abort(self) -> None:
        self._close()

    # ---- what torch asks

    def set_timeout(self, timeout: timedelta) -> None:
        self._links.timeout = timeout.total_seconds()

    def name(self) -> str:
        return "hoop"

    def _get_backend_name(self) -> str:
        return "hoop"

    getBackendName = _get_backend_name  # noqa: N815 - torch's C++ name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HoopProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}; Hoop has cpu")
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
        return self._started

    def _set_sequence_number_for_group(self) -> None:
        """Counted from the first operation on."""

    def __repr__(self) -> str:
        return f"<hoop group {self._name!r}: rank {self._links.rank} of {self._links.size}>"


def _nothing() -> None:
    """A send has nothing to put anywhere."""


def _close(links: GroupLinks, transports: Sequence[Transport]) -> None:
    links.close()
    rendezvous.give_back(transports)
