"""A real cluster whose methods tests call by name, with any request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from descriptor_stub import Stub
from lab_cluster import CALL_S, Cluster, LabClient, channel_to, hoop_up, wait_for

from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

LAB_COORDINATOR = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]
LAB_DEVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]
COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
DEVICE = pb.DESCRIPTOR.services_by_name["Device"]
METHODS = {
    f"{service.name}.{method.name}": method
    for service in (LAB_COORDINATOR, LAB_DEVICE, COORDINATOR, DEVICE)
    for method in service.methods
}


@dataclass(frozen=True)
class Target:
    """A cluster of three devices, channels to its coordinator and first device, and a communicator of all three."""

    cluster: Cluster
    coordinator: grpc.Channel
    device: grpc.Channel
    devices: list[dict[str, Any]]
    """As in the output of ``hoop status --json``."""
    comm: int

    @property
    def low(self) -> int:
        return int(self.devices[0]["min_address"])

    @property
    def high(self) -> int:
        return int(self.devices[0]["max_address"])

    @property
    def pid(self) -> int:
        return int(self.devices[0]["pid"])

    def channel(self, method: Any) -> grpc.Channel:
        of_device = method.containing_service in (LAB_DEVICE, DEVICE)
        return self.device if of_device else self.coordinator

    def call(self, name: str, request: Any, timeout: float = CALL_S) -> Any:
        """Calls a method. A streaming method takes a list of requests, or returns a list of answers."""
        method = METHODS[name]
        stub = Stub(self.channel(method), method.containing_service)
        answer = getattr(stub, method.name)(iter(request) if method.client_streaming else request, timeout=timeout)
        return list(answer) if method.server_streaming else answer

    def raw(self, name: str, *messages: bytes, timeout: float = CALL_S) -> Any:
        """Calls a method with bytes that need not be a valid message."""
        method = METHODS[name]
        request_kind = "stream" if method.client_streaming else "unary"
        response_kind = "stream" if method.server_streaming else "unary"
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = getattr(self.channel(method), f"{request_kind}_{response_kind}")(path)
        answer = call(iter(messages) if method.client_streaming else messages[0], timeout=timeout)
        return list(answer) if method.server_streaming else answer

    def member(self, device_id: int) -> pb.Member:
        found: Iterable[pb.Member] = self.call("Coordinator.GetStatus", pb.GetStatusRequest()).devices
        return next(one for one in found if one.device.device_id == device_id)

    def wait_until_dead(self, *device_ids: int) -> None:
        """Waits until the leases of fake devices have expired."""

        def is_dead(device_id: int) -> bool:
            return self.member(device_id).state in ("dead", "left")

        for device_id in device_ids:
            wait_for(partial(is_dead, device_id), f"device {device_id}'s lease to end")


@contextlib.contextmanager
def running_target(*options: str) -> Iterator[Target]:
    """Starts a target that anyone may call; at the end its processes must be the same as at the start."""
    with hoop_up(3, "--insecure", *options) as cluster:
        status = cluster.status()
        devices = status["devices"]
        with channel_to(cluster.address) as coordinator, channel_to(devices[0]["address"]) as device:
            yield Target(cluster, coordinator, device, devices, LabClient(coordinator, 3).id)
        after = cluster.status()
        assert after["coordinator"] == status["coordinator"]
        alive = {one["id"]: one["pid"] for one in after["devices"] if one["state"] == "alive"}
        assert alive == {one["id"]: one["pid"] for one in devices}, "a device died or was replaced"
