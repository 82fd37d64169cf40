"""Calls of the control plane on one machine: Unix sockets, TLS and plaintext, compared with another version of Hoop.

    python benchmarks/calls/calls.py --turns 20 --before ../hoop-before/src

Every way has a cluster and a client of its own, all at the same time, and they are measured in turns: so other load of
the machine falls on all. CPU is the time of the client and of the server that it calls.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hoop
from hoop.topology import Address
from hoop.transport.base import Endpoint
from hoop.transport.tcp_listener import TcpTransport

WAYS = {"local": (), "token": ("--token-file",), "insecure": ("--insecure",)}
WAIT_S = 600.0
BULK = 64 << 20
CALLS = 200
"""Calls of one measurement."""


# ---- one way, in a process of its own


@contextlib.contextmanager
def cluster_of(way: str, token: Path) -> Iterator[str]:
    """``hoop up`` with one device; yields the coordinator's address."""
    options = [*WAYS[way], *([str(token)] if way == "token" else [])]
    command = [sys.executable, "-m", "hoop", "up", "--devices", "1", "--json", "--memory", "256MiB", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as up:
        assert up.stdout is not None, "stdout is a pipe"
        try:
            yield str(json.loads(up.stdout.readline())["coordinator"])
        finally:
            up.terminate()
            up.wait(WAIT_S)


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], object], pid: int | None = None, times: int = 1) -> tuple[float, float]:
    """Wall and processor seconds of one of ``times`` runs; ``pid``: the server's."""

    def used() -> float:
        return time.process_time() + (cpu_s(pid) if pid is not None else 0.0)

    before, began = used(), time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times, (used() - before) / times


def serve_measurements(way: str) -> None:
    """Measures what standard input names, a line each, and prints wall and processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_text(f"join-{secrets.token_hex(32)}")
        token.chmod(0o600)
        secret = token.read_text() if way == "token" else None
        with cluster_of(way, token) as address, hoop.connect(address, token=secret) as cluster:
            status, device, data = cluster.status(), cluster.device(1), bytes(BULK)
            device.allocate("bulk", BULK)
            works: dict[str, Callable[[], tuple[float, float]]] = {
                "connect": lambda: timed(lambda: hoop.connect(address, token=secret).close(), status.pid, 5),
                "call": lambda: timed(cluster.status, status.pid, CALLS),
                "write": lambda: timed(lambda: device.write("bulk", data), status.devices[0].device.pid),
                "read": lambda: timed(lambda: device.read("bulk", BULK), status.devices[0].device.pid),
            }
            for line in sys.stdin:
                print(*works[line.strip()](), flush=True)


def measure_train() -> None:
    """Starts a training without steps, as ``hoop train`` does on one machine."""
    command = [sys.executable, "-m", "hoop", "train", "mnist", "-n", "2", "--epochs", "0", "--json"]
    for _ in sys.stdin:
        before, began = os.times(), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
        wall, after = time.perf_counter() - began, os.times()
        print(wall, after[2] + after[3] - before[2] - before[3], flush=True)


def exchange(sender: Endpoint, receiver: Endpoint) -> None:
    until = time.monotonic() + WAIT_S
    sender.send(1, memoryview(b"x"), until)
    receiver.recv_into(0, memoryview(bytearray(1)), until)


def measure_link() -> None:
    """Until the first byte of a new TCP link between two ranks of this process has arrived, with a key and without."""
    for number, line in enumerate(sys.stdin, start=1):
        key = b"k" * 32 if line.strip() == "link with a key" else b""
        with (
            TcpTransport(Address("127.0.0.1", 0), key=key) as one,
            TcpTransport(Address("127.0.0.1", 0), key=key) as two,
        ):
            peers = [one.address, two.address]
            ends = [transport.endpoint(number, 1, rank, peers) for rank, transport in enumerate((one, two))]

            print(*timed(partial(exchange, *ends)), flush=True)
            for end in ends:
                end.close()


# ---- all ways in turns

MEASURED = {
    **dict.fromkeys(WAYS, ("connect", "call", "write", "read")),
    "train": ("start",),
    "links": ("link with a key", "link without a key"),
}


def start_child(way: str, source: Path | None) -> subprocess.Popen[str]:
    """Measures one way on demand, with the Hoop of ``source`` if there is one."""
    environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    command = [sys.executable, __file__, "--only", way]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child: subprocess.Popen[str], what: str) -> tuple[float, float]:
    assert child.stdin is not None, "stdin is a pipe"
    assert child.stdout is not None, "stdout is a pipe"
    child.stdin.write(f"{what}\n")
    child.stdin.flush()
    wall, cpu = map(float, child.stdout.readline().split())
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--before", type=Path, help="folder src of another version of Hoop")
    parser.add_argument("--ways", default=",".join(MEASURED), help="what is measured, separated by commas")
    parser.add_argument("--only", choices=MEASURED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        {"train": measure_train, "links": measure_link}.get(options.only, lambda: serve_measurements(options.only))()
        return
    sources = {"now": None} | ({"before": options.before} if options.before else {})
    ways = options.ways.split(",")
    children = {(way, name): start_child(way, source) for way in ways for name, source in sources.items()}
    taken: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for turn in range(options.turns + 1):
        for what in dict.fromkeys(what for way in ways for what in MEASURED[way]):
            for (way, name), child in children.items():
                if what in MEASURED[way] and (result := ask(child, what)) and turn:  # the first turn is not counted
                    taken.setdefault((what, way, name), []).append(result)
    for child in children.values():
        child.communicate(timeout=WAIT_S)
    print("| | way | version | wall ms: median | least | CPU ms: median | least |\n|---|---|---|---|---|---|---|")
    for (what, way, name), results in taken.items():
        numbers = (
            f"{1e3 * pick(column):.4g}" for column in zip(*results, strict=True) for pick in (statistics.median, min)
        )
        print(f"| {what} | {way} | {name} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
