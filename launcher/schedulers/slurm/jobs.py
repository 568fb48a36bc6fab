"""Submit jobs. A submission creates at most one job, whatever Slurm answers."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import TypeVar

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.login import NOT_FOUND, Login, LoginError, ask
from launcher.schedulers.slurm.records import array_of
from launcher.spec.events import Requeued, SlurmJob, Submitted, Submitting, latest

PATIENCE_SECONDS = 20.0
"How long to retry while the controller is down or busy. Restarting one takes less."
FIRST_PAUSE_SECONDS = 0.5

# A submission from inside a job must not inherit that job's Slurm variables. sbatch's own variables take
# precedence over the script and would change what was shown. SBATCH_ACCOUNT stays: it is often set nowhere
# else.
CLEAN_ENVIRONMENT = """\
for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do
  case $name in
    SLURM_CONF|SBATCH_ACCOUNT) ;;
    SLURM_*|SLURMD_*|SBATCH_*|SRUN_*|LAUNCHER_*) unset "$name" ;;
  esac
done
"""

# The controller was not reached or could not accept anything: there is no job.
_NOT_TAKEN = re.compile(
    r"connect failure|Connection refused|temporarily unable to accept|try again|Transport endpoint"
    r"|Unable to resolve|No route to host",
    re.IGNORECASE,
)
# The controller was reached, but its answer did not arrive: there may be a job.
_UNCLEAR = re.compile(
    r"timed out|Zero Bytes|Unable to contact|Communication connection|Connection reset|Unexpected message"
    r"|Message (receive|send) failure|Insane message length",
    re.IGNORECASE,
)


BY_HAND = (
    ": submit on a host that has it, name a login node in the profile (`login:`), or write everything with "
    "`launcher render JOB -c CLUSTER --out DIR` and start it there with `sbatch DIR/scripts/job.sbatch`"
)


class NotSubmittedError(SchedulerError):
    """There is certainly no job. The message says why."""


class InterruptedSubmissionError(NotSubmittedError):
    """The user pressed Ctrl-C while there was certainly no job."""


class NotYetError(Exception):
    """No answer yet; retry later. If `unclear` is true, the request may have been carried out."""

    def __init__(self, words: str, unclear: bool) -> None:
        super().__init__(words)
        self.unclear = unclear


T = TypeVar("T")


def sbatch_command(script: PurePath | str, submission: int = 1) -> tuple[str, ...]:
    """Return the sbatch command. `submission` is its number within the run.

    If one submission creates two jobs, the first one gets the run.
    """
    return ("sbatch", "--parsable", str(script), str(submission))


def submission_of(run: RunDir) -> int:
    """Return the number of the current submission."""
    return sum(isinstance(event, Submitting) for event in run.read_events())


def _sbatch_text(command: tuple[str, ...], first: str, then: str) -> str:
    """Return POSIX shell that runs `first` and submits in a clean environment.

    If Slurm accepts the job, the shell runs `then` with the job id in `$job`.
    """
    pick = "sed -n 's/^\\([0-9][0-9]*\\)\\(;.*\\)*$/\\1/p' | tail -n 1"
    return (
        f"{first}{CLEAN_ENVIRONMENT}export LC_ALL=C\nsaid=$({shlex.join(command)}) || exit\n"
        f"printf '%s\\n' \"$said\"\njob=$(printf '%s\\n' \"$said\" | {pick})\n{then}"
    )


def submit(
    login: Login,
    command: tuple[str, ...],
    comment: str,
    patience: float = PATIENCE_SECONDS,
    *,
    earlier: Collection[str] = (),
    first: str = "",
    then: str = "",
) -> str:
    """Submit a job and return its id. The job has the comment `comment`, as do the `earlier` jobs of its run.

    Retry while there is certainly no job. If an answer was lost, look for the job. For `first` and `then` see
    `_sbatch_text`. Raises NotSubmittedError, UnclearError.
    """
    unclear = False

    def try_once() -> str:
        nonlocal unclear
        if unclear and (job := newest_jobs(login, earlier).get(comment)):
            return job
        was_unclear, unclear = unclear, True  # until Slurm answers
        try:
            return _submit_once(login, _sbatch_text(command, first, then))
        except NotYetError as error:
            unclear = was_unclear or error.unclear
            raise

    try:
        return with_retries(try_once, patience)
    except KeyboardInterrupt:
        if unclear:
            raise
        raise InterruptedSubmissionError(f"interrupted by Ctrl-C: {TAKES_NONE}") from None
    except NotYetError as error:
        if not unclear:
            raise NotSubmittedError(f"{TAKES_NONE}: {error}") from None
        raise UnclearError(
            f"Slurm did not answer, so the job may or may not be in its queue: {error}; "
            "`launcher status` shows it when Slurm answers again"
        ) from None


TAKES_NONE = "Slurm accepts no jobs at the moment"


def with_retries(try_once: Callable[[], T], patience: float = PATIENCE_SECONDS) -> T:
    """Return `try_once()`. Retry after each NotYetError for `patience` seconds, then raise the last one."""
    began = time.monotonic()
    try:
        return try_once()
    except NotYetError as error:
        print(f"Slurm: {error}; trying for {patience:.0f} s", file=sys.stderr)
    time.sleep(FIRST_PAUSE_SECONDS)
    import tenacity

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(NotYetError),
        stop=tenacity.stop_after_delay(max(0.0, patience - (time.monotonic() - began))),
        wait=tenacity.wait_exponential(multiplier=2 * FIRST_PAUSE_SECONDS, max=4),
        reraise=True,
    )
    return attempts(try_once)


def _submit_once(login: Login, script: str) -> str:
    try:
        done = login.run(script)
    except LoginError as error:
        raise NotYetError(str(error), unclear=True) from None
    message = done.stderr.decode(errors="replace").strip()
    if done.returncode == 0:
        return job_id(done.stdout.decode(errors="replace"))
    if unanswered(message):
        # With two controllers, the first may have accepted the job before the second could not be reached.
        unclear = any(_UNCLEAR.search(line) and not _NOT_TAKEN.search(line) for line in message.splitlines())
        raise NotYetError(last_error(message), unclear=unclear)
    if slurm_is_missing(done.returncode, message):
        raise NotSubmittedError(f"there is no Slurm on {login.name}{BY_HAND}")
    raise NotSubmittedError(f"sbatch: {errors_of(message) or f'exit code {done.returncode}'}")


def unanswered(message: str) -> bool:
    """Return whether these error messages of a Slurm command mean that the controller did not answer."""
    return bool(_NOT_TAKEN.search(message) or _UNCLEAR.search(message))


def slurm_is_missing(code: int, message: str) -> bool:
    """Return whether Slurm is missing: there is no command, or it has no cluster configuration.

    Call `unanswered` first: a controller that is down may provide no configuration either.
    """
    return code == NOT_FOUND or "configuration source" in message


def job_id(out: str) -> str:
    """Return the job id that `sbatch --parsable` prints as `123` or `123;cluster` after other output."""
    for line in reversed(out.strip().splitlines()):
        if re.fullmatch(r"\d+(;[^;\s]+)?", line.strip()):
            return line.strip().partition(";")[0]
    raise UnclearError(f"sbatch's answer has no job id: {out!r}")


def newest_jobs(login: Login, earlier: Collection[str] = ()) -> dict[str, str]:
    """Map each comment, and the name of each script's folder, to its newest job, except `earlier` ones.

    Both are the id of a run or sweep. If `slurm.comment` is false, only the folder's name is. Raises
    NotYetError if Slurm does not answer.
    """
    try:
        answer = ask(login, {"squeue": _QUEUE})["squeue"]
    except LoginError as error:
        raise NotYetError(str(error), unclear=True) from None
    if answer.code:
        raise NotYetError(last_error(answer.err), unclear=True)
    newest: dict[str, str] = {}
    rows = [line.partition("|")[::2] for line in answer.out.splitlines()]
    for job, rest in sorted(rows, key=lambda row: int(row[0])):
        comment, _, command = rest.rpartition("|")
        if job not in earlier:
            newest |= {name: job for name in (comment or rest, folder_of_script(command)) if name}
    return newest


_QUEUE = ("sh", "-c", 'exec squeue --noheader --states=all --user="$(id -un)" --format="%F|%k|%o"')


def folder_of_script(command: str) -> str | None:
    """Return the name of the run's or sweep's folder, or None if the script is not launcher's."""
    folder = _FOLDER_OF_SCRIPT.search(command)
    return folder[1] if folder is not None else None


# The script is in the run's directory, in the folder of the plan in force (`plans/003`) or in the sweep's
# folder. submitit submits a copy.
_FOLDER_OF_SCRIPT = re.compile(
    r"([^/]+)/(?:(?:(?:plans/\d+/)?scripts/job|array)\.sbatch|submitit/[^/]+\.sh)(?: |$)"
)


def begun(run: RunDir) -> bool:
    """Return whether the run's records show a batch script or supervisor that obeys the file `cancel`."""
    if run.read_state().state in ("running", "stopping"):
        return True
    return isinstance(latest(run.read_events(), Submitting, Submitted, Requeued, SlurmJob), SlurmJob)


def jobs_of(run: RunDir) -> set[str]:
    """Return every job that the run's records name; for an array task, the id of its array."""
    handles = (event.handle or "" for event in run.read_events())
    return {array_of(handle.rpartition(":")[2]) for handle in handles} - {""}


def last_error(message: str) -> str:
    return errors_of(message).rpartition("; ")[2] or "no answer"


def errors_of(message: str) -> str:
    """Return sbatch's error messages, without its prefix on each line and its advice."""
    lines = (re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in message.splitlines())
    return "; ".join(line for line in lines if line.strip() and not line.startswith('Try "sbatch --help"'))
