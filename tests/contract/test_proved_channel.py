"""Calls of every shape carry proofs, and are made again when the server does not know their challenge."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from hoop.topology import Address
from hoop.wire import proofs
from hoop.wire.auth import Credentials, Guard
from hoop.wire.channels import LEASE_S, channel_options
from hoop.wire.proofs import COORDINATOR_TARGET, Verifier
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

WAIT_S = 240.0
TOKEN = Token.parse(new_token())
CREDENTIALS = Credentials(Role.DEVICE, TOKEN)
UNARY, ANSWERS, REQUESTS, BOTH = (
    "/hoop.v1.Coordinator/Join",
    "/hoop.v1.Coordinator/Leave",
    "/gpu_sim.GPUDevice/StreamSend",
    "/hoop.v1.Coordinator/SendHeartbeats",
)
"""Four methods that a device may call. The server here gives them these four shapes."""


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers with the requests."""

    def service(self, details: Any) -> Any:
        async def unary(request: bytes, _: Any) -> bytes:
            return request

        async def answers(request: bytes, _: Any) -> AsyncIterator[bytes]:
            for byte in request:
                yield bytes([byte])

        async def requests(stream: Any, _: Any) -> bytes:
            return b"".join([one async for one in stream])

        async def both(stream: Any, _: Any) -> AsyncIterator[bytes]:
            async for one in stream:
                yield one

        return {
            UNARY: grpc.unary_unary_rpc_method_handler(unary),
            ANSWERS: grpc.unary_stream_rpc_method_handler(answers),
            REQUESTS: grpc.stream_unary_rpc_method_handler(requests),
            BOTH: grpc.stream_stream_rpc_method_handler(both),
        }[details.method]


