"""Write the page of a run on any cluster."""

from __future__ import annotations

import time
from pathlib import Path

from launcher.report.run_html import as_html
from launcher.report.run_report import report_of
from launcher.rundir.files import replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Status
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.wanted import Wanted


def write_report(run: RunDir, page: Path, refresh: int | None = None) -> Status:
    """Fetch the run's records and write its page. Return the status that the page shows.

    `refresh`: seconds after which a browser reloads the page, until the run has ended. Raises OSError, and
    SchedulerError if the run's cluster does not answer.
    """
    scheduler = scheduler_of(run)
    scheduler.fetch(run, Wanted(logs=True))
    status = scheduler.status(run)
    report = report_of(run, status, time.time())
    replace_text(page, as_html(report, None if status.ended else refresh))
    return status


def watch_report(run: RunDir, page: Path, every: float) -> None:
    """Write the page every `every` seconds until the run has ended."""
    while not write_report(run, page, refresh=round(every)).ended:
        time.sleep(every)
