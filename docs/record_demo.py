"""Record `make demo` as docs/demo.svg: run it, keep the lines a reader needs, export the picture.

.venv/bin/python docs/record_demo.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 118


def main() -> int:
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    demo = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    if demo.returncode != 0:
        return demo.returncode
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print("[bold]$ make demo[/]")
    for line in _shortened(demo.stdout.replace(str(ROOT), ".").splitlines()):
        console.print(Text.from_ansi(line[:400]), overflow="ellipsis", no_wrap=True)
    (ROOT / "docs" / "demo.svg").write_text(console.export_svg(title="launcher"), encoding="utf-8")
    return 0


def _shortened(lines: list[str]) -> list[str]:
    """Return the first two parts of the demo, without most of their steps and without C++ frames."""
    kept: list[str] = []
    for line in lines:
        if line.startswith("3. "):
            while kept and set(kept[-1].strip()) <= {"="}:
                kept.pop()
            break
        if re.search(r" ! (frame #|Exception raised from|<omitting)", line):
            continue
        step = re.search(r"step (\d+)/(\d+)", line)
        if step and int(step[1]) > 20 and int(step[1]) % 100 and step[1] != step[2]:
            continue
        kept.append(line.rstrip())
    return kept


if __name__ == "__main__":
    sys.exit(main())
