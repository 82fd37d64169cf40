"""All-reduce over TCP between two network namespaces of this machine: Hoop beside Gloo.

    namespace 0                       namespace 1
    rank 0 ── hoop0 10.213.0.1 ═══ 10.213.0.2 hoop0 ── rank 1

Messages pass both network stacks and a pair of virtual interfaces, as between two containers; there is no loopback
and no shared memory. A namespace lives as long as the process that holds it, which ends when this script's end of a
pipe closes: nothing is left behind, however the script ends.

    python benchmarks/tcp/two_namespaces.py --seconds 1

With ``--loopback`` the ranks talk over 127.0.0.1 instead, which needs no root. With ``--sockets 1,2,4`` Hoop's ``tcp``
runs with each of these numbers of sockets a link (HOOP_SOCKETS_PER_LINK), in turns:

    python benchmarks/tcp/two_namespaces.py --loopback --contenders tcp --sockets 1,2,4
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

INTERFACE = "hoop0"
HOSTS = ("10.213.0.1", "10.213.0.2")
MASTER_PORT = 29500
"""Any port is free in a new namespace."""
TOOLS = ("ip", "unshare", "nsenter")
START_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where ranks run, even ones in the first place and odd ones in the second."""

    host: str
    interface: str
    prefix: tuple[str, ...] = ()
    """Runs a command there."""


@dataclass(frozen=True)
class Contender:
    """What is measured: a program of ``hoop bench``, and for ``tcp`` the number of sockets a link, if one is given."""

    program: str
    sockets: int | None = None

    def __str__(self) -> str:
        if self.sockets is None:
            return self.program
        return f"{self.program} with {self.sockets} socket{'s' * (self.sockets > 1)}"

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.sockets is None else {"HOOP_SOCKETS_PER_LINK": str(self.sockets)}


