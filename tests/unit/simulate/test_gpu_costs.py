"""Steps on a GPU in the simulator: hand-computed times, the memory that devices share, costs from a measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hoop.engine.stage.peer_rows import SETS
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.runs.prediction import measured_gpu_costs
from hoop.simulate.cluster import Cluster, Host, read_cluster
from hoop.simulate.cost_model import Costs, GpuCosts, LinearCost
from hoop.simulate.search import search
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse
from hoop.strategies.memory_fit import GPU_ROW_SETS, gpu_bytes

WEIGHTS = 12_000
GPU = GpuCosts(LinearCost(0.0, 1.0), finish_s=10.0, read_s=0.001, step_s=5.0, memory=1 << 20)
COSTS = replace(Costs.uniform(3, 100.0, 200.0, weight_bytes=WEIGHTS // 3), rows=16, gpu=GPU)


def step(devices: int, gpus: int = 1, shards: int = 4, costs: Costs = COSTS) -> float:
    cluster = Cluster((Host(devices, gpus=gpus),))
    return simulate(parse("data"), costs, cluster, num_microbatches=shards).step_seconds


def test_one_device_launches_all_shards_at_once() -> None:
    """Blocks and cores do not count: 64 samples, the update, the host."""
    assert step(1) == pytest.approx(64 + 10 + 5)


def test_devices_share_a_gpu_and_read_each_other() -> None:
    """Each computes half of the samples in twice the time, and updates all weights itself."""
    read = 2 * WEIGHTS * 0.001  # the node of the other device, while that reads too
    assert step(2) == pytest.approx(64 + read + 2 * 10 + 5)
    assert step(2, gpus=2) == pytest.approx(32 + read / 2 + 10 + 5)


def test_more_shards_are_no_more_work() -> None:
    assert step(1, shards=8, costs=COSTS.with_rows(8)) == pytest.approx(step(1))


def test_the_state_must_fit_the_share_of_a_gpu() -> None:
    plan = parse("data").plan(2, 4)
    needed = gpu_bytes(COSTS.partition_blocks(), plan, 0)
    assert needed >= WEIGHTS + WEIGHTS + 4 * WEIGHTS  # weights, total, and rows for all shards, or two sets of half
    assert GPU_ROW_SETS == SETS

    def run(memory: int) -> list[int]:
        cluster = Cluster((Host(2, gpus=1, gpu_memory=memory),))
        return list(simulate(parse("data"), COSTS, cluster, num_microbatches=4).memory)

    assert run(2 * needed) == [needed, needed]
    with pytest.raises(FailedPrecondition, match=r"^memory: device 0 needs .* on its GPU, and has .*: 2 devices share"):
        run(2 * needed - 1)
    small = replace(COSTS, gpu=replace(GPU, memory=needed))
    assert [one.result is None for one in search(small, Cluster((Host(2),)), 64, wanted=[(parse("data"), 4)])] == [True]


def test_a_measurement_is_predicted_as_it_was_measured() -> None:
    measured: dict[str, Any] = {
        "rows": 64, "compute_s": 0.004, "finish_s": 0.001, "step_s": 0.0062, "stride_s": 0.0064, "stride": 32,
        "bytes_read": 2000, "copy_s": 1e-9, "sharing": 2, "total": 1 << 30,
    }  # fmt: skip
    found = measured_gpu_costs(measured)
    assert found.step_s == pytest.approx(0.0062 + 0.0002 - 0.005)
    assert found.memory == 1 << 30
    costs = replace(Costs.uniform(1, weight_bytes=2000), rows=32, gpu=found)
    assert step(2, shards=4, costs=costs) == pytest.approx(0.0064, rel=1e-3)
    alone = measured_gpu_costs({**measured, "sharing": 1, "finish_s": 0.0, "bytes_read": 0, "step_s": 0.003})
    assert alone.step_s == 0.0  # steps overlap with launches: no negative rest


def test_costs_of_a_gpu_survive_a_file() -> None:
    assert Costs.from_json(COSTS.to_json()) == COSTS
    text = COSTS.to_json()
    for wrong, message in (
        (text.replace('"read_s": 0.001', '"read_s": -1'), "gpu: read_s is -1"),
        (text.replace('"read_s": 0.001', '"speed": 1'), "gpu: no speed; there are"),
        (text.replace('"memory": 1048576', '"memory": 0'), "gpu: memory is 0"),
    ):
        assert wrong != text
        with pytest.raises(InvalidArgument, match=message):
            Costs.from_json(wrong)


def test_gpus_of_a_cluster_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[[host]]\ndevices = 4\ngpus = 2\ngpu_memory = "80GiB"\n')
    (host,) = read_cluster(path).hosts
    assert (host.gpus, host.gpu_memory) == (2, 80 << 30)
    assert read_cluster(path).gpu_memory == [(80 << 30, 2)] * 4
    assert read_cluster(path).on_gpus(None).describe() == "4 devices on 2 GPUs of 1 host"
    assert read_cluster(path).first(1).on_gpus(None).hosts[0].gpus == 2
    path.write_text("[[host]]\ndevices = 4\ngpus = 0\n")
    with pytest.raises(InvalidArgument, match="gpus: 0 is not a whole number"):
        read_cluster(path)
