"""A private network on this machine: a bridge, and one network namespace for the coordinator and for each device.

Packets that nftables drops there vanish as with a pulled cable: no process gets an error, no connection is reset.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

RULES = """
table inet hoop {{
  chain came {{ type filter hook input priority 0; {came} }}
  chain left {{ type filter hook output priority 0; {left} }}
}}
"""


def unavailable_reason() -> str:
    """Returns why network namespaces cannot be used on this machine; empty if they can."""
    if os.geteuid():
        return "namespaces need root"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (Debian: iproute2, nftables)"
    probe = subprocess.run(["unshare", "--net", "nft", "list", "ruleset"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "namespaces, or nftables in them, are not allowed here"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Network:
    """Hosts numbered from 1, each with its own address; the test process is an additional host."""

    def __init__(self, hosts: int, cleanup: ExitStack) -> None:
        self._name = f"hoop{os.getpid() % 100000}"
        ip("link", "add", self._name, "type", "bridge")
        cleanup.callback(ip, "link", "del", self._name)
        ip("addr", "add", "10.251.77.254/24", "dev", self._name)
        ip("link", "set", self._name, "up")
        for host in range(1, hosts + 1):
            namespace, veth = self._namespace(host), f"{self._name}-{host}"
            ip("netns", "add", namespace)
            cleanup.callback(ip, "netns", "del", namespace)
            ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            cleanup.callback(ip, "link", "del", veth)
            ip("link", "set", veth, "master", self._name, "up")
            ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.251.77.{host}"

    def exec_prefix(self, host: int) -> list[str]:
        """Returns the prefix of a command that is to run on this host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def cut(self, host: int, incoming: str = "", outgoing: str = "") -> None:
        """Drops packets on this host from ``incoming`` and to ``outgoing``: an address, ``all``, or empty for none."""
        drops = [
            "" if not address else "drop;" if address == "all" else f"ip {field} {address} drop;"
            for field, address in (("saddr", incoming), ("daddr", outgoing))
        ]
        rules = RULES.format(came=drops[0], left=drops[1])
        subprocess.run([*self.exec_prefix(host), "nft", "-f", "-"], input=rules, text=True, check=True)


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    with ExitStack() as cleanup:
        yield Network(hosts, cleanup)
