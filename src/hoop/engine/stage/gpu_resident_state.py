"""The state of a whole model that stays on a GPU: weights, buffers, optimizer state and totals.

    GPU    weights | moments | total      the current state, during steps
    arena  weights | moments | total      a copy, made when recovery, the last checkpoint or another rank needs it

``copy_state`` copies weights and moments on the GPU for a checkpoint, which is read while steps go on. ``download``
brings the arena up to date, ``upload`` the GPU; each does nothing if its copy is current. The vectors have the layout
of ``StateLayout`` in both places. On a GPU they are buffers of a ``CudaArena``.

A lane computes one shard: a copy of the modules whose parameters are views of the shared weights, with buffers (of
batch norms) of its own. So the shards of a step can be computed at the same time, and each begins with the buffers that
the step began with.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hoop.data.dataset import Batch, Dataset, Indices
from hoop.data.resident import ResidentData, make_resident
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.autograd import Stage
from hoop.engine.stage.gpu_stage import batch_counters, flatten_counters
from hoop.engine.stage.kept_gpu_memory import COMMIT_WORDS, MAX_STRIDE, StateCommit
from hoop.engine.stage.optimizer import make_tensor_update
from hoop.engine.stage.state import StageSpec, StageState, StateLayout, StateVectors, make_stage

_SHARE_FOR_DATA = 0.25
"""Maximum share of the free GPU memory that a dataset may need to stay there."""


@dataclass
class Lane:
    """One shard's modules on the GPU."""

    modules: nn.ModuleList
    stage: Stage
    buffers: Tensor
    """Float buffers of the modules, in one vector."""
    counts: Tensor
    """Batch counters of the modules."""


@dataclass(frozen=True)
class StateCopy:
    """The state after some step, in host memory."""

    tensors: list[Tensor]
    """Parameters and float buffers, in the order of the layout."""
    counters: list[Tensor]
    moments: list[Tensor]
    """State vectors of the optimizer."""


