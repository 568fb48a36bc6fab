"""Cancel jobs, many with one call to scancel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from launcher.rundir.layout import RunDir
from launcher.schedulers.login import Answer, Login, ask
from launcher.schedulers.slurm.records import CLEAN, array_of


def cancel_jobs(login: Login, jobs: Mapping[RunDir, str], again: Collection[RunDir]) -> str:
    """Cancel those of the jobs that are pending. Return why Slurm refused, or "".

    A job that is running or starting finds the request in its run directory. `jobs` maps each run to its
    latest job. Jobs of the runs `again`, which were asked to stop before, are cancelled in any state. Raises
    LoginError.
    """
    first = {job for run, job in jobs.items() if run not in again}
    tasks = {job for job in first if "_" in job}
    commands = {}
    if tasks:
        arrays = ",".join(sorted({array_of(job) for job in tasks}))
        commands["tasks"] = [*CLEAN, "sh", "-c", _TASKS, "sh", arrays, *sorted(tasks)]
    if first - tasks:
        commands["jobs"] = ["scancel", "--state=PENDING", *sorted(first - tasks)]
    if again:
        commands["again"] = ["scancel", *_grouped({jobs[run] for run in again})]
    answers = ask(login, commands) if commands else {}
    return "; ".join(dict.fromkeys(line for answer in answers.values() for line in _trouble(answer)))


# While array tasks share one record, `scancel --state=PENDING` cancels all of them (22.05). So it is used
# only if all pending tasks are to be cancelled; otherwise these are named.
_TASKS = """\
pending=$(squeue --noheader --array --states=PENDING --jobs="$1" --format=%i) || exit
shift
set -f
set -- $(printf '%s\\n' "$@" - $pending | awk -F_ '
  $1 == "-" { queued = 1; next }
  !queued { chosen[$0]; next }
  $0 in chosen { tasks[$1] = tasks[$1] "," $2; next }
  { others = 1 }
  END {
    for (array in tasks) ids = ids " " array (others ? "_[" substr(tasks[array], 2) "]" : "")
    if (ids != "") print (others ? "" : "--state=PENDING") ids
  }')
[ $# = 0 ] || exec scancel "$@"
"""


def _grouped(jobs: Collection[str]) -> Iterator[str]:
    """Yield ids for scancel: jobs, and `123_[4,5]` for the tasks of an array."""
    for array in sorted({array_of(job) for job in jobs}):
        tasks = sorted((job.partition("_")[2] for job in jobs if job.startswith(f"{array}_")), key=int)
        yield f"{array}_[{','.join(tasks)}]" if tasks else array


def _trouble(answer: Answer) -> Iterator[str]:
    """Yield scancel's error lines, without those about jobs that have ended in the meantime."""
    if answer.code:
        for line in answer.err.strip().splitlines() or [f"exit code {answer.code}"]:
            if "Invalid job id" not in line and "already" not in line.lower():
                yield f"scancel: {line.removeprefix('scancel: ')}"
