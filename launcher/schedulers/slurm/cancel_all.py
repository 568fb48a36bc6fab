"""Cancel jobs: a single one, or many with one call to scancel."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.login import Answer, Login, ask
from launcher.schedulers.slurm.records import CLEAN


def asked_before(jobs: Iterable[RunDir]) -> set[RunDir]:
    """Return the runs that were asked to stop before. A second request ends them at once."""
    return {run for run in jobs if run.cancel.exists()}


def cancel_job(login: Login, job: str, *, again: bool) -> str:
    """Cancel a job if it is pending, or in any state the second time (`again`).

    Return why Slurm refused, or "". A run that has begun reads the request in its directory. Raises
    LoginError.
    """
    answer = ask(login, {"scancel": ["scancel", job] if again else _cancel_if_pending(job)})["scancel"]
    return "scancel: " + (answer.err.strip() or f"exit code {answer.code}") if answer.code else ""


def cancel_jobs(login: Login, jobs: Mapping[RunDir, str], again: Collection[RunDir]) -> str:
    """Cancel those of many jobs that are pending. Return why Slurm refused, or "".

    A job that is running or starting finds the request in its run directory. `jobs` maps each run to its
    latest job. Jobs of the runs `again`, which were asked to stop before, are cancelled in any state. Raises
    LoginError.
    """
    commands = {}
    if first := {job for run, job in jobs.items() if run not in again}:
        commands["waiting"] = ["scancel", "--state=PENDING", *sorted({_array(job) for job in first})]
    if second := {jobs[run] for run in again}:
        commands["again"] = ["scancel", *_shortest(second, jobs.values())]
    answers = ask(login, commands) if commands else {}
    return "; ".join(dict.fromkeys(line for answer in answers.values() for line in _trouble(answer)))


def withdraw_refused_requests(waiting: Sequence[RunDir], refused: str) -> None:
    """Withdraw the stop requests of waiting runs if Slurm refused to cancel them; `refused` says why.

    Otherwise the next request would count as the second one. Raises SchedulerError.
    """
    if not refused:
        return
    for run in waiting:
        run.cancel.unlink(missing_ok=True)
    if waiting:
        raise SchedulerError(
            f"{refused}; {len(waiting)} runs have not begun and were not cancelled: cancel them again"
        )
    print(f"launcher: {refused}; all have begun, and stop anyway", file=sys.stderr)


# While an array task shares one record with other tasks, `scancel --state` cancels all of them (22.05).
_TASK = """\
said=$(squeue --noheader --array --states=PENDING --jobs="$1" --format=%i) || exit
[ -z "$said" ] || exec scancel "$1"
"""


def _cancel_if_pending(job: str) -> list[str]:
    """Return the command that cancels a job or an array task if it is pending."""
    if "_" not in job:
        return ["scancel", "--state=PENDING", job]
    return [*CLEAN, "sh", "-c", _TASK, "sh", job]


def _array(job: str) -> str:
    """Return the id of the whole array. With `--state=PENDING`, it selects only pending tasks."""
    return job.partition("_")[0]


def _shortest(chosen: Collection[str], living: Collection[str]) -> Iterator[str]:
    """Yield ids for scancel: a whole array by its own id if all of its living tasks are chosen."""
    for array in sorted({_array(job) for job in chosen}):
        tasks = [job for job in chosen if _array(job) == array]
        if len(tasks) == sum(_array(job) == array for job in living):
            yield array
        else:
            yield f"{array}_[{','.join(sorted((job.partition('_')[2] for job in tasks), key=int))}]"


def _trouble(answer: Answer) -> Sequence[str]:
    """Return scancel's error lines, without those about jobs that have ended in the meantime."""
    if not answer.code:
        return ()
    lines = answer.err.strip().splitlines() or [f"scancel: exit code {answer.code}"]
    return [line for line in lines if "Invalid job id" not in line and "already" not in line.lower()]
