"""``hoop status`` as a table: the reason of each row is shown in a terminal of 80 columns too."""

from __future__ import annotations

import pytest

from hoop.cli.status import _print
from hoop.wire.generated import hoop_pb2 as pb


def test_reasons_are_below_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    device = pb.DeviceDescription(device_id=2, address="10.251.17.3:4021", pid=29809, host="a-host")
    memory = pb.DeviceMemory(capacity=64 << 20, used=1300 << 10)
    member = pb.Member(device=device, state="alive", memory=memory, unreachable="device 1 cannot connect to it")
    job = pb.Job(id=7, name="mnist", device_ids=[2], status="failed", reason="device 9 was lost")
    _print(pb.GetStatusResponse(address="10.251.17.1:4021", pid=1, devices=[member], jobs=[job]))
    printed = capsys.readouterr().out
    assert "device 2: device 1 cannot connect to it\n" in printed
    assert "job 7: device 9 was lost\n" in printed
    assert max(map(len, printed.splitlines())) <= 80
