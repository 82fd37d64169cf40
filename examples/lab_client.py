"""All-reduces on three devices through the lab's own protocol (gpu_sim).

    python examples/lab_client.py                            starts a cluster here, uses it, ends it
    python examples/lab_client.py --coordinator HOST:PORT    uses one that is running (hoop up --lab)

Every device gets a vector of its own. After an all-reduce every device must hold the same sum, maximum and so on, which
NumPy computes for comparison. The exit code is 0 only if every device held the right values.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_sim_messages as lab  # the protocol's page as a table, beside this file
import grpc
import numpy as np

TIMEOUT_S = 30.0
"""Timeout of every call and of every wait."""


class LabClient:
    """One communicator, used through the lab's protocol only."""

    def __init__(self, channel: grpc.Channel, devices: int, count_unit: str = "bytes") -> None:
        self._coordinator = lab.Stub(channel, "GPUCoordinator")
        self._unit = 8 if count_unit == "bytes" else 1  # units of a float64 in the server's counts
        answer = self.call("CommInit", numDevices=devices)
        self.id = answer.commId
        self.devices = list(answer.devices)  # in rank order, each with its id and address range

    def call(self, rpc: str, **fields: Any) -> Any:
        request = getattr(lab, f"{rpc}Request")(**fields)
        return getattr(self._coordinator, rpc)(request, timeout=TIMEOUT_S)

    def on_all(self, rpc: str) -> None:
        """A call whose only argument is the communicator, such as GroupStart or CommDestroy."""
        self.call(rpc, commId=self.id)

    def address(self, rank: int, offset: int = 0) -> int:
        """An address in a rank's memory; ranks may use different addresses."""
        return int(self.devices[rank].minMemAddr.value) + offset

    def write(self, rank: int, address: int, vector: np.ndarray) -> None:
        device = self.devices[rank].deviceId
        copy = lab.MemcpyHostToDeviceRequest(
            hostSrcData=vector.tobytes(), dstDeviceId=device, dstMemAddr=lab.MemAddr(value=address)
        )
        self.call("Memcpy", hostToDevice=copy)

    def read(self, rank: int, address: int, count: int) -> np.ndarray:
        copy = lab.MemcpyDeviceToHostRequest(
            srcDeviceId=self.devices[rank].deviceId, srcMemAddr=lab.MemAddr(value=address), numBytes=8 * count
        )
        answer = self.call("Memcpy", deviceToHost=copy)
        return np.frombuffer(answer.deviceToHost.dstData, "<f8")  # vectors are float64, little-endian

    def all_reduce(self, op: int, addresses: list[int], count: int, rpc: str = "AllReduceRing") -> None:
        """All-reduce in place on every rank; inside a group the call is only queued."""
        mem_addrs = {rank: lab.MemAddr(value=address) for rank, address in enumerate(addresses)}
        self.call(rpc, commId=self.id, count=count * self._unit, op=op, memAddrs=mem_addrs)

    def wait(self) -> int:
        """Poll until the communicator's status is not IN_PROGRESS, and return it."""
        deadline = time.monotonic() + TIMEOUT_S
        while (status := self.call("GetCommStatus", commId=self.id).status) == lab.IN_PROGRESS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"communicator {self.id} was in progress for {TIMEOUT_S:g} s")
            time.sleep(0.005)
        return int(status)


