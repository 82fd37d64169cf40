"""A server whose process waits for a core takes long to answer a connection, and is not gone."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from hoop.wire.channels import channel_options

PATIENCE_S = 20.0
DELAY_S = 0.5


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic only in its stubs, not when it runs
    """Answers every call with its request."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Hands on what comes, until one of the two ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_server_that_takes_half_a_second_to_answer_a_connection_is_reached() -> None:
    """The kernel takes the connection at once; the first frame comes when the process gets to it."""
    over = threading.Event()
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    attempts = []
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(3) as threads:

        def answer_late() -> None:
            """One connection; a second attempt finds nobody."""
            guest, _ = door.accept()
            attempts.append(guest)
            over.wait(DELAY_S)
            with guest, socket.create_connection(("127.0.0.1", port)) as behind:
                back = threads.submit(pump, behind, guest)
                pump(guest, behind)
                back.result(PATIENCE_S)

        served = threads.submit(answer_late)
        address = f"127.0.0.1:{door.getsockname()[1]}"
        with grpc.insecure_channel(address, options=channel_options()) as channel:
            assert channel.unary_unary("/any/method", None, None)(b"hello", timeout=PATIENCE_S) == b"hello"
        served.result(PATIENCE_S)
    assert len(attempts) == 1
    server.stop(None).wait(PATIENCE_S)
