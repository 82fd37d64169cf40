"""The number of devices of a run for which the user states none."""

from __future__ import annotations

import pytest

from hoop.engine.recipes import RECIPES
from hoop.engine.settings import Settings
from hoop.runs import device_count
from hoop.runs.device_count import DEFAULT_DEVICES, MOST, default_device_count


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without GPUs, of which tests set the number of cores."""
    monkeypatch.setattr(device_count, "count_gpus", lambda: 0)
    return monkeypatch


def settings_of(job: str = "mnist", **changes: object) -> Settings:
    return RECIPES[job].defaults(job).replaced(changes).check()


@pytest.mark.parametrize(
    ("cores", "shards", "devices"), [(1, 8, 1), (2, 8, 2), (4, 8, 4), (16, 8, 8), (16, 1, 1), (16, 16, 16), (3, 2, 2)]
)
def test_one_for_each_core_and_shard(machine: pytest.MonkeyPatch, cores: int, shards: int, devices: int) -> None:
    machine.setattr(device_count, "available_cores", lambda: cores)
    found = default_device_count(settings_of(shards=shards, batch_size=4096))
    assert found.devices == devices
    assert "core" in found.reason


def test_there_is_a_limit(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(device_count, "available_cores", lambda: 1000)
    assert default_device_count(settings_of(shards=900, batch_size=900)).devices == MOST


def test_gpus_count_if_they_may_be_used(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(device_count, "available_cores", lambda: 16)
    machine.setattr(device_count, "count_gpus", lambda: 2)
    assert default_device_count(settings_of()).devices == 2
    assert default_device_count(settings_of(accelerator="cpu")).devices == 4


def test_partitioned_strategies_keep_their_number(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(device_count, "available_cores", lambda: 2)
    assert default_device_count(settings_of(strategy="pipeline")).devices == DEFAULT_DEVICES
    assert default_device_count(settings_of(strategy="pipeline", replicas=5)).devices == 6


def test_the_rank_of_a_fault_is_there(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(device_count, "available_cores", lambda: 2)
    assert default_device_count(settings_of(faults="kill@rank=3,step=7")).devices == 4
