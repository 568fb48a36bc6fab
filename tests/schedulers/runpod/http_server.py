"""A small HTTP server whose answers a test writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    drop: bool = False
    "The connection is closed without an answer, after the request was taken."
    hold: float = 0.0
    "Seconds of silence before the connection is closed."


@dataclass
class Asked:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any


class Served:
    """`answer(asked)` gives the Reply; requests are remembered."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self.asked: list[Asked] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                asked = Asked(
                    self.command, path, query, dict(self.headers), json.loads(data) if data else None
                )
                served.asked.append(asked)
                reply = answer(asked)
                if reply.drop:
                    time.sleep(reply.hold)
                    self.close_connection = True
                    return
                body = reply.raw if reply.raw is not None else b""
                if reply.raw is None and reply.body is not None:
                    body = json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                if reply.hold:
                    time.sleep(reply.hold)
                    self.close_connection = True

            do_GET = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
