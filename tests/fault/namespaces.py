"""A small network of this machine's own: a switch, and a namespace for the coordinator and for each device.

What nftables drops there is dropped by the kernel, as a pulled cable would: nobody is told, nothing is reset.
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


def missing() -> str:
    """Why this cannot be done here, or nothing."""
    if os.geteuid():
        return "namespaces need root"
    without = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if without:
        return f"{' and '.join(without)} not installed (Debian: iproute2, nftables)"
    tried = subprocess.run(["unshare", "--net", "nft", "list", "ruleset"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "namespaces, or nftables in them, are not allowed here"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Network:
    """Hosts that are numbered from 1, each with an address of its own; this process is another one."""

    def __init__(self, hosts: int, ended: ExitStack) -> None:
        self._name = f"hoop{os.getpid() % 100000}"
        ip("link", "add", self._name, "type", "bridge")
        ended.callback(ip, "link", "del", self._name)
        ip("addr", "add", "10.251.77.254/24", "dev", self._name)
        ip("link", "set", self._name, "up")
        for host in range(1, hosts + 1):
            space, cable = self._space(host), f"{self._name}-{host}"
            ip("netns", "add", space)
            ended.callback(ip, "netns", "del", space)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            ended.callback(ip, "link", "del", cable)
            ip("link", "set", cable, "master", self._name, "up")
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _space(self, host: int) -> str:
        return f"{self._name}-{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.251.77.{host}"

    def on(self, host: int) -> list[str]:
        """What a command begins with, to run there."""
        return ["ip", "netns", "exec", self._space(host)]

    def cut(self, host: int, came: str = "", left: str = "") -> None:
        """Drops there what comes from, or leaves to, such an address; ``all``: any."""
        drops = [
            "" if not whom else "drop;" if whom == "all" else f"ip {field} {whom} drop;"
            for field, whom in (("saddr", came), ("daddr", left))
        ]
        rules = RULES.format(came=drops[0], left=drops[1])
        subprocess.run([*self.on(host), "nft", "-f", "-"], input=rules, text=True, check=True)


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    with ExitStack() as ended:
        yield Network(hosts, ended)
