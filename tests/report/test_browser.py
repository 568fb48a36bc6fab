"""The plan's page in a real browser: fit for a telephone, bars as long as their bytes, nothing fetched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

ALONE = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ALONE += ["--disable-background-networking", "--disable-component-update"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "demo.yaml"

MEASURE = """<!doctype html><title>measure</title><body><script>
const widths = [1100, 360], found = {};
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:2000px;border:0`;
  frame.src = "plan.html";
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    found[width] = {
      overflow: root.scrollWidth - root.clientWidth,
      bars: [...page.querySelectorAll(".bars svg")].map(svg => ({
        whole: svg.getBoundingClientRect().width,
        parts: [...svg.querySelectorAll("rect[data-bytes]")].map(
          part => [Number(part.dataset.bytes), part.getBoundingClientRect().width]),
      })),
      colours: [...page.querySelectorAll(".legend i")].map(
        square => frame.contentWindow.getComputedStyle(square).backgroundColor),
    };
    if (Object.keys(found).length == widths.length) {
      const told = document.createElement("pre");
      told.textContent = JSON.stringify(found);
      document.body.append(told);
    }
  };
  document.body.append(frame);
}
</script>"""


class Server:
    """A folder over HTTP on loopback, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        asked: list[str] = []
        self.asked = asked

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *arguments: Any) -> None:
                asked.append(self.path)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(lab: Lab) -> Iterator[Server]:
    server = Server(lab.folder)
    yield server
    server.close()


def test_the_page_of_a_plan_in_a_browser(lab: Lab, server: Server, tmp_path: Path) -> None:
    done = lab.cli("plan", str(EXAMPLE), "--html", "plan.html")
    assert done.returncode == 0, done.stderr
    (lab.folder / "measure.html").write_text(MEASURE)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    command = [str(BROWSER), *ALONE, *sandbox, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", f"{server.url}/measure.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    told = re.search(r"<pre>(.*?)</pre>", shown, re.S)
    assert told, shown
    for width, page in json.loads(unescape(told[1])).items():
        assert page["overflow"] == 0, f"{width} px wide, it must be scrolled sideways"
        assert len(page["bars"]) > 5 and len(set(page["colours"])) == len(page["colours"]) >= 5
        whole = max(sum(size for size, _ in bar["parts"]) for bar in page["bars"])
        for bar in page["bars"]:
            for size, drawn in bar["parts"]:
                assert drawn == pytest.approx(bar["whole"] * size / whole, abs=0.6)
    assert {*server.asked} <= {"/measure.html", "/plan.html", "/favicon.ico"}
