"""Devices on several hosts join with the same command: ``--host 0.0.0.0``. Each advertises the address of its host."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import preloaded
import pytest
from trainings import ENV, HOOP, TIMEOUT_S

import hoop
from hoop.lab.chaos.network import private_network, unavailable_reason
from hoop.wire.tokens import new_token, write_private

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())
HOSTS = (1, 2)


def test_devices_that_listen_everywhere_reach_each_other(tmp_path: Path) -> None:
    secret, token = new_token(), tmp_path / "cluster.token"
    write_private(token, secret)
    with ExitStack() as cleanup:
        network = cleanup.enter_context(private_network(len(HOSTS)))
        address = f"{network.address(1)}:4021"

        def command(host: int, *arguments: str) -> list[str]:
            return [*network.exec_prefix(host), *HOOP, *arguments, "--token-file", str(token)]

        def start(host: int, *arguments: str) -> str:
            process = preloaded.Popen(command(host, *arguments), text=True, env=ENV, stdout=subprocess.PIPE)
            cleanup.callback(process.communicate, timeout=TIMEOUT_S)
            cleanup.callback(process.terminate)
            assert process.stdout is not None
            line: str = process.stdout.readline()
            return line

        assert start(1, "coordinator", "--host", "0.0.0.0", "--port", "4021")
        for host in HOSTS:
            line = start(host, "device", "--join", address, "--host", "0.0.0.0", "--memory", "1MiB")
            assert line.startswith(f"device {host} {network.address(host)}:")
        with hoop.connect(address, token=secret) as cluster:
            members = [member.device for member in cluster.status().devices]
            assert [member.data_address.partition(":")[0] for member in members] == [*map(network.address, HOSTS)]
            comm = cluster.communicator(len(HOSTS))
            for total in comm.all_reduce([np.ones(1000), np.arange(1000.0)]):
                np.testing.assert_array_equal(total, np.arange(1000.0) + 1)
        # The default is loopback: at the second host nobody else could reach it.
        refused = preloaded.run(
            command(2, "device", "--join", address),
            text=True,
            env=ENV,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert refused.returncode == 2
        assert "is on another machine and cannot call 127.0.0.1" in refused.stderr
        assert f"--host {network.address(2)}" in refused.stderr
