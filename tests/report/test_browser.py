"""The pages in a real browser: fit for a telephone, legible, nothing fetched, charts that zoom."""

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

from launcher.report import comparison_html
from launcher.report.comparison import comparison_of
from launcher.report.run_html import as_html
from launcher.schedulers.rundir import status_of
from tests.lab import Lab
from tests.report.written_run import Log, eventful, recipe

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

ALONE = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ALONE += ["--disable-background-networking", "--disable-component-update"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "demo.yaml"
HERE = Path(__file__).parent


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


def measured(page: str, measure: str, server: Server, folder: Path, profile: Path, *more: str) -> Any:
    """Open a page in frames of several widths and return what `measure`, a function of JavaScript, found.

    Fails if the browser has an error to tell, or asks the server for anything else.
    """
    frames = (HERE / "frames.js").read_text().replace("PAGE", page).replace("MEASURE", measure)
    (folder / "measure.html").write_text(
        f"<!doctype html><title>measure</title><body><script>{frames}</script>"
    )
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    command = [str(BROWSER), *ALONE, *sandbox, *more, f"--user-data-dir={profile}", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"{server.url}/measure.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    told = re.search(r"<pre>(.*?)</pre>", shown.stdout, re.S)
    assert told, shown.stdout
    assert [line for line in shown.stderr.splitlines() if ":CONSOLE" in line and "favicon" not in line] == []
    assert {*server.asked} <= {"/measure.html", f"/{page}", "/favicon.ico"}
    return json.loads(unescape(told[1]))


BARS = """page => ({
  bars: [...page.querySelectorAll(".bars svg")].map(svg => ({
    whole: svg.getBoundingClientRect().width,
    parts: [...svg.querySelectorAll("rect[data-bytes]")].map(
      part => [Number(part.dataset.bytes), part.getBoundingClientRect().width]),
  })),
  colours: [...page.querySelectorAll(".legend i")].map(
    square => page.defaultView.getComputedStyle(square).backgroundColor),
})"""


def test_the_page_of_a_plan_in_a_browser(lab: Lab, server: Server, tmp_path: Path) -> None:
    done = lab.cli("plan", str(EXAMPLE), "--html", "plan.html")
    assert done.returncode == 0, done.stderr
    found = measured("plan.html", BARS, server, lab.folder, tmp_path / "profile")
    for width, page in found.items():
        assert page["overflow"] == 0, f"{width} px wide, it must be scrolled sideways"
        assert len(page["bars"]) > 5 and len(set(page["colours"])) == len(page["colours"]) >= 5
        whole = max(sum(size for size, _ in bar["parts"]) for bar in page["bars"])
        for bar in page["bars"]:
            for size, drawn in bar["parts"]:
                assert drawn == pytest.approx(bar["whole"] * size / whole, abs=0.6)


CHARTS = (HERE / "use_charts.js").read_text()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_page_of_a_run_in_a_browser(lab: Lab, server: Server, tmp_path: Path, scheme: str) -> None:
    line = "</script><script>alert(1)</script>\x1b]0;title\x07<img src=x onerror=alert(2)>"
    log = eventful(lab.folder / "run", name="<script>alert(0)</script>", line=line)
    (lab.folder / "run.html").write_text(as_html(log.report()))
    dark = [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    found = measured("run.html", CHARTS, server, lab.folder, tmp_path / "profile", *dark)
    for width, page in found.items():
        assert page["overflow"] == 0, f"{width} px wide, it must be scrolled sideways"
        assert page["titles"] == [
            "loss", "learning rate", "tokens per second", "MFU",
            "memory of tensors, peak of each step", "host memory of the rank",
        ]  # fmt: skip
        assert page["dark"] is (scheme == "dark")
        assert page["drawn"] and all(page["drawn"]), "each canvas has lines in the colours of its series"
        step, loss = page["hovered"]["step"], page["hovered"]["loss"]
        assert float(loss) == pytest.approx(5 - int(step) / 10), "the legend tells what is under the pointer"
        low, high = page["zoomed"]
        assert 1 < low < high < 40 and page["after_double_click"] == [1, 40]
        assert page["smoothed"] == ["loss (each step)", "loss", "eval_loss"]
        assert page["over_tokens"][-1] == 4000
        assert page["paper"] == [255, 255, 255], "it is printed on white"
        assert page["opened"], "a click on the timeline opens the log lines of its event"
        assert page["contrast"] and min(page["contrast"].values()) >= 4.5, page["contrast"]
        assert min(page["lines"].values()) >= 3, page["lines"]


COMPARED = """async page => {
  await new Promise(done => setTimeout(done, 50));
  return {
    titles: [...page.querySelectorAll("figcaption")].map(one => one.textContent),
    labels: page.querySelectorAll("figure")[1].chart.series.slice(1).map(one => one.label),
    axes: page.querySelectorAll("figure")[0].chart.data[0].length,
    hidden: Math.max(...[...page.querySelectorAll(".wide")].map(one => one.scrollWidth - one.clientWidth)),
  };
}"""


def test_the_page_of_several_runs_in_a_browser(lab: Lab, server: Server, tmp_path: Path) -> None:
    logs = [eventful(lab.folder / f"run-{number}", lr=0.1 * (number + 1)) for number in range(3)]
    states = {log.run: status_of(log.run, "", log.run.read_state()) for log in logs}
    (lab.folder / "runs.html").write_text(comparison_html.as_html(comparison_of(states, "eval_loss")))
    found = measured("runs.html", COMPARED, server, lab.folder, tmp_path / "profile")
    for width, page in found.items():
        assert page["overflow"] == 0, f"{width} px wide, it must be scrolled sideways"
        assert page["titles"][:2] == ["from the least to the greatest value", "loss"]
        assert page["labels"] == [f"run-{n}{more}" for n in range(3) for more in ("", " eval_loss")]
        assert page["axes"] == 2, "train.lr and eval_loss"
    assert found["1280"]["hidden"] == 0, "the tables are whole"


GAPS = """async page => {
  await new Promise(done => setTimeout(done, 50));
  const figure = page.querySelector("figure"), canvas = figure.querySelector("canvas"), chart = figure.chart;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const probe = page.createElement("i");
  probe.style.color = chart.series[1].stroke();
  page.body.append(probe);
  const [red, green, blue] = page.defaultView.getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
  const columns = new Set();
  for (let at = 0; at < pixels.length; at += 4)
    if (Math.abs(pixels[at] - red) + Math.abs(pixels[at + 1] - green) + Math.abs(pixels[at + 2] - blue) < 24)
      columns.add((at / 4) % canvas.width);
  const { left, width } = chart.bbox;
  const tenths = Array(10).fill(0);
  for (const column of columns) tenths[Math.floor((column - left) / width * 10)] += 10 / width;
  return { tenths };
}"""


@pytest.mark.parametrize(("steps", "runs"), [(100, 2), (10_000, 1)])
def test_the_line_of_a_run_that_diverged_and_recovered_has_a_gap(
    lab: Lab, server: Server, tmp_path: Path, steps: int, runs: int
) -> None:
    states = {}
    for number in range(runs):
        log = Log(lab.folder / f"run-{number}")
        log.about(steps=steps)
        log.event("started", host="n")
        log.event("attempt", attempt=0, recipe=recipe(16))
        for step in range(1, steps + 1, number + 1):
            diverged = not number and 0.4 < step / steps < 0.6
            log.steps(0, step, step, 1.0, loss=None if diverged else 1 + number + step / steps)
        states[log.run] = status_of(log.run, "", log.run.read_state())
    page = as_html(log.report()) if runs == 1 else comparison_html.as_html(comparison_of(states))
    (lab.folder / "run.html").write_text(page)
    for told in measured("run.html", GAPS, server, lab.folder, tmp_path / "profile").values():
        drawn = told["tenths"]
        assert min(drawn[:4] + drawn[6:]) > 0.8 and max(drawn[4:6]) < 0.1, drawn
