"""A Ray cluster of several nodes on this machine, until standard input ends: a head without CPUs, nodes with one each.

Prints the address of the head. Reads ``add`` and ``remove`` from standard input, a line
each, and prints the word again when it is done. A node is removed without notice: its processes are killed.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

STARTS = 5


def start(**head: object) -> Cluster:
    """A cluster of a head. Ray gives it 30 s to start, which is short on a busy machine; it is tried again."""
    for attempt in range(STARTS):
        try:
            return Cluster(initialize_head=True, head_node_args=head)
        except Exception as error:  # Ray raises nothing more special
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise
    raise AssertionError("it returns or raises")


def add(cluster: Cluster) -> Any:
    """Adds a node, in the same way."""
    for attempt in range(STARTS):
        try:
            return cluster.add_node(num_cpus=1, wait=False)
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise
    raise AssertionError("it returns or raises")


def main() -> None:
    cluster = start(num_cpus=0, include_dashboard=False)
    try:
        nodes = [add(cluster) for _ in range(int(sys.argv[1]))]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "add":
                nodes.append(add(cluster))
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            print(line.strip(), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