class Server:
    """A server in a thread, whose process can seem to be another one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._guard = Guard(TOKEN, Role.COORDINATOR, lambda: COORDINATOR_TARGET)
        self.address: Address = self._call(self._start())

    async def _start(self) -> Address:
        self._server = grpc.aio.server(interceptors=(self._guard,))
        self._server.add_generic_rpc_handlers((Echo(),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return Address("127.0.0.1", port)

    def forget(self) -> None:
        """As a restart: no challenge that callers have is valid."""
        self._guard._verifier = Verifier(TOKEN, Role.COORDINATOR, lambda: COORDINATOR_TARGET)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._call(self._server.stop(None))
        self._call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with CREDENTIALS.channel(server.address, Role.COORDINATOR, channel_options(LEASE_S)) as opened:
        yield opened


def stream() -> Iterator[bytes]:
    return iter([b"a", b"b", b"c"])


SHAPES: dict[str, Callable[[Any], bytes]] = {
    "unary": lambda channel: channel.unary_unary(UNARY)(b"abc", timeout=WAIT_S),
    "future": lambda channel: channel.unary_unary(UNARY).future(b"abc", timeout=WAIT_S).result(WAIT_S),
    "answers": lambda channel: b"".join(channel.unary_stream(ANSWERS)(b"abc", timeout=WAIT_S)),
    "requests": lambda channel: channel.stream_unary(REQUESTS)(stream(), timeout=WAIT_S),
    "both": lambda channel: b"".join(channel.stream_stream(BOTH)(stream(), timeout=WAIT_S)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_pass_at_once_and_after_the_server_was_restarted(
    server: Server, channel: grpc.Channel, shape: str
) -> None:
    for _ in range(3):
        assert SHAPES[shape](channel) == b"abc"
        assert SHAPES[shape](channel) == b"abc"
        server.forget()


@pytest.mark.parametrize("shape", ["unary", "answers", "requests", "both"])
def test_asynchronous_calls_pass_at_once_and_after_the_server_was_restarted(server: Server, shape: str) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for one in (b"a", b"b", b"c"):
            yield one

    async def call(channel: Any) -> bytes:
        if shape == "unary":
            return bytes(await channel.unary_unary(UNARY)(b"abc", timeout=WAIT_S))
        if shape == "requests":
            return bytes(await channel.stream_unary(REQUESTS)(requests(), timeout=WAIT_S))
        if shape == "answers":
            return b"".join([one async for one in channel.unary_stream(ANSWERS)(b"abc", timeout=WAIT_S)])
        return b"".join([one async for one in channel.stream_stream(BOTH)(requests(), timeout=WAIT_S)])

    async def run() -> None:
        async with CREDENTIALS.aio_channel(server.address, Role.COORDINATOR, channel_options(LEASE_S)) as channel:
            for _ in range(3):
                assert await call(channel) == b"abc"
                assert set(await asyncio.gather(call(channel), call(channel))) == {b"abc"}
                server.forget()

    asyncio.run(run())


def test_a_stream_that_nobody_reads_is_made_again(server: Server, channel: grpc.Channel) -> None:
    """A session is reopened like this: its callback gets the call that has really ended."""
    method: Any = channel.unary_stream(ANSWERS, None, None)
    assert list(method(b"a", timeout=WAIT_S)) == [b"a"]
    server.forget()
    ended, codes = threading.Event(), []

    def on_end(call: Any) -> None:
        codes.append(call.code())
        ended.set()

    answers: Any = method(b"", timeout=WAIT_S, wait_for_ready=True)
    answers.add_done_callback(on_end)
    assert ended.wait(WAIT_S)
    assert codes == [grpc.StatusCode.OK]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_token_is_refused_after_one_attempt(server: Server, shape: str) -> None:
    other = Credentials(Role.DEVICE, Token.parse(new_token()))
    with (
        other.channel(server.address, Role.COORDINATOR, channel_options(LEASE_S)) as channel,
        pytest.raises(grpc.RpcError, match="not of this cluster"),
    ):
        SHAPES[shape](channel)


class Stranger(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A program at a server's port that has no key. It answers every call, and keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.status = grpc.StatusCode.OK

    def service(self, details: Any) -> Any:
        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            self.requests += [one for one in requests if one]
            context.set_trailing_metadata((("hoop-proof", "ab" * 32), ("hoop-challenge", f"{'ab' * 16} {'cd' * 32}")))
            if self.status != grpc.StatusCode.OK:
                context.abort(self.status, "no")
            yield b"abc"

        return grpc.stream_stream_rpc_method_handler(answer)


@contextmanager
def stranger_at(address: Address) -> Iterator[Stranger]:
    with ThreadPoolExecutor(4) as pool:
        server, handler = grpc.server(pool, options=(("grpc.so_reuseport", 0),)), Stranger()
        server.add_generic_rpc_handlers((handler,))
        assert server.add_insecure_port(str(address)) == address.port
        server.start()
        yield handler
        server.stop(None).wait(WAIT_S)


STATUSES = (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_process_that_has_taken_the_port_gets_no_request_and_its_answer_does_not_count(shape: str) -> None:
    server = Server()
    try:
        with CREDENTIALS.channel(server.address, Role.COORDINATOR, channel_options(LEASE_S)) as channel:
            assert SHAPES[shape](channel) == b"abc"
            server.close()
            with pytest.raises(grpc.RpcError):  # the connection is gone
                SHAPES[shape](channel)
            with stranger_at(server.address) as stranger:
                for stranger.status in STATUSES:
                    with pytest.raises(grpc.RpcError) as refused:
                        call_until_answered(lambda: SHAPES[shape](channel))
                    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert stranger.requests == []
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_an_answer_of_another_process_does_not_count_within_the_second_after_a_proof(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The request has gone out then: SECURITY.md says so."""
    monkeypatch.setattr(proofs, "FRESH_S", 1e9)
    server = Server()
    try:
        with CREDENTIALS.channel(server.address, Role.COORDINATOR, channel_options(LEASE_S)) as channel:
            assert SHAPES["unary"](channel) == b"abc"
            server.close()
            with stranger_at(server.address) as stranger:
                with pytest.raises(grpc.RpcError, match="has not proven"):
                    list(getattr(channel, kind)(UNARY)(b"abc", timeout=WAIT_S, wait_for_ready=True))
                assert stranger.requests == [b"abc"]
    finally:
        server.close()


def call_until_answered(call: Callable[[], bytes]) -> bytes:
    """While gRPC waits before it connects again, a call fails with the last connection's error."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
