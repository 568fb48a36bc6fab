"""Record docs/report.png: run examples/demo-oom.yaml with more steps and take a picture of its page.

.venv/bin/python docs/record_report.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def main() -> int:
    if BROWSER is None:
        sys.exit("no Chromium on this machine: bash tests/report/install.sh")
    with tempfile.TemporaryDirectory() as folder:

        def launcher(*arguments: str) -> None:
            names = ("STATE", "CACHE", "CONFIG")
            environ = {**os.environ, **{f"XDG_{name}_HOME": f"{folder}/{name}" for name in names}}
            subprocess.run(
                [sys.executable, "-m", "launcher", *arguments], cwd=folder, env=environ, check=True
            )

        launcher("run", str(ROOT / "examples/demo-oom.yaml"), "-s", "steps=80", "-s", "train.eval_every=10")
        launcher("report", "-o", "run.html")
        picture(Path(folder) / "run.html", ROOT / "docs" / "report.png", height=1700)
    return 0


def picture(page: Path, to: Path, height: int) -> None:
    """Take a picture of a page, 1,100 pixels wide."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size=1100,{height}",
    ]
    options += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=5000"]
    subprocess.run(
        [str(BROWSER), *options, f"--screenshot={to}", page.as_uri()], check=True, capture_output=True
    )


if __name__ == "__main__":
    sys.exit(main())
