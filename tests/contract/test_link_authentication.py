"""Authenticated links, and listeners that receive arbitrary bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from exchange import receive, send_and_flush
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import COMMUNICATOR, LONG_S, deadline_in

from hoop.errors import InvalidArgument, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport import shm_listener
from hoop.transport.auth_handshake import NONCE_BYTES, PROOF_BYTES
from hoop.transport.base import Endpoint
from hoop.transport.link_key import key_of_environment
from hoop.transport.registry import open_transport
from hoop.transport.shm_endpoint import ShmEndpoint
from hoop.transport.shm_listener import ABSTRACT, ShmTransport, pack_offer, socket_name
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind
from hoop.wire.private_files import write_private
from hoop.wire.roles import Role
from hoop.wire.tokens import Token

HERE = Address("127.0.0.1", 0)
KEY, OTHER = b"k" * 32, b"o" * 32


@contextlib.contextmanager
def pair(*keys: bytes) -> Iterator[list[Endpoint]]:
    """Two endpoints with these keys."""
    with TcpTransport(HERE, key=keys[0]) as left, TcpTransport(HERE, key=keys[1]) as right:
        peers = [left.address, right.address]
        ends = [one.endpoint(COMMUNICATOR, 1, rank, peers) for rank, one in enumerate((left, right))]
        yield ends
        for end in ends:
            end.close()


def test_with_the_same_key_messages_arrive_in_both_directions() -> None:
    with pair(KEY, KEY) as ends:
        for sender, receiver in ((0, 1), (1, 0)):
            for data in (b"first", b"second"):
                send_and_flush(ends[sender], receiver, data)
                assert receive(ends[receiver], sender, len(data)) == data


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ((KEY, OTHER), "could not prove that it belongs to this cluster"),
        ((KEY, b""), "it refused the link: this device has no token and cannot prove itself"),
        ((b"", KEY), "refused the link: this device wants links that prove themselves"),
    ],
)
def test_without_the_same_key_the_link_is_refused(keys: tuple[bytes, bytes], reason: str) -> None:
    with (
        pair(*keys) as ends,
        pytest.raises((PeerLost, MembershipChanged), match=f"rank 0: rank 1 at .*{reason}"),
    ):
        send_and_receive(ends[0])


def send_and_receive(end: Endpoint) -> None:
    """A rank without a key sends at once and learns of the refusal when it receives."""
    with contextlib.suppress(BrokenPipeError):
        send_and_flush(end, 1, b"secret" * 1000)
    receive(end, 1, 1)


def test_the_same_token_gives_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of torch.distributed get it from the environment; another token is refused."""
    keys = []
    for token in ("a" * 40, "a" * 40, "b" * 40):
        monkeypatch.setenv("HOOP_TOKEN", token)
        keys.append(key_of_environment())
    assert keys[0] == keys[1] != keys[2]
    with contextlib.ExitStack() as stack:
        transports = [stack.enter_context(open_transport("tcp://127.0.0.1:0", key)) for key in keys]
        peers = [Address("127.0.0.1", one.address.port) for one in transports]
        ends = [one.endpoint(COMMUNICATOR, 1, rank, peers) for rank, one in enumerate(transports)]
        for end in ends:
            stack.callback(end.close)
        send_and_flush(ends[0], 1, b"known")
        assert receive(ends[1], 0, 5) == b"known"
        with pytest.raises(PeerLost, match="have both the same token"):
            send_and_flush(ends[0], 2, b"unknown")


