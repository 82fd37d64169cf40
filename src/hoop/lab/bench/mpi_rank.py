"""One MPI rank of the benchmark, run under mpirun by any Python that has mpi4py and NumPy.

``mpirun -n 2 python mpi_rank.py SECONDS BYTES …`` prints, on rank 0, one JSON line a size.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys


def main() -> None:
    import numpy as np
    from mpi4py import MPI

    spec = importlib.util.spec_from_file_location("timing", pathlib.Path(__file__).with_name("timing.py"))
    assert spec is not None
    assert spec.loader is not None
    timing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(timing)
    world = MPI.COMM_WORLD
    for size in map(int, sys.argv[2:]):
        vector = np.zeros(size // 4, np.float32)
        median = timing.median_seconds(
            lambda vector=vector: world.Allreduce(MPI.IN_PLACE, vector),
            lambda value: world.bcast(value, root=0),
            float(sys.argv[1]),
        )
        vector[:] = world.rank + 1
        world.Allreduce(MPI.IN_PLACE, vector)
        assert (vector == world.size * (world.size + 1) / 2).all(), f"rank {world.rank}: the sum is wrong"
        if world.rank == 0:
            sys.stdout.write(json.dumps({"bytes": size, "seconds": median}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
