"""Check in one round trip, before a job is queued, whether Slurm would refuse it or could never start it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from launcher.planning.plan import Plan
from launcher.schedulers.base import Findings, warnings_of_runs
from launcher.schedulers.login import Answer, LocalLogin, Login, ask
from launcher.schedulers.slurm.accounting_cache import read_cache, stamp, write_cache
from launcher.schedulers.slurm.feasibility import Feasibility
from launcher.schedulers.slurm.jobs import (
    BY_HAND,
    CLEAN_ENVIRONMENT,
    TAKES_NONE,
    NotSubmittedError,
    NotYetError,
    errors_of,
    last_error,
    slurm_is_missing,
    unanswered,
    with_retries,
)
from launcher.schedulers.slurm.site import OF_ACCOUNTING, RUNTIMES, questions, site
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job


def _accounting_questions() -> dict[str, list[str]]:
    commands = questions()
    return {name: commands[name] for name in OF_ACCOUNTING}


def problems(login: Login, cluster: Cluster, jobs: Sequence[tuple[str, Job, Plan]], script: str) -> Findings:
    """Check a job, or those of an array, against the site.

    `jobs` has each one's values in its sweep, and `script` is the rendered job.sbatch of the first. A
    controller that does not answer is queried again for a while. Raises LoginError, NotSubmittedError.
    """
    _, job, plan = jobs[0]
    if isinstance(login, LocalLogin) and shutil.which("sbatch") is None:  # there may be no shell either
        raise NotSubmittedError(f"there is no Slurm on {login.name}{BY_HAND}")
    paths = _paths(cluster, job)
    job_questions = _questions(cluster, script, [path for path, _ in paths])
    cached = read_cache(login)

    def query() -> dict[str, Answer]:
        nonlocal cached
        answered = cached.answers if cached is not None else {}
        open_questions = {name: command for name, command in questions().items() if name not in answered}
        answers = answered | ask(login, open_questions | job_questions)
        test = answers["test"]
        if test.code and unanswered(test.err):
            if answers["config"].code:
                raise NotYetError(last_error(test.err), unclear=False)
        elif test.code and slurm_is_missing(test.code, test.err):
            raise NotSubmittedError(f"there is no Slurm on {login.name}{BY_HAND}")
        if cached is not None and cached.stamp != stamp(answers):
            answers, cached = answers | ask(login, _accounting_questions()), None
        return answers

    try:
        answers = with_retries(query)
    except NotYetError as error:
        raise NotSubmittedError(f"{TAKES_NONE}: {error}") from None
    feasibility = Feasibility(cluster, job, plan, site(answers), len(jobs))
    if cached is not None and next(feasibility.refusals(), None) is not None:
        # Cached answers must not refuse what has been allowed since.
        answers, cached = answers | ask(login, _accounting_questions()), None
        feasibility = replace(feasibility, site=site(answers))
    if cached is None:
        write_cache(login, answers)
    test = answers["test"]
    flags = dict(zip(paths, answers["paths"].out.split(), strict=False))
    refusals = [*feasibility.refusals(), *_path_refusals(flags)]
    by_values = [(values, replace(feasibility, job=job, plan=plan).warnings()) for values, job, plan in jobs]
    warnings = [*warnings_of_runs(by_values), *_path_warnings(flags), *_runtime_warnings(cluster, answers)]
    said = errors_of(test.err) or f"exit {test.code}"
    if test.code and unanswered(test.err):  # a busy controller still answers cheaper queries
        warnings.append(f"not checked by sbatch --test-only: {said}")
    elif test.code != 0 and not refusals:
        lines = warnings if _TEMPORARY.search(test.err) else refusals
        lines.append(f"sbatch --test-only: {said}")
    return Findings(tuple(refusals), tuple(warnings))


_TEST = CLEAN_ENVIRONMENT + "printf '%s\\n' \"$1\" | sbatch --test-only\n"
# Per path: d (directory), w (writable), f (file), - (does not exist; -w if its nearest parent is writable).
_LOOK = """
for p; do
  if [ -d "$p" ]; then if [ -w "$p" ]; then echo dw; else echo d; fi
  elif [ -e "$p" ]; then echo f
  else
    q=$p; while [ ! -e "$q" ] && [ "$q" != / ]; do q=$(dirname -- "$q"); done
    if [ -d "$q" ] && [ -w "$q" ]; then echo -w; else echo -; fi
  fi
done
"""
# Problems that may be gone by the time the job starts, and that sbatch itself accepts.
_TEMPORARY = re.compile(
    r"busy|not available \(down|Required partition not available|(partition|node) configuration (is )?not",
    re.I,
)


def _questions(cluster: Cluster, script: str, paths: list[str]) -> dict[str, list[str]]:
    commands = {
        "test": ["sh", "-c", _TEST, "sh", script],
        "paths": ["sh", "-c", _LOOK, "sh", *paths],
    }
    if cluster.container.runtime in RUNTIMES:
        commands["runtime"] = RUNTIMES[cluster.container.runtime]
    return commands


def _paths(cluster: Cluster, job: Job) -> list[tuple[str, str]]:
    """Return (path, field of the profile or job) of each path that must exist on the nodes.

    Paths with `~` are left out, because they cannot be resolved here.
    """
    container, inside = cluster.container, cluster.container.runtime != "none"
    named = [(cluster.paths.runs, "paths.runs")]
    if not inside:
        named.append((cluster.paths.python, "paths.python"))
    else:
        image = job.image or container.image
        named.append((image, "image" if job.image else "container.image"))
        named += [(host, "container.mounts") for host in container.mounts]
    return [(path, field) for path, field in named if path is not None and PurePosixPath(path).is_absolute()]


def _path_refusals(flags: Mapping[tuple[str, str], str]) -> Iterator[str]:
    for (path, field), found in flags.items():
        if field == "paths.runs" and "w" not in found:
            yield f"{field}: {path} cannot be written to"


def _path_warnings(flags: Mapping[tuple[str, str], str]) -> Iterator[str]:
    for (path, field), found in flags.items():
        if found.startswith("-") and field != "paths.runs":
            yield f"{field}: {path} is not there on the login node; the nodes must have it"


def _runtime_warnings(cluster: Cluster, answers: Mapping[str, Answer]) -> Iterator[str]:
    runtime = cluster.container.runtime
    if runtime == "pyxis" and answers["runtime"].code != 0:
        yield "container.runtime: srun has no --container-image here; the nodes must have it (pyxis plugin)"
    if runtime == "apptainer" and answers["runtime"].code != 0 and not cluster.setup:
        yield "container.runtime: no apptainer command here; the nodes must have it, or `setup:` load it"
