"""Find the address and the network interface through which this node reaches node 0."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

_SIOCGIFCONF = 0x8912  # netdevice(7): the IPv4 addresses of all interfaces
_ENTRY = 40  # bytes of a `struct ifreq` with 64-bit pointers
_MOST = 1024
"Maximum number of addresses read from the kernel."


def main() -> None:
    """Print this node's address, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.

    sys.argv holds the host and port of node 0. `-` means that the variable should not be set.
    """
    address = own_address(sys.argv[1], int(sys.argv[2]))
    found = addresses()
    name = next((name for name, one in found if one == address), None)
    print(address, name or "-", nccl(name, [one for one, _ in found]) or "-")


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
    first = next((one for one in names if not re.match(r"docker|lo$", one)), None)
    if name is None or first == name or any(one.startswith("ib") for one in names):
        return None
    return f"={name}"  # without `=`, NCCL reads a prefix: eth1 would match eth10


def addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs in the kernel's order."""
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> list[tuple[str, str]]:
    answers = array.array("B", bytes(_ENTRY * _MOST))
    asked = struct.pack("iL", len(answers), answers.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        length = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, asked))[0]
    entries = (answers[start : start + _ENTRY].tobytes() for start in range(0, length, _ENTRY))
    # `eth0:1` is an alias label of eth0.
    return [
        (one[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(one[20:24])) for one in entries
    ]


def _ipv6(file: Path = Path("/proc/net/if_inet6")) -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        return []
    return [(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows]
