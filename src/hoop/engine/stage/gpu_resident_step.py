"""One step of data parallel training on a GPU, without a copy to the host. Other strategies: ``gpu_stage.py``.

``BatchLoader`` brings the samples of the next steps to the GPU. ``ResidentStep`` is the step for one batch size:

    compute   gather the batch; forward, loss and backward of each shard on a stream of its own, into a row of its own;
              add the rows along the reduction tree
    finish    add the nodes of all ranks, after they have met; clip; update the weights; write the tail to ``totals``

Each is recorded as a CUDA graph where that is possible, so that a launch costs some microseconds. With one rank the
whole step is one graph. What changes from step to step is in tensors that the graph reads: ``cursor`` is the number of
the step within the loaded ones and selects its samples, learning rate and tail.

A model that draws random numbers, or has modules of unknown code, runs the same functions without a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.shard_tree import MergePlan, Node
from hoop.data.dataset import Dataset, Indices
from hoop.data.sampler import shard
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.autograd import AutogradStage, Objective
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.gpu_stage import capturable
from hoop.engine.stage.gradient_reduction import clip_scale
from hoop.engine.stage.peer_rows import PeerRows
from hoop.engine.stage.state import LOSS, squared_norms

_WARM_UPS = 2
"""Number of runs before a capture, as PyTorch requires: libraries initialise themselves in them."""


class BatchLoader:
    """The samples of the steps of a stride, on the GPU.

    A resident dataset is there already; the loader brings indices and draws. Batches of other datasets are made on the
    host, in pinned memory. Each step has a place of its own, so a step is loaded while the GPU computes the one before.
    """

    def __init__(self, data: Dataset, state: ResidentStageState, seed: int, steps: int, samples: int) -> None:
        """``steps``: steps of a stride. ``samples``: the most that a step has, in all ranks."""
        self._data, self._seed, accelerator = data, seed, state.accelerator
        self.usual_batch = min(samples, len(data))
        """Number of samples of every global batch but the last of an epoch."""
        self._resident = state.resident_data(data)
        shapes = [(tuple(one.shape), one.dtype) for one in data.allocate(samples)]
        if self._resident is not None:
            shapes = [((samples, self._resident.columns), torch.int64)]
        self._host = [accelerator.pinned_buffer(steps, *shape, dtype=dtype) for shape, dtype in shapes]
        self._host_arrays = [one.numpy() for one in self._host]
        self._device = [torch.zeros_like(one, device=accelerator.device) for one in self._host]

    @property
    def resident(self) -> bool:
        """The samples are on the GPU, and a step's load is small."""
        return self._resident is not None

    def load(self, first: int, steps: Sequence[Indices], epoch: int) -> None:
        """Bring the samples of the steps from ``first`` of the stride on to the GPU, on the current stream."""
        for index, samples in enumerate(steps, start=first):
            if not len(samples):
                continue
            if self._resident is not None:
                rows = self._resident.rows(samples, epoch=epoch, seed=self._seed)
                self._host_arrays[0][index, : len(samples)] = rows
            else:
                out = (self._host[0][index], self._host[1][index])
                self._data.batch(samples, epoch=epoch, seed=self._seed, out=out)
        most, end = max(map(len, steps), default=0), first + len(steps)
        for device, host in zip(self._device, self._host, strict=True) if most else ():
            if end - first == 1:
                device[first, :most].copy_(host[first, :most], non_blocking=True)
            else:  # one copy: what it copies beyond a step's samples is never read
                device[first:end].copy_(host[first:end], non_blocking=True)

    def inputs(self, cursor: Tensor, count: int) -> Tensor:
        """The inputs of the first ``count`` samples of the step with this index; a CUDA graph can record it."""
        rows = self._device[0].index_select(0, cursor)[0, :count]
        return rows if self._resident is None else self._resident.inputs(rows)

    def targets(self, cursor: Tensor, count: int) -> Tensor:
        """Their targets."""
        rows = self._device[-1].index_select(0, cursor)[0, :count]
        return rows if self._resident is None else self._resident.targets(rows)


