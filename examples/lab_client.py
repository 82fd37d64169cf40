"""A first look at Hoop: all-reduces on three devices, through the lab's own protocol (gpu_sim).

    python examples/lab_client.py                            starts a cluster here, uses it, ends it
    python examples/lab_client.py --coordinator HOST:PORT    uses one that is running (hoop up)

Every device gets a vector of its own. Then every device must hold the same sum, the same maximum and so on,
and NumPy says what those are. The exit code is 0 only if every device held the right values.
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

PATIENCE_S = 30.0
"""Nothing here waits longer than this for one answer."""


class LabClient:
    """One communicator, as a program that knows only the lab's protocol uses it."""

    def __init__(self, channel: grpc.Channel, devices: int, count_unit: str = "bytes") -> None:
        self._coordinator = lab.Stub(channel, "GPUCoordinator")
        self._unit = 8 if count_unit == "bytes" else 1  # what a server counts a float64 as
        answer = self.call("CommInit", numDevices=devices)
        self.id = answer.commId
        self.devices = list(answer.devices)  # in rank order, each with its id and its range of addresses

    def call(self, rpc: str, **fields: Any) -> Any:
        request = getattr(lab, f"{rpc}Request")(**fields)
        return getattr(self._coordinator, rpc)(request, timeout=PATIENCE_S)

    def on_all(self, rpc: str) -> None:
        """A call that takes nothing but the communicator: GroupStart, CommDestroy and the like."""
        self.call(rpc, commId=self.id)

    def address(self, rank: int, offset: int = 0) -> int:
        """A place in a rank's memory; the ranks need not agree on theirs."""
        return int(self.devices[rank].minMemAddr.value) + offset

    def write(self, rank: int, address: int, vector: np.ndarray) -> None:
        to = self.devices[rank].deviceId
        copy = lab.MemcpyHostToDeviceRequest(
            hostSrcData=vector.tobytes(), dstDeviceId=to, dstMemAddr=lab.MemAddr(value=address)
        )
        self.call("Memcpy", hostToDevice=copy)

    def read(self, rank: int, address: int, count: int) -> np.ndarray:
        copy = lab.MemcpyDeviceToHostRequest(
            srcDeviceId=self.devices[rank].deviceId, srcMemAddr=lab.MemAddr(value=address), numBytes=8 * count
        )
        answer = self.call("Memcpy", deviceToHost=copy)
        return np.frombuffer(answer.deviceToHost.dstData, "<f8")  # vectors are float64, little-endian

    def all_reduce(self, op: int, addresses: list[int], count: int, rpc: str = "AllReduceRing") -> None:
        """In place, on every rank; inside a group only queued."""
        places = {rank: lab.MemAddr(value=address) for rank, address in enumerate(addresses)}
        self.call(rpc, commId=self.id, count=count * self._unit, op=op, memAddrs=places)

    def wait(self) -> int:
        """The communicator's status once it is not IN_PROGRESS any more."""
        deadline = time.monotonic() + PATIENCE_S
        while (status := self.call("GetCommStatus", commId=self.id).status) == lab.IN_PROGRESS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"communicator {self.id} was in progress for {PATIENCE_S:g} s")
            time.sleep(0.005)
        return int(status)


