"""A job that cannot be started on all of its devices runs on none of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fault_cluster import TIMEOUT_S, running_cluster

from hoop.engine.fault_tolerance.checkpoint_format import serialize
from hoop.engine.settings import Settings
from hoop.errors import NotFound
from hoop.wire.generated import hoop_pb2 as pb


def test_a_device_whose_peer_could_not_start_the_job_does_not_keep_it(tmp_path: Path) -> None:
    """Its task once waited ten minutes for another rank, and kept its memory."""
    with running_cluster(2, tmp_path) as processes:
        device, checkpoint = processes.cluster.device(1), serialize({}, {"steps": 0})
        device.allocate("resume.test", len(checkpoint))
        device.write("resume.test", checkpoint)
        with pytest.raises(NotFound, match=r"device 2.*resume\.test"):
            processes.cluster.start_job(Settings(job="mnist").to_json(), [1, 2], resume="resume.test")
        deadline = time.monotonic() + TIMEOUT_S / 2
        while device._stub.Describe(pb.DescribeRequest()).tasks:
            assert time.monotonic() < deadline, "the task goes on"
        assert not [name for name in device.buffers() if name.startswith("job")]
