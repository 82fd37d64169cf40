"""``hoop calibrate`` measures on devices of this machine, all at once, as a run does before its first step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import preloaded
from preload_server import MEASURES

from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import read_costs
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse


def test_devices_measure_shards_of_two_sizes_and_a_sum_of_gradients(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    command = [sys.executable, "-m", "hoop", "calibrate", "mnist", "--devices=2", "--memory=32MiB", "--batch-size=64"]
    environment = {**os.environ, MEASURES: "fully"}
    done = preloaded.run([*command, f"--out={out}"], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    assert "measuring mnist on 2 devices" in done.stderr
    costs = read_costs(out)
    assert (costs.about["devices"], costs.rows) == (2, 32)
    assert 1 <= costs.joint <= 4, "the shards of a device in the run with small ones, if a batch has the same bits"
    assert len(costs.blocks) == 3
    assert sum(one.forward.at(8) for one in costs.blocks) < sum(one.forward.at(8192) for one in costs.blocks)
    assert costs.machine.crowding >= 1
    assert costs.machine.shard_s > 0
    outcome = simulate(parse("data"), costs, Cluster.even(2, 2), num_microbatches=4)
    assert outcome.step_seconds > 2 * costs.machine.reduce_s