class StepInputs:
    """The inputs of each step of a stride, from host to GPU (learning rate, number, tail), and the tails of the totals.

    A tail has the elements of ``state.py``: this rank's samples, votes and provenance, which the total sums.
    """

    def __init__(self, accelerator: Accelerator, tail: int, steps: int) -> None:
        """``tail``: elements of a tail. ``steps``: steps of a stride."""
        device = accelerator.device
        self._host = accelerator.pinned_buffer(steps, 2 + tail)
        self._host_array = self._host.numpy()
        self._device = torch.zeros(steps, 2 + tail, device=device)
        self.totals = accelerator.state_vector("totals", steps * tail).view(steps, tail)
        """The tail of each step's total."""
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        """Index of the next step in the stride."""
        self.exact_rate: float | None = None if accelerator.cuda else 0.0
        """Learning rate of the step in double precision, as the CPU's kernels take it; None on a real GPU."""

    def begin(self) -> None:
        """A stride begins."""
        self.cursor.zero_()

    def load(self, index: int, rate: float, number: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Set rate and number (from 0) of step ``index``; returns the tail, for the caller to fill before ``send``."""
        row: np.ndarray[tuple[int], np.dtype[np.float32]] = self._host_array[index]
        row[0], row[1] = rate, number + 1
        return row[2:]

    def send(self, first: int, end: int) -> None:
        """Bring the steps from ``first`` to before ``end`` to the GPU, on the current stream."""
        self._device[first:end].copy_(self._host[first:end], non_blocking=True)

    def current(self) -> tuple[Tensor, Tensor, Tensor]:
        """Learning rate, number from 1 on, and tail of the step at the cursor."""
        row = self._device.index_select(0, self.cursor)[0]
        return row[0], row[1], row[2:]


class Launch:
    """A function of kernels that is launched every step: as a CUDA graph, or call by call."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        """Record the function. It must have run before. ``pool``: memory that graphs which never overlap share."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._function()
        self._graph = graph

    def __call__(self) -> None:
        self._graph.replay() if self._graph is not None else self._function()


@dataclass(frozen=True)
class RankRows:
    """The shards that one rank computes in a plan, and the memory of their gradients."""

    shards: int
    """Number of shards of all ranks."""
    plan: MergePlan
    """The shards of this rank."""
    rows: Tensor
    """Gradients, indexed by (set, shard, element)."""
    total: Tensor
    """Memory for the sum over all ranks; the first row, if there is one rank."""
    peers: PeerRows | None = None
    """The rows of all ranks; None if there is one rank."""


class ResidentStep:
    """The step of one rank for batches of one size, in one plan."""

    def __init__(
        self,
        state: ResidentStageState,
        loader: BatchLoader,
        inputs: StepInputs,
        objective: Objective,
        settings: Settings,
        batch: int,
        memory: RankRows,
    ) -> None:
        """``batch``: samples of the global batch."""
        plan, shards, rows, peers = memory.plan, memory.shards, memory.rows, memory.peers
        self._state, self._loader, self._inputs, self._objective = state, loader, inputs, objective
        self._clip, self._batch, self._peers = settings.optimizer.clip, batch, peers
        everything = np.arange(batch, dtype=np.int64)
        self._spans: list[tuple[int, int]] = []
        """First sample and end of each shard, in the batch of this rank."""
        at = 0
        for micro in plan.order:
            count = len(shard(everything, micro, shards))
            self._spans.append((at, at + count))
            at += count
        self.samples = at
        """Number of samples of this rank."""
        self._nonempty = min(shards, batch)
        self._order = list(plan.order)
        self._nodes = plan.nodes
        self._all_rows, self._all_views = rows, [[state.device_views(row) for row in one] for one in rows]
        self._rows, self._views = rows[0], self._all_views[0]
        self._rate = self._count = self._targets = torch.zeros(0)
        self._total = memory.total
        self._lanes = max(1, -(-len(self._order) // settings.accumulate))
        """Maximum number of shards that are computed at the same time."""
        self._streams: list[torch.cuda.Stream] = []
        self._aux: torch.cuda.Stream | None = None
        """Stream for work that overlaps with the shards and with the update. None on an emulated GPU."""
        self.seeds: list[int] = [0] * len(self._order)
        """Random seed of each shard of the step, for models that draw random numbers."""
        device = state.accelerator.device
        if state.accelerator.cuda:
            self._aux = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams = [torch.cuda.Stream(device) for _ in range(self._lanes)]  # type: ignore[no-untyped-call]
        self.graph_refusal: str | None = None
        """Reason why the step runs without a CUDA graph; None if it is recorded."""
        if peers is None:
            self._whole = Launch(self._compute_and_finish)
        self._compute_launches = [Launch(partial(self._compute, number)) for number in range(len(rows))]
        self._finish_launches = [Launch(partial(self._finish, number)) for number in range(len(rows))]

    # ---- launches

    def compute(self, number: int) -> None:
        """The gradients of this rank's shards, in set ``number`` of its rows."""
        self._compute_launches[number]()

    def whole(self) -> None:
        """The step of a single rank."""
        self._state.device_total = self._total
        self._whole()

    def finish(self, number: int) -> None:
        """The sum of all ranks' rows in set ``number``, and the update."""
        self._state.device_total = self._total
        self._finish_launches[number]()

    def capture(self) -> None:
        """Record the step as CUDA graphs, if it can be; otherwise ``graph_refusal`` says why not."""
        state = self._state
        if not state.accelerator.cuda:
            self.graph_refusal = "the GPU is emulated"
            return
        if not capturable(nn.ModuleList(state.blocks)):
            self.graph_refusal = "a module is neither PyTorch's nor Hoop's own: its kernels may change"
            return
        device = state.accelerator.device
        rng = torch.cuda.get_rng_state(device)
        self._seed_blocks(False)
        main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._compute(0)
            main.wait_stream(side)
            torch.cuda.synchronize(device)
            if not torch.equal(rng, torch.cuda.get_rng_state(device)):
                self.graph_refusal = "the model draws random numbers"
                self._seed_blocks(True)
                return
            state.drop_counters()
            pool = torch.cuda.graph_pool_handle()
            if self._peers is None:
                self._whole.capture(pool)
                return
            launches = [*self._compute_launches, *(self._finish_launches if self._peers.captured else ())]
            for one in launches:
                one.capture(pool)
        except RuntimeError as error:
            self.graph_refusal = str(error).splitlines()[0]
            self._seed_blocks(True)

    def _seed_blocks(self, seed: bool) -> None:
        """Whether blocks that may draw random numbers are seeded: a CUDA graph cannot record that."""
        for index in range(self._lanes):
            stage = self._state.lane(index).stage
            if isinstance(stage, AutogradStage):
                stage.seed_blocks = seed

    # ---- kernels

    def _compute_and_finish(self) -> None:
        self._compute(0)
        self._finish(0)

    @torch.no_grad()
    def _compute(self, number: int) -> None:
        """Gradients of this rank's shards, one a row of set ``number``, added along the tree."""
        self._rows, self._views = self._all_rows[number], self._all_views[number]
        if self._order:
            self._state.accelerator.select_kernels(self._batch == self._loader.usual_batch)
            with self._fork():
                self._load_tails()
            self._state.round_weights()
            inputs = self._state.to_memory_format(self._loader.inputs(self._inputs.cursor, self.samples))
            self._run_shards(inputs)
            self._join(self._aux)
            if len(self._state.device_counts) and self.samples and not self._state.counters_known:
                computed = next(index for index, (low, high) in enumerate(self._spans) if high > low)
                lane = self._state.lane(computed % self._lanes)
                torch.sub(lane.counts, self._state.device_counts, out=self._state.device_increments)
            for node, _ in self._nodes:
                self._merge(node)

    def _load_tails(self) -> None:
        """Read the targets and this step's rate, number and tail, beside the forward of the shards."""
        tail = self._state.layout.state
        self._rate, self._count, mine = self._inputs.current()
        self._rows[1:, tail:].zero_()
        self._rows[0, tail:].copy_(mine)
        self._targets = self._loader.targets(self._inputs.cursor, self.samples)

    def _run_shards(self, inputs: Tensor) -> None:
        if not self._streams:
            for index in range(len(self._order)):
                self._run_shard(index, inputs)
            return
        main = torch.cuda.current_stream(self._state.accelerator.device)
        for stream in self._streams:
            stream.wait_stream(main)
        for index in range(len(self._order)):
            with torch.cuda.stream(self._streams[index % self._lanes]):
                self._run_shard(index, inputs)
        for stream in self._streams:
            main.wait_stream(stream)

    def _run_shard(self, index: int, inputs: Tensor) -> None:
        """Write the gradient, the changes of the buffers and the loss of a shard to its row."""
        state, row, micro = self._state, self._rows[index], self._order[index]
        low, high = self._spans[index]
        layout = state.layout
        if low == high:
            row[: layout.state].zero_()
            return
        lane = state.lane(index % self._lanes)
        if layout.buffers:
            lane.buffers.copy_(state.device_buffers)
        if len(lane.counts) and not state.counters_known:
            lane.counts.copy_(state.device_counts)
        outputs = lane.stage.forward(micro, inputs[low:high], self.seeds[index])
        self._join(self._aux)
        loss, gradient = self._objective(outputs, self._targets[low:high], self._batch)
        lane.stage.backward(micro, gradient, self._views[index], False)
        if layout.buffers:
            changes = row[layout.trained : layout.state]
            torch.sub(lane.buffers, state.device_buffers, out=changes)
            changes.div_(self._nonempty)
        target = row[layout.state + LOSS]
        target.copy_(loss) if isinstance(loss, Tensor) else target.fill_(loss)

    @contextlib.contextmanager
    def _fork(self) -> Iterator[None]:
        """Launch the kernels of this block on a second stream, in parallel with later ones, until ``_join``."""
        if self._aux is None:
            yield
            return
        self._aux.wait_stream(torch.cuda.current_stream(self._state.accelerator.device))
        with torch.cuda.stream(self._aux):
            yield

    def _join(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.current_stream(self._state.accelerator.device).wait_stream(stream)

    def _merge(self, node: Node) -> None:
        """Add the rows of a node's shards along the tree; the sum is in the row of its first shard."""
        if node.high - node.low == 1:
            return
        left, right = node.halves
        self._merge(left)
        self._merge(right)
        self._rows[self._order.index(left.low)].add_(self._rows[self._order.index(right.low)])

    @torch.no_grad()
    def _finish(self, number: int) -> None:
        """The sum over all ranks, and the update. ``number``: the set of exported rows."""
        state, inputs = self._state, self._inputs
        layout, total = state.layout, self._total
        rate, count = self._rate, self._count
        if self._peers is not None:
            with self._fork():
                rate, count, _ = inputs.current()
            self._peers.sum_into(total, number)
            self._join(self._aux)
        if state.commit is not None:
            state.commit.begin_update()
        with self._fork():
            inputs.totals.index_copy_(0, inputs.cursor, total[layout.state :].unsqueeze(0))
            inputs.cursor.add_(1)
            if len(state.device_counts):
                state.device_counts.add_(state.device_increments)
            if layout.buffers:
                state.device_buffers.add_(total[layout.trained : layout.state])
        gradient = total[: layout.trained]
        if self._clip:
            views = [one.contiguous() for one in state.device_views(gradient)]
            scale = clip_scale(squared_norms(views), self._clip)
            gradient.mul_(scale if scale.is_cuda else float(scale))
        if layout.trained:
            exact = inputs.exact_rate
            state.tensor_update(gradient, rate if exact is None else exact, count, False)
        self._join(self._aux)
        if state.commit is not None:
            state.commit.end_update()
