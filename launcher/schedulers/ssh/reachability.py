"""Find out before the start whether several hosts share a folder, and how they reach the first host.

This file is sent to the hosts and runs there, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEET_SECONDS = 15.0
"Timeout for a host to reach the first host, and to see the file that the first host has written."
Request = Mapping[str, Any]


def meet(request: Request) -> dict[str, Any]:
    """Run one host's part. All hosts run theirs at the same time."""
    note = Path(request["runs"]) / f".meeting-{request['token'][:16]}"
    return _receive(request, note) if request["rank"] == 0 else _visit(request, note)


def _receive(request: Request, note: Path) -> dict[str, Any]:
    """Run the first host's part: write the note, and send the token to each visitor until all have left."""
    note.parent.mkdir(parents=True, exist_ok=True)
    goodbyes = 0
    try:
        note.write_text(request["token"])
        with _listening(request["port"]) as server:
            server.settimeout(0.5)
            deadline = time.monotonic() + 2 * MEET_SECONDS
            while goodbyes < request["others"] and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    peer, _ = server.accept()
                    with peer:
                        peer.settimeout(2)
                        peer.sendall(request["token"].encode())
                        goodbyes += peer.recv(4) == b"left"
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
    return {}


def _listening(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _visit(request: Request, note: Path) -> dict[str, Any]:
    reached: set[str] = set()
    deadline = time.monotonic() + MEET_SECONDS

    def keep_trying(address: str) -> None:
        while address not in reached and time.monotonic() < deadline:
            if _token_at(address, request["port"], b"here") == request["token"]:
                reached.add(address)
            else:
                time.sleep(0.2)

    tries = [threading.Thread(target=keep_trying, args=(one,), daemon=True) for one in request["addresses"]]
    for thread in tries:
        thread.start()
    while not reached and time.monotonic() < deadline:
        time.sleep(0.05)
    for thread in tries:
        thread.join(0.5 if reached else 0)
    shared = _appears(note, request["token"], deadline)
    for address in reached:
        if _token_at(address, request["port"], b"left"):
            break
    return {"reached": [address for address in request["addresses"] if address in reached], "shared": shared}


def _token_at(address: str, port: int, word: bytes) -> str:
    try:
        with socket.create_connection((address, port), timeout=3) as connection:
            token = connection.recv(100)
            connection.sendall(word)
            return token.decode(errors="replace")
    except OSError:
        return ""


def _appears(note: Path, token: str, deadline: float) -> bool:
    while True:
        with contextlib.suppress(OSError):
            os.listdir(note.parent)  # makes a network file system query its server again
            if note.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
