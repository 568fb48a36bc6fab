"""Measure the connection from this node to another: names, ports, clock, packets and bandwidth."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

from launcher.doctor.measure.guarded import guarded
from launcher.doctor.values import Measured
from launcher.supervise.interface import addresses, own_address

CONNECT_SECONDS = 3.0
PORT_TRIES = 5
"Tries per port in this time, because single packets may get lost. A network answers in milliseconds."
NAME_SECONDS = 5.0
"Time limit for resolving a name. A resolver queries the next server after 5 s (resolv.conf(5))."
ANSWER_SECONDS = 20.0
"How long to retry until node 0 listens."
STREAM_SECONDS, STREAM_BYTES = 0.5, 64 * 2**20
BUFFER_BYTES = 2**18
PACKETS, PACKET_SECONDS = 100, 0.5
ECHOES = 5
SPARSE_ABOVE = 16
"With more nodes than this, each node tests only those at distances that are powers of two."
MTUS = (1500, 1450, 1400, 1280, 576)
"Packet sizes to try if the interface's MTU does not pass: Ethernet, VXLAN, VPNs, IPv6, IPv4."
_HEADERS = 28  # IPv4 and UDP
_IP_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 3  # ip(7): the socket module lacks them


def identity(host: str, port: int) -> dict[str, Any]:
    """Return what the other nodes need to know about this node."""
    return {
        "name": socket.gethostname(),
        "address": own_address(host, port),
        "adapters": sorted(adapter.name for adapter in Path("/sys/class/infiniband").glob("*")),
        "addresses": [
            list(adapter) for adapter in addresses() if ":" not in adapter[1] and adapter[0] != "lo"
        ],
    }


def partners(node: int, nodes: int) -> list[int]:
    """Return the nodes to which this node tests its connection."""
    if nodes <= SPARSE_ABOVE:
        return [(node + step) % nodes for step in range(1, nodes)]
    steps = [2**power for power in range(nodes.bit_length()) if 2**power < nodes]
    return sorted({(node + step) % nodes for step in steps} | {(node - step) % nodes for step in steps})


def measure_ways(node: int, peers: Mapping[int, Mapping[str, Any]]) -> Iterator[Measured]:
    """Yield the values of the connections from this node to others. `peers` holds their identities.

    Names and ports of all nodes are tried at the same time. The other measurements would disturb each other.
    """
    if not peers:
        return
    with ThreadPoolExecutor(len(peers)) as pool:
        results = list(pool.map(_name_and_ports, peers.values()))
    for (other, peer), (name, states) in zip(peers.items(), results, strict=True):
        subject, ports = f"{node} to {other}", peer["ports"]
        yield Measured("name", node, name, subject)
        for kind in ("rendezvous", "ephemeral"):
            yield Measured(f"{kind}-port", node, {str(port): states[port] for port in ports[kind]}, subject)
        if port := next((port for port, state in states.items() if state == "open"), None):
            yield from _measure_open_connection(node, other, peer, port)


def _name_and_ports(peer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    return _resolved(peer), _ports(peer["address"], _listening(peer))


def _measure_open_connection(node: int, other: int, peer: Mapping[str, Any], port: int) -> Iterator[Measured]:
    """Yield the values that can be measured through an open port."""
    subject, address, ports = f"{node} to {other}", peer["address"], peer["ports"]
    yield guarded("interfaces", node, lambda: _interfaces(peer, port), subject)
    echoes = guarded("latency", node, lambda: [_echo(address, port) for _ in range(ECHOES)], subject)
    if echoes.error:
        yield echoes
        return
    yield Measured("latency", node, round(median(seconds for seconds, _ in echoes.value), 6), subject)
    if node < other:
        yield Measured("clocks", node, round(_clock_lead(*min(echoes.value)), 3), subject)
    yield guarded("mtu", node, lambda: _mtu(address, ports["udp"]), subject)
    yield guarded("loss", node, lambda: _loss(address, ports["udp"]), subject)
    yield guarded("bandwidth", node, lambda: round(_stream(address, port)), subject)


def send_answer(host: str, port: int, answer: Mapping[str, Any]) -> None:
    """Send an answer to node 0, for a node that cannot write into the run directory. Raises OSError."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            _ask(host, port, {"answer": answer}, b"")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def responds(peer: Mapping[str, Any]) -> bool:
    """Return whether the doctor of another node answers at one of its ports. `peer` is its identity.

    Nodes may share an address, as ssh hosts can, but their ports differ.
    """

    def answers(port: int) -> bool:
        with suppress(OSError, ValueError):
            return bool(_ask(peer["address"], port, {}, b"")[0].get("ports") == peer["ports"])
        return False

    ports = _listening(peer)
    with ThreadPoolExecutor(len(ports)) as pool:
        return any(pool.map(answers, ports))


def _listening(peer: Mapping[str, Any]) -> list[int]:
    """Return the TCP ports at which another node listens."""
    return [*peer["ports"]["rendezvous"], *peer["ports"]["ephemeral"]]


def _port(address: str, port: int) -> str:
    for _ in range(PORT_TRIES):
        try:
            with socket.create_connection((address, port), CONNECT_SECONDS / PORT_TRIES):
                return "open"
        except TimeoutError:
            continue
        except OSError as error:
            return "refused" if isinstance(error, ConnectionRefusedError) else error.strerror or str(error)
    return "no answer"


