"""What mirrors cost: the step of each strategy that holds parts of a model, with them and without, in turns.

    python benchmarks/recovery/mirrors.py
    python benchmarks/recovery/mirrors.py --strategies ring,ps:bsp --turns 20 --json

Ranks are processes of this machine that share memory, one core each; no server and no coordinator. Both kinds of run
are made by the same processes, one after the other, so what else the machine does hits both alike. A step is timed from
its beginning to the next one's; processor time, bytes and memory are those of all ranks together.
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
"""Steps a turn are a multiple of it: asynchronous strategies meet so often."""
ARENA_BYTES = 256 << 20
HEADER = "| strategy | without, ms | with, ms | ratio | CPU ratio | bytes a step | memory |"


def turn(transport: ShmTransport, arena: Arena, peers: Sequence[Address], rank: int, job: str) -> Any:
    """One run of one rank: its steps' seconds, processor time, bytes and memory."""
    told = json.loads(job)
    number, recipe = told["number"], RECIPES[told["settings"]["job"]]
    opened: list[Communicator] = []

    def group(ranks: Sequence[int]) -> Communicator:
        identity = 100 * number + 1 + ranks[0] + 10 * len(ranks)
        place = transport.endpoint(identity, 1, list(ranks).index(rank), [peers[one] for one in ranks])
        opened.append(Communicator(place))
        return opened[-1]

    def never(patience: float) -> RankContext:
        raise AssertionError("nobody is lost here")

    marks: list[tuple[float, float, int]] = []

    def stopping() -> bool:
        marks.append((time.perf_counter(), time.process_time(), run.executor.bytes_sent))
        return False

    whole = group(range(len(peers)))
    world = RankContext(arena, whole, group, (rank, len(peers)), never)
    before = arena.used
    settings = Settings().replaced({**recipe.settings, **told["settings"]})
    run = Trainer(world, settings, recipe, lambda event: None, stopping, None, f"turn{number}.")
    run.train()
    begun = marks[::2]  # asked as a run goes on, and as ranks meet
    steps = told["settings"]["max_steps"] / len(begun)
    found = {
        "seconds": [(late[0] - early[0]) / steps for early, late in itertools.pairwise(begun)],
        "cpu": (begun[-1][1] - begun[0][1]) / steps / (len(begun) - 1),
        "bytes": (begun[-1][2] - begun[0][2]) / steps / (len(begun) - 1),
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


def started(devices: int) -> list[Connection]:
    """Ranks, which know each other."""
    links = []
    for rank in range(devices):
        ours, theirs = Pipe()
        if not os.fork():
            for link in [*links, ours]:
                link.close()
            try:
                rank_main(theirs, rank)
            finally:
                os._exit(0)
        theirs.close()
        links.append(ours)
    addresses = [link.recv() for link in links]
    for link in links:
        link.send(addresses)
    return links


def measured(links: Sequence[Connection], strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """One strategy, in turns."""
    found: dict[bool, list[list[dict[str, Any]]]] = {False: [], True: []}
    for number in range(2 * options.turns):
        replicate = bool(number % 2) ^ bool(number // 2 % 2)  # neither is always first
        print(f"\r{strategy}: turn {number + 1} of {2 * options.turns}   ", end="", file=sys.stderr, flush=True)
        settings = {
            "job": options.job,
            "strategy": strategy,
            "max_steps": options.steps,
            "replicate": replicate,
        }
        settings |= {"trace_steps": 0, "evaluate_every": 0, "checkpoint_every": 0}
        options.number += 1
        for link in links:
            link.send(json.dumps({"number": options.number, "settings": settings}))
        found[replicate].append([link.recv() for link in links])
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    told: dict[str, Any] = {"strategy": strategy}
    for replicate, name in ((False, "without"), (True, "with")):
        turns = found[replicate]
        told[f"step_s_{name}"] = statistics.median(one for ranks in turns for one in ranks[0]["seconds"])
        told[f"cpu_s_{name}"] = statistics.median(sum(one["cpu"] for one in ranks) for ranks in turns)
        told[f"bytes_{name}"] = sum(one["bytes"] for one in turns[-1])
        told[f"memory_{name}"] = sum(one["memory"] for one in turns[-1])
    pairs = zip(found[True], found[False], strict=True)
    ratios = [statistics.median(one[0]["seconds"]) / statistics.median(other[0]["seconds"]) for one, other in pairs]
    return told | {"ratio": statistics.median(ratios), "ratios": sorted(ratios)}


def row(told: dict[str, Any]) -> str:
    moved = format_size(round(told["bytes_with"] - told["bytes_without"]))
    held = format_size(told["memory_with"] - told["memory_without"])
    return (
        f"| `{told['strategy']}` | {1000 * told['step_s_without']:.2f} | {1000 * told['step_s_with']:.2f} "
        f"| {told['ratio']:.2f} | {told['cpu_s_with'] / told['cpu_s_without']:.2f} | +{moved} | +{held} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--job", default="mnist", choices=RECIPES)
    parser.add_argument("--turns", type=int, default=6, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=3 * SPAN, help=f"of a run; a multiple of {SPAN}")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    options.number = 0
    RECIPES[options.job].data()
    links = started(options.devices)
    load = os.getloadavg()[0]
    found = [measured(links, strategy, options) for strategy in options.strategies.split(",")]
    for link in links:
        link.send("")
    for _ in links:
        os.wait()
    environment = f"{os.cpu_count()} cores, {platform.machine()}, load {load:.1f} at the start"
    if options.json:
        print(json.dumps({"environment": environment, "strategies": found}))
        return
    print(HEADER + "\n" + "|---" * 7 + "|")
    print("\n".join(map(row, found)))
    print(f"\n{options.devices} devices, {options.job}, {options.turns} turns of {options.steps} steps; {environment}")


if __name__ == "__main__":
    main()
