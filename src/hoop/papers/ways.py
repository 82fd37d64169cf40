"""Every way to all-reduce one vector through real servers, from the naive listing of a paper to the ring.

listed    the paper's listing as it stands: the client loops over the devices with the lab's Memcpy, sums, loops again
relay     the lab's NaiveAllReduce: all devices at once to the coordinator and back
stepped   the ring, with the coordinator stepping every round
ring      the ring, run by the devices alone after one launch
tree      a tree, run by the devices alone
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np

from hoop.client.cluster import Cluster
from hoop.errors import InternalError
from hoop.wire.channels import channel_options
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.rpc import Stub

WAYS = ("listed", "relay", "stepped", "ring", "tree")


class Ways:
    """One communicator with one float64 vector a rank, and every way to sum it."""

    def __init__(self, client: Cluster, devices: int, count: int) -> None:
        self.comm = client.communicator(devices)
        self.addresses = [device.info.min_address for device in self.comm.devices]
        self.buffer = self.comm.at(self.addresses, count, "float64")
        self.count = count
        self._channel = grpc.insecure_channel(str(client.address), options=channel_options())
        self._lab = Stub(self._channel, lab.DESCRIPTOR.services_by_name["GPUCoordinator"])

    def listed(self) -> None:
        vectors = []
        for device, address in zip(self.comm.devices, self.addresses, strict=True):
            get = lab.MemcpyDeviceToHostRequest(
                srcDeviceId={"value": device.id}, srcMemAddr={"value": address}, numBytes=8 * self.count
            )
            answer = self._lab.Memcpy(lab.MemcpyRequest(deviceToHost=get))
            vectors.append(np.frombuffer(answer.deviceToHost.dstData))
        total = sum(vectors[1:], start=vectors[0]).tobytes()
        for device, address in zip(self.comm.devices, self.addresses, strict=True):
            put = lab.MemcpyHostToDeviceRequest(
                hostSrcData=total, dstDeviceId={"value": device.id}, dstMemAddr={"value": address}
            )
            self._lab.Memcpy(lab.MemcpyRequest(hostToDevice=put))

    def every(self) -> dict[str, Callable[[], object]]:
        return {
            "listed": self.listed,
            "relay": lambda: self.comm.all_reduce(self.buffer, driver="relay"),
            "stepped": lambda: self.comm.all_reduce(self.buffer, driver="stepped", algorithm="ring"),
            "ring": lambda: self.comm.all_reduce(self.buffer, algorithm="ring"),
            "tree": lambda: self.comm.all_reduce(self.buffer, algorithm="tree"),
        }

    def check(self, run: Callable[[], object]) -> None:
        """Every way must give the right sum on every device before its time counts."""
        size = len(self.comm.devices)
        values = [np.arange(self.count, dtype=np.float64) + rank for rank in range(size)]
        self.buffer.fill(values)
        run()
        expected = np.sum(values, axis=0)
        for rank in range(size):
            if not np.array_equal(self.buffer.read(rank), expected):
                raise InternalError(
                    f"all-reduce of {self.count} float64 on {size}: rank {rank} has a wrong sum"
                )

    def close(self) -> None:
        self.comm.destroy()
        self._channel.close()
