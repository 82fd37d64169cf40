"""The state of custom training on one rank: the bytes of all objects in the arena, and the gradients of shards.

The state vector has the bytes of every tensor, each in its own type, and a JSON text at its end:

    | parameters | buffers | averaged weights | optimizer state | length | JSON: parameter groups, scheduler, numbers |

On the CPU parameters and optimizer state are views of it. Buffers change in every forward, which undoes the change, so
they are copied; so is everything that is on a GPU. ``pack`` brings the vector up to date, ``unpack`` loads the objects
from it. Recovery copies the vector from rank to rank as it copies the weights of the flat path.

A gradient slot has the contribution of one shard; all of it is summed over the shards in a fixed order:

    | gradients | changes of buffers | tail | provenance | 1 for each parameter with a gradient | metrics: sum, weight |

Gradients of bfloat16 parameters are summed as float32. If a parameter or buffer is float64, slots are float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.engine.custom.loss import CustomLoss, ShardLoss
from hoop.engine.custom.objects import StateTemplate, TrainableState
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import CPU
from hoop.engine.stage.state import (
    LOSS,
    SAMPLES,
    StageState,
    StateLayout,
    StateVectors,
    padded,
    squared_norms,
)
from hoop.errors import FailedPrecondition, InvalidArgument

ALIGN_BYTES = 64
MIN_TEXT_BYTES = 16 << 10
"""Bytes reserved for the JSON text, beside twice its first length."""
_LENGTH_BYTES = 8
STATE = "hoop.optimizer."
"""Prefix of the names of optimizer state in checkpoints: ``hoop.optimizer.0.exp_avg.layer.weight``."""
AVERAGE = "hoop.average."
TEXT = "hoop.text"
"""Name of the JSON text in checkpoints, as bytes."""
WHOLE_VECTOR = "hoop.vector"
"""Name of the whole state vector, for a device that restarts on its arena."""


class GradientLayout(StateLayout):
    """The layout of a gradient slot for parameters and buffers of any type."""

    def __init__(self, modules: list[nn.Module], shards: int, metrics: int) -> None:
        super().__init__(modules, shards, any_type=True)
        self.flags = self.total
        """Index of the first element that says whether a parameter has a gradient."""
        self.metrics = self.flags + padded(len(self.parameters))
        self.total = self.metrics + padded(2 * metrics)


class CustomState(StageState):
    """The objects of custom training on one rank, and the gradients of its shards. ``CustomRole`` drives it."""

    def __init__(
        self,
        vectors: StateVectors,
        objects: TrainableState,
        loss: CustomLoss,
        settings: Settings,
        template: StateTemplate,
        device: torch.device = CPU,
    ) -> None:
        """``template``: ``objects.trial_state()``. ``device``: of the parameters."""
        self.objects, self.loss, self.device, self._template = objects, loss, device, template
        self.blocks = list(objects.modules)
        self.first_block = 0
        self._shards = settings.num_microbatches
        self.layout: GradientLayout = GradientLayout(self.blocks, self._shards, len(loss.metric_names))
        self.device_id, self.provenance = 0, None
        self._vectors, self._name = vectors, "stage0."
        self._places: list[tuple[str, torch.dtype, torch.Size, int]] = []
        """Name, type, shape and byte offset of each tensor in the state vector."""
        self._end = 0
        trained_places = self._place_all(objects.trained, "")
        frozen = [one for one in self._parameters() if not one.requires_grad]
        frozen_places = self._place_all(frozen, "")
        self._buffers = _buffers(self.blocks)
        buffer_places = self._place_all([holder[key] for holder, key in self._buffers], "")
        average_places = self._place_all(objects.average, AVERAGE, objects.trained if objects.average else ())
        kept = [(index, *key, one) for index, kept in enumerate(template) for key, one in kept.items()]
        self._kept = [(index, number, key) for index, number, key, one in kept if isinstance(one, Tensor)]
        kept_places = [
            self._place(f"{STATE}{number}.{key}.{self._trained_name(index)}", one)
            for index, number, key, one in kept
            if isinstance(one, Tensor)
        ]
        text_bytes = 2 * len(self._text()) + MIN_TEXT_BYTES + 32 * sum(not isinstance(one[-1], Tensor) for one in kept)
        self._text_at = self._end
        words = (self._text_at + _LENGTH_BYTES + text_bytes + ALIGN_BYTES) // ALIGN_BYTES * (ALIGN_BYTES // 4)
        self._vector = vectors.new(f"{self._name}weights", words)
        bytes_ = torch.from_numpy(self._vector.view(np.uint8))
        self._text_bytes = self._vector.view(np.uint8)[self._text_at :]
        self._views = [_view(bytes_, place) for place in self._places]
        self._trained_views, self._frozen_views, self._buffer_views, self._average_views, self._kept_views = (
            [self._views[index] for index in group]
            for group in (trained_places, frozen_places, buffer_places, average_places, kept_places)
        )
        self.in_place = device.type == "cpu"
        with torch.no_grad():
            pairs = [*zip(objects.trained, self._trained_views, strict=True)]
            pairs += [*zip(frozen, self._frozen_views, strict=True)]
            pairs += [*zip(objects.average, self._average_views, strict=True)]
            for one, view in pairs:
                view.copy_(one)
                if self.in_place:
                    one.data = view
        self._frozen = frozen
        self._start_values = [holder[key] for holder, key in self._buffers]
        self._dirty = True
        self.state = bytes_.view(torch.float32)
        self.trained = torch.zeros(0)
        self.moments = []
        self.total_buffer = vectors.new(f"{self._name}total", self.layout.total, self.layout.element)
        self._rotations, self._older_totals = 0, []
        self.total = self.total_buffer
        self.update_device = CPU
        self.buckets = [0, self.layout.trained]
        self.slots: Array = np.empty((0, self.layout.total), self.layout.element.numpy)
        self._slot_views, self._slot_merges = [], {}
        self._deltas: list[Tensor] = []

    def _parameters(self) -> list[Tensor]:
        return list(nn.ModuleList(self.blocks).parameters())

    def _trained_name(self, index: int) -> str:
        return self.objects.names[id(self.objects.trained[index])]

    def _place_all(self, tensors: Any, prefix: str, named: Any = None) -> list[int]:
        names = self.objects.names
        return [
            self._place(prefix + names[id(like)], one)
            for one, like in zip(tensors, named if named is not None else tensors, strict=True)
        ]

    def _place(self, name: str, like: Tensor) -> int:
        """Reserves bytes for a tensor; returns the index of its view."""
        self._places.append((name, like.dtype, like.shape, self._end))
        self._end += -(-like.numel() * like.element_size() // ALIGN_BYTES) * ALIGN_BYTES
        return len(self._places) - 1

    # ---- the state vector

    @property
    def state_array(self) -> Array:  # type: ignore[override]
        """The state vector, up to date. Recovery reads it, and overwrites it before ``unpack``."""
        self.pack()
        return self._vector

    def pack(self) -> None:
        """Copies into the state vector what is not there already."""
        if not self._dirty:
            return
        with torch.no_grad():
            for (holder, key), view in zip(self._buffers, self._buffer_views, strict=True):
                view.copy_(holder[key])
            if not self.in_place:
                for one, view in zip(self.objects.trained, self._trained_views, strict=True):
                    view.copy_(one)
                for one, view in zip(self.objects.average, self._average_views, strict=True):
                    view.copy_(one)
            self._adopt_optimizer_state()
        text = self._text()
        if len(text) + _LENGTH_BYTES > len(self._text_bytes):
            raise FailedPrecondition(
                f"lr_scheduler, optimizer: their state has grown to {len(text)} bytes of text, and there is room for "
                f"{len(self._text_bytes)}; keep less in it"
            )
        self._text_bytes[:_LENGTH_BYTES] = np.array([len(text)], np.int64).view(np.uint8)
        self._text_bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        self._text_bytes[_LENGTH_BYTES + len(text) :] = 0  # equal states have equal bytes
        self._dirty = False

    def _adopt_optimizer_state(self) -> None:
        """Copies optimizer state into the vector; on the CPU the optimizers work there from now on."""
        for (index, number, key), view in zip(self._kept, self._kept_views, strict=True):
            kept = self.objects.optimizers[number].state.get(self.objects.trained[index])
            if not kept or not isinstance(kept.get(key), Tensor):
                view.zero_()
                continue
            if kept[key].data_ptr() != view.data_ptr():
                view.copy_(kept[key])
                if self.in_place:
                    kept[key] = view

    def _text(self) -> bytes:
        """Everything that is not in tensors: which parameters have optimizer state, its numbers, groups, schedulers."""
        numbers: dict[str, dict[str, Any]] = {}
        for number, optimizer in enumerate(self.objects.optimizers):
            for index, one in enumerate(self.objects.trained):
                kept = optimizer.state.get(one)
                if kept:
                    plain = {key: value for key, value in kept.items() if not isinstance(value, Tensor)}
                    numbers[f"{number}.{index}"] = plain
                    self._check_kept(number, index, kept)
        return json.dumps({"kept": numbers, **self.objects.json_state()}, separators=(",", ":")).encode()

    def _check_kept(self, number: int, index: int, kept: Mapping[str, Any]) -> None:
        expected = self._template[index]
        for key, value in kept.items():
            known = expected.get((number, key))
            if isinstance(value, Tensor) and not (
                isinstance(known, Tensor) and (known.shape, known.dtype) == (value.shape, value.dtype)
            ):
                raise InvalidArgument(
                    f"optimizer: it keeps a new tensor {key!r} of {self._trained_name(index)}, which its first step "
                    "did not make; keep the same tensors from the first step on"
                )

    def unpack(self) -> None:
        """Loads all objects from the state vector, after another rank or a restart has written it."""
        if self._dirty:  # the objects are newer
            return
        with torch.no_grad():
            for (holder, key), view, own in zip(self._buffers, self._buffer_views, self._start_values, strict=True):
                own.copy_(view)
                holder[key] = own
            if not self.in_place:
                for one, view in zip(self.objects.trained, self._trained_views, strict=True):
                    one.copy_(view)
                for one, view in zip(self._frozen, self._frozen_views, strict=True):
                    one.copy_(view)
                for one, view in zip(self.objects.average, self._average_views, strict=True):
                    one.copy_(view)
        length = int(self._text_bytes[:_LENGTH_BYTES].view(np.int64)[0])
        self._load_text(self._text_bytes[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())

    def _load_text(self, text: bytes) -> None:
        state = json.loads(text)
        kept: Mapping[str, Mapping[str, Any]] = state.pop("kept")
        views = dict(zip(self._kept, self._kept_views, strict=True))
        for number, optimizer in enumerate(self.objects.optimizers):
            optimizer.state.clear()
            for index, one in enumerate(self.objects.trained):
                plain = kept.get(f"{number}.{index}")
                if plain is None:
                    continue
                found: dict[str, Any] = {}
                for at, key in self._template[index]:
                    if at == number:
                        view = views.get((index, number, key))
                        if view is None:
                            found[key] = plain.get(key)
                        else:
                            on_device = isinstance(self._template[index][at, key], Tensor) and view.dim() > 0
                            found[key] = view if self.in_place or not on_device else view.to(self.device)
                optimizer.state[one] = found
        self.objects.load_json_state(state)

    def mark_changed(self) -> None:
        """The objects have changed since the last ``pack``."""
        self._dirty = True

    # ---- checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, for a checkpoint."""
        self.pack()
        found = {place[0]: view for place, view in zip(self._places, self._views, strict=True)}
        length = int(self._text_bytes[:_LENGTH_BYTES].view(np.int64)[0])
        text = self._text_bytes[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return found | {TEXT: torch.from_numpy(text.copy())}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads a checkpoint; raises if a tensor is missing, or has another shape or type."""
        self.pack()
        for (name, kind, shape, _), view in zip(self._places, self._views, strict=True):
            if name not in tensors:
                raise FailedPrecondition(f"checkpoint: no {name}; is it of another model or optimizer?")
            given = tensors[name]
            if given.shape != shape or given.dtype != kind:
                raise FailedPrecondition(
                    f"checkpoint: {name} is {given.dtype} {list(given.shape)}, the job's is {kind} {list(shape)}"
                )
            with torch.no_grad():
                view.copy_(given)
        if TEXT not in tensors:
            raise FailedPrecondition(f"checkpoint: no {TEXT}; is it of another optimizer?")
        text = tensors[TEXT].numpy().tobytes()
        self._text_bytes[:_LENGTH_BYTES] = np.array([len(text)], np.int64).view(np.uint8)
        self._text_bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        self._dirty = False
        self.unpack()

    def load_vector(self, vector: Tensor) -> None:
        """Loads a copy of the whole state vector, from before a restart."""
        self._vector.view(np.uint8)[:] = vector.view(torch.uint8).numpy()
        self._dirty = False
        self.unpack()

    # ---- a step

    def begin(self) -> None:
        with torch.no_grad():
            self._start_copies = [holder[key].clone() for holder, key in self._buffers]

    def sync_device_weights(self) -> None:
        """Nothing to do: the model computes with these weights."""

    def save_buffer_changes(self) -> None:
        """After a shard's forward: saves its change of the buffers for its slot, and undoes it."""
        self._deltas = []
        with torch.no_grad():
            for (holder, key), own, start in zip(self._buffers, self._start_values, self._start_copies, strict=True):
                now = holder[key]
                if start.dtype == torch.bool:
                    self._deltas.append(torch.zeros(start.shape))
                else:
                    self._deltas.append((now.double() - start.double()).cpu())
                holder[key] = own  # the forward may have put another tensor there
                own.copy_(start)

    def write_gradient(self, micro: int, found: ShardLoss, shards: int, fingerprint: int) -> None:
        """Writes a shard's contribution to its slot, from the parameters' ``grad``, and merges complete tree nodes."""
        slot = self._slot_views[self._slot_merges[micro].slot]
        layout = self.layout
        row = self.slots[self._slot_merges[micro].slot]
        row[layout.state :] = 0
        for index, (one, view) in enumerate(zip(self.objects.trained, slot.gradients, strict=True)):
            gradient = one.grad
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                raise InvalidArgument(
                    f"model: the gradient of {self._trained_name(index)} is sparse; use sparse=False in its embedding"
                )
            view.copy_(gradient)
            row[layout.flags + index] = 1
            one.grad = None
        for (low, high), delta in zip(layout.buffer_spans, self._deltas, strict=True):
            row[low:high] = delta.reshape(-1).numpy() / shards
        slot.tail[LOSS], slot.tail[SAMPLES] = float(found.objective.detach()), found.weight
        for index, name in enumerate(self.loss.metric_names):
            row[layout.metrics + 2 * index : layout.metrics + 2 * index + 2] = found.metrics[name]
        if fingerprint:
            self._mark_provenance(slot, micro, fingerprint)
        self.merge(micro, 0, layout.total)

    # ---- the total, and the update

    def normalisation(self) -> float:
        return self.loss.normalisation(float(self.tail[SAMPLES]))

    def mean_loss(self, tail: Array) -> float:
        return self.loss.reported(float(tail[LOSS]), float(tail[SAMPLES]))

    def metrics(self) -> list[float]:
        """The metrics of the step, in the order of their names."""
        first = self.layout.metrics
        pairs = self.total[first : first + 2 * len(self.loss.metric_names)].reshape(-1, 2)
        return [float(total) / float(weight) if weight else 0.0 for total, weight in pairs]

    def apply_update(self, rate: float, step: int) -> None:
        layout, total = self.layout, torch.from_numpy(self.total)
        views = layout.views_trained(total)
        for index, (one, view) in enumerate(zip(self.objects.trained, views, strict=True)):
            if not self.total[layout.flags + index]:
                one.grad = None  # no shard has used it: optimizers leave it alone, as in PyTorch
            elif self.objects.changes_gradients or view.dtype != one.dtype or self.device.type != "cpu":
                one.grad = view.to(device=self.device, dtype=one.dtype, copy=True)
            else:
                one.grad = view
        self.objects.update(rate, step)
        for one in self.objects.trained:
            one.grad = None
        with torch.no_grad():
            for (holder, key), (low, high) in zip(self._buffers, layout.buffer_spans, strict=True):
                added = total[low:high].view(holder[key].shape)
                if holder[key].is_floating_point():
                    holder[key].add_(added.to(device=holder[key].device, dtype=holder[key].dtype))
                elif holder[key].dtype != torch.bool:
                    holder[key].add_(added.round().to(device=holder[key].device, dtype=holder[key].dtype))
        self._dirty = True

    def squared_norms(self) -> list[float]:
        return squared_norms(self.layout.views_trained(torch.from_numpy(self.total))).tolist()

    def close(self) -> None:
        """Gives the objects memory of their own: the arena's is freed."""
        if self.in_place:
            with torch.no_grad():
                for one in [*self.objects.trained, *self._frozen, *self.objects.average]:
                    one.data = one.data.clone()


def _buffers(modules: list[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Each buffer once, as the dict of its module and its key: a forward may put another tensor there."""
    found, seen = [], set()
    for module in nn.ModuleList(modules).modules():
        for key, one in module._buffers.items():
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                found.append((module._buffers, key))
    return found


def _view(bytes_: Tensor, place: tuple[str, torch.dtype, torch.Size, int]) -> Tensor:
    _, kind, shape, offset = place
    size = shape.numel() * torch.empty(0, dtype=kind).element_size()
    return bytes_[offset : offset + size].view(kind).view(shape)
