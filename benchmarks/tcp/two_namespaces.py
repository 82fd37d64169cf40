"""All-reduce over TCP between two network namespaces of this machine: Hoop beside Gloo.

    namespace 0                       namespace 1
    rank 0 ── hoop0 10.213.0.1 ═══ 10.213.0.2 hoop0 ── rank 1

Messages pass both network stacks and a pair of virtual interfaces, as between two containers; there is no loopback
and no shared memory. A namespace lives as long as the process that holds it, which ends when this script's end of a
pipe closes: nothing is left behind, however the script ends.

    python benchmarks/tcp/two_namespaces.py --seconds 1
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

INTERFACE = "hoop0"
HOSTS = ("10.213.0.1", "10.213.0.2")
MASTER_PORT = 29500
"""Any port is free in a new namespace."""
TOOLS = ("ip", "unshare", "nsenter")
START_S = 60.0


def main() -> None:
    options = _options()
    if os.geteuid() != 0:
        sys.exit("two_namespaces.py must be run as root: only root may make network namespaces")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(f"two_namespaces.py needs {' and '.join(missing)}: install iproute2 and util-linux")
    contenders = options.contenders.split(",")
    times: dict[str, dict[int, list[float]]] = {name: {size: [] for size in options.sizes} for name in contenders}
    try:
        with two_namespaces() as prefixes:
            for turn in range(options.turns):  # in turns, so that noise affects all contenders alike
                for name in contenders:
                    for answer in measure(prefixes, name, options):
                        times[name][int(answer["bytes"])].append(float(answer["seconds"]))
                        text = f"turn {turn + 1}, {name}, {answer['bytes']} bytes: {answer['seconds'] * 1e6:.0f} us"
                        print(text, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit("interrupted; the namespaces are gone")
    medians = {
        name: {size: sorted(found)[len(found) // 2] for size, found in by_size.items()}
        for name, by_size in times.items()
    }
    if options.json:
        print(json.dumps({"seconds": medians, "ranks": options.ranks, "turns": options.turns}))
    else:
        print(as_table(medians))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="All-reduce over TCP between two network namespaces.")
    parser.add_argument(
        "--contenders", default="tcp,gloo", help="of tcp, torch (both Hoop), gloo; the last is the yardstick"
    )
    parser.add_argument("--ranks", type=int, default=2, help="even ones in one namespace, odd ones in the other")
    parser.add_argument("--sizes", type=_sizes, default="4,437544,4194304,67108864", help="bytes, with commas")
    parser.add_argument("--seconds", type=float, default=0.7, help="how long each figure is measured")
    parser.add_argument("--turns", type=int, default=3, help="how often; the median counts")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser.parse_args()


def _sizes(text: str) -> list[int]:
    sizes = [int(one) for one in text.split(",")]
    if any(size < 4 or size % 4 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are whole float32 elements, 4 bytes each")
    return sizes


@contextmanager
def two_namespaces() -> Iterator[list[list[str]]]:
    """For each namespace, the command prefix that runs a command in it."""
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
        yield prefixes


def _ip(prefix: list[str], *command: str) -> None:
    done = subprocess.run([*prefix, "ip", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"two_namespaces.py: ip {' '.join(command)}: {done.stderr.strip()}")


def measure(prefixes: list[list[str]], contender: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The times of rank 0 by size; the ranks run the program of ``hoop bench``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    with ExitStack() as stack:
        ranks = []
        for rank in range(options.ranks):
            command = [*prefixes[rank % 2], sys.executable, "-m", "hoop.lab.bench.rank"]
            process = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.append(process)
        for rank, process in enumerate(ranks):
            task = {"contender": contender, "rank": rank, "ranks": options.ranks, "sizes": options.sizes}
            location = {"host": HOSTS[rank % 2], "master": f"{HOSTS[0]}:{MASTER_PORT}"}
            _write(process, {**task, **location, "seconds": options.seconds})
        addresses = [_read(process, contender) for process in ranks]
        for process in ranks:
            _write(process, addresses)
        for _ in options.sizes:
            yield _read(ranks[0], contender)
        for rank, process in enumerate(ranks):
            if process.wait(START_S):
                sys.exit(f"{contender}: rank {rank} ended with code {process.returncode}")


def _write(process: subprocess.Popen[str], message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str], contender: str) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{contender}: a rank ended with code {process.wait()}")
    return json.loads(line)


def as_table(medians: dict[str, dict[int, float]]) -> str:
    """A Markdown table with one row per size."""
    *names, baseline = medians
    heads = [f"{name}, us" for name in (*names, baseline)] + [f"{baseline} / {name}" for name in names]
    lines = [f"| bytes | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for size, baseline_seconds in medians[baseline].items():
        cells = [f"{medians[name][size] * 1e6:.0f}" for name in (*names, baseline)]
        cells += [f"{baseline_seconds / medians[name][size]:.2f}x" for name in names]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
