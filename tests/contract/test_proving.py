"""Links that prove themselves, and strangers who say anything at all to a listener."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from exchange import receive, say
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import COMMUNICATOR, LONG_S, soon

from hoop.errors import MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.auth_handshake import NONCE_BYTES, PROOF_BYTES
from hoop.transport.base import Endpoint
from hoop.transport.registry import key_of_environment, open_transport
from hoop.transport.shm_endpoint import ShmEndpoint
from hoop.transport.shm_listener import ABSTRACT, ShmTransport, pack_offer, socket_name
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

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


def test_with_the_same_key_messages_arrive_both_ways() -> None:
    with pair(KEY, KEY) as ends:
        for sender, receiver in ((0, 1), (1, 0)):
            for words in (b"first", b"second"):
                say(ends[sender], receiver, words)
                assert receive(ends[receiver], sender, len(words)) == words


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((KEY, OTHER), "could not prove that it belongs to this cluster"),
        ((KEY, b""), "it refused the link: this device has no token and cannot prove itself"),
        ((b"", KEY), "refused the link: this device wants links that prove themselves"),
    ],
)
def test_without_it_no_byte_is_taken(keys: tuple[bytes, bytes], why: str) -> None:
    with (
        pair(*keys) as ends,
        pytest.raises((PeerLost, MembershipChanged), match=f"rank 0: rank 1 at .*{why}"),
    ):
        exchange(ends[0])


def exchange(end: Endpoint) -> None:
    """One that has no key sends at once, and hears of the refusal when it waits for an answer."""
    with contextlib.suppress(BrokenPipeError):
        say(end, 1, b"secret" * 1000)
    receive(end, 1, 1)


def test_one_token_in_the_environment_is_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of torch.distributed have it; with another token there is no link."""
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
        say(ends[0], 1, b"known")
        assert receive(ends[1], 0, 5) == b"known"
        with pytest.raises(PeerLost, match="have both the same token"):
            say(ends[0], 2, b"unknown")


def test_a_proof_is_of_no_use_twice() -> None:
    """What was overheard on one link opens no other: the challenge is new each time."""
    with pair(KEY, KEY) as ends, socket.create_server(("127.0.0.1", 0)) as middle:
        listener = ends[1].peers[1]
        ends[0].peers = (ends[0].peers[0], Address("127.0.0.1", middle.getsockname()[1]))
        overheard: list[bytes] = []

        def relay() -> None:
            near, _ = middle.accept()
            with near, socket.create_connection((listener.host, listener.port), LONG_S) as far:
                near.settimeout(LONG_S)
                overheard.append(exactly(near, HEADER_BYTES + NONCE_BYTES))
                far.sendall(overheard[0])
                near.sendall(exactly(far, HEADER_BYTES + NONCE_BYTES + PROOF_BYTES))
                overheard.append(exactly(near, PROOF_BYTES))
                far.sendall(overheard[1] + near.recv(4096))

        thread = threading.Thread(target=relay)
        thread.start()
        say(ends[0], 1, b"overheard")
        assert receive(ends[1], 0, 9) == b"overheard"
        thread.join(LONG_S)
        with socket.create_connection((listener.host, listener.port), LONG_S) as again:
            again.sendall(overheard[0])
            exactly(again, HEADER_BYTES + NONCE_BYTES + PROOF_BYTES)
            again.sendall(overheard[1])
            assert FrameHeader.unpack(exactly(again, HEADER_BYTES)).kind == FrameKind.REFUSAL


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, f"it ended after {len(data)} of {size} bytes"
        data += more
    return data


# ---- other users of the machine


@pytest.mark.skipif(not ABSTRACT or os.getuid() != 0, reason="to be somebody else one must be root, on Linux")
def test_memory_is_not_handed_to_another_user() -> None:
    """Anybody can take a name that is no file, and wait there for descriptors."""
    ours, theirs = socket.socketpair()
    thief = Address("anywhere", 1000)
    pid = os.fork()
    if not pid:  # another user, at the name where a peer is expected
        with contextlib.suppress(BaseException), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(socket_name(thief))
            os.setuid(65534)
            sock.listen()
            theirs.send(b"!")
            data, descriptors, _, _ = socket.recv_fds(sock.accept()[0], 4096, 4)
            theirs.send(b"%d bytes, %d descriptors" % (len(data), len(descriptors)))
        os._exit(0)
    try:
        assert ours.recv(1) == b"!"
        with ShmTransport(HERE) as left:
            end = left.endpoint(COMMUNICATOR, 1, 0, [left.address, thief])
            with pytest.raises(PeerLost, match="user 65534 may not share memory with this one"):
                receive(end, 1, 1)
            end.close()
        assert ours.recv(100) == b"0 bytes, 0 descriptors"
    finally:
        os.waitpid(pid, 0)
        ours.close()
        theirs.close()


# ---- anything at all

greetings = st.builds(
    lambda kind, numbers, length, rest: (
        FrameHeader(kind, COMMUNICATOR, numbers[0], numbers[1], numbers[2], length).pack() + rest
    ),
    st.sampled_from(FrameKind),
    st.tuples(*[st.sampled_from([0, 1, 2, 2**32 - 1])] * 3),
    st.sampled_from([0, 16, 48, 2**40]),
    st.binary(max_size=100),
)
anything = st.binary(max_size=200) | greetings


@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "keyed"])
def test_any_bytes_at_a_tcp_listener(key: bytes) -> None:
    """They are refused, or wait their time; the listener lives, and links that are in order are made."""
    with pair(key, key) as ends:
        door = ends[1].peers[1]

        @settings(max_examples=60, deadline=None, database=None, derandomize=True)
        @given(st.lists(anything, min_size=1, max_size=3))
        def attack(words: list[bytes]) -> None:
            sock = socket.create_connection((door.host, door.port), LONG_S)
            with sock, contextlib.suppress(ConnectionError):
                for word in words:
                    sock.sendall(word)

        attack()
        listeners = [thread for thread in threading.enumerate() if thread.name == "hoop-tcp-listener"]
        assert len(listeners) == 2
        if key:  # without one, whoever says HELLO in rank 0's name is rank 0: that is what the key is for
            say(ends[0], 1, b"still here")
            assert receive(ends[1], 0, 10) == b"still here"


def test_any_bytes_and_descriptors_at_a_shared_memory_listener() -> None:
    """From a process of the same user, which is let in so far: what it offers is looked at before it is used."""
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
        @given(anything | offers, st.integers(0, 2))
        def attack(words: bytes, descriptors: int) -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(socket_name(right.address))
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(sock, [words or b"!"], [nothing.fileno()] * descriptors)

        target = right.endpoint(COMMUNICATOR, 1, 1, peers)
        attack()
        target.close()
        ends = [one.endpoint(COMMUNICATOR, 2, rank, peers) for rank, one in enumerate((left, right))]
        ends[0].send(1, memoryview(b"still here"), soon())
        assert receive(ends[1], 0, 10) == b"still here"
        for end in ends:
            end.close()


@pytest.mark.parametrize("source", [1, 2, 2**32 - 1])
def test_a_rank_that_there_is_not_is_sent_away(source: int) -> None:
    """Its memory and bells are in order, and its number is the listener's own, or nobody's."""
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
        peer.send(1, memoryview(b"still here"), soon())
        assert receive(target, 0, 10) == b"still here"
        for end in (peer, real, target):
            end.close()
