"""Replication: every rank's state is also kept by other ranks, its holders, so that the loss of a device loses nothing.

    rank 0 ── this step's summed gradient ──▶ rank 1 ── … ──▶ rank 2 ── … ──▶ rank 0      (1) replicate
                                all ranks synchronize                                     (2) commit
    each rank updates its own state and, while it waits for messages, its replica         (3) apply

No rank updates before all ranks have synchronized, and at that point every holder has the gradient. So when a device is
lost, either no rank has updated, and every state exists as of before the step, at its owner or at the holder; or every
rank can update, and every state exists as of after the step. ``membership/recovery.py`` decides which.

A holder on the same host copies from the owner's arena. It may be stopped (SIGSTOP) in the middle of a copy, be
evicted, and continue when the owner has gone on without it and its bytes are others. Later it may be the only one that
has a replica. So a copy counts only after ``verify_reads``: the owner has not left the generation, which it does before
it changes a byte.

A replica has the same vectors as its owner, so the same update works on them:

    | weights | moment 0 | moment 1 |   per stage, or per server shard   | counters, untrained tensors |

The owner sends all of it once. After that it sends the summed gradient of each step (a third of Adam's state), and the
holder repeats the update. Every element is updated by itself, by the same kernel, so the bits are equal. On a GPU the
holder has weights and moments of the replica on its GPU, and uploads the gradient.

Ranks of asynchronous strategies synchronize only every ``stride`` steps, and updates do not wait. Each rank keeps a
copy of its state at the last synchronization and sends its whole state at the next one, alternating between two
replicas.

A rank has ``settings.replicas`` holders, or one for each other rank if there are fewer. With two, a device and the
holder of its replica may be lost at once. The pipelines of a hybrid have the same state anyway: only the replicas
beyond these are sent, by one of them.

``ShardedStateManager`` (``manager.py``) calls this module. If the arena survives the process, the manager also keeps
the rank's own last two states there, with commit records (``DoubleBufferedState``). Ranks are at most one step apart,
so if all devices are killed at once, there is a step of which every rank has its shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hoop.collectives.communicator import all_gather_object
from hoop.collectives.rank_context import RankContext
from hoop.collectives.reduction import Array
from hoop.config import format_size
from hoop.engine.fault_tolerance.state_slices import (
    Bytes,
    FlatState,
    LiveSlice,
    StateShard,
    align,
    bytes_of,
    specs_of,
    state_rows,
)
from hoop.engine.job import names_of
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.roles.base import RankRole
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator, Staging
from hoop.engine.stage.device_state import DeviceState
from hoop.engine.stage.optimizer import apply_update, make_update
from hoop.engine.stage.state import StateVectors
from hoop.errors import FailedPrecondition
from hoop.membership.recovery import SliceSpec
from hoop.membership.replication import replica_holders, replica_shares, same_state
from hoop.memory.commit_record import NO_STEP
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.strategies.memory_fit import Fit
from hoop.transport.base import SharedEndpoint

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Receive = Callable[[memoryview], None]


def replicates_gradients(role: RankRole) -> bool:
    """True if updates wait until all ranks synchronize, so that a holder can repeat them from gradients alone."""
    return role.stride == 1


@dataclass(frozen=True)
class ReplicaLayout:
    """Where each part of a rank's state is in its replica, in bytes. Plain values: the owner sends it as JSON."""

    vectors: list[tuple[int, int]]
    """Offset and size in bytes of each vector, in the order of sending."""
    flats: list[tuple[int, int, int]]
    """For each stage: index of its first vector (the weights), number of elements of the weights, how many of them are
    trained."""
    slices: list[tuple[SliceSpec, int]]
    """Slices of the state, each with its offset."""
    counters: list[tuple[int, int]]
    """Offset and size in bytes of each counter."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> ReplicaLayout:
        slices = [(SliceSpec(*spec), offset) for spec, offset in message["slices"]]
        return cls(**{**message, "slices": slices})

    @property
    def size(self) -> int:
        return sum(align(count) for _, count in self.vectors)


def replica_layout(
    flats: Sequence[FlatState], counters: Sequence[str], state: Sequence[LiveSlice]
) -> tuple[ReplicaLayout, list[Bytes]]:
    """The layout of a replica of this state, and the vectors to send, in order. ``counters``: names of tensors."""
    arrays: list[Bytes] = []
    firsts = []
    for flat in flats:
        firsts.append((len(arrays), len(flat.weights), flat.trained))
        arrays += [flat.weights.view(np.uint8), *(one.numpy().view(np.uint8) for one in flat.moments)]
    vectors, spans, slices = [], [], []
    end = 0

    def add(array: Bytes, start: int) -> None:
        nonlocal end
        vectors.append((end, array.nbytes))
        spans.append((start, start + array.nbytes, end))
        end += align(array.nbytes)

    def offset_of(address: int) -> int | None:
        return next((at + address - low for low, high, at in spans if low <= address < high), None)

    for array in arrays:
        add(array, array.__array_interface__["data"][0])
    for one, spec in zip(state, specs_of(state), strict=True):
        offset = offset_of(one.elements.data_ptr())
        if offset is None:  # a tensor outside the flat vectors, which no update changes
            offset = end
            arrays.append(one.elements.detach().view(torch.uint8).numpy())
            add(arrays[-1], one.elements.data_ptr())
        slices.append((spec, offset))
    named = {spec.name: (offset, spec.bytes) for spec, offset in slices}
    return ReplicaLayout(vectors, firsts, slices, [named[name] for name in counters]), arrays


class StageReplica:
    """The vectors of one stage in a replica, in the arena, and the memory into which a step's gradient is received.

    On a GPU ``GpuStageReplica`` takes its place.
    """

    def __init__(self, flat: FlatState, optimizer: OptimizerSettings, total: Floats) -> None:
        self._flat, self._total = flat, total
        self._update = make_update(optimizer, torch.from_numpy(flat.weights[: flat.trained]), flat.moments)

    @property
    def total(self) -> Floats:
        """The memory for the next gradient, which the caller fills before ``apply_update``."""
        return self._total

    def apply_update(self, rate: float, step: int) -> None:
        """Update the state with the gradient in ``total``; ``rate`` is the learning rate."""
        apply_update(self._update, self._flat.weights, self._flat.trained, self._total, rate, step)

    def download(self) -> None:
        """Bring the vectors in the arena up to date."""

    def on_arena_change(self) -> None:
        """The vectors in the arena were received, and are the current state."""


class GpuStageReplica(StageReplica):
    """The vectors of one stage in a replica on this rank's GPU, with a copy in the arena."""

    def __init__(self, accelerator: Accelerator, name: str, flat: FlatState, optimizer: OptimizerSettings) -> None:
        """``name``: begins the names of the buffers on the GPU."""
        self._staging = Staging(accelerator, len(flat.weights))
        super().__init__(flat, optimizer, self._staging.array)
        self._device_state = DeviceState(accelerator, name, flat.weights, flat.trained, flat.moments, optimizer)
        self._device_total = accelerator.vector(f"{name}total", len(flat.weights))

    @property
    def total(self) -> Floats:
        return self._staging.array

    def apply_update(self, rate: float, step: int) -> None:
        self._staging.send(self._device_total)
        self._device_state.apply_update(self._device_total, rate, step)

    def download(self) -> None:
        self._device_state.download()

    def on_arena_change(self) -> None:
        self._device_state.on_arena_change()


