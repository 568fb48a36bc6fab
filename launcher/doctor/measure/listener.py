"""A TCP and UDP echo server to which the other nodes connect while they examine the network."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.supervise.ports import RENDEZVOUS_PORTS

PORTS = 5
"Number of ports to open in a port range, because a firewall may open only a part of the range."
TRIES = 20
"Number of neighbouring ports to try if a port is in use."
IDLE_SECONDS = 20.0
"How long a connection may be silent."
HEADER_BYTES = 2**20
"Maximum bytes of a request. The longest is an answer that a node cannot write into the run directory."


def ephemeral_range() -> tuple[int, int]:
    """Return the first and the last ephemeral port. The kernel chooses gloo's and NCCL's ports from these."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


class Listener:
    """Sockets at the run's rendezvous port, and at some other rendezvous and ephemeral ports.

    Use it as a context manager. `take` is called with answers of nodes that cannot write into the run
    directory.
    """

    def __init__(self, port: int, take: Callable[..., None] | None = None) -> None:
        self._take = take
        self._sockets: list[socket.socket] = []
        with contextlib.suppress(OSError):  # other nodes then find the port as it is
            self._listen(port)
        rendezvous = [port, *self._listen_within(RENDEZVOUS_PORTS[0], RENDEZVOUS_PORTS[-1])]
        ephemeral = list(self._listen_within(*ephemeral_range()))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("", 0))
        self._sockets.append(datagrams)
        threading.Thread(target=self._echo, args=(datagrams,), daemon=True).start()
        self.ports = {"rendezvous": rendezvous, "ephemeral": ephemeral, "udp": datagrams.getsockname()[1]}

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for socket_ in self._sockets:
            with contextlib.suppress(OSError):  # wakes the thread that waits in accept
                socket_.shutdown(socket.SHUT_RDWR)
            socket_.close()

    def _listen(self, port: int) -> int:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(256)
        except OSError:
            server.close()
            raise
        self._sockets.append(server)
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def _listen_within(self, low: int, high: int) -> Iterator[int]:
        """Listen at PORTS ports, spread over a range including its ends."""
        for number in range(PORTS):
            first = low + (high - low) * number // (PORTS - 1)
            nearby = range(first, high + 1) if number < PORTS - 1 else range(high, low - 1, -1)
            for port in nearby[:TRIES]:
                with contextlib.suppress(OSError):  # it is in use
                    yield self._listen(port)
                    break

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(IDLE_SECONDS)
            with connection.makefile("rwb") as file:
                request = json.loads(file.readline(HEADER_BYTES))
                began, received = time.monotonic(), 0
                if "answer" in request and self._take is not None:
                    self._take(**request["answer"])
                elif request.get("stream"):
                    while part := file.read1(2**20):
                        received += len(part)
                seconds = time.monotonic() - began
                answer = {"time": time.time(), "bytes": received, "seconds": seconds, "ports": self.ports}
                file.write(json.dumps(answer).encode() + b"\n")

    def _echo(self, datagrams: socket.socket) -> None:
        while True:
            try:
                data, sender = datagrams.recvfrom(2**16)
                if sender is None:  # shut down
                    return
                datagrams.sendto(data[:16], sender)
            except OSError:
                if datagrams.fileno() < 0:
                    return
                time.sleep(0.01)
