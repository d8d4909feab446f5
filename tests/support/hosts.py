"""Several hosts on this machine: network namespaces on their own switch, whose links can be cut.

A cut link is silent: the port is taken off the switch, both ends keep their carrier, and no RST is ever sent. Needs
root (``CAP_NET_ADMIN``).
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def available() -> bool:
    """Whether this process can make namespaces: it has iproute2, and may."""
    if shutil.which("ip") is None:
        return False
    name = f"fr-{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    _ip("netns", "del", name)
    return True


def can_lose() -> bool:
    """Whether packets can be dropped at random, or refused."""
    return shutil.which("nft") is not None


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """One host. ``command``: what to put before a command that is to run there."""

    name: str
    address: str
    port: str
    namespace: str

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def sent_bytes(self) -> int:
        """What has left it so far, of all processes."""
        count = [*self.command, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return int(subprocess.run(count, check=True, capture_output=True, text=True).stdout)

    def shape(self, mb_s: float) -> None:
        """What the host sends leaves it at that many megabytes a second, from a queue of at most 50 ms."""
        burst_kb = max(16, round(mb_s))  # a millisecond's
        rate = ["rate", f"{mb_s * 8:g}mbit", "burst", f"{burst_kb}kb", "latency", "50ms"]
        tc = [*self.command, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate]
        subprocess.run(tc, check=True, capture_output=True)


class Network:
    """A switch and its hosts."""

    def __init__(self, number: int) -> None:
        self._id = f"fr{uuid.uuid4().hex[:5]}"
        self.switch = f"{self._id}-sw"
        self._losses: dict[tuple[str, str], float] = {}
        self.hosts = [Host(f"host{i}", f"10.77.0.{i + 1}", f"p{i}", f"{self._id}-{i}") for i in range(number)]

    def part(self, number: int) -> Network:
        """The first ``number`` hosts of this network, for a job on fewer of them."""
        part = copy.copy(self)
        part.hosts = self.hosts[:number]
        return part

    def make(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            peer = ("peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", self.switch, "link", "add", host.port, "type", "veth", *peer)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", self.switch, "link", "set", host.port, "up")
            self.heal(host)

    def remove(self) -> None:
        for name in (self.switch, *(h.namespace for h in self.hosts)):
            left = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout
            for pid in map(int, left.split()):  # of a test that has failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", name)

    def cut(self, *hosts: Host) -> None:
        """No packet to or from these any more, not even between them."""
        for host in hosts:
            _ip("-n", self.switch, "link", "set", host.port, "nomaster")

    def heal(self, *hosts: Host) -> None:
        for host in hosts:
            _ip("-n", self.switch, "link", "set", host.port, "master", "br0")

    def readdress(self, host: Host, address: str) -> None:
        """Another address instead of its own, as a machine gets that is re-created."""
        _ip("-n", host.namespace, "addr", "flush", "dev", "eth0", "scope", "global")
        _ip("-n", host.namespace, "addr", "add", f"{address}/24", "dev", "eth0")

    def lose(self, host: Host, percent: float, *, to_host: bool = True, from_host: bool = True) -> None:
        """Drop this part of its packets at random on the switch; 0 ends it. Needs nft."""
        for way, wanted in (("oifname", to_host), ("iifname", from_host)):
            self._losses[way, host.port] = percent if wanted else 0.0
        rules = [
            f"add rule bridge loss forward {way} {port} {_at_random(percent)} drop"
            for (way, port), percent in self._losses.items()
            if percent
        ]
        chain = ["add table bridge loss", "add chain bridge loss forward { type filter hook forward priority 0; }"]
        program = "\n".join([*chain, "flush chain bridge loss forward", *rules, ""])
        command = ["ip", "netns", "exec", self.switch, "nft", "-f", "-"]
        subprocess.run(command, input=program, check=True, capture_output=True, text=True)

    def refuse(self, host: Host, *, on: bool = True) -> None:
        """A firewall on the host answers for it and to it, whatever is sent: TCP with a reset, UDP with "port
        unreachable". Needs nft."""
        verdicts = ("meta l4proto tcp reject with tcp reset", "meta l4proto udp reject")
        rules = ["add rule inet walls output tcp flags & rst == rst accept"]
        rules += [f"add rule inet walls {way} {verdict}" for way in ("input", "output") for verdict in verdicts]
        chains = [f"add chain inet walls {way} {{ type filter hook {way} priority 0; }}" for way in ("input", "output")]
        local = ["add rule inet walls input iifname lo accept", "add rule inet walls output oifname lo accept"]
        program = ["add table inet walls", *chains, "flush table inet walls", *((*local, *rules) if on else ()), ""]
        command = [*host.command, "nft", "-f", "-"]
        subprocess.run(command, input="\n".join(program), check=True, capture_output=True, text=True)


def _at_random(percent: float) -> str:
    return "" if percent >= 100 else f"numgen random mod 1000 < {round(10 * percent)}"


@contextmanager
def network(number: int) -> Iterator[Network]:
    """``number`` hosts that reach each other, and no other rank."""
    net = Network(number)
    net.make()
    try:
        yield net
    finally:
        net.remove()