def _ports(address: str, ports: Sequence[int]) -> dict[int, str]:
    """Return the state of each port. All ports are tried at the same time."""
    with ThreadPoolExecutor(len(ports)) as pool:
        return dict(zip(ports, pool.map(partial(_port, address), ports), strict=True))


def _resolved(peer: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve a node's name. `right` says whether one of the addresses belongs to that node."""
    results: list[list[str]] = []

    def resolve() -> None:
        try:
            answers = socket.getaddrinfo(peer["name"], None, type=socket.SOCK_STREAM)
            results.append(sorted({str(answer[4][0]) for answer in answers}))
        except OSError:
            results.append([])

    thread = threading.Thread(target=resolve, daemon=True)  # a resolver that waits cannot be interrupted
    thread.start()
    thread.join(NAME_SECONDS)
    own_addresses = {peer["address"], *(address for _, address in peer["addresses"])}
    addresses = results[0] if results else []
    return {
        "name": peer["name"],
        "addresses": addresses,
        "right": bool(own_addresses & set(addresses)),
        "late": not results,
    }


def _ask(host: str, port: int, request: Mapping[str, Any], stream: bytes) -> tuple[dict[str, Any], float]:
    """Send a request, then `stream` repeatedly for STREAM_SECONDS. Return the reply and the time it took."""
    with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        connection.settimeout(2 * CONNECT_SECONDS)
        began = time.monotonic()
        connection.sendall(json.dumps(request).encode() + b"\n")
        sent = 0
        while stream and time.monotonic() < began + STREAM_SECONDS and sent < STREAM_BYTES:
            sent += connection.send(stream)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            line = file.readline()
        if not line:
            raise ConnectionError("the other node closed the connection without an answer")
        return json.loads(line), time.monotonic() - began


def _echo(address: str, port: int) -> tuple[float, float]:
    """Return the time of a round trip, and how far the other node's clock is ahead, in seconds."""
    answer, seconds = _ask(address, port, {}, b"")
    return seconds, answer["time"] - (time.time() - seconds / 2)  # excludes the time to connect


def _clock_lead(seconds: float, ahead: float) -> float:
    """Return a lower bound of how far the other clock is ahead, from the fastest echo."""
    return max(0.0, ahead - seconds / 2) + min(0.0, ahead + seconds / 2)


def _stream(address: str, port: int) -> float:
    """Return the bytes/s of one TCP connection."""
    answer, _ = _ask(address, port, {"stream": True}, os.urandom(2**17))
    return float(answer["bytes"] / answer["seconds"])


def _interfaces(peer: Mapping[str, Any], port: int) -> list[str]:
    """Return the other node's interfaces that answer, each with the local interface used to reach it."""
    pairs = []
    for interface, address in peer["addresses"]:
        if _port(address, port) == "open":
            local_address = own_address(address, 9)
            local_names = (name for name, own in addresses() if own == local_address)
            pairs.append(f"{next(local_names, local_address)} to {interface}")
    return pairs


def _datagrams(address: str, port: int) -> socket.socket:
    socket_ = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    socket_.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)  # do not fragment packets
    socket_.connect((address, port))
    return socket_


def _mtu(address: str, port: int) -> dict[str, int]:
    """Return the MTU of the local interface and the largest packet that reaches the other node, in bytes.

    Raises OSError if no datagram passes.
    """
    local_address = own_address(address, port)
    name = next(name for name, one in addresses() if one == local_address)
    mtu = psutil.net_if_stats()[name].mtu
    with _datagrams(address, port) as socket_:
        passes = next((size for size in (mtu, *MTUS) if size <= mtu and _passes(socket_, size)), None)
    if passes is None:
        raise OSError("no UDP packet comes back")
    return {"interface": mtu, "passes": passes}


def _passes(socket_: socket.socket, size: int) -> bool:
    data = struct.pack("!QQ", size, 0).ljust(min(size, 65535) - _HEADERS, b"\0")
    socket_.settimeout(0.3)
    for _ in range(4):  # a packet may be lost for other reasons
        try:
            socket_.send(data)
            while struct.unpack("!QQ", socket_.recv(64))[0] != size:
                pass
        except OSError:
            continue
        return True
    return False


def _loss(address: str, port: int) -> float:
    """Return the fraction of small packets that do not come back. Raises OSError if none does."""
    returned: set[int] = set()
    with _datagrams(address, port) as socket_:
        socket_.settimeout(0.001)
        for number in range(PACKETS):
            socket_.send(struct.pack("!QQ", 0, number))
            _receive(socket_, returned)
        deadline = time.monotonic() + PACKET_SECONDS
        while len(returned) < PACKETS and time.monotonic() < deadline:
            _receive(socket_, returned)
    if not returned:
        raise OSError("no UDP packet comes back")
    return 1 - len(returned) / PACKETS


def _receive(socket_: socket.socket, returned: set[int]) -> None:
    try:
        returned.add(struct.unpack("!QQ", socket_.recv(64))[1])
    except OSError:
        return


def common_interfaces(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of interfaces that every node has, in the first node's order."""
    names = [{name for name, _ in identity_["addresses"]} for identity_ in identities]
    order = dict.fromkeys(name for name, _ in identities[0]["addresses"]) if identities else {}
    return [name for name in order if all(name in have for have in names)]


def common_adapters(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of InfiniBand adapters that every node has."""
    names = [set(identity_.get("adapters", ())) for identity_ in identities]
    return sorted(set.intersection(*names)) if names else []
