"""A process that listens at a port of the cluster learns nothing from its callers that it could use."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from lab_in_process import WAIT_S, Servers, lab_servers
from lab_target import DEVICE, LAB_DEVICE, METHODS

from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

JOIN = Token.parse(new_token())
DEVICE_TOKEN = Token.parse(JOIN.role_token(Role.DEVICE))
COORDINATOR = Credentials(Role.COORDINATOR, JOIN)
Call = tuple[str, tuple[tuple[str, str], ...], bytes]
"""Path, metadata and first message."""


class Impostor(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Records every call, and answers the first one with a made-up challenge, the others as the coordinator would."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Call] = queue.Queue()
        self._answered = 0

    def service(self, details: Any) -> Any:
        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            metadata = tuple((key, str(value)) for key, value in details.invocation_metadata)
            self.calls.put((details.method, metadata, next(requests)))
            self._answered += 1
            if self._answered > 1:
                yield pb.HeartbeatAnswer(known=False).SerializeToString()
                return
            context.set_trailing_metadata((("hoop-challenge", f"{'ab' * 16} {'cd' * 32}"),))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "prove it")

        return grpc.stream_stream_rpc_method_handler(answer)

    def wait_for(self, count: int) -> list[Call]:
        """The first calls."""
        return [self.calls.get(timeout=WAIT_S) for _ in range(count)]


@contextmanager
def impostor_at(address: str) -> Iterator[Impostor]:
    with ThreadPoolExecutor() as pool:
        server, handler = grpc.server(pool, options=(("grpc.so_reuseport", 0),)), Impostor()
        server.add_generic_rpc_handlers((handler,))
        server.add_insecure_port(address)
        server.start()
        yield handler
        server.stop(None).wait(WAIT_S)


@contextmanager
def restarted(servers: Servers, address: str) -> Iterator[CoordinatorServer]:
    """The coordinator, anew at its former address."""

    async def start() -> CoordinatorServer:
        server = CoordinatorServer(CoordinatorConfig(port=Address.parse(address).port, credentials=COORDINATOR))
        await server.start()
        return server

    running = servers.call(start())
    try:
        yield running
    finally:
        servers.call(running.stop())


def code_of(address: str, method: Any, metadata: Any, request: bytes) -> str:
    kind = "_".join("stream" if one else "unary" for one in (method.client_streaming, method.server_streaming))
    path = f"/{method.containing_service.full_name}/{method.name}"
    with grpc.insecure_channel(address) as channel:
        try:
            answer = getattr(channel, kind)(path)(
                iter([request]) if method.client_streaming else request, timeout=WAIT_S, metadata=metadata
            )
            if method.server_streaming:
                next(iter(answer), None)
                answer.cancel()
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_an_impostor_at_the_coordinators_port_can_make_no_call() -> None:
    """A device asks it for a proof, and sends nothing else; what it asks with is refused by the coordinator, when it is
    back, and by devices."""
    config = CoordinatorConfig(credentials=COORDINATOR)
    with lab_servers(1, config, credentials=Credentials(Role.DEVICE, DEVICE_TOKEN)) as servers:
        address, device = servers.address, str(servers.info(0).address)
        servers.call(servers.coordinator.stop())
        with impostor_at(address) as impostor:
            recorded = impostor.wait_for(5)
        assert {(path, request) for path, _, request in recorded} == {("/hoop.v1.Challenge/Ask", b"")}
        sent = " ".join(value for _, metadata, _ in recorded for _, value in metadata)
        assert not [one for one in (*JOIN.secrets.values(), JOIN.link_key.hex()) if one in sent]
        with restarted(servers, address) as coordinator:
            of_device = (DEVICE, LAB_DEVICE)
            codes = {
                (path, name): code_of(
                    device if method.containing_service in of_device else address, method, metadata, request
                )
                for path, metadata, request in recorded
                for name, method in METHODS.items()
            }
            assert {call: code for call, code in codes.items() if code != "UNAUTHENTICATED"} == {}
            # The device, whose challenges are all of the former process, joins the new one.
            joined = coordinator.coordinator.events.wait_for(lambda event: event.kind == "device_joined", WAIT_S)
            assert joined is not None


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    config = CoordinatorConfig(credentials=COORDINATOR)
    with lab_servers(2, config, credentials=Credentials(Role.DEVICE, DEVICE_TOKEN)) as running:
        yield running


def recorded_call(servers: Servers, to_device: bool) -> tuple[str, tuple[tuple[str, str], ...], bytes]:
    """Address, metadata and request of a call of a client that was not delivered."""
    sent: list[Any] = []
    client = Credentials(Role.CLIENT, Token.parse(JOIN.role_token(Role.CLIENT)))
    address = servers.info(0).address if to_device else Address.parse(servers.address)
    path = "/hoop.v1.Device/Free" if to_device else "/hoop.v1.Coordinator/StopJob"
    request = (pb.FreeRequest(name="none") if to_device else pb.StopJobRequest(job_id=77)).SerializeToString()
    with client.channel(address, Role.DEVICE if to_device else Role.COORDINATOR, []) as channel:
        method: Any = channel.unary_unary(path, None, None)
        with pytest.raises(grpc.RpcError, match=r"none|77"):  # from now on the channel knows the challenge
            method(request, timeout=WAIT_S)
        method.call = SimpleNamespace(with_call=lambda request, metadata, **_: sent.append(metadata))
        with pytest.raises(TypeError):  # there is no answer
            method(request, timeout=WAIT_S)
    return str(address), sent[0], request


@pytest.mark.parametrize("to_device", [True, False])
def test_a_recorded_call_is_good_for_one_delivery_of_the_same_request(servers: Servers, to_device: bool) -> None:
    address, metadata, request = recorded_call(servers, to_device)
    method = METHODS["Device.Free" if to_device else "Coordinator.StopJob"]
    other = METHODS["Device.ListBuffers" if to_device else "Coordinator.GetStatus"]
    assert code_of(address, other, metadata, b"") == "UNAUTHENTICATED"
    if to_device:
        assert code_of(str(servers.info(1).address), method, metadata, request) == "UNAUTHENTICATED"
    assert code_of(address, method, metadata, request) == "NOT_FOUND"
    assert code_of(address, method, metadata, request) == "UNAUTHENTICATED"


@pytest.mark.parametrize("to_device", [True, False])
def test_a_proof_does_not_fit_another_request(servers: Servers, to_device: bool) -> None:
    """A process between a caller and a server, which passes calls on, cannot change them."""
    address, metadata, request = recorded_call(servers, to_device)
    method = METHODS["Device.Free" if to_device else "Coordinator.StopJob"]
    assert code_of(address, method, metadata, request + request) == "UNAUTHENTICATED"
