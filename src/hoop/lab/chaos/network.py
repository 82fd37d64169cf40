"""A private network on this machine: a bridge, and one network namespace for the coordinator and for each device.

Packets that nftables drops there vanish as with a pulled cable: no process gets an error, no connection is reset. Needs
root, ``ip`` and ``nft``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PREFIX = "hoop"
"""Prefix of the names of bridges, links and namespaces; the id of the process that made them follows."""
NO_RULES = "add table inet hoop\ndelete table inet hoop\n"
RULES = """
table inet hoop {{
  chain came {{ type filter hook input priority 0; {came} }}
  chain left {{ type filter hook output priority 0; {left} }}
}}
"""


def unavailable_reason(rules: bool = True) -> str:
    """Returns why network namespaces cannot be used on this machine; empty if they can.

    ``rules``: with rules of nftables, which all but ``unplug`` need.
    """
    if os.geteuid():
        return "namespaces need root"
    missing = [tool for tool in ("ip", "nft", "unshare") if shutil.which(tool) is None and (rules or tool != "nft")]
    if missing:
        return f"{' and '.join(missing)} not installed (Debian: iproute2, nftables, util-linux)"
    tried = ["nft", "list", "ruleset"] if rules else ["ip", "link", "add", "type", "veth"]
    probe = subprocess.run(["unshare", "--net", *tried], capture_output=True, check=False)
    what = "nftables" if rules else "links"
    return "" if probe.returncode == 0 else f"namespaces, or {what} in them, are not allowed here"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Network:
    """Hosts numbered from 1, each with its own address; the process that makes it is an additional host.

    With ``second``, every host also has an interface eth1 in another subnet, which nothing else reaches.
    """

    def __init__(self, hosts: int, cleanup: ExitStack, ipv6: bool = False, second: bool = False) -> None:
        self._name = f"{PREFIX}{os.getpid()}"
        number = os.getpid() % 256
        self._subnets = [f"fd00:251:{number:x}::" if ipv6 else f"10.251.{number}."]
        if second:
            self._subnets.append(f"fd00:252:{number:x}::" if ipv6 else f"10.252.{number}.")
        self._ipv6 = ipv6
        for host in range(1, hosts + 1):
            ip("netns", "add", self._namespace(host))
            cleanup.callback(ip, "netns", "del", self._namespace(host))
            ip("-n", self._namespace(host), "link", "set", "lo", "up")
        for interface in range(len(self._subnets)):
            self._add_bridge(hosts, interface, cleanup)

    def _add_bridge(self, hosts: int, interface: int, cleanup: ExitStack) -> None:
        """Creates a bridge and connects interface number ``interface`` of every host to it."""
        bridge = f"{self._name}{'x' * interface}"
        options = ["nodad"] if self._ipv6 else []  # without it a new address cannot be used for a second
        prefix = 64 if self._ipv6 else 24
        ip("link", "add", bridge, "type", "bridge")
        cleanup.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{self._own_address(interface)}/{prefix}", "dev", bridge, *options)
        ip("link", "set", bridge, "up")
        for host in range(1, hosts + 1):
            namespace, veth, name = self._namespace(host), f"{bridge}-{host}", f"eth{interface}"
            ip("link", "add", veth, "type", "veth", "peer", "name", name, "netns", namespace)
            cleanup.callback(ip, "link", "del", veth)
            ip("link", "set", veth, "master", bridge, "up")
            ip("-n", namespace, "addr", "add", f"{self.address(host, interface)}/{prefix}", "dev", name, *options)
            ip("-n", namespace, "link", "set", name, "up")

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _own_address(self, interface: int = 0) -> str:
        return f"{self._subnets[interface]}{'fe' if self._ipv6 else 254}"

    @property
    def gateway(self) -> str:
        """The address of the process that made the network."""
        return self._own_address()

    def address(self, host: int, interface: int = 0) -> str:
        return f"{self._subnets[interface]}{host:x}" if self._ipv6 else f"{self._subnets[interface]}{host}"

    def bracketed(self, host: int, interface: int = 0) -> str:
        """The address as it is written before a port."""
        address = self.address(host, interface)
        return f"[{address}]" if ":" in address else address

    def exec_prefix(self, host: int) -> list[str]:
        """Returns the prefix of a command that is to run on this host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def cut(self, host: int, incoming: str = "", outgoing: str = "") -> None:
        """Drops packets on this host from ``incoming`` and to ``outgoing``: an address, ``all``, or empty for none."""
        family = "ip6" if self._ipv6 else "ip"
        came, left = (
            "" if not address else "counter drop;" if address == "all" else f"{family} {field} {address} counter drop;"
            for field, address in (("saddr", incoming), ("daddr", outgoing))
        )
        self._set_rules(host, came, left)

    def unplug(self, host: int) -> None:
        """Takes this host off the bridge: nothing reaches it, and nothing that it sends arrives. Needs no nft."""
        ip("link", "set", f"{self._name}-{host}", "nomaster")

    def plug_in(self, host: int) -> None:
        """Puts a host that was unplugged on the bridge again."""
        ip("link", "set", f"{self._name}-{host}", "master", self._name)

    def lose(self, host: int, percent: int) -> None:
        """Drops ``percent`` of a hundred packets that reach this host, and of those that leave it, at random."""
        rule = f"numgen random mod 100 < {percent} counter drop;"
        self._set_rules(host, rule, rule)

    def count_sent(self, host: int, low: int, high: int) -> None:
        """Counts what leaves this host for TCP ports ``low`` to ``high`` from now on; drops nothing any more."""
        self._set_rules(host, "", f"tcp dport {low}-{high} counter;")

    def count_received(self, host: int, interface: int) -> None:
        """Counts what reaches this host by this interface from now on; drops nothing any more."""
        self._set_rules(host, f'iifname "eth{interface}" counter;', "")

    def counted_bytes(self, host: int) -> int:
        """The bytes that the present rules of this host have counted, headers included."""
        return self._counted(host, "bytes")

    def heal(self, host: int) -> None:
        """Drops and counts nothing on this host any more."""
        self._nft(host, NO_RULES)

    def dropped(self, host: int) -> int:
        """How many packets the present rules of this host have dropped."""
        return self._counted(host, "packets")

    def _counted(self, host: int, unit: str) -> int:
        listed = subprocess.run(
            [*self.exec_prefix(host), "nft", "--json", "list", "ruleset"], stdout=subprocess.PIPE, text=True, check=True
        )
        rules = [one["rule"]["expr"] for one in json.loads(listed.stdout)["nftables"] if "rule" in one]
        return sum(int(part["counter"][unit]) for rule in rules for part in rule if "counter" in part)

    def _set_rules(self, host: int, came: str, left: str) -> None:
        self._nft(host, NO_RULES + RULES.format(came=came, left=left))

    def _nft(self, host: int, rules: str) -> None:
        subprocess.run([*self.exec_prefix(host), "nft", "-f", "-"], input=rules, text=True, check=True)


@contextmanager
def private_network(hosts: int, ipv6: bool = False, second: bool = False) -> Iterator[Network]:
    """A network that exists within the block. Networks of processes that were killed are removed first."""
    _remove_stale()
    with ExitStack() as cleanup:
        yield Network(hosts, cleanup, ipv6, second)


def _remove_stale() -> None:
    """Removes the networks of processes that exist no more."""
    for folder, remove in ((Path("/run/netns"), ("netns", "del")), (Path("/sys/class/net"), ("link", "del"))):
        for path in folder.glob(f"{PREFIX}*"):
            found = re.fullmatch(rf"{PREFIX}(\d+)x?(-\d+)?", path.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                subprocess.run(["ip", *remove, path.name], capture_output=True, check=False)  # another may be faster
