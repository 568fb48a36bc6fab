"""Choose the ports for the rendezvous of a run's ranks."""

from __future__ import annotations

import contextlib
import random
import socket

RENDEZVOUS_PORTS = range(61000, 65536)
"Above Linux's default ephemeral range (32768-60999), so that no outgoing connection takes one by chance."


def hold_port() -> socket.socket:
    """Return a socket bound to a free port of RENDEZVOUS_PORTS on all addresses, where torch's store listens.

    While the socket is open, no other run gets the port here, because each binds without SO_REUSEADDR first.
    torch's store sets that option, and can listen at the port (socket(7)). Raises OSError if none is free.
    """
    for port in random.sample(RENDEZVOUS_PORTS, 50):
        holder = socket.socket()
        with contextlib.suppress(OSError):
            holder.bind(("", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on, for a later listener
            return holder
        holder.close()
    raise OSError("none of 50 ports between 61000 and 65535 is free")


def free_port() -> int:
    """Return a port that is free now. Raises OSError if none is found."""
    with hold_port() as holder:
        return int(holder.getsockname()[1])
