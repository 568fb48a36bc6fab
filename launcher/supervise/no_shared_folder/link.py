"""Connections between nodes: every other node keeps one to node 0 and reconnects when it breaks."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable

from launcher.rundir.layout import RunDir
from launcher.supervise.attempt import NodePlace
from launcher.supervise.no_shared_folder.file_sync import DOWN, Inbox, Outbox, up
from launcher.supervise.no_shared_folder.wire import Wire, WireError, authenticate_caller, connect
from launcher.supervise.nodes import NodesError

LOOK_SECONDS = 0.1
"Interval between two checks of this node's files. Checking several hundred takes 1 to 2 ms."
MORE_SECONDS = 0.02
"Interval after a check that found changes."
IDLE_SECONDS = 2.0
"An idle connection sends an empty message this often."
AGAIN_SECONDS = 0.5
"Pause before a broken connection is tried again."
EARLY_SECONDS = 30.0
"Time before missing answers are reported, because node 0 is started last."
END_SECONDS = 20.0
"How long to wait for the last lines of every node at the end of a run."
AWAY_SECONDS = 5.0
"How long to wait at the end of a run for a node without a connection to reconnect."


class Link:
    """One connection in both directions, from `serve` until it breaks or both sides have said goodbye."""

    def __init__(
        self,
        wire: Wire,
        outbox: Outbox,
        inbox: Inbox,
        make_room: Callable[[], None],
        on_goodbye: Callable[[Link], None],
    ) -> None:
        """`on_goodbye` is called when the other side has said goodbye and sends nothing more."""
        self.wire, self.outbox, self.inbox, self.make_room = wire, outbox, inbox, make_room
        self.on_goodbye = on_goodbye
        self.ending = threading.Event()
        "Set from outside: send what is left, then say goodbye."
        self.said_goodbye = threading.Event()
        self.heard_goodbye = threading.Event()
        self.why = ""
        "Why the connection broke."
        self._left_out: set[str] = set()

    def serve(self) -> None:
        """Send and receive until the connection ends."""
        reader = threading.Thread(target=self._receive, daemon=True)
        reader.start()
        try:
            self._send()
            reader.join()
        except (WireError, OSError) as error:
            self._broken(error)
        finally:
            self.wire.close()
            reader.join()

    def _send(self) -> None:
        last = time.monotonic()
        while not self.wire.closed:
            ending, sent = self.ending.is_set(), False
            for header, data in self.outbox.news(final=ending):
                self.wire.send(header, data)
                sent, last = True, time.monotonic()
            if ending and not sent:
                self.wire.send({"goodbye": True})
                self.said_goodbye.set()
                return
            if not sent and time.monotonic() > last + IDLE_SECONDS:
                self.wire.send({})
                last = time.monotonic()
            self.ending.wait(MORE_SECONDS if sent else LOOK_SECONDS)

    def _receive(self) -> None:
        try:
            while not self.heard_goodbye.is_set():
                header, data = self.wire.receive()
                if "path" in header:
                    self._take(header, data)
                elif "goodbye" in header:
                    self.heard_goodbye.set()
                    self.on_goodbye(self)
        except (WireError, OSError, ValueError, KeyError) as error:
            self._broken(error)
        finally:
            if not self.heard_goodbye.is_set():
                self.wire.close()

    def _take(self, header: dict[str, object], data: bytes) -> None:
        path = str(header["path"])
        if path in self._left_out:
            return
        try:
            self.inbox.take(header, data)
        except OSError:
            # The disk is full, and the reserve is for heartbeats and verdicts. Drop the rest of a log; the
            # next connection sends it.
            if self.inbox.grows(path):
                self._left_out.add(path)
                return
            self.make_room()
            self.inbox.take(header, data)

    def _broken(self, error: Exception) -> None:
        self.why = self.why or str(error)


class Hub:
    """Node 0, which the other nodes call."""

    closed_by_node_0 = False
    "Whether node 0 has ended, so that there is nothing to wait for."

    def __init__(self, run: RunDir, place: NodePlace, token: str) -> None:
        """Listen for the other nodes. Raises NodesError if that is not possible."""
        self.run, self.place, self.token = run, place, token
        self._links: dict[int, Link] = {}
        self._connected: set[int] = set()
        self._gone: set[int] = set()
        "Nodes that have said goodbye."
        self._ending = False
        self._lock = threading.Lock()
        host, port = place.rendezvous_host or "", place.mirror_port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server((host, port), family=family)
        except OSError as error:
            raise NodesError(
                f"cannot listen for the other hosts at port {port} of {host}: {error.strerror}; "
                "start the run again, which uses another port"
            ) from None

    def start(self, make_room: Callable[[], None]) -> None:
        """Start the threads. `make_room` makes room on a full disk."""
        self._make_room = make_room
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Send the last lines and wait for those of the other side. A second call does nothing."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
            for link in self._links.values():
                link.ending.set()
        began = time.monotonic()
        while time.monotonic() < began + END_SECONDS and self._awaited(time.monotonic() - began):
            time.sleep(0.02)
        for node in set(range(1, self.place.count)) - self._gone:
            port = self.place.mirror_port
            never = f"never connected to this host at port {port}: open this port between the hosts"
            _print(f"node {node} {'did not finish sending its files' if node in self._connected else never}")
        self._server.close()
        for link in list(self._links.values()):
            link.wire.close()

    def _awaited(self, seconds: float) -> list[int]:
        with self._lock:
            waiting = self._connected - self._gone
            return [node for node in waiting if node in self._links or seconds < AWAY_SECONDS]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if self._ending:
                    return
                _print(f"cannot accept a connection: {error}")
                time.sleep(AGAIN_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            node, wire = authenticate_caller(connection, self.token)
            if not 0 < node < self.place.count:
                raise WireError(f"there is no node {node}")
            self._end_earlier(node)
            inbox = Inbox(self.run, up(node), node)
            wire.send({"have": inbox.sizes()})
        except (WireError, OSError):
            connection.close()
            return
        outbox = Outbox(self.run, DOWN, {})
        link = Link(wire, outbox, inbox, self._make_room, lambda link: link.ending.set())
        with self._lock:
            self._links[node] = link
            self._connected.add(node)
            if self._ending:
                link.ending.set()
        try:
            link.serve()
        finally:
            self._hang_up(node, link)

    def _end_earlier(self, node: int) -> None:
        """End an earlier connection of this node, so that all its data is written before sizes are read."""
        while True:
            with self._lock:
                earlier = self._links.get(node)
            if earlier is None:
                return
            earlier.wire.close()
            time.sleep(0.01)

    def _hang_up(self, node: int, link: Link) -> None:
        with self._lock:
            if link.heard_goodbye.is_set():
                self._gone.add(node)
            if self._links.get(node) is link:
                del self._links[node]
            ended = node in self._gone or self._ending
        if not ended:
            _print(f"node {node}: the connection broke ({link.why})")


class Spoke:
    """A node other than 0, which calls node 0."""

    def __init__(self, run: RunDir, place: NodePlace, token: str) -> None:
        self.run, self.place, self.token = run, place, token
        self.closed_by_node_0 = False
        self._link: Link | None = None
        self._connected = False
        self._ending = threading.Event()
        self._done = threading.Event()
        self._lock = threading.Lock()

    def start(self, make_room: Callable[[], None]) -> None:
        self._make_room = make_room
        self.run.cancel.unlink(missing_ok=True)  # left by an earlier start; node 0 has the valid one
        threading.Thread(target=self._keep_calling, daemon=True).start()

    def close(self) -> None:
        self._ending.set()
        with self._lock:
            if self._link is not None:
                self._link.ending.set()
            seconds = END_SECONDS if self._link is not None else AWAY_SECONDS
        self._done.wait(seconds if self._connected else 0)

    def _keep_calling(self) -> None:
        printed, began = "", time.monotonic()
        while not self._done.is_set():
            try:
                address = (self.place.rendezvous_host or "", self.place.mirror_port)
                wire, printed = connect(address, self.token, self.place.rank), ""
                why = self._serve(wire)
            except (WireError, OSError, ValueError, KeyError) as error:
                why = str(error)
            if self._done.is_set():
                return
            late = self._connected or time.monotonic() > began + EARLY_SECONDS
            if late and why != printed:
                _print(f"no connection to node 0 ({why}); trying again")
                printed = why
            time.sleep(AGAIN_SECONDS)

    def _serve(self, wire: Wire) -> str:
        """Serve one connection. Return why it broke."""
        about, _ = wire.receive()
        outbox = Outbox(self.run, up(self.place.rank), about["have"])
        link = Link(wire, outbox, Inbox(self.run, DOWN, 0), self._make_room, self._node_0_closed)
        with self._lock:
            self._link, self._connected = link, True
            if self._ending.is_set():
                link.ending.set()
        link.serve()
        with self._lock:
            self._link = None
        if link.said_goodbye.is_set() and link.heard_goodbye.is_set():
            self._done.set()
        return link.why

    def _node_0_closed(self, _link: Link) -> None:
        self.closed_by_node_0 = True


Mirror = Hub | Spoke
"A node's end of the connections, as used by a supervisor."


def mirror(run: RunDir, place: NodePlace, token: str) -> Mirror:
    """Return this node's Mirror. Raises NodesError if node 0 cannot be called here."""
    return Hub(run, place, token) if place.rank == 0 else Spoke(run, place, token)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"[launcher] {text}", file=sys.stderr, flush=True)
