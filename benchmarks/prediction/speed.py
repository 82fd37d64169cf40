"""How long a simulation takes: one step of many devices, in CPU seconds.

python benchmarks/prediction/speed.py
python benchmarks/prediction/speed.py --devices 4096
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from hoop.plan.partition import Block, StageDevice, partition
from hoop.report.tables import Column, Table
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs, Machine
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse


def time_simulation(spec: str, devices: int, num_microbatches: int) -> list[object]:
    costs = Costs.uniform(devices, 1e-3, 2e-3, weight_bytes=4_000, output_bytes=10_000, machine=Machine())
    strategy, cluster, started = parse(spec), Cluster.even(devices), time.process_time()
    outcome = simulate(strategy, costs, cluster, num_microbatches=num_microbatches, trace=False)
    seconds = time.process_time() - started
    return [spec, devices, num_microbatches, sum(map(len, outcome.plan.ranks)), seconds]


def time_partition(blocks: int, stages: int) -> list[object]:
    block_list = [Block(str(index), 1.0 + index * 7 % 5, 1000) for index in range(blocks)]
    started = time.process_time()
    partition(block_list, [StageDevice(str(index)) for index in range(stages)])
    return [f"a cut of {blocks} blocks", stages, None, None, time.process_time() - started]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    rows = []
    for spec, num_microbatches in (
        ("data", options.devices),
        ("pipeline:1f1b", 64),
        ("hybrid:replicas=128,1f1b", 1024),
    ):
        print(f"simulating {spec} on {options.devices} …", file=sys.stderr)
        rows.append(time_simulation(spec, options.devices, num_microbatches))
    rows.append(time_partition(4 * options.devices, 8))
    names = [Column("what"), Column("devices"), Column("micro-batches"), Column("instructions")]
    table = Table([*names, Column("processor", "s", digits=2)], rows)
    print(json.dumps(table.plain()) if options.json else table.markdown())


if __name__ == "__main__":
    main()
