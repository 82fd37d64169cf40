"""Devices on several hosts join with the same command: ``--host 0.0.0.0``. Each advertises the address of its host.

So do the ranks of a run that a scheduler started.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import preloaded
import pytest
from scheduler_environments import slurm
from trainings import ENV, HOOP, TIMEOUT_S

import hoop
from hoop.lab.chaos.network import private_network, unavailable_reason
from hoop.wire.private_files import write_private
from hoop.wire.tokens import new_token

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())
HOSTS = (1, 2)
JOB = f"{Path(__file__).parents[1] / 'process' / 'train_driver.py'}:job"
TRAIN = ("train", JOB, "--memory", "16MiB", "--json")
TORCHRUN = str(Path(sysconfig.get_path("scripts")) / "torchrun")


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


def local_weights() -> str:
    """The hash of the weights that devices of one host train."""
    command = [*preloaded.HOOP, *TRAIN, "-n", "2"]
    done = preloaded.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    return str(json.loads(done.stdout)["weights_sha256"])


def check_trained(processes: list[subprocess.Popen[str]], devices: int) -> None:
    """All processes end with code 0, and the first prints the weights of a local training."""
    outputs = [one.communicate(timeout=TIMEOUT_S) for one in processes]
    assert [one.returncode for one in processes] == [0] * len(processes), outputs
    trained = json.loads(outputs[0][0])
    assert (trained["devices"], trained["weights_sha256"]) == (devices, local_weights())
    assert not any(output for output, _ in outputs[1:]), "only rank 0 prints"


@pytest.mark.slow
def test_ranks_on_several_hosts_meet_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "cluster.token"
    write_private(token, new_token())
    where = ((1, 0), (1, 1), (2, 0))  # host and local rank of each rank
    with ExitStack() as cleanup:
        network = cleanup.enter_context(private_network(len(HOSTS)))
        processes = []
        for rank, (host, local) in enumerate(where):
            environment = slurm(
                rank,
                SLURM_STEP_NODELIST=f"{network.address(1)},{network.address(2)}",
                SLURM_STEP_NUM_TASKS="3",
                SLURM_STEP_TASKS_PER_NODE="2,1",
                SLURM_NODEID=str(host - 1),
                SLURM_LOCALID=str(local),
            )
            process = subprocess.Popen(
                [*network.exec_prefix(host), *HOOP, *TRAIN],
                text=True,
                env={**ENV, **environment, "HOOP_TOKEN_FILE": str(token)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            cleanup.callback(process.kill)
            processes.append(process)
        check_trained(processes, devices=3)


@pytest.mark.slow
def test_torchrun_on_several_hosts(tmp_path: Path) -> None:
    token = tmp_path / "cluster.token"
    write_private(token, new_token())
    with ExitStack() as cleanup:
        network = cleanup.enter_context(private_network(len(HOSTS)))
        processes = []
        for host in HOSTS:
            agent = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
            agent += ["--rdzv-endpoint", f"{network.address(1)}:29400", "--rdzv-conf", f"is_host={int(host == 1)}"]
            agent += ["--local-addr", network.address(host), "-m", "hoop", *TRAIN]
            process = subprocess.Popen(
                [*network.exec_prefix(host), *agent],
                text=True,
                env={**ENV, "HOOP_TOKEN_FILE": str(token)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            cleanup.callback(process.kill)
            processes.append(process)
        outputs = [one.communicate(timeout=TIMEOUT_S) for one in processes]
    assert [one.returncode for one in processes] == [0, 0], outputs
    (line,) = "".join(output for output, _ in outputs).splitlines()  # either host may have rank 0
    trained = json.loads(line)
    assert (trained["devices"], trained["weights_sha256"]) == (2, local_weights())
