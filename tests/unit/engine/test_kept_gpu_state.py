"""The state on a GPU that a restarted device finds: complete and right states only, to the bit, with their losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hoop
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.fault_tolerance.checkpoint_format import tensors_of
from hoop.engine.fault_tolerance.gpu_persistence import KeptGpuState, load_kept_gpu_state
from hoop.engine.fault_tolerance.local_persistence import read_step_log, tensors_from_shard
from hoop.engine.job import Job, names_of
from hoop.engine.settings import Settings
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.kept_gpu_memory import BEGUN, ENDED
from hoop.engine.trainer import Trainer
from hoop.job_events import Steps
from hoop.memory import Arena
from hoop.memory.gpu_keeper import can_keep
from hoop.transport.registry import open_transport

pytestmark = pytest.mark.skipif(not can_keep(), reason="keepers need Linux")
RUN, PREFIX, STEPS = "a run", "test.", 6
KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(seed: int) -> nn.Module:
    """Filters, batch norm with its counter, a parameter that is not trained, a mask."""
    torch.manual_seed(seed)
    found = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    found[4].bias.requires_grad_(False)
    found[4].register_buffer("mask", torch.tensor([True, False]))
    return found


def data() -> hoop.Splits:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(16, 2, 5, 5, generator=generator)
    found = hoop.TensorData(inputs, torch.randint(0, 3, (16,), generator=generator))
    return hoop.Splits(found, found)


class Device:
    """A device that trains ``STEPS`` steps and can then be killed, as far as its keeper can tell."""

    def __init__(self, arena: Arena, exits: ExitStack, **changes: Any) -> None:
        transport = exits.enter_context(open_transport("inproc://one:0"))
        one = Communicator(transport.endpoint(1, 1, 0, [transport.address]))
        context = RankContext(arena, one, lambda ranks: one, run=RUN, persistent_memory=True)
        standard = Settings(epochs=100, max_steps=STEPS, batch_size=4, shards=2, evaluate_every=0, pin=False)
        wanted = standard.replaced(changes)
        self.losses: dict[int, float] = {}
        self.trainer = Trainer(context, wanted, Job(model, data), self._emit, lambda: False, prefix=PREFIX)
        exits.callback(self.trainer.close)
        self.trainer.train()
        state = self.trainer.executor.stage_states[0]
        assert isinstance(state, ResidentStageState)
        self.state = state
        assert self.state.commit is not None

    def _emit(self, event: Any) -> None:
        if isinstance(event, Steps):
            self.losses |= dict(enumerate(event.loss, start=event.first + 1))

    def kill(self) -> None:
        kept = self.state.accelerator.kept
        assert kept is not None
        self.state.accelerator.synchronize()
        stdin = kept._keeper._process.stdin
        assert stdin is not None
        stdin.close()

    def targets(self) -> dict[str, torch.Tensor]:
        self.state.download()
        found = tensors_of([self.state], names_of(self.trainer._setup.model))
        return {name: one.detach().clone() for name, one in found.items()}


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", 8 << 20) as created:
        yield created


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def load(arena: Arena) -> KeptGpuState | None:
    return load_kept_gpu_state(arena, PREFIX, RUN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_state_after_the_last_step_is_found_with_its_losses(
    arena: Arena, exits: ExitStack, kind: str, channels_last: bool
) -> None:
    device = Device(arena, exits, accelerator=kind, channels_last=channels_last)
    wanted = device.targets()
    device.kill()
    found = load(arena)
    assert found is not None
    assert found.shard.step == STEPS
    tensors = tensors_from_shard(wanted, found.shard, ["4.bias"])
    assert tensors is not None
    assert {name for name, one in wanted.items() if not torch.equal(tensors[name], one)} == set()
    rows = {**read_step_log(arena, PREFIX, RUN), **found.rows}
    assert {step: row[0] for step, row in rows.items()} == device.losses
    assert load(arena) is None, "the keeper gives it once"


@pytest.mark.parametrize(
    ("words", "verified"),
    [({BEGUN: STEPS + 1}, STEPS), ({}, STEPS - 1), ({BEGUN: -5, ENDED: -5}, STEPS)],
    ids=["an update was under way", "another rank had left", "the state was being uploaded"],
)
def test_a_state_that_may_be_wrong_is_not_used(
    arena: Arena, exits: ExitStack, words: dict[int, int], verified: int
) -> None:
    device = Device(arena, exits, accelerator="emulated")
    commit = device.state.commit
    assert commit is not None
    assert commit.record is not None
    for index, value in words.items():
        commit.words[index] = value
    commit.record.step = verified
    device.kill()
    assert load(arena) is None


def test_the_state_on_a_gpu_that_had_an_error_is_not_kept(arena: Arena, exits: ExitStack) -> None:
    device = Device(arena, exits, accelerator="emulated")
    device.trainer.forget_gpu_state()
    device.kill()
    assert load(arena) is None


def test_a_state_of_another_run_is_not_used(arena: Arena, exits: ExitStack) -> None:
    device = Device(arena, exits, accelerator="emulated")
    device.kill()
    assert load_kept_gpu_state(arena, PREFIX, "another run") is None
    assert load(arena) is not None


def test_measurements_before_the_run_leave_no_state(arena: Arena, exits: ExitStack) -> None:
    """A rehearsal counts its steps nowhere; the next stride counts on from the steps of the run."""
    device = Device(arena, exits, accelerator="emulated")
    role, commit = device.trainer._role, device.state.commit
    assert commit is not None
    with role.rehearsal():  # type: ignore[attr-defined]
        role.advance(device.trainer._schedule.next_steps(0, 2), False)
        assert int(commit.words[BEGUN]) < 0
        assert int(commit.words[BEGUN]) != int(commit.words[ENDED])
    assert not commit.current
    role.advance(device.trainer._schedule.next_steps(3, 1), False)
    assert commit.words[:2].tolist() == [4, 4]
    assert np.isfinite(device.targets()["0.weight"].numpy()).all()