class ResidentStageState(StageState):
    """The state of a model on one rank of data parallel training, on the rank's GPU (or emulated, in host memory)."""

    resident = True

    def __init__(self, accelerator: Accelerator, vectors: StateVectors, spec: StageSpec, settings: Settings) -> None:
        """The parameters are those of ``StageState``."""
        settings = dataclasses.replace(settings, bucket_bytes=0)
        super().__init__(vectors, spec, settings, accelerator.device)
        self.accelerator, self._settings, self._chain = accelerator, settings, spec.chain
        self._channels_last = settings.channels_last
        layout, device = self.layout, accelerator.device
        batch_counts, tail = len(batch_counters(layout)), layout.total - layout.state
        sizes = [layout.state, *[layout.trained] * len(self.moments), 2 * batch_counts, 2 * COMMIT_WORDS]
        kept = accelerator.keep_state(*sizes, MAX_STRIDE * tail)
        self.weights = accelerator.state_vector(f"{spec.name}weights", layout.state)
        """Parameters and float buffers on the GPU, in one vector."""
        half = settings.precision == "bfloat16" and accelerator.cuda
        self._rounded = torch.zeros(layout.trained if half else 0, dtype=torch.bfloat16, device=device)
        """The parameters in bfloat16, from which autocast would make them in each shard; empty without autocast."""
        self.device_moments = [
            accelerator.state_vector(f"{spec.name}moment{index}", layout.trained) for index in range(len(self.moments))
        ]
        self.device_total = torch.zeros(layout.total, device=device)
        """Total of the last step: the clipped gradient, the changes of the buffers, and the tail. A step sets it."""
        self.device_counts = accelerator.state_vector(f"{spec.name}counters", 2 * batch_counts).view(torch.int64)
        self.commit: StateCommit | None = None
        """Which step the state on the GPU is of, for a restarted device; None: it finds no state there."""
        if kept:
            self.commit = StateCommit(accelerator.state_vector("commit", 2 * COMMIT_WORDS).view(torch.int64))
        self.tensor_update = make_tensor_update(settings.optimizer, self.weights[: layout.trained], self.device_moments)
        self._lanes: list[Lane] = []
        self._resident_data: dict[int, ResidentData | None] = {}
        """Datasets on the GPU, by ``id`` of the dataset; None: this one does not fit there."""
        self._arena_stale, self._device_stale = False, True
        self.device_increments = torch.zeros_like(self.device_counts)
        """Number by which a step advances each counter."""
        self.counters_known = False
        """True if ``device_increments`` is known: the lanes have no counters any more."""
        self._increments = torch.zeros(len(self.device_counts), dtype=torch.int64)

    @property
    def device_buffers(self) -> Tensor:
        """The float buffers of the current state."""
        return self.weights[self.layout.trained :]

    # ---- the two copies

    def on_device_steps(self) -> None:
        """Steps were launched that change the state on the GPU: the arena is out of date."""
        self._arena_stale = True

    def on_arena_change(self) -> None:
        """The state in the arena was changed: the GPU is out of date."""
        assert not self._arena_stale, "the arena was changed while it was out of date"
        self._device_stale = True

    def discard_device_steps(self) -> None:
        """Forget the steps that were launched since the last ``upload``: the state in the arena is the current one."""
        self._arena_stale, self._device_stale = False, True

    def upload(self) -> None:
        """Copy the state from the arena to the GPU, if it was changed there."""
        if not self._device_stale:
            return
        if self.commit is not None:
            self.commit.invalidate()
        for device, host in self._pairs():
            device.copy_(host)
        if counters := batch_counters(self.layout):
            self.device_counts.copy_(torch.cat([one.reshape(-1) for one in counters]))
        for lane in self._lanes[:1]:
            self._copy_frozen(lane)
        self._device_stale = False

    def download(self) -> None:
        """Wait for the GPU, and copy the state and the last total from there, if the arena is out of date."""
        if not self._arena_stale:
            return
        self.total = self.total_buffer
        for device, host in [*self._pairs(), *self._pair(self.device_total, torch.from_numpy(self.total))]:
            host.copy_(device)
        for one, value in zip(batch_counters(self.layout), self.device_counts.tolist(), strict=True):
            one.fill_(value)
        self._increments.copy_(self.device_increments)
        self._arena_stale = False

    def copy_state(self) -> Callable[[], StateCopy]:
        """Copy the state on the GPU, and return a function that downloads the copy, which another thread may call."""
        vectors = [one.clone() for one in (self.weights, *self.device_moments)]
        counts, copied = self.device_counts.clone(), self.accelerator.mark()

        def read() -> StateCopy:
            with self.accelerator.reading(copied):
                state, *moments = (self._downloaded(one) for one in vectors)
                counted = dict(zip(map(id, batch_counters(self.layout)), counts.tolist(), strict=True))
            counters = [torch.full_like(one, counted.get(id(one), 0)) for one in self.layout.counters]
            for one, counter in zip(self.layout.counters, counters, strict=True):
                if id(one) not in counted:  # a mask: it does not change
                    counter.copy_(one)
            return StateCopy(self.layout.views(state), counters, moments)

        return read

    def _downloaded(self, vector: Tensor) -> Tensor:
        """A vector from the GPU in the order of the arena."""
        host = torch.empty_like(vector, device="cpu")
        for device, view in self._pair(vector, host):
            view.copy_(device)
        return host

    def device_views(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector on the GPU in the shapes of the parameters.

        With ``channels_last`` the elements of a filter are in the order in which the kernels read them.
        """
        views = self.layout.views_trained(vector)
        return [_in_channels_last(one) if self._channels_last and one.dim() == 4 else one for one in views]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors on the GPU with those in the arena that have the same elements: weights and moments."""
        vectors = [(self.weights, self.state), *zip(self.device_moments, self.moments, strict=True)]
        return [pair for vector in vectors for pair in self._pair(*vector)]

    def _pair(self, device: Tensor, host: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A vector on the GPU and the one in the arena; then the parameters whose elements have another order there."""
        views = zip(self.device_views(device), self.layout.views_trained(host), strict=True)
        return [(device, host), *((one, other) for one, other in views if self._channels_last and one.dim() == 4)]

    def apply_update(self, rate: float, step: int) -> None:
        """Update the state in the arena with the total there: a rank one step behind catches up in a recovery."""
        super().apply_update(rate, step)
        self.on_arena_change()

    def set_counter_increments(self, increments: Sequence[Tensor]) -> None:
        known = dict(zip(map(id, self.layout.counters), increments, strict=True))
        for index, one in enumerate(batch_counters(self.layout)):
            self._increments[index] = int(known[id(one)])
        self.device_increments.copy_(self._increments)

    def counter_increments(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(batch_counters(self.layout), self._increments, strict=True))

    def sync_device_weights(self) -> None:
        self.upload()
        lane = self.lane(0)
        self.round_weights()
        lane.buffers.copy_(self.device_buffers)
        self.sync_modes()

    def sync_modes(self) -> None:
        """Set the lanes' modules to the mode (training or evaluation) of the model's."""
        for lane in self._lanes:
            for module, twin in zip(nn.ModuleList(self.blocks).modules(), lane.modules.modules(), strict=True):
                twin.training = module.training

    def read_inputs(self, data: Dataset, samples: Indices, out: Batch) -> Tensor:
        resident = self.resident_data(data)
        if resident is None:
            return super().read_inputs(data, samples, out)
        rows = torch.from_numpy(resident.rows(samples, epoch=0, seed=0))
        return resident.inputs(self.to_device(rows))

    def read_targets(self, data: Dataset, samples: Indices, out: Batch) -> Tensor:
        resident = self.resident_data(data)
        if resident is None:
            return self.to_device(super().read_targets(data, samples, out))
        rows = torch.from_numpy(resident.rows(samples, epoch=0, seed=0))
        return resident.targets(self.to_device(rows))

    def resident_data(self, data: Dataset) -> ResidentData | None:
        """The samples of a dataset on the GPU; None if they do not fit there. They are copied when first used."""
        if id(data) not in self._resident_data:
            free = int(_SHARE_FOR_DATA * self.accelerator.free_bytes())
            self._resident_data[id(data)] = make_resident(data, self.accelerator.device, free)
        return self._resident_data[id(data)]

    def evaluate(self, inputs: Tensor) -> Tensor:
        lane = self.lane(0)
        with self.accelerator.no_compilation(lane.modules):
            return lane.stage.evaluate(self.to_memory_format(self.to_device(inputs)))

    def to_device(self, tensor: Tensor) -> Tensor:
        return self.accelerator.upload(tensor)

    def to_memory_format(self, inputs: Tensor) -> Tensor:
        channels_last = self._channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs

    # ---- lanes

    def round_weights(self) -> None:
        """Make the lanes' bfloat16 parameters those of the current weights; a CUDA graph can record it."""
        if len(self._rounded):
            self._rounded.copy_(self.weights[: self.layout.trained])

    def lane(self, index: int) -> Lane:
        """The lane with this number; it is made when first used."""
        while len(self._lanes) <= index:
            self._lanes.append(self._new_lane())
        return self._lanes[index]

    def _new_lane(self) -> Lane:
        device = self.accelerator.device
        modules = copy.deepcopy(nn.ModuleList(self.blocks)).to(device)
        layout = StateLayout(modules)
        buffers = torch.zeros(layout.state - layout.trained, device=device)
        for tensor, view in zip(layout.parameters, self.device_views(self.weights), strict=True):
            tensor.data = view
        for buffer, offset in zip(layout.buffers, layout.offsets[len(layout.parameters) :], strict=True):
            low = offset - layout.trained
            buffers[low : low + buffer.numel()].copy_(buffer.reshape(-1))
            buffer.data = buffers[low : low + buffer.numel()].view(buffer.shape)
        counts, _, _ = flatten_counters(layout, device)
        if len(self._rounded):
            _use_rounded(modules, layout, self.device_views(self._rounded))
        if self.counters_known:
            _drop_counters(modules)
        stage, _ = make_stage(list(modules), self.first_block, layout, self._settings, self._chain, device)
        lane = Lane(modules, stage, buffers, counts)
        if self._lanes:  # frozen parameters are the same in all lanes
            for frozen, first in zip(layout.frozen, _frozen(self._lanes[0].modules), strict=True):
                frozen.data = first.data
        return lane

    def drop_counters(self) -> None:
        """Remove batch norm's counters from the lanes: ``device_increments`` has what they count in a step."""
        self.counters_known = True
        for lane in self._lanes:
            _drop_counters(lane.modules)

    def _copy_frozen(self, lane: Lane) -> None:
        for own, twin in zip(self.layout.frozen, _frozen(lane.modules), strict=True):
            twin.data.copy_(own.data)

    def close(self) -> None:
        """Drop the lanes and the samples on the GPU; ``PlanExecutor`` frees the rest with the accelerator."""
        self._lanes.clear()
        self._resident_data.clear()


def _frozen(modules: nn.ModuleList) -> list[nn.Parameter]:
    return [one for one in modules.parameters() if not one.requires_grad]


_ROUNDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose parameters autocast rounds to bfloat16, all of them."""


def _use_rounded(modules: nn.ModuleList, layout: StateLayout, views: Sequence[Tensor]) -> None:
    """Replace the parameters that autocast would round by ``views``, which are rounded, also in ``layout``.

    The gradient of a rounded parameter has the bits of the one that autocast would round in the backward.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    for index, (parameter, view) in enumerate(zip(layout.parameters, views, strict=True)):
        if all(type(module) in _ROUNDED for module, _ in users[id(parameter)]):
            layout.parameters[index] = nn.Parameter(view)
            for module, name in users[id(parameter)]:
                module._parameters[name] = layout.parameters[index]


def _in_channels_last(view: Tensor) -> Tensor:
    """A view of the same memory and shape whose elements are in channels-last order."""
    outputs, inputs, height, width = view.shape
    return view.reshape(-1).view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _drop_counters(modules: nn.ModuleList) -> None:
    """A batch norm with a fixed momentum does not read its counter."""
    for one in modules.modules():
        if isinstance(one, nn.modules.batchnorm._NormBase) and one.momentum is not None:
            one.num_batches_tracked = None