def main() -> None:
    options = _options()
    contenders, yardstick = _contenders(options)
    times: dict[Contender, dict[int, list[float]]] = {one: {size: [] for size in options.sizes} for one in contenders}
    try:
        with loopback() if options.loopback else two_namespaces() as places:
            for turn in range(options.turns):  # in turns, so that noise affects all contenders alike
                for contender in contenders:
                    for answer in measure(places, contender, options):
                        times[contender][int(answer["bytes"])].append(float(answer["seconds"]))
                        took = f"{answer['bytes']} bytes: {answer['seconds'] * 1e6:.0f} us"
                        print(f"turn {turn + 1}, {contender}, {took}", file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit("interrupted; the namespaces are gone")
    medians = {
        str(contender): {size: sorted(found)[len(found) // 2] for size, found in by_size.items()}
        for contender, by_size in times.items()
    }
    if options.json:
        print(json.dumps({"seconds": medians, "ranks": options.ranks, "turns": options.turns}))
    else:
        print(as_table(medians, str(yardstick)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="All-reduce over TCP between two network namespaces.")
    parser.add_argument(
        "--contenders", default="tcp,gloo", help="of tcp, torch (both Hoop), gloo; others are compared with the last"
    )
    parser.add_argument(
        "--sockets", type=_numbers, default=[], help="numbers of sockets a link, with commas; tcp runs with each"
    )
    parser.add_argument("--loopback", action="store_true", help="over 127.0.0.1 instead; needs no root")
    parser.add_argument("--ranks", type=int, default=2, help="even ones in one namespace, odd ones in the other")
    parser.add_argument("--sizes", type=_sizes, default="4,437544,4194304,67108864", help="bytes, with commas")
    parser.add_argument("--seconds", type=float, default=0.7, help="how long each figure is measured")
    parser.add_argument("--turns", type=int, default=3, help="how often; the median counts")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser.parse_args()


def _contenders(options: argparse.Namespace) -> tuple[list[Contender], Contender]:
    """All contenders, and the one that the others are compared with: the last program, with its fewest sockets."""
    *_, last = programs = options.contenders.split(",")
    found = [
        Contender(program, sockets)
        for program in programs
        for sockets in (options.sockets if program == "tcp" and options.sockets else [None])
    ]
    return found, next(one for one in found if one.program == last)


def _numbers(text: str) -> list[int]:
    return sorted(int(one) for one in text.split(","))


def _sizes(text: str) -> list[int]:
    sizes = [int(one) for one in text.split(",")]
    if any(size < 4 or size % 4 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are whole float32 elements, 4 bytes each")
    return sizes


@contextmanager
def loopback() -> Iterator[list[Place]]:
    yield [Place("127.0.0.1", "lo")] * 2


@contextmanager
def two_namespaces() -> Iterator[list[Place]]:
    if os.geteuid() != 0:
        sys.exit("two_namespaces.py must be run as root, or with --loopback: only root may make network namespaces")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(f"two_namespaces.py needs {' and '.join(missing)}: install iproute2 and util-linux")
    with ExitStack() as stack:
        holders = []
        for _ in HOSTS:
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to this script only, which closes the pipe
            )
            stack.callback(holder.wait)
            assert holder.stdin is not None
            assert holder.stdout is not None
            stack.callback(holder.stdin.close)
            if not holder.stdout.readline():
                sys.exit("two_namespaces.py: this machine lets nobody make network namespaces (unshare --net)")
            holders.append(holder)
        prefixes = [["nsenter", f"--net=/proc/{holder.pid}/ns/net"] for holder in holders]
        other = str(holders[1].pid)
        _ip(prefixes[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", other)
        for prefix, host in zip(prefixes, HOSTS, strict=True):
            _ip(prefix, "address", "add", f"{host}/24", "dev", INTERFACE)
            _ip(prefix, "link", "set", INTERFACE, "up")
            _ip(prefix, "link", "set", "lo", "up")
        yield [Place(host, INTERFACE, tuple(prefix)) for host, prefix in zip(HOSTS, prefixes, strict=True)]


def _ip(prefix: list[str], *command: str) -> None:
    done = subprocess.run([*prefix, "ip", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"two_namespaces.py: ip {' '.join(command)}: {done.stderr.strip()}")


def measure(places: list[Place], contender: Contender, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The times of rank 0 by size; the ranks run the program of ``hoop bench``."""
    environment = {**os.environ, **contender.environment, "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = places[0].interface
    master = f"{places[0].host}:{MASTER_PORT if places[0].prefix else _free_port()}"
    with ExitStack() as stack:
        ranks = []
        for rank in range(options.ranks):
            command = [*places[rank % 2].prefix, sys.executable, "-m", "hoop.lab.bench.rank"]
            process = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.append(process)
        for rank, process in enumerate(ranks):
            task = {"contender": contender.program, "rank": rank, "ranks": options.ranks, "sizes": options.sizes}
            location = {"host": places[rank % 2].host, "master": master}
            _write(process, {**task, **location, "seconds": options.seconds})
        addresses = [_read(process, contender) for process in ranks]
        for process in ranks:
            _write(process, addresses)
        for _ in options.sizes:
            yield _read(ranks[0], contender)
        for rank, process in enumerate(ranks):
            if process.wait(START_S):
                sys.exit(f"{contender}: rank {rank} ended with code {process.returncode}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _write(process: subprocess.Popen[str], message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str], contender: Contender) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{contender}: a rank ended with code {process.wait()}")
    return json.loads(line)


def as_table(medians: dict[str, dict[int, float]], yardstick: str) -> str:
    """A Markdown table with one row per size, and for each other contender how often it fits into the yardstick."""
    others = [name for name in medians if name != yardstick]
    heads = [f"{name}, us" for name in medians] + [f"{yardstick} / {name}" for name in others]
    lines = [f"| bytes | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for size, yardstick_seconds in medians[yardstick].items():
        cells = [f"{medians[name][size] * 1e6:.0f}" for name in medians]
        cells += [f"{yardstick_seconds / medians[name][size]:.2f}x" for name in others]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
