"""A cluster of hosts with several devices each: hosts are network namespaces, so only devices of one share memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import preloaded
from trainings import DRIVER, ENV, HOOP, TIMEOUT_S

from hoop.lab.chaos.network import Network, private_network

COORDINATOR = 1
"""The coordinator's host; the devices are on hosts 2, 3, …"""
PORT = "4021"
CALL_PORTS, DATA_PORTS = (4030, 4049), (4050, 4069)


class HostCluster:
    """A coordinator on host 1, and devices where ``add_devices`` puts them."""

    def __init__(
        self, network: Network, folder: Path, cleanup: ExitStack, interface: int = 0, options: Sequence[str] = ()
    ) -> None:
        """``interface``: number of the one that the coordinator listens on. ``options``: more of the coordinator's."""
        self.network, self._folder, self._cleanup = network, folder, cleanup
        self.address = f"{network.bracketed(COORDINATOR, interface)}:{PORT}"
        coordinator = "coordinator", "--host", network.address(COORDINATOR, interface), "--port", PORT
        self.first_line(self.start(COORDINATOR, *coordinator, *options))

    def start(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        """Starts a command of Hoop on a host."""
        with open(self._folder / "errors", "ab") as errors:
            process = preloaded.Popen(
                [*self.network.exec_prefix(host), *HOOP, *arguments, "--insecure"],
                text=True,
                env=ENV,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._cleanup.callback(process.communicate, timeout=TIMEOUT_S)
        self._cleanup.callback(process.kill)
        return process

    def first_line(self, process: subprocess.Popen[str]) -> str:
        """Waits until a command has printed its first line."""
        assert process.stdout is not None
        line: str = process.stdout.readline()
        assert line, (self._folder / "errors").read_text()
        return line

    def add_devices(self, hosts: Sequence[int], *options: str, jobs: Path = DRIVER.parent) -> list[str]:
        """Starts one device for each entry, with ids 1, 2, … in this order; returns their first lines.

        ``jobs``: folder with the code of jobs. ``options``: where they listen; the default is the host's address.
        """
        started = []
        for number, host in enumerate(hosts, start=1):
            where = options or ("--host", self.network.address(host))
            ports = ["--port", "{}-{}".format(*CALL_PORTS), "--data-port", "{}-{}".format(*DATA_PORTS)]
            join = ["--join", self.address, "--jobs", str(jobs), "--memory", "64MiB"]
            started.append(self.start(host, "device", *join, *where, *ports, "--id", str(number)))
        return [self.first_line(process) for process in started]


@contextmanager
def host_cluster(
    hosts: int, folder: Path, ipv6: bool = False, interface: int = 0, options: Sequence[str] = ()
) -> Iterator[HostCluster]:
    """A coordinator on a host of its own with these options, and ``hosts`` hosts without devices.

    ``interface``: 1: the hosts have two interfaces, and the coordinator listens on the second one.
    """
    with ExitStack() as cleanup:
        network = cleanup.enter_context(private_network(hosts + 1, ipv6, second=interface == 1))
        yield HostCluster(network, folder, cleanup, interface, options)
