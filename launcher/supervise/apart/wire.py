"""Messages between two supervisors over TCP, once both have proved that they know the token of this start."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

HELLO_SECONDS = 10.0
"For the other side to prove itself."
SILENCE_SECONDS = 20.0
"Nothing came, or nothing could be sent, for this long: the connection is dead. Idle ones say so every two."
NONCE, DIGEST = 32, 32
MAX_HEADER = MAX_DATA = 2**24
_HEAD = struct.Struct(">II")


class WireError(Exception):
    """The other side is gone, silent, or not who it says it is."""


class Wire:
    """One connection. A message is a JSON object and bytes. Closing it wakes whoever waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self.closed = False

    def send(self, about: dict[str, Any], data: bytes = b"") -> None:
        """Raises WireError."""
        header = json.dumps(about).encode()
        with self._sending, _as_wire_error():
            self._socket.sendall(_HEAD.pack(len(header), len(data)) + header + data)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Raises WireError."""
        size, more = _HEAD.unpack(_exactly(self._socket, _HEAD.size))
        if size > MAX_HEADER or more > MAX_DATA:
            raise WireError("a message without end")
        about = json.loads(_exactly(self._socket, size))
        return about, _exactly(self._socket, more)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def called(connection: socket.socket, token: str) -> tuple[int, Wire]:
    """Node 0: who called, as which node. Raises WireError; nothing longer than its proof is read before."""
    connection.settimeout(HELLO_SECONDS)
    ours = os.urandom(NONCE)
    with _as_wire_error():
        connection.sendall(ours)
        theirs, place = _exactly(connection, NONCE), _exactly(connection, 4)
        if not hmac.compare_digest(
            _exactly(connection, DIGEST), _proof(token, b"caller", ours, theirs, place)
        ):
            raise WireError("a caller that does not know this start's token")
        connection.sendall(_proof(token, b"called", ours, theirs, place))
        connection.settimeout(SILENCE_SECONDS)
    return int.from_bytes(place, "big"), Wire(connection)


def call(address: tuple[str, int], token: str, node: int) -> Wire:
    """Another node. Raises WireError."""
    with _as_wire_error():
        connection = socket.create_connection(address, timeout=HELLO_SECONDS)
    try:
        with _as_wire_error():
            theirs, ours, place = _exactly(connection, NONCE), os.urandom(NONCE), node.to_bytes(4, "big")
            connection.sendall(ours + place + _proof(token, b"caller", theirs, ours, place))
            proof = _exactly(connection, DIGEST)
            if not hmac.compare_digest(proof, _proof(token, b"called", theirs, ours, place)):
                raise WireError(f"what answers at {address[0]} port {address[1]} is not node 0 of this start")
            connection.settimeout(SILENCE_SECONDS)
    except WireError:
        connection.close()
        raise
    return Wire(connection)


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), b"|".join(parts), hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        with _as_wire_error():
            part = connection.recv(min(count - len(found), 2**20))
        if not part:
            raise WireError("the other side has closed the connection")
        found += part
    return bytes(found)


@contextlib.contextmanager
def _as_wire_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WireError(error.strerror or str(error)) from None
