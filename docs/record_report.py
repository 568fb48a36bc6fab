"""Record the pictures of docs/reports.md and docs/watching.md from real runs: examples/demo-oom.yaml, three
runs of examples/demo.yaml with other learning rates, and one that goes on.

.venv/bin/python docs/record_report.py
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launcher.api.run import Run

ROOT = Path(__file__).resolve().parents[1]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def main() -> int:
    if BROWSER is None:
        sys.exit("no Chromium on this machine: bash tests/report/install.sh")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ |= {f"XDG_{name}_HOME": f"{folder}/{name}" for name in ("STATE", "CACHE", "CONFIG")}
        demo, held_out = str(EXAMPLES / "demo.yaml"), ("-s", "train.eval_every=5")
        launcher("run", str(EXAMPLES / "demo-oom.yaml"), "-s", "steps=40", *held_out)
        launcher("report", "-o", "run.html")
        picture(Path("run.html"), DOCS / "report.png", height=2190)
        for lr in ("3e-4", "1e-3", "3e-3"):
            launcher("run", demo, "-s", "steps=30", "-s", f"train.lr={lr}", "-s", "tags=[rates]", *held_out)
        launcher("compare", "rates", "--by", "eval_loss", "-o", "runs.html")
        picture(Path("runs.html"), DOCS / "compare.png", height=1450)
        launcher("submit", demo, "-s", "steps=5000")
        asyncio.run(record_top())
        launcher("cancel")
        Run().wait()
    return 0


def launcher(*arguments: str) -> str:
    command = [sys.executable, "-m", "launcher", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def picture(page: Path, to: Path, height: int) -> None:
    """Take a picture of a page, 1,100 pixels wide."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size=1100,{height}", f"--user-data-dir={page.absolute().parent / 'profile'}"]
    options += ["--virtual-time-budget=5000"]
    subprocess.run(
        [str(BROWSER), *options, f"--screenshot={to}", page.absolute().as_uri()],
        check=True,
        capture_output=True,
    )


async def record_top() -> None:
    """Save the screen of `launcher top` once its newest run has a curve."""
    from launcher.top.board import Board
    from launcher.top.screen import Top

    board = Board()
    board.look()
    app = Top(board, timed=False)
    async with app.run_test(size=(80, 24)) as pilot:
        while True:
            await pilot.pause(1.0)
            app.read()
            run = app.chosen
            if run is not None and run.metrics.exists() and len(run.read_metrics()) > 40:
                break
        board.look()
        app.read()
        await pilot.pause()
        # Without the fonts that the picture would fetch.
        drawn = re.sub(r"@font-face \{.*?\}\n?", "", app.export_screenshot(), flags=re.S)
        (DOCS / "top.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