class StepLog:
    """The steps of the tour with their times and results."""

    def __init__(self, quiet: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        self._quiet = quiet
        self._started = time.perf_counter()

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end(self, what: str) -> None:
        """Record a step; its time is from ``begin`` to here."""
        self.steps.append({"step": what, "seconds": time.perf_counter() - self._started, "right": True})

    def report(self, note: str, right: bool = True) -> None:
        """Record the result of the latest step, after it was checked."""
        step = self.steps[-1]
        step |= {"note": note, "right": right}
        if not self._quiet:
            print(f"  {step['step']:<28}{step['seconds'] * 1000:8.1f} ms   {note}")

    @property
    def right(self) -> bool:
        return all(step["right"] for step in self.steps)


def tour(channel: grpc.Channel, devices: int, count: int, count_unit: str, step_log: StepLog) -> None:
    """Make every call of the lab's coordinator once."""
    vectors = np.random.default_rng(seed=7).normal(size=(devices, count))  # one per device

    step_log.begin()
    comm = LabClient(channel, devices, count_unit)
    step_log.end(f"CommInit({devices})")
    ids = " ".join(str(device.deviceId.value) for device in comm.devices)
    step_log.report(f"communicator {comm.id} of devices {ids}")

    # Three experiments, each with its own copy of the vectors, at a different offset on each rank.
    vector_addresses = [
        [comm.address(rank, 8 * (experiment * (count + devices) + rank)) for rank in range(devices)]
        for experiment in range(3)
    ]
    step_log.begin()
    for addresses in vector_addresses:
        for rank, address in enumerate(addresses):
            comm.write(rank, address, vectors[rank])
    step_log.end("Memcpy to the devices")
    step_log.report(f"3 vectors of {count} float64 each")

    def check(addresses: list[int], expected: np.ndarray) -> None:
        """Read the vector of every device back: it must be right, and bit for bit the same on all."""
        held = [comm.read(rank, address, count) for rank, address in enumerate(addresses)]
        right = [np.allclose(one, expected, rtol=1e-12, atol=1e-12) and (one == held[0]).all() for one in held]
        wrong = " ".join(str(rank) for rank, good in enumerate(right) if not good)
        step_log.report(f"WRONG on ranks {wrong}" if wrong else f"right on all {devices} devices", not wrong)

    step_log.begin()
    comm.all_reduce(lab.SUM, vector_addresses[0], count)  # outside a group the call returns when the all-reduce is done
    step_log.end("AllReduceRing SUM")
    check(vector_addresses[0], vectors.sum(axis=0))

    step_log.begin()
    comm.on_all("GroupStart")
    comm.all_reduce(lab.MAX, vector_addresses[1], count)  # inside a group both are queued …
    comm.all_reduce(lab.PROD, vector_addresses[1], count)
    comm.on_all("GroupEnd")  # … and run now, in this order
    if comm.wait() != lab.SUCCESS:
        raise RuntimeError(f"communicator {comm.id} says that its group failed")
    step_log.end("a group: MAX, then PROD")
    check(vector_addresses[1], vectors.max(axis=0) ** devices)

    step_log.begin()
    comm.all_reduce(lab.MIN, vector_addresses[2], count, rpc="NaiveAllReduce")  # through the coordinator
    step_log.end("NaiveAllReduce MIN")
    check(vector_addresses[2], vectors.min(axis=0))

    step_log.begin()
    comm.on_all("CommFinalize")
    comm.on_all("CommDestroy")
    step_log.end("CommFinalize, CommDestroy")
    step_log.report("the communicator is gone, the memory stays")


@contextlib.contextmanager
def own_cluster(devices: int, count: int, count_unit: str) -> Iterator[str]:
    """Start a cluster that ends with the block; yields the coordinator's address."""
    # SIGTERM unwinds the stack like Ctrl-C, so that the cluster always ends with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="lab-client-") as folder:
        address, log = Path(folder, "address"), Path(folder, "log")
        memory = max(16 << 20, 8 * count * (devices + 2))  # vectors are at a different offset on each device
        command = [sys.executable, "-m", "hoop", "up", "--devices", str(devices), "--memory", str(memory)]
        command += ["--lab", "--count-unit", count_unit, "--address-file", str(address)]
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                deadline = time.monotonic() + TIMEOUT_S
                while not address.exists():  # it is written atomically once every device is up
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"hoop up did not come up:\n{log.read_text()}")
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.02)
                yield address.read_text().strip()
            finally:
                process.terminate()  # not SIGINT: in the background of a shell it is ignored
                try:
                    process.wait(TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description="All-reduces on a few devices, by the lab's protocol alone.")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="use this one instead of starting a cluster")
    parser.add_argument("--devices", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--count", type=int, default=17, help="elements of a vector (default: 17)")
    parser.add_argument(
        "--count-unit", choices=["bytes", "elements"], default="bytes", help="what the server's count means"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    options = parser.parse_args()
    step_log = StepLog(quiet=options.json)
    with contextlib.ExitStack() as stack:
        try:
            coordinator = options.coordinator or stack.enter_context(
                own_cluster(options.devices, options.count, options.count_unit)
            )
            if not options.json:
                print(f"coordinator {coordinator}{'' if options.coordinator else ' (started for this)'}")
            limit = [("grpc.max_receive_message_length", 64 << 20)]  # the default of gRPC is 4 MiB
            channel = stack.enter_context(grpc.insecure_channel(coordinator, options=limit))
            tour(channel, options.devices, options.count, options.count_unit, step_log)
        except grpc.RpcError as error:
            print(f"lab_client: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        except (RuntimeError, TimeoutError) as error:
            print(f"lab_client: {error}", file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps({"coordinator": coordinator, "right": step_log.right, "steps": step_log.steps}))
    else:
        print("every device held the right values" if step_log.right else "some device held WRONG values")
    return 0 if step_log.right else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
