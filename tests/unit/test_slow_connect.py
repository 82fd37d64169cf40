"""A server that answers a new connection late, because its process waits for a core, is still reached."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from hoop.wire.channels import LEASE_S, channel_options

TIMEOUT_S = 120.0
DELAY_S = 0.5


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic only in its stubs, not when it runs
    """Answers every call with its request."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until one side closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_server_that_answers_a_connection_after_half_a_second_is_reached() -> None:
    """The kernel accepts the connection at once; the server's first frame comes half a second later."""
    never_set = threading.Event()
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    attempts = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as threads:

        def answer_late() -> None:
            """Accept one connection; a second attempt is not accepted."""
            client, _ = listener.accept()
            attempts.append(client)
            never_set.wait(DELAY_S)
            with client, socket.create_connection(("127.0.0.1", port)) as upstream:
                replies = threads.submit(pump, upstream, client)
                pump(client, upstream)
                replies.result(TIMEOUT_S)

        served = threads.submit(answer_late)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with grpc.insecure_channel(address, options=channel_options(LEASE_S)) as channel:
            assert channel.unary_unary("/any/method", None, None)(b"hello", timeout=TIMEOUT_S) == b"hello"
        served.result(TIMEOUT_S)
    assert len(attempts) == 1
    server.stop(None).wait(TIMEOUT_S)