class Diary:
    """What was done, how long it took, and whether it was right."""

    def __init__(self, quiet: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        self._quiet = quiet
        self._started = time.perf_counter()

    def begin(self) -> None:
        self._started = time.perf_counter()

    def ended(self, what: str) -> None:
        """Notes a step; its time is from ``begin`` to here."""
        self.steps.append({"step": what, "seconds": time.perf_counter() - self._started, "right": True})

    def judge(self, note: str, right: bool = True) -> None:
        """What there is to say of the latest step, once it has been looked at."""
        step = self.steps[-1]
        step |= {"note": note, "right": right}
        if not self._quiet:
            print(f"  {step['step']:<28}{step['seconds'] * 1000:8.1f} ms   {note}")

    @property
    def right(self) -> bool:
        return all(step["right"] for step in self.steps)


def tour(channel: grpc.Channel, devices: int, count: int, count_unit: str, diary: Diary) -> None:
    """Every call of the lab's coordinator, once."""
    vectors = np.random.default_rng(seed=7).normal(size=(devices, count))  # one a device

    diary.begin()
    comm = LabClient(channel, devices, count_unit)
    diary.ended(f"CommInit({devices})")
    ids = " ".join(str(device.deviceId.value) for device in comm.devices)
    diary.judge(f"communicator {comm.id} of devices {ids}")

    # Three experiments, each with its own copy of the vectors, and on each rank at another offset.
    places = [
        [comm.address(rank, 8 * (experiment * (count + devices) + rank)) for rank in range(devices)]
        for experiment in range(3)
    ]
    diary.begin()
    for addresses in places:
        for rank, address in enumerate(addresses):
            comm.write(rank, address, vectors[rank])
    diary.ended("Memcpy to the devices")
    diary.judge(f"3 vectors of {count} float64 each")

    def check(addresses: list[int], expected: np.ndarray) -> None:
        """Reads every device's vector back: right everywhere, and the same bits everywhere."""
        held = [comm.read(rank, address, count) for rank, address in enumerate(addresses)]
        right = [np.allclose(one, expected, rtol=1e-12, atol=1e-12) and (one == held[0]).all() for one in held]
        wrong = " ".join(str(rank) for rank, good in enumerate(right) if not good)
        diary.judge(f"WRONG on ranks {wrong}" if wrong else f"right on all {devices} devices", not wrong)

    diary.begin()
    comm.all_reduce(lab.SUM, places[0], count)  # outside a group it returns when it is done
    diary.ended("AllReduceRing SUM")
    check(places[0], vectors.sum(axis=0))

    diary.begin()
    comm.on_all("GroupStart")
    comm.all_reduce(lab.MAX, places[1], count)  # inside a group both are queued …
    comm.all_reduce(lab.PROD, places[1], count)
    comm.on_all("GroupEnd")  # … and run from here on, in this order
    if comm.wait() != lab.SUCCESS:
        raise RuntimeError(f"communicator {comm.id} says that its group failed")
    diary.ended("a group: MAX, then PROD")
    check(places[1], vectors.max(axis=0) ** devices)

    diary.begin()
    comm.all_reduce(lab.MIN, places[2], count, rpc="NaiveAllReduce")  # through the coordinator, to compare with
    diary.ended("NaiveAllReduce MIN")
    check(places[2], vectors.min(axis=0))

    diary.begin()
    comm.on_all("CommFinalize")
    comm.on_all("CommDestroy")
    diary.ended("CommFinalize, CommDestroy")
    diary.judge("the communicator is gone, the memory stays")


@contextlib.contextmanager
def own_cluster(devices: int, count: int, count_unit: str) -> Iterator[str]:
    """A cluster of our own for as long as the context lasts; gives the coordinator's address."""
    # A polite kill unwinds like Ctrl-C does, so that the cluster is ended whatever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="lab-client-") as folder:
        address, log = Path(folder, "address"), Path(folder, "log")
        memory = max(16 << 20, 8 * count * (devices + 2))  # every device's vector lies elsewhere
        command = [sys.executable, "-m", "hoop", "up", "--devices", str(devices), "--memory", str(memory)]
        command += ["--count-unit", count_unit, "--address-file", str(address)]
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                deadline = time.monotonic() + PATIENCE_S
                while not address.exists():  # it appears, whole, when every device is up
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"hoop up did not come up:\n{log.read_text()}")
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.02)
                yield address.read_text().strip()
            finally:
                process.terminate()  # not SIGINT: in the background of a shell it is ignored
                try:
                    process.wait(PATIENCE_S)
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
    diary = Diary(quiet=options.json)
    with contextlib.ExitStack() as stack:
        try:
            where = options.coordinator or stack.enter_context(
                own_cluster(options.devices, options.count, options.count_unit)
            )
            if not options.json:
                print(f"coordinator {where}{'' if options.coordinator else ' (started for this)'}")
            limit = [("grpc.max_receive_message_length", 64 << 20)]  # gRPC itself takes 4 MiB at most
            channel = stack.enter_context(grpc.insecure_channel(where, options=limit))
            tour(channel, options.devices, options.count, options.count_unit, diary)
        except grpc.RpcError as error:
            print(f"lab_client: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        except (RuntimeError, TimeoutError) as error:
            print(f"lab_client: {error}", file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps({"coordinator": where, "right": diary.right, "steps": diary.steps}))
    else:
        print("every device held the right values" if diary.right else "some device held WRONG values")
    return 0 if diary.right else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