class Replica:
    """Another rank's state, kept at this rank, with at most one received update that is not applied yet."""

    def __init__(
        self,
        layout: ReplicaLayout,
        vectors: StateVectors,
        name: str,
        optimizer: OptimizerSettings,
        incremental: bool,
        accelerator: Accelerator | None,
    ) -> None:
        """``incremental``: gradients will come, and updates are repeated here; otherwise whole states will come.

        ``accelerator``: the GPU that has the state then; None: it is in the arena only.
        """
        self._layout = layout
        self._data: Bytes = vectors.new(name, layout.size // 4).view(np.uint8)
        specs, offsets = [one for one, _ in layout.slices], [offset for _, offset in layout.slices]
        self.shard = StateShard(specs, self._data, offsets=offsets)
        self._stages: list[StageReplica] = []
        for number, (first, elements, trained) in enumerate(layout.flats if incremental else ()):
            weights = self._vector(first)
            assert len(weights) == elements, "the owner's layout is consistent"
            moments = [torch.from_numpy(self._vector(first + 1 + one)) for one in range(optimizer.num_moments)]
            flat = FlatState(weights, trained, moments)
            if accelerator is None:
                total = vectors.new(f"{name}.total{number}", elements)
                self._stages.append(StageReplica(flat, optimizer, total))
            else:
                self._stages.append(GpuStageReplica(accelerator, f"{name}.stage{number}.", flat, optimizer))
        self.counters: Bytes = np.empty(sum(count for _, count in layout.counters), np.uint8)
        """Buffer into which the counters after the step are received."""
        self._pending: tuple[int, float] | None = None

    @property
    def totals(self) -> list[Floats]:
        """Receive buffers: the summed gradient of each stage."""
        return [one.total for one in self._stages]

    def _vector(self, number: int) -> Floats:
        offset, count = self._layout.vectors[number]
        return self._data[offset : offset + count].view(np.float32)

    def receive_state(
        self, receive: Receive, verify_reads: Callable[[], None], step: int, arena: Bytes | None = None
    ) -> None:
        """Receives the owner's whole state after ``step``. Invalid until all of it has arrived.

        ``arena``: the owner's, if it sends where in it each vector is; -1 for one that is elsewhere, and sent.
        ``verify_reads``: raises if the owner may have changed its memory meanwhile (``Endpoint.verify_reads``).
        """
        self.shard.step = NO_STEP
        places = np.full(len(self._layout.vectors), -1, np.int64)
        if arena is not None and places.size:
            receive(places.view(np.uint8).data)
        for (offset, count), place in zip(self._layout.vectors, places.tolist(), strict=True):
            into = self._data[offset : offset + count]
            if arena is not None and place >= 0:
                copy_from_arena(into, arena, place)
            elif count:
                receive(into.data)
        verify_reads()
        for one in self._stages:
            one.on_arena_change()
        self.shard.step = step

    def schedule_update(self, step: int, rate: float) -> None:
        """Called when ``totals`` and ``counters`` have been received: the update to ``step`` can be applied."""
        assert self.shard.step == step - 1, "a replica advances step by step"
        self._pending = step, rate

    def apply_update(self) -> bool:
        """Applies the pending update; returns False if there is none."""
        if self._pending is None:
            return False
        (step, rate), self._pending = self._pending, None
        self.shard.step = NO_STEP
        for one in self._stages:
            one.apply_update(rate, step - 1)
        at = 0
        for offset, count in self._layout.counters:
            self._data[offset : offset + count] = self.counters[at : at + count]
            at += count
        self.shard.step = step
        return True

    def versions(self) -> list[StateShard]:
        """Every consistent version: the newest one in the arena, and before that a copy if an update was pending."""
        found = [] if self._pending is None or self.shard.step == NO_STEP else [self._downloaded().clone()]
        self.apply_update()
        return found + ([self._downloaded()] if self.shard.step != NO_STEP else [])

    def _downloaded(self) -> StateShard:
        for one in self._stages:
            one.download()
        return self.shard


class Replicator:
    """Sends this rank's state to its holders, and keeps the replicas that this rank holds.

    The manager makes it before the first step after each (re)partitioning, and calls:

        replicate         every commit: collective, between the step's reduction and its update
        apply_updates     whenever this rank waits for messages, and before the next ``replicate``
        save_own_state    asynchronous strategies: before steps that update without synchronizing
        versions          after a membership change: everything that is consistent
    """

    def __init__(
        self, context: RankContext, vectors: StateVectors, role: RankRole, model: nn.Module, settings: Settings
    ) -> None:
        """Collective: ranks exchange layouts."""
        self._endpoint, self._timeout = context.communicator.endpoint, settings.timeout_s
        self._role, self._model, self._incremental = role, model, replicates_gradients(role)
        groups = same_state(role.executor.plan)
        holders = replica_holders(context.size, context.hosts, settings.replicas, groups)
        layout, arrays = self._layout()
        self._holders = holders[context.rank] if arrays else ()
        layouts = all_gather_object(context.communicator, vars(layout) if self._holders else None, self._timeout)
        self._replicas = {
            owner: [
                Replica(
                    ReplicaLayout.from_json(message),
                    vectors,
                    f"replica{owner}.{turn}",
                    settings.optimizer,
                    self._incremental,
                    role.executor.accelerator,
                )
                for turn in range(1 if self._incremental else 2)
            ]
            for owner, message in enumerate(layouts)
            if message is not None and context.rank in holders[owner]
        }
        """Replicas of each owner's state that this rank keeps: one, or two that are overwritten in turn; the newest is
        last."""
        arenas = self._endpoint.arenas if isinstance(self._endpoint, SharedEndpoint) else []
        self._arenas: list[Bytes] = [one for one in arenas if one is not None]
        """Arenas of all ranks, if all of them are mapped here; else empty."""
        if len(self._arenas) < context.size:
            self._arenas = []
        self._own_copy: StateShard | None = None
        if not self._incremental:
            specs = specs_of(role.live_slices(model))
            data: Bytes = vectors.new("own", bytes_of(specs) // 4).view(np.uint8)
            self._own_copy = StateShard(specs, data)
        self._sent_state = False

    def _layout(self) -> tuple[ReplicaLayout, list[Bytes]]:
        names = names_of(self._model)
        counters = [names[id(one)] for one, _ in self._role.counters()]
        return replica_layout(self._role.flat_states(), counters, self._role.live_slices(self._model))

    def replicate(self, step: int, rate: float) -> None:
        """Collective. Send this step's gradients to my replica holders; receive those of the replicas I hold.

        The first call, and every call of an asynchronous strategy, sends the whole state after ``step`` instead.
        Otherwise ``step`` is the step under way, whose update with learning rate ``rate`` no rank has applied yet.
        """
        deadline = time.monotonic() + self._timeout
        gradients = self._sent_state and self._incremental
        self.apply_updates()
        if self._holders:
            arrays = self._outgoing() if gradients else self._whole_state()
            for holder in self._holders:
                for array in arrays:
                    if array.nbytes:
                        self._endpoint.send(holder, array.view(np.uint8).data, deadline)
        for owner, replicas in self._replicas.items():
            receive = partial(self._endpoint.recv_into, owner, deadline=deadline)
            if gradients:
                self._receive_gradients(owner, replicas[0], receive)
                replicas[0].schedule_update(step, rate)
            else:
                replicas.append(replicas.pop(0))
                arena = self._arenas[owner] if self._copies_directly else None
                replicas[-1].receive_state(receive, self._endpoint.verify_reads, step, arena)
        self._endpoint.flush(deadline)
        if self._copies_directly and not gradients:
            # The next forward changes buffers (a batch norm's running mean) in the memory that holders copy.
            assert isinstance(self._endpoint, SharedEndpoint), "arenas are mapped"
            self._endpoint.barrier(deadline)
        self._sent_state = True

    @property
    def _copies_directly(self) -> bool:
        """Whether holders copy a whole state from its owner's arena. The same at all ranks."""
        return bool(self._arenas) and self._incremental

    def _whole_state(self) -> list[Array]:
        """This rank's state: its vectors, or their places in this rank's arena and those that are not in it."""
        arrays: list[Array] = [*self._layout()[1]]
        if not self._copies_directly:
            return arrays
        arena = self._arenas[self._endpoint.rank]
        places = np.array([_address(one) - _address(arena) for one in arrays], np.int64)
        places[(places < 0) | (places >= arena.nbytes)] = -1
        inside = sum(one.nbytes for one, place in zip(arrays, places.tolist(), strict=True) if place >= 0)
        self._role.executor.extra_bytes_sent += len(self._holders) * inside
        return [places, *(one for one, place in zip(arrays, places.tolist(), strict=True) if place < 0)]

    def _outgoing(self) -> list[Array]:
        """This step's gradients, or their offsets in this rank's arena if holders have it mapped; then counters."""
        totals = self._role.totals()
        counters = [later.contiguous().view(-1).numpy().view(np.uint8) for _, later in self._role.counters()]
        if self._arenas:
            self._role.executor.extra_bytes_sent += len(self._holders) * sum(one.nbytes for one in totals)
            start = _address(self._arenas[self._endpoint.rank])
            totals = [np.array([_address(one) - start for one in totals], np.int64)]
        return totals + ([np.concatenate(counters)] if counters else [])

    def _receive_gradients(self, owner: int, replica: Replica, receive: Receive) -> None:
        """The receiving side of ``_outgoing``."""
        totals = replica.totals
        offsets = np.empty(len(totals) if self._arenas else 0, np.int64)
        if offsets.size:
            receive(offsets.view(np.uint8).data)
            for offset, total in zip(offsets.tolist(), totals, strict=True):
                copy_from_arena(total.view(np.uint8), self._arenas[owner], offset)
            self._endpoint.verify_reads()
        for total in totals if not self._arenas else ():
            if total.size:
                receive(total.view(np.uint8).data)
        if replica.counters.size:
            receive(replica.counters.data)

    def apply_updates(self) -> None:
        """Applies the pending update of each replica."""
        for replicas in self._replicas.values():
            replicas[-1].apply_update()

    def save_own_state(self, step: int) -> None:
        """Asynchronous strategies: copies this rank's state after ``step``, before steps change it."""
        if self._own_copy is not None and self._own_copy.step != step:
            self._own_copy.copy_from(self._role.live_slices(self._model), step)

    def versions(self) -> list[StateShard]:
        """Every consistent version of the replicas, and ``save_own_state``'s copy. No method is called after it."""
        found = [one for replicas in self._replicas.values() for replica in replicas for one in replica.versions()]
        if self._own_copy is not None and self._own_copy.step != NO_STEP:
            found.append(self._own_copy)
        return found


def copy_from_arena(into: Bytes, arena: Bytes, place: int) -> None:
    """Copies what another rank has at ``place`` of its arena; ``verify_reads`` must follow before it counts."""
    np.copyto(into, arena[place : place + into.nbytes])


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


COPIES = 2


class DoubleBufferedState:
    """The last two versions of this rank's own state, in the arena, for a device that is restarted on it.

    A version's commit record has no step while the version is written, so a killed device leaves at least one valid
    version.
    """

    def __init__(self, vectors: StateVectors, role: RankRole, model: nn.Module) -> None:
        self._role, self._model = role, model
        specs = specs_of(role.live_slices(model))
        self._shards = [allocate_shard(vectors, f"own{turn}", specs) for turn in range(COPIES)]

    def save(self, step: int) -> None:
        """Overwrites the older version with the live state, which is that after ``step``."""
        self._shards.append(self._shards.pop(0))
        self._shards[-1].copy_from(self._role.live_slices(self._model), step)


def allocate_shard(vectors: StateVectors, name: str, specs: Sequence[SliceSpec]) -> StateShard:
    """Allocates a buffer for these slices, with a commit record."""
    # The record comes first: it says "no step" before there are bytes that it could be wrong about.
    record = vectors.commit_record(name, state_rows(specs, name))
    return StateShard(specs, vectors.new(name, bytes_of(specs) // 4).view(np.uint8), record=record)


def copies_bytes(
    plan: Plan,
    fit: Fit,
    blocks: Sequence[Block],
    hosts: Sequence[Hashable] = (),
    persistent_memory: bool = False,
    replicas: int = 1,
) -> list[int]:
    """Bytes of each rank's replicas of other ranks' state, and of its persistent copies of its own."""
    copies = [0] * plan.size
    holders = replica_holders(plan.size, hosts, replicas, same_state(plan))
    for rank, share in enumerate(replica_shares(plan, fit.stages, blocks)):
        for holder in holders[rank]:
            copies[holder] += share.state + share.change if fit.strategy.synchronous else 2 * share.state
        if not fit.strategy.synchronous:
            copies[rank] += share.state
        copies[rank] += COPIES * share.state * persistent_memory
    return copies


def gpu_copies_bytes(
    plan: Plan, fit: Fit, blocks: Sequence[Block], hosts: Sequence[Hashable] = (), replicas: int = 1
) -> list[int]:
    """Bytes of each rank's replicas on its GPU: those that it updates. Asynchronous strategies' are in the arena."""
    if not fit.strategy.synchronous or not replicas:
        return [0] * plan.size
    return copies_bytes(plan, fit, blocks, hosts, replicas=replicas)


def check_memory(
    plan: Plan,
    fit: Fit,
    blocks: Sequence[Block],
    memory: Sequence[int],
    hosts: Sequence[Hashable] = (),
    persistent_memory: bool = False,
    replicas: int = 1,
) -> None:
    """Raises ``FailedPrecondition`` if a rank's replicas and persistent copies do not fit beside its training state.

    ``memory``: free bytes of each rank's arena.
    """
    copies = copies_bytes(plan, fit, blocks, hosts, persistent_memory, replicas)
    fewer = "With --replicas 1 a device needs less. " if replicas > 1 else ""
    for rank, (needed, free) in enumerate(zip(fit.bytes, memory, strict=True)):
        if needed + copies[rank] > free:
            raise FailedPrecondition(
                f"memory: rank {rank} needs {format_size(needed)}, and {format_size(copies[rank])} for replicas "
                f"of other ranks' state, and has {format_size(free)}; give each device more (--memory, memory= of "
                f"hoop.train). {fewer}Without replicas (--no-replicate) it fits, but the loss of a device ends the run"
            )
