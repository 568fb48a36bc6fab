"""`python -m launcher.report.at_end RUN_DIR`: write `report.html`. The supervisor starts it after a run.

It reads only the run directory and does not query the scheduler.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launcher.report.run_html import as_html
from launcher.report.run_report import report_of
from launcher.rundir.files import replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.rundir import status_of


def main() -> None:
    run = RunDir(Path(sys.argv[1]))
    report = report_of(run, status_of(run, "", run.read_state()), time.time())
    try:
        replace_text(run.report, as_html(report))
    except OSError as error:  # a full disk, or the run was deleted in the meantime
        sys.exit(f"[launcher] {run.report} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
