"""Write the page of a run on any cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from launcher.report.run_html import as_html
from launcher.report.run_report import report_of
from launcher.rundir.files import replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Status
from launcher.schedulers.lookup import fetch_to_read, scheduler_of
from launcher.schedulers.wanted_files import Wanted


class Written(NamedTuple):
    """What a page shows."""

    status: Status
    outdated: str
    "Why the page shows an earlier copy of a run that has ended, or ''."


def write_report(run: RunDir, page: Path, refresh: int | None = None) -> Written:
    """Fetch the run's records and write its page.

    `refresh`: seconds after which a browser reloads the page, until the run has ended. Raises OSError, and
    SchedulerError if the cluster of a run that has not ended does not answer.
    """
    outdated = fetch_to_read(run, Wanted(logs=True))
    status = scheduler_of(run).status(run)
    report = report_of(run, status, time.time())
    replace_text(page, as_html(report, None if status.ended else refresh))
    return Written(status, outdated)


def watch_report(run: RunDir, page: Path, every: float) -> Written:
    """Write the page every `every` seconds until the run has ended. Return what the last page shows."""
    while not (written := write_report(run, page, refresh=round(every))).status.ended:
        time.sleep(every)
    return written
