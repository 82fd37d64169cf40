"""A Write's messages, which the client serializes by itself to save copies, are those that protobuf reads."""

from __future__ import annotations

import pytest

from hoop.client.device import _with_data
from hoop.wire.generated import hoop_pb2 as pb


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16383, 16384, 2 << 20])
def test_protobuf_reads_what_was_framed(size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    first = pb.WriteRequest(location=pb.Location(buffer="x", offset=5))
    assert pb.WriteRequest.FromString(_with_data(first.SerializeToString(), memoryview(data))) == pb.WriteRequest(
        location=first.location, data=data
    )
    assert pb.WriteRequest.FromString(_with_data(b"", memoryview(data))).data == data
