"""Cancel jobs: a single one, or many with one call to scancel."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.login import Answer, Login, ask
from launcher.schedulers.slurm.records import CLEAN


def asked_before(jobs: Iterable[RunDir]) -> set[RunDir]:
    """The runs that were asked to stop before. A second request ends them at once."""
    return {run for run in jobs if run.cancel.exists()}


def cancel_job(login: Login, job: str, *, again: bool) -> str:
    """Remove one pending job from the queue; the second time, end it. Return why Slurm refused, or "".

    A run that has begun only needs the request in its directory. Raises LoginError.
    """
    answer = ask(login, {"scancel": ["scancel", job] if again else _out_of_queue(job)})["scancel"]
    return "scancel: " + (answer.err.strip() or f"exit code {answer.code}") if answer.code else ""


def cancel_jobs(login: Login, jobs: Mapping[RunDir, str], again: Collection[RunDir]) -> str:
    """Remove the pending ones of many jobs from the queue. Return why Slurm refused, or "".

    A job that is running, or is just starting, finds the request in its run directory. `jobs` maps each run
    to its latest job; the jobs of the runs `again`, which were `asked_before`, are ended. Raises LoginError.
    """
    commands = {}
    if first := {job for run, job in jobs.items() if run not in again}:
        commands["waiting"] = ["scancel", "--state=PENDING", *sorted({_array(job) for job in first})]
    if second := {jobs[run] for run in again}:
        commands["again"] = ["scancel", *_shortest(second, jobs.values())]
    answers = ask(login, commands) if commands else {}
    return "; ".join(dict.fromkeys(line for answer in answers.values() for line in _trouble(answer)))


def see_off(waiting: Sequence[RunDir], refused: str) -> None:
    """Withdraw the stop requests of runs that have not begun if Slurm refused (`refused` says why).

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
    print(f"launcher: {refused}; all have begun, and stop all the same", file=sys.stderr)


# While an array task shares one record with other tasks, `scancel --state` cancels all of them (22.05).
_TASK = """\
said=$(squeue --noheader --array --states=PENDING --jobs="$1" --format=%i) || exit
[ -z "$said" ] || exec scancel "$1"
"""


def _out_of_queue(job: str) -> list[str]:
    """The command that cancels a job or an array task if it is pending."""
    if "_" not in job:
        return ["scancel", "--state=PENDING", job]
    return [*CLEAN, "sh", "-c", _TASK, "sh", job]


def _array(job: str) -> str:
    """The id of the whole array. It is safe to name for pending tasks: the others are in another state."""
    return job.partition("_")[0]


def _shortest(chosen: Collection[str], living: Collection[str]) -> Iterator[str]:
    """Name a whole array by its own id if none of its living tasks is to keep running."""
    for array in sorted({_array(job) for job in chosen}):
        tasks = [job for job in chosen if _array(job) == array]
        if len(tasks) == sum(_array(job) == array for job in living):
            yield array
        else:
            yield f"{array}_[{','.join(sorted((job.partition('_')[2] for job in tasks), key=int))}]"


def _trouble(answer: Answer) -> Sequence[str]:
    """scancel's error lines, without those about jobs that have ended in the meantime."""
    if not answer.code:
        return ()
    lines = answer.err.strip().splitlines() or [f"scancel: exit code {answer.code}"]
    return [line for line in lines if "Invalid job id" not in line and "already" not in line.lower()]
