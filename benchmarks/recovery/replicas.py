"""The cost of replicas: the step of each strategy whose ranks hold parts of a model, with them and without, in turns.

    python benchmarks/recovery/replicas.py
    python benchmarks/recovery/replicas.py --strategies ring,ps:bsp --turns 20 --json
    python benchmarks/recovery/replicas.py --strategies pipeline:1f1b --devices 3 --replicas 1,2

Ranks are processes of this machine that share memory, with one core each; there is no server and no coordinator. The
same processes make all kinds of run in turns, so that other load affects them alike. A step is timed from its start to
the start of the next; CPU time, bytes and memory are sums over all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.config import format_size
from hoop.engine.recipes import RECIPES
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.shm_listener import ShmTransport

STRATEGIES = "ps:bsp,ring,pipeline:1f1b,pipeline:gpipe,ring:async"
SPAN = 32
"""The steps of a turn are a multiple of this: asynchronous strategies synchronize once in this many steps."""
ARENA_BYTES = 256 << 20
HEADER = "| strategy | replicas | without, ms | with, ms | ratio | CPU ratio | bytes a step | memory |"


def turn(transport: ShmTransport, arena: Arena, peers: Sequence[Address], rank: int, job: str) -> Any:
    """One run of one rank: the seconds of its steps, CPU time, bytes and memory."""
    request = json.loads(job)
    number, recipe = request["number"], RECIPES[request["settings"]["job"]]
    opened: list[Communicator] = []

    def group(ranks: Sequence[int]) -> Communicator:
        identity = 100 * number + 1 + ranks[0] + 10 * len(ranks)
        endpoint = transport.endpoint(identity, 1, list(ranks).index(rank), [peers[one] for one in ranks])
        opened.append(Communicator(endpoint))
        return opened[-1]

    def no_reassignment(*_: object) -> RankContext:
        raise AssertionError("no rank is lost in this benchmark")

    marks: list[tuple[float, float, int]] = []

    def should_stop() -> bool:
        marks.append((time.perf_counter(), time.process_time(), run.executor.bytes_sent))
        return False

    whole = group(range(len(peers)))
    context = RankContext(arena, whole, group, (rank, len(peers)), no_reassignment)
    before = arena.used
    settings = Settings().replaced({**recipe.settings, **request["settings"]})
    run = Trainer(context, settings, recipe, lambda event: None, should_stop, None, f"turn{number}.")
    run.train()
    starts = marks[::2]  # every other call: when a step starts, not when the ranks synchronize
    steps = request["settings"]["max_steps"] / len(starts)
    found = {
        "seconds": [(end[0] - start[0]) / steps for start, end in itertools.pairwise(starts)],
        "cpu": (starts[-1][1] - starts[0][1]) / steps / (len(starts) - 1),
        "bytes": (starts[-1][2] - starts[0][2]) / steps / (len(starts) - 1),
        "memory": arena.used - before,
    }
    run.close()
    for buffer in list(arena.buffers()):
        arena.free(buffer.name)
    for one in opened:
        one.close()
    return found


def rank_main(link: Connection, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", ARENA_BYTES)
        transport = ShmTransport(Address("127.0.0.1", 0), arena)
        link.send([transport.address.host, transport.address.port])
        peers = [Address(*one) for one in link.recv()]
        while job := link.recv():
            link.send(turn(transport, arena, peers, rank, job))
        transport.close()
        arena.close()


def start_ranks(devices: int) -> list[Connection]:
    """Fork the ranks and exchange their addresses."""
    links = []
    for rank in range(devices):
        local, remote = Pipe()
        if not os.fork():
            for link in [*links, local]:
                link.close()
            try:
                rank_main(remote, rank)
            finally:
                os._exit(0)
        remote.close()
        links.append(local)
    addresses = [link.recv() for link in links]
    for link in links:
        link.send(addresses)
    return links


def measure(links: Sequence[Connection], strategy: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one strategy, in turns: without replicas, and with each number of them."""
    kinds = [0, *options.replicas]
    found: dict[int, list[list[dict[str, Any]]]] = {replicas: [] for replicas in kinds}
    for number in range(options.turns):
        for replicas in kinds if number % 2 else reversed(kinds):  # none is always first
            print(f"\r{strategy}: turn {number + 1} of {options.turns}   ", end="", file=sys.stderr, flush=True)
            settings = {
                "job": options.job,
                "strategy": strategy,
                "max_steps": options.steps,
                "replicate": bool(replicas),
                "replicas": max(1, replicas),
            }
            settings |= {"trace_steps": 0, "evaluate_every": 0, "checkpoint_every": 0}
            options.number += 1
            for link in links:
                link.send(json.dumps({"number": options.number, "settings": settings}))
            found[replicas].append([link.recv() for link in links])
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return [compare(strategy, replicas, found[0], found[replicas]) for replicas in options.replicas]


def compare(
    strategy: str, replicas: int, without: list[list[dict[str, Any]]], replicated: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """The figures of turns with replicas beside those of turns without."""
    result: dict[str, Any] = {"strategy": strategy, "replicas": replicas}
    for turns, name in ((without, "without"), (replicated, "with")):
        result[f"step_s_{name}"] = statistics.median(one for ranks in turns for one in ranks[0]["seconds"])
        result[f"cpu_s_{name}"] = statistics.median(sum(one["cpu"] for one in ranks) for ranks in turns)
        result[f"bytes_{name}"] = sum(one["bytes"] for one in turns[-1])
        result[f"memory_{name}"] = sum(one["memory"] for one in turns[-1])
    pairs = zip(replicated, without, strict=True)
    ratios = [statistics.median(one[0]["seconds"]) / statistics.median(other[0]["seconds"]) for one, other in pairs]
    return result | {"ratio": statistics.median(ratios), "ratios": sorted(ratios)}


def row(result: dict[str, Any]) -> str:
    size = format_size(round(result["bytes_with"] - result["bytes_without"]))
    memory = format_size(result["memory_with"] - result["memory_without"])
    return (
        f"| `{result['strategy']}` | {result['replicas']} | {1000 * result['step_s_without']:.2f} "
        f"| {1000 * result['step_s_with']:.2f} | {result['ratio']:.2f} "
        f"| {result['cpu_s_with'] / result['cpu_s_without']:.2f} | +{size} | +{memory} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--job", default="mnist", choices=RECIPES)
    parser.add_argument("--replicas", default="1", help="how many of each part; several separated by commas")
    parser.add_argument("--turns", type=int, default=6, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=3 * SPAN, help=f"of a run; a multiple of {SPAN}")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    options.number = 0
    options.replicas = [int(one) for one in options.replicas.split(",")]
    RECIPES[options.job].data()
    links = start_ranks(options.devices)
    load = os.getloadavg()[0]
    found = [one for strategy in options.strategies.split(",") for one in measure(links, strategy, options)]
    for link in links:
        link.send("")
    for _ in links:
        os.wait()
    environment = f"{os.cpu_count()} cores, {platform.machine()}, load {load:.1f} at the start"
    if options.json:
        print(json.dumps({"environment": environment, "strategies": found}))
        return
    print(HEADER + "\n" + "|---" * 8 + "|")
    print("\n".join(map(row, found)))
    print(f"\n{options.devices} devices, {options.job}, {options.turns} turns of {options.steps} steps; {environment}")


if __name__ == "__main__":
    main()
