"""Messages between two supervisors over TCP. Both first prove that they know the token of this start.

`multiprocessing.connection` is not used: it has no time limits, so that one silent caller would block all
others, and before Python 3.12 its proof is an HMAC with MD5.
"""

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
"How long the other side has to authenticate."
SILENCE_SECONDS = 20.0
"A connection is dead if it was silent or blocked for this long. Idle sides send a message every 2 s."
NONCE, DIGEST = 32, 32
MAX_HEADER = MAX_DATA = 2**24
_HEAD = struct.Struct(">II")


class WireError(Exception):
    """The other side is gone, silent or not authenticated."""


class Wire:
    """One connection. A message is a JSON object and bytes. Closing the connection wakes blocked threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self.closed = False

    def send(self, about: dict[str, Any], data: bytes = b"") -> None:
        """Send one message. Raises WireError."""
        header = json.dumps(about).encode()
        with self._sending, _as_wire_error():
            self._socket.sendall(_HEAD.pack(len(header), len(data)) + header + data)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Receive one message. Raises WireError."""
        size, data_size = _HEAD.unpack(_exactly(self._socket, _HEAD.size))
        if size > MAX_HEADER or data_size > MAX_DATA:
            raise WireError("the message is too long")
        header_ = json.loads(_exactly(self._socket, size))
        return header_, _exactly(self._socket, data_size)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def authenticate_caller(connection: socket.socket, token: str) -> tuple[int, Wire]:
    """Node 0: authenticate a caller. Return its node and the connection.

    Raises WireError. No more than the proof is read before the caller is authenticated.
    """
    connection.settimeout(HELLO_SECONDS)
    own_nonce = os.urandom(NONCE)
    with _as_wire_error():
        connection.sendall(own_nonce)
        caller_nonce, node_bytes = _exactly(connection, NONCE), _exactly(connection, 4)
        if not hmac.compare_digest(
            _exactly(connection, DIGEST), _proof(token, b"caller", own_nonce, caller_nonce, node_bytes)
        ):
            raise WireError("the caller does not know this start's token")
        connection.sendall(_proof(token, b"called", own_nonce, caller_nonce, node_bytes))
        connection.settimeout(SILENCE_SECONDS)
    return int.from_bytes(node_bytes, "big"), Wire(connection)


def connect(address: tuple[str, int], token: str, node: int) -> Wire:
    """Other nodes: connect to node 0. Raises WireError."""
    with _as_wire_error():
        connection = socket.create_connection(address, timeout=HELLO_SECONDS)
    try:
        with _as_wire_error():
            node_0_nonce, own_nonce, node_bytes = (
                _exactly(connection, NONCE),
                os.urandom(NONCE),
                node.to_bytes(4, "big"),
            )
            connection.sendall(
                own_nonce + node_bytes + _proof(token, b"caller", node_0_nonce, own_nonce, node_bytes)
            )
            proof = _exactly(connection, DIGEST)
            if not hmac.compare_digest(proof, _proof(token, b"called", node_0_nonce, own_nonce, node_bytes)):
                raise WireError(f"the process at {address[0]} port {address[1]} is not node 0 of this start")
            connection.settimeout(SILENCE_SECONDS)
    except WireError:
        connection.close()
        raise
    return Wire(connection)


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), b"|".join(parts), hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        with _as_wire_error():
            part = connection.recv(min(count - len(received), 2**20))
        if not part:
            raise WireError("the other side has closed the connection")
        received += part
    return bytes(received)


@contextlib.contextmanager
def _as_wire_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WireError(error.strerror or str(error)) from None
