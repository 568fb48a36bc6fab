"""Find the address and the network interface by which this node reaches node 0."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]


def main() -> None:
    """Print this node's address, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.

    sys.argv holds the host and port of node 0. `-` means that the variable should not be set.
    """
    address = own_address(sys.argv[1], int(sys.argv[2]))
    pairs = addresses()
    name = next((name for name, one in pairs if one == address), None)
    print(address, name or "-", nccl(name, [one for one, _ in pairs]) or "-")


def own_address(host: str, port: int) -> str:
    """Return this node's address on the route to `host`.

    Connecting a UDP socket only consults the routing table; nothing is sent.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def nccl(name: str | None, names: Sequence[str]) -> str | None:
    """Return NCCL_SOCKET_IFNAME, or None if NCCL chooses correctly without it.

    NCCL prefers InfiniBand interfaces. Otherwise it takes the first interface other than docker* and lo
    (`ncclFindInterfaces`), which other nodes may not reach.
    """
    first = next((interface for interface in names if not re.match(r"docker|lo$", interface)), None)
    if name is None or first == name or any(interface.startswith("ib") for interface in names):
        return None
    return f"={name}"  # without `=`, NCCL reads a prefix: eth1 would match eth10


def addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs in the kernel's order, IPv4 first."""
    interfaces = psutil.net_if_addrs().items()
    # `eth0:1` is an alias label of eth0, and the address of a link ends in `%eth0`.
    return [
        (name.partition(":")[0], entry.address.partition("%")[0])
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, entries in interfaces
        for entry in entries
        if entry.family == family
    ]
