"""Ring against naive all-reduce, through real servers, with and without link latency.

Paper 1 reports 83 ms a step for its naive all-reduce and 8 ms for its ring. This measures, for each number of
devices, vector size and link latency, the median time of one all-reduce as the client sees it:

    listed    the paper's listing as it stands: the client loops over the devices with the lab's Memcpy,
              sums, and loops again
    relay     the lab's NaiveAllReduce: all devices at once to the coordinator and back
    stepped   the ring, with the coordinator stepping every round
    ring      the ring, run by the devices alone after one launch
    tree      a tree, run by the devices alone

    python benchmarks/ring_vs_naive/run.py --out table.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import hoop
from hoop.lab.papers.mnist_pipeline import VARIANTS, AllReduceVariants

HERE = pathlib.Path(__file__).parent


def free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


@contextlib.contextmanager
def cluster(devices: int, latency: float) -> Iterator[str]:
    """A coordinator and devices, behind slow links if there is a latency; yields the coordinator's address."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:

        def start(*command: str, **options: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE, **options)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        address_file = f"{folder}/coordinator"
        coordinator = start(sys.executable, "-m", "hoop", "coordinator", "--address-file", address_file)
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().split()[1]
        ports = free_ports(4 * devices)
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        if latency:
            plan = [f"{listen}:{target}" for listen, target in pairs]
            proxy = start(sys.executable, str(HERE / "slow_links.py"), str(latency), *plan)
            assert proxy.stdout is not None
            proxy.stdout.readline()
        for index in range(devices):
            (front, port), (data_front, data_port) = pairs[2 * index : 2 * index + 2]
            command = [sys.executable, "-m", "hoop", "device", "--join", address, "--memory", "64MiB"]
            command += ["--port", str(port), "--data-port", str(data_port)]
            if latency:
                command += [
                    "--advertise",
                    f"127.0.0.1:{front}",
                    "--advertise-data",
                    f"127.0.0.1:{data_front}",
                ]
            start(*command)
        with hoop.connect(address) as watcher:
            joined = 0
            for event in watcher.events(follow=True):
                joined += event.kind == "device_joined"
                if joined == devices:
                    break
        yield address


def measure(run: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < stop and len(times) < 200):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| devices | vector | link latency | "
        + " | ".join(f"{variant}, ms" for variant in VARIANTS)
        + " | listed / ring |",
        "|---" * (len(VARIANTS) + 4) + "|",
    ]
    for row in rows:
        times = [float(str(row[variant])) for variant in VARIANTS]
        best = min(times)
        cells = [f"**{ms:.1f}**" if ms == best else f"{ms:.1f}" for ms in times]
        size = int(str(row["bytes"]))
        name = f"{size} B" if size < 1024 else f"{size / 1024:.0f} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        ratio = times[VARIANTS.index("listed")] / times[VARIANTS.index("ring")]
        latency = float(str(row["latency_ms"]))
        lines.append(
            f"| {row['devices']} | {name} | {f'{latency:g} ms' if latency else 'none added'} | "
            + " | ".join(cells)
            + f" | {ratio:.1f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--bytes", default="136,875088,8388608", help="vector sizes; 875088 is the MLP's gradient")
    parser.add_argument("--latency-ms", default="0,1,5", help="added to each direction of every link to a device")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each figure is measured")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for latency in map(float, arguments.latency_ms.split(",")):
        for devices in map(int, arguments.devices.split(",")):
            with cluster(devices, latency / 1000) as address, hoop.connect(address) as client:
                for size in map(int, arguments.bytes.split(",")):
                    trial = AllReduceVariants(client, devices, size // 8)
                    row: dict[str, object] = {"devices": devices, "bytes": size, "latency_ms": latency}
                    for variant, run in trial.variants().items():
                        trial.check(run)
                        row[variant] = round(1000 * measure(run, arguments.seconds), 3)
                    trial.close()
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    text = table(rows)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, hoop {hoop.__version__}"
    print(json.dumps({"machine": machine, "rows": rows}) if arguments.json else f"{machine}\n\n{text}")


if __name__ == "__main__":
    main()