def test_the_key_of_a_token_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HOOP_TOKEN_FILE gives the key of the token in the file; HOOP_TOKEN has precedence, as everywhere."""
    monkeypatch.delenv("HOOP_TOKEN", raising=False)
    path = tmp_path / "cluster.token"
    write_private(path, "a" * 40)
    monkeypatch.setenv("HOOP_TOKEN_FILE", str(path))
    assert key_of_environment() == Token.parse("a" * 40).link_key
    monkeypatch.setenv("HOOP_TOKEN", "b" * 40)
    assert key_of_environment() == Token.parse("b" * 40).link_key
    monkeypatch.setenv("HOOP_TOKEN", Token.parse("a" * 40).role_token(Role.CLIENT))
    assert key_of_environment() == b""
    monkeypatch.delenv("HOOP_TOKEN")
    path.chmod(0o644)
    with pytest.raises(InvalidArgument, match=r"mode 644.*chmod 600"):
        key_of_environment()


def test_a_proof_cannot_be_replayed() -> None:
    """Every link has a new challenge, so recorded bytes do not open another link."""
    with pair(KEY, KEY) as ends, socket.create_server(("127.0.0.1", 0)) as middle:
        listener = ends[1].peers[1]
        ends[0].peers = (ends[0].peers[0], Address("127.0.0.1", middle.getsockname()[1]))
        recorded: list[bytes] = []

        def relay() -> None:
            near, _ = middle.accept()
            with near, socket.create_connection((listener.host, listener.port), LONG_S) as far:
                near.settimeout(LONG_S)
                recorded.append(recv_exactly(near, HEADER_BYTES + NONCE_BYTES))
                far.sendall(recorded[0])
                near.sendall(recv_exactly(far, HEADER_BYTES + NONCE_BYTES + PROOF_BYTES))
                recorded.append(recv_exactly(near, PROOF_BYTES))
                far.sendall(recorded[1] + near.recv(4096))

        thread = threading.Thread(target=relay)
        thread.start()
        send_and_flush(ends[0], 1, b"overheard")
        assert receive(ends[1], 0, 9) == b"overheard"
        thread.join(LONG_S)
        with socket.create_connection((listener.host, listener.port), LONG_S) as replay:
            replay.sendall(recorded[0])
            recv_exactly(replay, HEADER_BYTES + NONCE_BYTES + PROOF_BYTES)
            replay.sendall(recorded[1])
            assert FrameHeader.unpack(recv_exactly(replay, HEADER_BYTES)).kind == FrameKind.REFUSAL


def recv_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, f"it ended after {len(data)} of {size} bytes"
        data += more
    return data


# ---- other users of the machine


@pytest.mark.skipif(not ABSTRACT or os.getuid() != 0, reason="to be somebody else one must be root, on Linux")
def test_memory_is_not_sent_to_another_user() -> None:
    """Any user can bind an abstract socket name and wait there for file descriptors."""
    ours, theirs = socket.socketpair()
    other_user = Address("anywhere", 1024 + os.getpid() % 60_000)  # a name of this process alone
    pid = os.fork()
    if not pid:  # a process of another user listens at the name of the peer
        with contextlib.suppress(BaseException), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(socket_name(other_user))
            os.setuid(65534)
            sock.listen()
            theirs.send(b"!")
            data, descriptors, _, _ = socket.recv_fds(sock.accept()[0], 4096, 4)
            theirs.send(b"%d bytes, %d descriptors" % (len(data), len(descriptors)))
        os._exit(0)
    try:
        assert ours.recv(1) == b"!"
        with ShmTransport(HERE) as left:
            end = left.endpoint(COMMUNICATOR, 1, 0, [left.address, other_user])
            with pytest.raises(PeerLost, match="user 65534 may not share memory with this one"):
                receive(end, 1, 1)
            end.close()
        assert ours.recv(100) == b"0 bytes, 0 descriptors"
    finally:
        os.waitpid(pid, 0)
        ours.close()
        theirs.close()


# ---- arbitrary bytes

frames = st.builds(
    lambda kind, numbers, length, rest: (
        FrameHeader(kind, COMMUNICATOR, numbers[0], numbers[1], numbers[2], length).pack() + rest
    ),
    st.sampled_from(FrameKind),
    st.tuples(*[st.sampled_from([0, 1, 2, 2**32 - 1])] * 3),
    st.sampled_from([0, 16, 48, 2**40]),
    st.binary(max_size=100),
)
arbitrary = st.binary(max_size=200) | frames


@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "keyed"])
def test_a_tcp_listener_survives_arbitrary_bytes(key: bytes) -> None:
    """Such connections are refused or time out; the listener keeps running and accepts valid links."""
    with pair(key, key) as ends:
        listener = ends[1].peers[1]

        @settings(max_examples=60, deadline=None, database=None, derandomize=True)
        @given(st.lists(arbitrary, min_size=1, max_size=3))
        def attack(chunks: list[bytes]) -> None:
            sock = socket.create_connection((listener.host, listener.port), LONG_S)
            with sock, contextlib.suppress(ConnectionError):
                for chunk in chunks:
                    sock.sendall(chunk)

        attack()
        listeners = [thread for thread in threading.enumerate() if thread.name == "hoop-tcp-listener"]
        assert len(listeners) == 2
        if key:  # without a key, any HELLO that claims rank 0 is accepted
            send_and_flush(ends[0], 1, b"still here")
            assert receive(ends[1], 0, 10) == b"still here"


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.LANE, FrameKind.ASK, FrameKind.MISMATCH])
@pytest.mark.parametrize("number", [2**32, 2**64 - 1])
def test_a_rank_beyond_32_bits_does_not_end_the_listener(kind: FrameKind, number: int) -> None:
    lane = int(kind == FrameKind.LANE)
    first = FrameHeader(kind, COMMUNICATOR, 1, source=0, sequence=number, length=0, lane=lane)
    with TcpTransport(HERE) as left, TcpTransport(HERE) as right:
        peers = [left.address, right.address]
        with socket.create_connection((right.address.host, right.address.port), LONG_S) as sock:
            sock.sendall(first.pack())
            assert b"a first frame for rank" in sock.recv(4096)
        ends = [one.endpoint(COMMUNICATOR, 1, rank, peers) for rank, one in enumerate((left, right))]
        send_and_flush(ends[0], 1, b"still here")
        assert receive(ends[1], 0, 10) == b"still here"
        for end in ends:
            end.close()


def test_a_shared_memory_listener_survives_arbitrary_bytes_and_descriptors() -> None:
    """A process of the same user may connect; its offer is checked before it is used."""
    offers = st.builds(
        lambda source, start, size: (
            FrameHeader(FrameKind.HELLO, COMMUNICATOR, 1, source, 1, 48).pack()
            + b"a" * 32
            + start.to_bytes(8, "little")
            + size.to_bytes(8, "little")
        ),
        st.sampled_from([0, 1, 2, 7, 2**32 - 1]),
        st.sampled_from([0, 1, 4096, 2**63, 2**64 - 1]),
        st.sampled_from([0, 1, 4096, 2**63, 2**64 - 1]),
    )
    with ShmTransport(HERE) as left, ShmTransport(HERE) as right, open("/dev/null", "rb") as nothing:
        peers = [left.address, right.address]

        @settings(max_examples=40, deadline=None, database=None, derandomize=True)
        @given(arbitrary | offers, st.integers(0, 2))
        def attack(data: bytes, descriptors: int) -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(socket_name(right.address))
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(sock, [data or b"!"], [nothing.fileno()] * descriptors)

        target = right.endpoint(COMMUNICATOR, 1, 1, peers)
        attack()
        target.close()
        ends = [one.endpoint(COMMUNICATOR, 2, rank, peers) for rank, one in enumerate((left, right))]
        ends[0].send(1, memoryview(b"still here"), deadline_in())
        assert receive(ends[1], 0, 10) == b"still here"
        for end in ends:
            end.close()


def test_an_error_in_taking_a_connection_does_not_end_a_shared_memory_listener(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_hello = shm_listener._read_hello
    failed = threading.Event()

    def fail_once(sock: socket.socket) -> shm_listener.PendingConnection:
        if failed.is_set():
            return read_hello(sock)
        failed.set()
        raise RuntimeError("on purpose")

    monkeypatch.setattr(shm_listener, "_read_hello", fail_once)
    with ShmTransport(HERE) as left, ShmTransport(HERE) as right:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(socket_name(right.address))
            assert failed.wait(LONG_S)
        peers = [left.address, right.address]
        ends = [one.endpoint(COMMUNICATOR, 1, rank, peers) for rank, one in enumerate((left, right))]
        ends[0].send(1, memoryview(b"still here"), deadline_in())
        assert receive(ends[1], 0, 10) == b"still here"
        for end in ends:
            end.close()
    assert "a bug in Hoop" in caplog.text


@pytest.mark.parametrize("source", [1, 2, 2**32 - 1])
def test_an_invalid_rank_is_refused(source: int) -> None:
    """Its memory and semaphores are valid, but its rank is the listener's own or not in the communicator."""
    with ShmTransport(HERE) as left, ShmTransport(HERE) as right:
        peers = [left.address, right.address]
        target = right.endpoint(COMMUNICATOR, 1, 1, peers)
        real = left.endpoint(COMMUNICATOR + 1, 1, 0, peers)
        assert isinstance(real, ShmEndpoint)
        hello = FrameHeader(FrameKind.HELLO, COMMUNICATOR, 1, source, 1, 48).pack() + pack_offer(real.token, 0, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(LONG_S)
            sock.connect(socket_name(right.address))
            socket.send_fds(sock, [hello], [real.descriptor])
            assert sock.recv(1) == b""
        peer = left.endpoint(COMMUNICATOR, 1, 0, peers)
        peer.send(1, memoryview(b"still here"), deadline_in())
        assert receive(target, 0, 10) == b"still here"
        for end in (peer, real, target):
            end.close()
